"""The runs of compute-sanitizer as far as they go without one: processes, deadlines, progress, what 'clean' covers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from blink_core.abi.enums import EventKind
from blink_core.frontend.ring_client import RingClient
from blink_core.ops.cuda_sources import KERNELS
from blink_core.runtime.cpu import CpuRuntime, Plan, noop_step
from blink_core.transport.shm import ShmTransport
from hil_rigs.gpu import sanitize, sanitize_warm
from hil_rigs.gpu.all import ROOT
from hil_rigs.gpu.sanitize import Found, Session, report
from hil_rigs.gpu.sanitize_serve import LONG, LONG_TOKENS, LONGEST, PARTS, SERVES, TOOLS, workload
from tests.waiting import DEADLINE_S, ended, until


def program(folder: Path, code: str) -> str:
    """Stands in for compute-sanitizer; it does not run what it is given."""
    path = folder / "compute-sanitizer"
    path.write_text(f"#!{sys.executable}\nimport sys\n{code}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are compiled already."""
    monkeypatch.setattr(sanitize, "warm_cache", lambda *arguments: None)


def await_gone(pid: int) -> None:
    until(lambda: ended(pid), f"process {pid} lives on")


CLEAN = """
print("AT imported (1.0 s)")
print("SERVED dense: 9 tokens (2.0 s)")
print("KERNELS rope_kv.cu:rope_append elementwise.cu:add cublasLt:cublasLt")
print("========= ERROR SUMMARY: 0 errors")
"""


@pytest.mark.usefixtures("warm")
def test_progress_and_kernels_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a run that says nothing until it is over; 'clean' that does not say over which kernels; options that do
    not reach the tool."""
    code = f"assert sys.argv[1:3] == ['--tool', 'racecheck'], sys.argv\nassert 'strict' in sys.argv\n{CLEAN}"
    found = Session(program(tmp_path, code), None, DEADLINE_S, tmp_path / "out").one("racecheck", "strict")
    assert found.ok
    assert found.reached == "dense: 9 tokens (2.0 s)"
    assert found.ran == {"rope_kv.cu:rope_append", "elementwise.cu:add", "cublasLt:cublasLt"}
    told = capsys.readouterr().out
    assert "racecheck strict: imported (1.0 s)" in told
    assert told.index("imported") < told.index("9 tokens") < told.index("clean")
    assert "ERROR SUMMARY" in (tmp_path / "out" / "racecheck-strict.log").read_text()
    assert report([found], whole=False) == 0
    told = capsys.readouterr().out
    assert "racecheck: clean over 2 kernels: cublasLt:cublasLt elementwise.cu:add" in told
    assert told.splitlines()[-1] == "clean: racecheck, 2 kernels clean"


HANGS = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("AT step of mixed 96 (3.0 s)", flush=True)
print("pid", child.pid, flush=True)
child.wait()
"""


@pytest.mark.usefixtures("warm")
def test_a_run_that_is_cut_off_says_how_far_it_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a tool that hangs until the machine is taken away; a TIMEOUT of which nobody knows where; the program
    under the tool left on the GPU when the tool is killed."""
    begun = time.monotonic()
    session = Session(program(tmp_path, HANGS), None, 8.0, tmp_path)
    found = session.one("memcheck", "dense")
    assert (found.status, found.reached, found.ok) == ("TIMEOUT", "step of mixed 96 (3.0 s)", False)
    assert time.monotonic() - begun < DEADLINE_S
    pid = int((tmp_path / "memcheck-dense.log").read_text().split("pid ")[1])
    await_gone(pid)
    assert session.one("memcheck", "mixture").status == "TIMEOUT"  # its time is over before it begins
    assert report([found], whole=False) == 1
    assert "TIMEOUT, at: step of mixed 96" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("sleep 600 & echo pid $!", None),
        ("sleep 600 >/dev/null 2>&1 & echo pid $!", 0),
        ("echo pid $$; exec sleep 600 >/dev/null 2>&1", None),
    ],
    ids=["holds the output", "has left the output", "has closed its own"],
)
def test_what_outlives_the_tool_neither_holds_it_nor_is_left(
    script: str, code: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a tool that ends before its program, which holds the output: a wait without a deadline, and nobody finds
    the program from its dead parent; one that is left on the GPU; a deadline that is over and is told as an end."""
    begun = time.monotonic()
    session = Session("", None, 5.0)
    text, ended = session._run("memcheck", "dense", ["sh", "-c", script])
    assert time.monotonic() - begun < DEADLINE_S
    assert ended == code
    assert text.endswith("\n")
    await_gone(int(text.removeprefix("pid ")))
    assert "live on" not in capsys.readouterr().out


def test_output_is_read_by_lines() -> None:
    """Catches: a line that came in two pieces told as two; the last one lost for want of its end, or to the deadline;
    output that is no UTF-8 taken for the end of a run; a pipe that is held open waited for past the deadline."""
    for closed in (True, False):
        reading, writing = os.pipe()
        with open(reading, "rb"), open(writing, "wb", buffering=0) as pipe:
            lines = sanitize.lines_until(reading, time.monotonic() + (DEADLINE_S if closed else 5.0))
            pipe.write(b"AT imp\nSER")
            assert next(lines) == "AT imp\n"
            pipe.write(b"VED \xff\nlast")
            assert next(lines) == "SERVED \ufffd\n"
            if closed:
                pipe.close()
            assert next(lines) == "last"
            with pytest.raises(StopIteration if closed else TimeoutError):
                next(lines)


def test_whoever_ends_the_group_ends_all_of_it(tmp_path: Path) -> None:
    """Catches: a stage of `hil_rigs.gpu.all` that is killed and leaves its tools at work on the GPU."""
    tool = program(tmp_path, HANGS)
    code = (
        "from hil_rigs.gpu import sanitize; from pathlib import Path; sanitize.warm_cache = lambda *a: None; "
        f"print(sanitize.Session({tool!r}, None, 600.0, Path({str(tmp_path)!r})).one('memcheck', 'dense'))"
    )
    wrapped = tool + "-seen"
    Path(wrapped).write_text("")
    told = HANGS.replace('print("pid", child.pid, flush=True)', f"open({wrapped!r}, 'w').write(str(child.pid))")
    program(tmp_path, told)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as stage:
        try:
            assert stage.stdout is not None
            assert b"step of mixed 96" in stage.stdout.readline()
            until(Path(wrapped).read_text, "the program under the tool was not begun")
        finally:
            os.killpg(stage.pid, signal.SIGKILL)
    await_gone(int(Path(wrapped).read_text()))


def test_a_part_that_fails_without_the_tool_is_no_finding_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a serve that does not run at all told as the tool's doing, or not told; one that is clean by that."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))
    (tmp_path / "cupy.py").write_text("raise SystemExit('no driver here')\n")
    found = Session(program(tmp_path, CLEAN), None, DEADLINE_S).one("memcheck", "dense")
    assert (found.status, found.ok) == ("exit status 1 without the tool", False)
    assert "no driver here" in capsys.readouterr().out


@pytest.mark.usefixtures("warm")
def test_a_device_that_the_tool_does_not_take_is_named(tmp_path: Path) -> None:
    """Catches: a machine on which the tool cannot work at all counted as findings."""
    refuses = 'print("========= Error: Device not supported. Please refer to the documentation"); sys.exit(1)'
    found = Session(program(tmp_path, refuses), None, DEADLINE_S).one("memcheck", "dense")
    assert found.status == "REFUSED: device not supported"
    assert report([found], whole=False) == 2


def test_clean_covers_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a kernel that no part runs, under a tool that says clean; one that ran only in a part that was not
    clean; one that is gone among those that need not run."""
    kernels = sorted(sanitize.all_kernels())
    assert {"attention_decode.cu:attention_decode", "gemm_skinny.cu:skinny_32_3", "moe_one.cu:moe_router_one_8"} <= {
        *kernels
    }
    sources = {path.name: path.read_text() for path in KERNELS.glob("*.cu")}
    for kernel in sanitize.NOT_OF_A_STEP:
        file, _, name = kernel.partition(":")
        assert name in sanitize.kernels_in(sources[file])

    def found(status: str, *ran: str) -> Found:
        return Found("memcheck", 0, 1, 1.0, status, ran=frozenset(ran))

    assert report([found("ended", *kernels)], whole=True) == 0
    capsys.readouterr()
    assert report([found("ended", *kernels[1:])], whole=True) == 1
    assert f"NOT RUN, or not clean: {kernels[0]}" in capsys.readouterr().out
    assert report([found("ended", *kernels[1:]), found("TIMEOUT", kernels[0])], whole=True) == 1
    assert f"NOT RUN, or not clean: {kernels[0]}" in capsys.readouterr().out
    assert report([found("ended", *kernels[1:])], whole=False) == 0
    assert report([], whole=False) == 1


def test_kernels_are_found_in_their_sources() -> None:
    """Catches: a kernel that nobody misses, because its declaration is written in another way, or made by a macro."""
    text = """
#define KERNEL(NAME, SILU)                                                                  \\
  extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME(const __grid_constant__ P p) { product<SILU>(p); }
KERNEL(tile, false)
#if DTYPE != 0
KERNEL(tile_silu, true)
#endif
// not a kernel: extern "C" __global__ void in_a_comment()
extern "C" __global__ void plain(int n) {}
extern "C" __global__ void __launch_bounds__(WARPS * 32) bounded(int n) {}
extern "C" __global__ void __launch_bounds__(f(A), 2)
    on_another_line(int n) {}
extern "C" __global__ void CLUSTER __launch_bounds__(f(A), 2)
    clustered(int n) {}
"""
    assert sorted(sanitize.kernels_in(text)) == [
        *("bounded", "clustered", "on_another_line", "plain", "tile", "tile_silu")
    ]
    text = """
#if JOINED
#define KERNEL joined
#else
#define KERNEL apart
#endif
extern "C" __global__ void __launch_bounds__(32) KERNEL(int n) {}
"""
    assert sorted(sanitize.kernels_in(text)) == ["apart", "joined"]
    for path in KERNELS.glob("*.cu"):
        text = path.read_text()
        code = "\n".join(line.partition("//")[0] for line in text.splitlines())
        named = len(re.findall(r"^KERNEL\(|^#define KERNEL \w+$", code, re.M))
        declared = code.count("__global__") - len(re.findall(r"__global__ void[^;{]*?\b(?:NAME|KERNEL)\(", code))
        assert len(sanitize.kernels_in(text)) == declared + named, path.name


DIRECT = """
import sys
from unittest.mock import MagicMock
import numpy as np
# NumPy in CuPy's place; kernels are noted, not run.
np.asnumpy, np.cuda = np.asarray, MagicMock()
np.cuda.Device.return_value.attributes = {"MultiProcessorCount": 132}
np.cuda.runtime.deviceGetAttribute = lambda attribute, device: {97: 227 * 1024, 133: 0}[attribute]
sys.modules |= {"cupy": np, "nvmath": MagicMock(), "nvmath.bindings": MagicMock()}
from blink_core.ops import cuda_gemm, cuda_moe, cuda_modules
ran, files = set(), {}
for module in (cuda_gemm, cuda_moe, cuda_modules):
    module.pointer = lambda array: 0
cuda_modules.Kernels.get = lambda self, file, name, shared=0, **d: (
    files.update({name: file}), cuda_modules.Kernel(name, None, shared))[1]
cuda_modules.Kernel.launch = lambda self, *a, **k: ran.add(f"{files[self.name]}:{self.name}")
cuda_modules.Kernel.places = lambda self, threads: 132
from blink_core.ops.cuda_ops import CudaOps
from hil_rigs.gpu.sanitize_kernels import all_launched
for launched in all_launched(CudaOps("bfloat16"), CudaOps("bfloat16", batch_invariant=True)):
    assert np.isfinite(launched.expected).all() and np.linalg.norm(launched.expected) > 0, launched.case
    assert launched.out.size == launched.expected.size and abs(launched.error - 1) < 1e-6, launched.case  # nothing ran
print(*sorted(ran))
"""


def test_every_kernel_has_a_part_that_runs_it() -> None:
    """Catches: a kernel that the product launches and no sanitizer ever sees, noticed without a GPU; one that a serve
    is said to run and that is gone."""
    done = subprocess.run(
        [sys.executable, "-c", DIRECT], capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    direct = set(done.stdout.split())
    assert {f"gemm_skinny.cu:skinny_32_{tiles}" for tiles in (1, 2, 3)} <= direct
    assert {"moe_one.cu:moe_router_one_8", "moe_one.cu:moe_router_one_16"} <= direct
    served = {f"{file}:{name}" for file, names in SERVES.items() for name in names.split()}
    assert served | direct == sanitize.all_kernels()


def test_kernels_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: four tools that compile the same kernels side by side; a failure taken for a full cache; kernels that
    have changed and count as compiled; a wait for a process that does not end."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    ran: list[int] = []
    inside, go = threading.Event(), threading.Event()

    def run() -> tuple[str, int | None]:
        ran.append(1)
        inside.set()
        assert go.wait(DEADLINE_S)
        return "no compiler", int(len(ran) == 1)

    def warm(seconds: float = DEADLINE_S) -> tuple[str, int | None] | None:
        return sanitize_warm.warm_cache("dense", None, run, time.monotonic() + seconds)

    first: list[tuple[str, int | None] | None] = []
    thread = threading.Thread(target=lambda: first.append(warm()))
    thread.start()
    assert inside.wait(DEADLINE_S)
    late = warm(0.0)
    assert late == ("the kernels are still being compiled by another process", None)
    go.set()
    thread.join(DEADLINE_S)
    assert first == [("no compiler", 1)]
    assert (warm(), warm(), len(ran)) == (None, None, 2)
    monkeypatch.setattr(sanitize_warm, "state_of_kernels", lambda: "changed")
    assert (warm(), len(ran)) == (None, 3)


RECORDER = """
import sys
tool, cleared = sys.argv[1], int(sys.argv[2])
from types import SimpleNamespace
from unittest.mock import MagicMock
for name in ("cupy", "nvmath", "nvmath.bindings"):
    sys.modules[name] = MagicMock()
from blink_core.ops.cublaslt import CublasLt
from blink_core.ops.cuda_modules import Kernel, Kernels
from blink_core.runtime.cuda_graphs import StepGraphs
from blink_core.runtime.cuda_step import Bucket, CudaStep
from hil_rigs.gpu.sanitize_serve import NO_FILE, Steps
Kernel.launch = lambda self, *arguments, **named: None
Kernels.get = lambda self, file, name, shared=0, **defines: Kernel(name, None)
CublasLt.launch = lambda self, *arguments: None
StepGraphs.launch = lambda self, graph: None
CudaStep.run = lambda self, bucket, resident=False: self.work(bucket)
CudaStep.work = lambda self, bucket: (
    Kernel("step_view", None).launch(1, 256),
    kernels.get("moe_one.cu" if bucket.decode else "moe.cu", "one" if bucket.decode else "many", HEAD=1).launch(1, 2),
    None if bucket.decode else [library.launch(out, out, out, residual, None) for residual in (None, out)],
)
kernels, library, out = Kernels("bfloat16"), CublasLt.__new__(CublasLt), MagicMock()
steps, step, graphs = Steps(tool), CudaStep.__new__(CudaStep), StepGraphs.__new__(StepGraphs)
steps.patch()
decode, mixed = Bucket(1, 1, 1, True), Bucket(32, 4, 4, False)
for bucket in (decode, mixed, decode):
    step.run(bucket, resident=False)
assert steps.ran == set(), steps.ran
graphs.launch(SimpleNamespace(bucket=decode))
assert steps.ran == {"step_view.cu:step_view", "moe_one.cu:one"}, steps.ran
graphs.launch(SimpleNamespace(bucket=mixed))
assert steps.ran == {"step_view.cu:step_view", "moe_one.cu:one", "moe.cu:many", "cublasLt:cublasLt"}, steps.ran
memset = sys.modules["cupy"].cuda.runtime.memsetAsync
assert memset.call_count == cleared, memset.call_args_list
from blink_core.ops.cuda_kv_sanitizer import KERNELS
assert set(KERNELS) <= set(NO_FILE)
print("recorded")
"""


@pytest.mark.parametrize("tool", TOOLS)
def test_kernels_of_a_step_count_when_it_is_launched(tool: str) -> None:
    """Catches: kernels that were only captured, or run on an empty plan, counted as looked at; a hook at a name that is
    gone, so that nothing is recorded; steps that are not the engine's, with outputs cleared for initcheck's sake, under
    the tools that need none of it; an initcheck that takes cuBLASLt's outputs for uninitialised."""
    command = [sys.executable, "-c", RECORDER, tool, str(int(tool == "initcheck"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False)
    assert done.stdout.strip().endswith("recorded"), done.stderr[-2000:]


@pytest.mark.parametrize("tool", TOOLS)
def test_the_workload_has_every_kind_of_step(tool: str) -> None:
    """Catches: sizes that an engine refuses; requests of which no step is large enough for the kernels of many tokens,
    or none decodes several rows, or one alone; one that never ends."""
    config, requests = workload(tool, 512, LONGEST)
    name = f"blink-workload-{os.getpid()}-{tool}"
    steps: set[tuple[int, int]] = set()
    asked = threading.Event()

    def step(plan: Plan) -> None:
        assert asked.wait(DEADLINE_S)  # a step of the GPU takes longer than it takes to ask
        steps.add((len(plan.token_ids), len(plan.rows)))
        noop_step(plan)

    with closing(CpuRuntime(config, name)) as runtime:
        thread = threading.Thread(target=runtime.serve, args=(step,), daemon=True)
        thread.start()
        try:
            layouts = config.layouts()
            transport = ShmTransport(runtime.segment, layouts["Control"].nbytes, layouts["Ring"].nbytes)
            client = RingClient(transport, config)
            client.attach()
            for prompt, params in requests:
                client.submit(np.asarray(prompt, np.int32), params)
            asked.set()
            kinds: list[int] = []
            deadline = time.monotonic() + DEADLINE_S
            while client.live:
                kinds += client.poll(0.2)["kind"].tolist()
                assert time.monotonic() < deadline
        finally:
            runtime.request_stop()
            thread.join(DEADLINE_S)
    assert kinds.count(EventKind.FINISH) == len(requests)
    assert kinds.count(EventKind.ERROR) == 0
    assert any(tokens > 64 for tokens, _ in steps)  # of a mixture and of a batch-invariant product other kernels
    assert any(tokens > rows and tokens <= 64 for tokens, rows in steps)
    assert (1, 1) in steps
    assert any(tokens == rows > 1 for tokens, rows in steps)


NETWORKS = """
import sys
from unittest.mock import MagicMock
import numpy as np
# NumPy in CuPy's place: arrays, not kernels, are what is made here.
np.asnumpy, np.cuda = np.asarray, MagicMock()
sys.modules |= {"cupy": np, "nvmath": MagicMock(), "nvmath.bindings": MagicMock()}
from hil_rigs.gpu.sanitize_serve import LONGEST, PARTS, network_of
for name, part in PARTS.items():
    network = network_of(part, LONGEST)
    layers, ops = network.layers, network.ops
    assert (ops.dtype, ops.batch_invariant) == (part.dtype, part.invariant), name
    assert [layer.experts is not None for layer in layers] == [False, part.experts], name
    expected = np.float32 if part.dtype == "float32" else np.uint16
    first = layers[0]
    arrays = [network.embedding, network.head.nk, network.norm, first.qkv.nk, first.attention_norm, first.gate_up.nk]
    arrays += [layers[1].experts.router.nk, layers[1].experts.down.nk, first.qk_norm] if part.experts else []
    assert {a.dtype for a in arrays} == {np.dtype(expected)}, (name, [a.dtype for a in arrays])
    assert network.tables[0].dtype == np.float32
    values = network.head.nk.astype(np.float32) if part.dtype == "float32" else None
    assert values is None or 0.001 < np.abs(values).min() <= np.abs(values).max() < 0.1, name
print("made")
"""


def test_networks_are_made_as_the_parts_say() -> None:
    """Catches: a part whose model the engine refuses; float32 that is bfloat16 still, or whose values are not those; a
    layer without, or with, experts where the part says otherwise."""
    done = subprocess.run(
        [sys.executable, "-c", NETWORKS], capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False
    )
    assert done.stdout.strip().endswith("made"), done.stderr[-3000:]


PRODUCTS = """
import sys
from unittest.mock import MagicMock
sys.modules |= {name: MagicMock() for name in ("cupy", "nvmath", "nvmath.bindings")}
from blink_core.ops import cuda_gemm
from hil_rigs.gpu.sanitize_serve import BUDGET, PARTS
cuda_gemm.multiprocessors = lambda reserved: 132
used = set()
for name, part in PARTS.items():
    library = MagicMock()
    library.plan.return_value.choice.tiles = 0  # not tuned
    cuda_gemm.Gemm.library = lambda gemm, name=name, library=library: used.add(name) or library
    for rows in range(1, BUDGET + 1):
        gemm = cuda_gemm.Gemm(MagicMock(dtype=part.dtype), invariant=part.invariant)
        x, weight, out = MagicMock(shape=(rows, 256)), MagicMock(), MagicMock(shape=(rows, 512))
        weight.nk.shape = (512, 256)
        gemm(x, weight, out)
        list(gemm.by_pieces(x, weight, out))
assert used == {"dense", "mixture"}, used
print("looked at")
"""


def test_parts_whose_products_initcheck_sees() -> None:
    """Catches: strict or batch-invariant products by cuBLASLt, of which initcheck sees nothing: then no part's would
    show it an input that nobody wrote."""
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS], capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False
    )
    assert done.stdout.strip() == "looked at", done.stderr[-2000:]


def test_parts_differ_in_what_they_run() -> None:
    """Catches: a part that was made equal to another one, so that its kernels are not run."""
    assert len(set(PARTS.values())) == len(PARTS)
    assert {part.dtype for part in PARTS.values()} == {"bfloat16", "float32"}
    assert any(p.invariant for p in PARTS.values())
    assert any(p.watched for p in PARTS.values())
    assert {p.experts for p in PARTS.values()} == {True, False}
    assert set(LONG) == set(TOOLS)
    assert max(LONG.values()) + LONG_TOKENS < LONGEST
