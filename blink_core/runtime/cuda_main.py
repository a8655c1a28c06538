"""The engine process of the gpu rig: `python -m blink_core.runtime.cuda_main [--dtype T] [--launch S] ...`.

Takes engine_main's arguments too. Loads the model onto the GPU, captures its step graphs, launches the scheduler,
writes `DIR/engine.json` and `DIR/gpu.json` (what was built: graphs, memory, times), and sleeps until SIGTERM (stop), or
SIGUSR1 (drain) and then SIGTERM; meanwhile its watchdog keeps `DIR/health.json`. Exit status 2 and one line on standard
error: it could not start; 4: the engine was lost, and `health.json` says why.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from blink_core.abi.config import ConfigError, EngineConfig
from blink_core.abi.enums import EngineState
from blink_core.models.errors import ModelError
from blink_core.runtime.cpu import HOLD_LIMIT_S, CpuRuntime
from blink_core.runtime.descriptor import EngineDescriptor, Memory, ModelInfo
from blink_core.runtime.engine_main import NOOP_VOCAB, ORPHAN_GRACE_S, engine_config, parse_arguments
from blink_core.runtime.gpu_events import EventSource, NvmlEvents, RecordedEvents
from blink_core.runtime.parent import EXIT_ORPHANED, ParentWatch
from blink_core.runtime.watchdog import Watchdog
from blink_core.transport.interface import TransportError
from blink_core.transport.shm import Segment

if TYPE_CHECKING:
    from blink_core.runtime.cuda_model import CudaNetwork
    from blink_core.runtime.launch import Runtime

log = logging.getLogger("blink.cuda")


class Watched(Protocol):
    """What the watchdog needs of a runtime."""

    segment: Segment

    def status(self, field: str) -> int: ...


EXIT_LOST = 4
HEARTBEAT_MARGIN_S = 10.0  # beyond the longest step: the copies of KV pages for verification, among others
DTYPES = ("auto", "float32", "bfloat16", "float16")


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, argparse.Namespace]:
    """Arguments of this module, and those of every engine."""
    parser = argparse.ArgumentParser(prog="blink-engine-gpu", add_help=False)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: float32 in check modes, else bfloat16")
    parser.add_argument("--launch", choices=("host", "fire", "tail", "switch", "auto"), default="auto")
    parser.add_argument("--step-limit", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--gpu-events", type=Path, metavar="FILE", help="Xid errors of a recording, not of the driver")
    parser.add_argument("--run-limit", type=float, default=0.0, metavar="SECONDS", help="stop when idle after so long")
    own, rest = parser.parse_known_args(argv)
    return own, parse_arguments(rest)


def dtype_of(own: argparse.Namespace, args: argparse.Namespace, head_dim: int) -> str:
    """The element type. Token equivalence is decided in float32 [design 9], which is also what batch-invariant mode
    means unless another one is asked for, and takes heads of sizes that the tensor-core kernels do not."""
    from blink_core.ops.cuda_attention import HEAD_DIMS

    if own.dtype == "auto":
        strict = args.capture or args.batch_invariant or head_dim not in HEAD_DIMS
        return "float32" if strict else "bfloat16"
    return str(own.dtype)


def load(own: argparse.Namespace, args: argparse.Namespace) -> tuple[EngineConfig, CudaNetwork | None]:
    """Configuration and network; None for the no-op model. Raises ConfigError or ModelError."""
    if args.model is None:
        if args.kv_sanitizer:
            raise ConfigError("--kv-sanitizer needs a model: the no-op model has no KV rows")
        return engine_config(args, NOOP_VOCAB, (), 1 << 20), None
    from blink_core.models.load_config import load_config
    from blink_core.ops.cuda_ops import CudaOps
    from blink_core.runtime.cuda_model import load_network

    m = load_config(args.model)
    config = engine_config(args, m.vocab_size, m.eos_token_ids, m.max_position_embeddings)
    if config.prefix_cache and not m.keys_are_final(config.max_len):
        log.info("prefix cache off: sequences beyond %s tokens have their keys computed anew", m.rope.original_max)
        config = replace(config, prefix_cache=0)
    ops = CudaOps(dtype_of(own, args, m.head_dim), batch_invariant=args.batch_invariant)
    return config, load_network(args.model, ops, config.max_len)


def describe(args: argparse.Namespace, runtime: Runtime, network: CudaNetwork | None) -> EngineDescriptor:
    """What others need to find the engine's rings and memory."""
    from blink_core.runtime.launch import kv_shape

    config = runtime.config
    info = ModelInfo("noop", "", NOOP_VOCAB, config.max_len, (), None)
    if network is not None:
        m = network.config
        shape = kv_shape(network, config)
        info = ModelInfo(args.name, str(args.model), m.vocab_size, config.max_len, m.eos_token_ids, shape)
    return EngineDescriptor(
        pid=os.getpid(),
        segment=args.segment,
        config=config,
        model=info,
        state=Memory(runtime.state.fd, runtime.state.nbytes),
        log=Memory(runtime.log.fd, runtime.log.nbytes),
        kv=Memory(runtime.kv.fd, runtime.kv.nbytes) if runtime.kv else None,
        capture=str(args.run_dir / "capture.bin") if args.capture and network is not None else None,
        kv_sanitizer=runtime.sanitizer_info,
    )


def event_source(recording: Path | None) -> EventSource:
    """Xid errors of a recording, or else of the GPU that CUDA gave this process. Raises EventError."""
    if recording is not None:
        return RecordedEvents(recording)
    import cupy

    return NvmlEvents(cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.Device().id))


class StepsOfHost:
    """The heart of a host-driven engine: steps taken, None while none runs.

    A plan whose step has not begun, because the scheduler is held, is none that runs. Only for the longest hold there
    is: of a holder that died without a release, the scheduler is free after it.
    """

    def __init__(self, runtime: CpuRuntime) -> None:
        self._runtime = runtime
        self._hold, self._held_since = 0, 0.0

    def __call__(self) -> int | None:
        held = self._held()  # asked at every look: its time counts from the first one
        if held or not self._runtime.step_in_flight:
            return None
        return self._runtime.status("steps")

    def _held(self) -> bool:
        hold, now = self._runtime.hold, time.monotonic()
        if hold != self._hold:
            self._hold, self._held_since = hold, now
        return hold != 0 and now - self._held_since < HOLD_LIMIT_S


def say(reason: str) -> None:
    """One line on standard error, whose loss must not keep the engine from what follows."""
    with contextlib.suppress(OSError, ValueError):
        print(f"blink engine: {reason}", file=sys.stderr, flush=True)


def watch(
    own: argparse.Namespace, args: argparse.Namespace, runtime: Watched, failure: Callable[[], str | None] | None = None
) -> Watchdog:
    """The engine's watchdog. failure: of a device-driven engine, whose main thread asks the watchdog for its verdict.
    Without it the process is ended from here, because the main thread may be waiting for a step for ever; the heart of
    its scheduler beats on meanwhile, so the steps are looked at."""

    steps = StepsOfHost(runtime) if isinstance(runtime, CpuRuntime) else None

    def heartbeat() -> int | None:
        if runtime.status("state") in (EngineState.STOPPED, EngineState.FAILED):
            return None
        return runtime.status("heartbeat") if steps is None else steps()

    def end(reason: str) -> None:
        if failure is None:
            say(reason)
            try:
                runtime.segment.close()
            finally:
                os._exit(EXIT_LOST)

    return Watchdog(
        args.run_dir,
        lambda: event_source(own.gpu_events),
        heartbeat=heartbeat,
        failure=failure or (lambda: None),
        heartbeat_limit_s=own.step_limit + HEARTBEAT_MARGIN_S,
        on_lost=end,
        watched="the step in flight" if isinstance(runtime, CpuRuntime) else "the scheduler's heart",
    )


def stop_orphan(runtime: Runtime) -> None:
    """Stops an engine whose launcher is gone; ends the process if its step does not end in time."""
    runtime.request_stop()
    time.sleep(ORPHAN_GRACE_S)  # on a daemon thread: it goes with the process
    try:
        runtime.segment.close()
    finally:
        os._exit(EXIT_ORPHANED)


def run(own: argparse.Namespace, args: argparse.Namespace) -> None:
    """Serves until told to stop."""
    from blink_core.runtime.launch import EngineLost, HostDriven, LaunchOptions, make_runtime

    parent = ParentWatch(args.exit_with_parent)
    begin = time.monotonic()
    config, network = load(own, args)
    loaded = time.monotonic()
    options = LaunchOptions(
        strategy=own.launch,
        capture=args.run_dir / "capture.bin" if args.capture else None,
        step_limit_s=own.step_limit,
        run_limit_s=own.run_limit,
        kv_sanitizer=args.run_dir / "kv-sanitizer.jsonl" if args.kv_sanitizer else None,
    )
    with parent.hold():
        runtime = make_runtime(config, args.segment, network, options)
        parent.on_gone(lambda: stop_orphan(runtime))
    try:
        signal.signal(signal.SIGTERM, lambda *_: runtime.request_stop())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, which stops the engine in order
        signal.signal(signal.SIGUSR1, lambda *_: runtime.request_drain())
        report = runtime.report | {
            "load_seconds": round(loaded - begin, 3),
            "start_seconds": round(time.monotonic() - begin, 3),
        }
        (args.run_dir / "gpu.json").write_text(json.dumps(report, indent=1))
        log.info("built: %s", json.dumps(report))
        failure = None if isinstance(runtime, HostDriven) else runtime.failure
        with closing(watch(own, args, runtime, failure)) as watchdog:
            # After the health file of an earlier engine in this folder is gone: front ends come by this one.
            describe(args, runtime, network).write(args.run_dir / "engine.json")
            try:
                if isinstance(runtime, HostDriven):
                    runtime.serve()
                else:
                    runtime.serve(lost=lambda: watchdog.lost)
            except EngineLost as error:
                watchdog.health.fail("lost", str(error))
                raise
        log.info("stopped after %d steps", runtime.status("steps"))
    finally:
        runtime.close()


def main(argv: list[str] | None = None) -> int:
    # Before CUDA starts: a kernel that is loaded lazily beside a resident one never runs.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    own, args = parse(argv)
    logging.basicConfig(
        level=args.verbosity.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        print(f"blink engine: CuPy is not there ({error}); install with `pip install '.[gpu]'`", file=sys.stderr)
        return 2
    from blink_core.ops.cuda_modules import CudaError
    from blink_core.runtime.launch import EngineLost

    try:
        run(own, args)
    except (ConfigError, ModelError, TransportError, CudaError, OSError) as e:
        print(f"blink engine: {e}", file=sys.stderr)
        return 2
    except EngineLost as e:
        say(str(e))
        logging.shutdown()
        os._exit(EXIT_LOST)  # CUDA's own end would wait for work that never ends
    return 0


if __name__ == "__main__":
    sys.exit(main())
