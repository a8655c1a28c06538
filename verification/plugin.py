"""The pytest plugin (`pytest11` entry point `blink`): options, markers, fixtures, outcomes and the report of a run.

It does nothing until one of its options, or the ini option `blink_rig`, is used; nothing heavy is imported before that.
Options are `--blink-rig`, `--blink-model` ...; a command line with `--rig` may leave the prefix out of all of them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from verification.run_context import DEFAULT_SEED, RunContext, new_run_id, parse_seed

if TYPE_CHECKING:
    from verification.certificate.shards import Shard
    from verification.recording import Recording

OPTIONS = ("rig", "rig-file", "model", "profile", "seed", "replay", "out")
SHORT = ("--rig", "--rig-file")  # either on the command line frees all options from their prefix
CONTEXT: pytest.StashKey[RunContext] = pytest.StashKey()
_HYPOTHESIS_BEFORE: pytest.StashKey[tuple[str, Any]] = pytest.StashKey()
REPLAYS = 5
_FIXTURES = "verification.fixtures"
_FORCE_SEED = "global_force_seed"  # what hypothesis's own --hypothesis-seed sets; declared as None in its sources

MARKERS = (
    "blink_property(name, id=None): the property that a test checks; `id` is its own stable id (by default made of the "
    "property's and the test's name).",
    "capability(*names): what the test needs of a rig (`blink rig probe` lists the names); on a rig without it the "
    "test is filtered. A name that Blink does not know is a defect of that test: it fails, and the others go on.",
    "blink_profile(*names): the profiles that run the test (smoke, nightly, full; by default all); in others it is "
    "filtered. A name that is none is a defect of that test.",
)

_HELP = {
    "rig": "rig to run on, e.g. local; `blink rig list` names them",
    "rig-file": "description of a rig of your own, a YAML file anywhere (`blink rig init` writes one)",
    "model": "model file, folder or name",
    "profile": "smoke (default), nightly or full",
    "seed": "root seed: a number, or 'random' to draw a fresh one (default: fixed)",
    "replay": "recording of a failed test (evidence/.../failure-N.json): runs that test with the recorded program",
    "out": "folder for report.json, report.html, junit.xml, allure-results and the signature",
}


def _taken_options(parser: pytest.Parser) -> set[str]:
    groups = [*getattr(parser, "_groups", []), getattr(parser, "_anonymous", None)]
    return {name for group in groups if group is not None for option in group.options for name in option.names()}


def _short_names_wanted(manager: pytest.PytestPluginManager) -> bool:
    """Whether the command line has `--rig` or `--rig-file`: only then are --model, --seed ... ours; many a project has
    its own."""
    config = manager.get_plugin("pytestconfig")
    given = [str(argument) for argument in config.invocation_params.args] if config is not None else []
    given += os.environ.get("PYTEST_ADDOPTS", "").split()
    return any(argument.partition("=")[0] in SHORT for argument in given)


@pytest.hookimpl(trylast=True)
def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add each option as `--blink-NAME`, and as `--NAME` where Blink is asked for and no other plugin has that name."""
    taken = _taken_options(parser)
    short = _short_names_wanted(pluginmanager)
    group = parser.getgroup(
        "blink", "Blink: an LLM serving stack on a rig (with --rig, also without the prefix blink-)"
    )
    for name in OPTIONS:
        names = [f"--blink-{name}"]
        if short and f"--{name}" not in taken:
            names.insert(0, f"--{name}")
        metavar = "FILE" if name in ("rig-file", "replay") else name.upper()
        group.addoption(*names, dest=_dest(name), default=None, metavar=metavar, help=_HELP[name])
    group.addoption(
        "--blink-required",
        dest="blink_required",
        action="store_true",
        help="judge the rig's whole required set, as `blink certify` does; by default the tests that were selected",
    )
    prefixes = ("--", "--blink-") if short else ("--blink-",)
    group.addoption(
        *(f"{prefix}bundle-prompts" for prefix in prefixes if f"{prefix}bundle-prompts" not in taken),
        dest="blink_bundle_prompts",
        action="store_true",
        help="keep prompts and generated tokens in the bundles of failures; without it only lengths and salted digests",
    )
    group.addoption(
        *(f"{prefix}known-issues" for prefix in prefixes if f"{prefix}known-issues" not in taken),
        dest="blink_known_issues",
        default=None,
        metavar="FILE",
        help="known issues (YAML) instead of Blink's own: notes beside failures, which excuse none",
    )
    group.addoption(
        *(f"{prefix}agree-with" for prefix in prefixes if f"{prefix}agree-with" not in taken),
        dest="blink_agree_with",
        default=None,
        metavar="DIR",
        help="output folder of another run, on another rig, whose recorded answers this one's are compared with",
    )
    group.addoption(
        "--blink-shard", dest="blink_shard", default=None, metavar="I/N", help="run the I-th of N parts of the tests"
    )
    group.addoption(
        "--blink-done",
        dest="blink_done",
        default=None,
        metavar="FILE",
        help="state of an interrupted shard: tests that it says are done are left out",
    )
    group.addoption(
        "--blink-key", dest="blink_key", default=None, metavar="FILE", help="private key (PEM, ed25519) that signs"
    )
    parser.addini("blink_rig", "rig that is used when no --rig is given; its presence turns the Blink fixtures on")


def _dest(name: str) -> str:
    return f"blink_{name.replace('-', '_')}"


def _active(config: pytest.Config) -> bool:
    options = (config.getoption(_dest(name), None) for name in OPTIONS)
    return bool(config.getini("blink_rig")) or any(value is not None for value in options)


def context_of(config: pytest.Config) -> RunContext | None:
    """The run of a pytest session, None where the plugin is not in use."""
    return config.stash.get(CONTEXT, None)


@pytest.hookimpl(tryfirst=True)  # before junitxml and allure read where to write
def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if not _active(config):
        return
    context = _context(config)
    config.stash[CONTEXT] = context
    _configure_hypothesis(config, context)
    if not config.option.collectonly and context.out is not None:
        _configure_output(config, context)
    from verification import plugin_fixtures

    config.pluginmanager.register(plugin_fixtures, "blink-fixtures")
    if _exists(_FIXTURES) and not config.pluginmanager.is_blocked(_FIXTURES):
        config.pluginmanager.import_plugin(_FIXTURES)
    from verification.plugin_session import SessionPlugin

    session = SessionPlugin(config, context)
    config.pluginmanager.register(session, "blink-session")
    config.pluginmanager.register(session.items, "blink-items")


def pytest_unconfigure(config: pytest.Config) -> None:
    before = config.stash.get(_HYPOTHESIS_BEFORE, None)
    if before is not None:  # a pytest inside a pytest must leave the outer one as it was
        import hypothesis
        from hypothesis import core

        hypothesis.settings.load_profile(before[0])
        setattr(core, _FORCE_SEED, before[1])


def _context(config: pytest.Config) -> RunContext:
    from verification.certificate.required import RequiredSetError

    given = getattr(config, "workerinput", {}).get("blink", {})
    base = config.invocation_params.dir
    replay = _replay(config)
    wanted = config.getoption("blink_seed")
    if wanted is None and replay is not None:
        wanted = str(replay.seed)
    profile = config.getoption("blink_profile") or (replay.profile if replay else "smoke")
    try:
        seed, source = (given["seed"], given["seed_source"]) if given else parse_seed(wanted, profile)
    except ValueError as error:
        raise pytest.UsageError(f"--seed: {error}") from error
    out, key = config.getoption("blink_out"), config.getoption("blink_key")
    agree_with, done = config.getoption("blink_agree_with"), config.getoption("blink_done")
    context = RunContext(
        run_id=given.get("run_id") or new_run_id(),
        rig=_rig(config),
        profile_name=profile,
        model=config.getoption("blink_model") or (replay.model if replay else None),
        seed=seed,
        seed_source=source,
        out=(base / out).resolve() if out else None,
        worker=getattr(config, "workerinput", {}).get("workerid", "main"),
        key=(base / key) if key else None,
        replay=replay,
        judges_required=bool(config.getoption("blink_required")),
        agree_with=(base / agree_with) if agree_with else None,
        shard=_shard(config),
        done=(base / done) if done else None,
    )
    try:
        context.profile  # noqa: B018  (an unknown rig or profile is an error now, not in the middle of the run)
    except RequiredSetError as error:
        raise pytest.UsageError(str(error)) from error
    context.capabilities = _capabilities(context.rig)
    if replay is not None:
        from verification.recording import RecordingError, check_rig

        try:
            check_rig(replay, context.rig, context.rig_kind)
        except RecordingError as error:
            raise pytest.UsageError(f"--replay: {error}") from error
    return context


def _shard(config: pytest.Config) -> Shard | None:
    text = config.getoption("blink_shard")
    if text is None:
        return None
    from verification.certificate.shards import ShardError, parse_shard

    try:
        return parse_shard(str(text))
    except ShardError as error:
        raise pytest.UsageError(f"--blink-shard: {error}") from error


def _rig(config: pytest.Config) -> str:
    """The rig's name, or the absolute path of its description."""
    name, file = config.getoption("blink_rig"), config.getoption("blink_rig_file")
    if file is None:
        return str(name or config.getini("blink_rig") or "local")
    if name is not None:
        raise pytest.UsageError(f"--rig {name} and --rig-file {file}: name one rig")
    if not str(file).endswith((".yaml", ".yml")):
        raise pytest.UsageError(f"--rig-file {file}: the file of a rig ends in .yaml or .yml")
    return str((config.invocation_params.dir / file).resolve())


def _replay(config: pytest.Config) -> Recording | None:
    file = config.getoption("blink_replay")
    if file is None:
        return None
    from verification.recording import RecordingError, read_recording

    try:
        return read_recording(config.invocation_params.dir / file)
    except RecordingError as error:
        raise pytest.UsageError(f"--replay: {error}") from error


def _capabilities(rig: str) -> frozenset[str]:
    from hil_rigs.description import RigError, load_rig

    try:
        return frozenset(load_rig(rig).capabilities)
    except RigError as error:
        raise pytest.UsageError(str(error)) from error


def _exists(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


def _configure_output(config: pytest.Config, context: RunContext) -> None:
    """Point junitxml and allure into the output folder, unless the user sent them elsewhere."""
    from verification.certificate.output import ALLURE, JUNIT

    assert context.out is not None
    if getattr(config.option, "xmlpath", None) is None:
        config.option.xmlpath = str(context.out / JUNIT)
    if hasattr(config.option, "allure_report_dir") and config.option.allure_report_dir is None:
        config.option.allure_report_dir = str(context.out / ALLURE)
    if hasattr(config.option, "attach_capture") and not config.getoption("blink_bundle_prompts"):
        config.option.attach_capture = False  # what tests print may hold prompts


def _configure_hypothesis(config: pytest.Config, context: RunContext) -> None:
    """A settings profile for the run: derandomised with the default seed, otherwise drawn from the root seed."""
    try:
        import hypothesis
        from hypothesis import HealthCheck, core
    except ImportError:
        return
    config.stash[_HYPOTHESIS_BEFORE] = (hypothesis.settings.get_current_profile_name(), getattr(core, _FORCE_SEED))
    name = f"blink-{context.profile_name}"
    hypothesis.settings.register_profile(
        name,
        derandomize=context.seed == DEFAULT_SEED,  # also when it is given, as the command that replays a failure does
        database=None,
        deadline=None,  # time is the rig's business, never a reason to fail an example
        # A recorded program is run as often as that, for what it showed may show in some of the runs only.
        max_examples=context.profile.max_examples if context.replay is None else REPLAYS,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    hypothesis.settings.load_profile(name)
    if context.seed != DEFAULT_SEED and getattr(config.option, "hypothesis_seed", None) is None:
        setattr(core, _FORCE_SEED, context.derive_seed("hypothesis", bits=48))


def invocation(config: pytest.Config) -> list[str]:
    """The command line that started the run, as `blink certify` or pytest got it."""
    import json

    if given := os.environ.get("BLINK_INVOCATION"):
        return [str(part) for part in json.loads(given)]
    return ["pytest", *map(str, config.invocation_params.args)]
