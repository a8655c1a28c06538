"""Which tests run, and on what: rigs behind fixtures, families, names in markers, the one test of a recording."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import pytest

from verification.certificate.identity import own_id
from verification.run_context import PROFILES

if TYPE_CHECKING:
    from verification.recording import Recording

# Fixture -> the fixture that started the rig behind it. Tests of one rig do not suffer when the other breaks.
RIG_FIXTURES = {
    "rig": "rig",
    "engine": "rig",
    "client": "rig",
    "history": "rig",
    "tiny": "tiny",
    "family": "family",
    "fault": "fault_engine",
}

TINY = "llama-gqa3"  # the model behind fixture `tiny`
# Both head ratios, and of each kind of layer that differs from Llama's one model; other profiles take all there are.
SMOKE_FAMILIES = (TINY, "llama-gqa7", "mistral-window", "phi3-longrope", "qwen3-moe")


def families(profile: str) -> tuple[str, ...]:
    """Names of the tiny models that fixture `family` gives in a profile."""
    if profile == "smoke":
        return SMOKE_FAMILIES
    from verification.models.variants import tiny_names  # imports transformers

    return tiny_names()


def parametrize_family(metafunc: pytest.Metafunc, profile: str) -> None:
    """One test for each model of the profile, where a test uses `family` and does not say which ones itself."""
    own = (mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    names = {name.strip() for given in own for name in (given.split(",") if isinstance(given, str) else given)}
    if "family" in metafunc.fixturenames and "family" not in names:
        metafunc.parametrize("family", families(profile), indirect=True, scope="session")


def rigs_of(item: pytest.Item) -> set[str]:
    """Which rigs a test uses: "rig", "family[qwen2]": each parameter of a fixture starts an engine of its own."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    starters = {RIG_FIXTURES[name] for name in getattr(item, "fixturenames", ()) if name in RIG_FIXTURES}
    rigs = {f"{name}[{parameters[name]}]" if name in parameters else name for name in starters}
    return {"tiny" if rig == f"family[{TINY}]" else rig for rig in rigs}


def engine_of(item: pytest.Item) -> str:
    """What a test shares with others, for shards: the engine of its model family, else nothing."""
    families = sorted(rig for rig in rigs_of(item) if rig == "tiny" or rig.startswith("family["))
    return families[0] if families else own_id(item)


def unknown_names(item: pytest.Item) -> str | None:
    """What is wrong with a test's markers; a misspelt name would filter the test on every rig, without a word."""
    from hil_rigs import capabilities

    for marker, known in (("capability", tuple(capabilities.CAPABILITIES)), ("blink_profile", PROFILES)):
        for name in (name for mark in item.iter_markers(marker) for name in mark.args):
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1)
                hint = f", did you mean {near[0]!r}?" if near else ""
                return f"unknown {marker.replace('_', ' ')} {name!r}{hint}; known: {', '.join(known)}"
    return None


def never_ran(replay: Recording) -> str:
    """Why a test that passed under `--replay` shows nothing."""
    what = "program" if replay.plan is None else f"plan of fault {replay.plan.get('fault')}"
    return (
        f"the recorded {what} of {replay.path.name} (engine {replay.subject!r}) never ran in this test: it starts no "
        "engine of that name, or runs programs past `Subject.run`, where --replay does not reach"
    )


def select_recorded(items: list[pytest.Item], replay: Recording) -> list[pytest.Item]:
    """Leaves the recorded test alone in `items` and returns the others. Raises UsageError when it is not among them."""
    chosen = [item for item in items if own_id(item) == replay.test]
    if not chosen:
        raise pytest.UsageError(
            f"--replay: {replay.path} is of test {replay.test}, which is not among the {len(items)} collected; name "
            f"its file (it was {replay.nodeid})"
        )
    others = [item for item in items if item not in chosen]
    items[:] = chosen
    return others
