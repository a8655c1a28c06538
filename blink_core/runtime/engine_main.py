"""The engine process: `python -m blink_core.runtime.engine_main --run-dir DIR --segment NAME --model PATH ...`.

Loads the model, creates rings and engine memory, starts the scheduler thread, publishes `DIR/engine.json`, and runs the
model step until SIGTERM (stop), or SIGUSR1 (drain) and then SIGTERM. Exit status 2 and one line on standard
error: it could not start.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from blink_core.abi.config import ConfigError, EngineConfig, fit_shared_memory
from blink_core.models import KVPool, ModelError, load_model
from blink_core.ops.sanitized_ops import SanitizedOps
from blink_core.runtime.cpu import CpuRuntime, noop_step, poison
from blink_core.runtime.cpu import ModelStep as StepFunction
from blink_core.runtime.descriptor import EngineDescriptor, Memory, ModelInfo, SanitizerInfo
from blink_core.runtime.kv_sanitizer import KvSanitizer, SanitizedStep
from blink_core.runtime.memory import OwnedMemory
from blink_core.runtime.model_step import Capture, ModelStep
from blink_core.runtime.parent import EXIT_ORPHANED, ParentWatch
from blink_core.transport.interface import TransportError
from blink_core.transport.shm import shm_available

log = logging.getLogger("blink.engine")

NOOP_VOCAB = 251
SHM_SHARE = 0.5  # of what is free: the rest is for a second engine
ORPHAN_GRACE_S = 20.0  # for the step in flight, when nobody is left to kill this process


@dataclass(frozen=True, slots=True)
class Served:
    """A model ready to run and the memory its KV pool lies in."""

    info: ModelInfo
    step: StepFunction
    kv: OwnedMemory | None
    sanitizer: KvSanitizer | None = None


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="blink-engine", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--segment", required=True, help="name of the shared memory segment to create")
    parser.add_argument("--model", type=Path, help="GGUF file or HuggingFace folder; without it a no-op model runs")
    parser.add_argument("--name", default="noop", help="served model name")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--capture", action="store_true", help="append the logits of every sampled row to a file")
    parser.add_argument("--kv-sanitizer", action="store_true", help="check the owner of every KV row that is read")
    parser.add_argument("--exit-with-parent", type=int, metavar="PID", help="stop when the launching process is gone")
    parser.add_argument("--verbosity", default="info", help="level of the process log")
    for field in fields(EngineConfig):
        if field.name not in ("vocab", "eos_ids"):
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=int)
    return parser.parse_args(argv)


def engine_config(args: argparse.Namespace, vocab: int, eos_ids: tuple[int, ...], longest: int) -> EngineConfig:
    """Configuration from the command line, the model's limits, and the shared memory there is."""
    given = {f.name: getattr(args, f.name, None) for f in fields(EngineConfig)}
    chosen = {name: value for name, value in given.items() if value is not None}
    chosen["max_len"] = min(chosen.get("max_len", EngineConfig(vocab=1).max_len), longest)
    config = EngineConfig(vocab=vocab, eos_ids=eos_ids, **chosen)
    return fit_shared_memory(config, int(shm_available() * SHM_SHARE))


def serve_noop(args: argparse.Namespace) -> tuple[EngineConfig, Served]:
    if args.kv_sanitizer:
        raise ConfigError("--kv-sanitizer needs a model: the no-op model has no KV rows")
    config = engine_config(args, NOOP_VOCAB, (), 1 << 20)
    info = ModelInfo("noop", "", NOOP_VOCAB, config.max_len, (), None)
    return config, Served(info, noop_step, None)


def serve_model(args: argparse.Namespace) -> tuple[EngineConfig, Served]:
    ops = SanitizedOps(batch_invariant=args.batch_invariant) if args.kv_sanitizer else None
    model = load_model(args.model, batch_invariant=args.batch_invariant, ops=ops)
    m = model.config
    config = engine_config(args, m.vocab_size, m.eos_token_ids, m.max_position_embeddings)
    if config.prefix_cache and not m.keys_are_final(config.max_len):
        log.info("prefix cache off: sequences beyond %s tokens have their keys computed anew", m.rope.original_max)
        config = replace(config, prefix_cache=0)
    shape = (2, m.num_layers, config.pages, config.page_size, m.num_kv_heads, m.head_dim)
    kv = OwnedMemory("kv", 4 * int(np.prod(shape)))
    pool = kv.array(np.float32, shape)
    poison(pool)
    capture = Capture(args.run_dir / "capture.bin", m.vocab_size) if args.capture else None
    info = ModelInfo(args.name, str(args.model), m.vocab_size, config.max_len, m.eos_token_ids, shape)
    pages = KVPool(pool[0], pool[1], config.page_size)
    step = ModelStep(model, pages, capture)
    if ops is None:
        return config, Served(info, step, kv)
    sanitizer = KvSanitizer(pages, prefix_cache=bool(config.prefix_cache), reports=args.run_dir / "kv-sanitizer.jsonl")
    ops.store = sanitizer
    return config, Served(info, SanitizedStep(step, sanitizer), kv, sanitizer)


def sanitizer_info(sanitizer: KvSanitizer | None) -> SanitizerInfo | None:
    """Where others find its reports and counters."""
    if sanitizer is None:
        return None
    memory = sanitizer.counter_memory
    return SanitizerInfo(str(sanitizer.reports), Memory(memory.fd, memory.nbytes))


def stop_orphan(runtime: CpuRuntime) -> None:
    """Stops an engine whose launcher is gone; ends the process if its step does not end in time."""
    runtime.request_stop()
    threading.Event().wait(ORPHAN_GRACE_S)  # a daemon thread: it goes with the process
    try:
        runtime.segment.close()
    except Exception:
        log.exception("the shared memory segment of an engine without a launcher could not be removed")
    finally:  # whatever became of the segment, or of the log that may go nowhere now
        os._exit(EXIT_ORPHANED)


def run(args: argparse.Namespace) -> None:
    """Serves until told to stop. Raises ConfigError, ModelError or TransportError if it cannot start."""
    parent = ParentWatch(args.exit_with_parent)  # first: loading a model takes long
    config, served = serve_model(args) if args.model else serve_noop(args)
    with parent.hold():
        runtime = CpuRuntime(config, args.segment)
        parent.on_gone(lambda: stop_orphan(runtime))
    try:
        if served.sanitizer is not None:
            served.sanitizer.bind(runtime)
        signal.signal(signal.SIGTERM, lambda *_: runtime.request_stop())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, which stops the engine in order
        signal.signal(signal.SIGUSR1, lambda *_: runtime.request_drain())
        EngineDescriptor(
            pid=os.getpid(),
            segment=args.segment,
            config=config,
            model=served.info,
            state=Memory(runtime.state.fd, runtime.state.nbytes),
            log=Memory(runtime.log.fd, runtime.log.nbytes),
            kv=Memory(served.kv.fd, served.kv.nbytes) if served.kv else None,
            capture=str(args.run_dir / "capture.bin") if args.capture else None,
            kv_sanitizer=sanitizer_info(served.sanitizer),
        ).write(args.run_dir / "engine.json")
        log.info(
            "ready: %s, %d pages, %d rows, segment %s%s",
            served.info.name,
            config.pages,
            config.max_rows,
            args.segment,
            ", KV sanitizer on" if served.sanitizer else "",
        )
        runtime.serve(served.step)
        log.info("stopped after %d steps", runtime.status("steps"))
    finally:
        runtime.close()


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    logging.basicConfig(
        level=args.verbosity.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        run(args)
    except (ConfigError, ModelError, TransportError, OSError) as e:
        print(f"blink engine: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
