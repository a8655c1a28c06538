"""How a run describes itself to its report."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

from verification.run_context import RunContext


def now() -> str:
    """The time as a report states it: ISO 8601, UTC."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")


def model_path(model: str) -> Path | None:
    """Where a model given by path or by pinned name lies; None where it is not to be found."""
    from blink_core.model_store import ModelStoreError, resolve

    try:
        return resolve(model)
    except ModelStoreError:
        return None


def _capabilities(context: RunContext) -> frozenset[str]:
    """Of the run's rig, by its description."""
    from hil_rigs.description import load_rig

    return context.capabilities or frozenset(load_rig(context.rig).capabilities)


def describe_run(
    context: RunContext,
    facts: dict[str, Any],
    started: str,
    duration_s: float,
    command: list[str],
    required_text: str,
    thresholds_text: str | None,
    *,
    judges_required: bool = True,
) -> Any:
    """The run as the report describes it, judged by its required set or by what was selected.

    A model given as a file or folder is hashed unless the rig already did.
    """
    from verification.certificate.provenance import model_digest
    from verification.certificate.report import RunDescription

    model = dict(facts.get("model") or {})
    if context.model is not None:
        path = model_path(context.model)
        model.setdefault("name", context.model if path is None else path.name)
        if path is not None:
            model.setdefault("path", str(path.resolve()))
            if not model.get("sha256"):
                model["sha256"] = model_digest(path)
    return RunDescription(
        run_id=context.run_id,
        rig=context.rig,
        profile=context.profile_name,
        seed=context.seed,
        seed_source=context.seed_source,
        started=started,
        ended=now(),
        duration_s=duration_s,
        command=command,
        required_text=required_text,
        thresholds_text=thresholds_text,
        model=model,
        facts={name: value for name, value in facts.items() if name not in ("model", "known_issues")},
        known_issues=facts.get("known_issues", []),
        judges_required=judges_required and context.shard is None,
        shard=None if context.shard is None else str(context.shard),
        capabilities=_capabilities(context),
    )
