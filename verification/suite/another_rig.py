"""A further engine beside those of the session's fixtures, for tests that need other options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hil_rigs.description import load_rig
from hil_rigs.local import LocalOptions, LocalRig, RigFailure
from hil_rigs.locks import rig_lock
from verification.certificate.outcomes import RigBroken
from verification.run_context import RunContext


@contextmanager
def another_rig(run: RunContext, name: str, model: Path | None, options: LocalOptions) -> Iterator[LocalRig]:
    """The rig of `run` with `options`, without an HTTP front end, for as long as the context lasts."""
    description = load_rig(run.rig)
    rig = LocalRig(description, model, http=False, name=f"{run.run_id}-{run.worker}-{name}", options=options)
    with rig_lock(description, run.run_id):
        try:
            rig.start()
        except RigFailure as e:
            raise RigBroken(f"{name}: {e}") from e
        try:
            yield rig
        finally:
            rig.stop()
