"""The profile's tables and what it reads of ncu's output; no GPU needed."""

from __future__ import annotations

import sys
import threading

import pytest

from hil_rigs.gpu.clocks import Clocks
from hil_rigs.gpu.profile import DRAM, TIME, Row, main, read_ncu, table, weight_bytes

HEADER = '"ID","Kernel Name","Block Size","Grid Size","Section Name","Metric Name","Metric Unit","Metric Value"'


def line(launch: int, kernel: str, metric: str, value: str) -> str:
    return (
        f'"{launch}","{kernel}","(256, 1, 1)","(132, 1, 1)","Command line profiler metrics","{metric}","ns","{value}"'
    )


def test_launches_of_a_kernel_are_one_row() -> None:
    """Catches: a time read in the wrong unit or cut at its thousands' comma, metrics swapped, launches not added up."""
    text = "\n".join(
        (
            "==PROF== Connected to process 7", HEADER,
            line(0, "skinny_8_1(SkinnyParams)", DRAM, "80.5"), line(0, "skinny_8_1(SkinnyParams)", TIME, "12,345"),
            line(1, "rope_append", TIME, "2500"), line(1, "rope_append", DRAM, "1.5"),
            line(2, "skinny_8_1(SkinnyParams)", TIME, "12,355"), line(2, "skinny_8_1(SkinnyParams)", DRAM, "81.5"),
        )
    )  # fmt: skip
    rows = {row.name: row for row in read_ncu(text)}
    assert set(rows) == {"skinny_8_1 (132, 1, 1)", "rope_append (132, 1, 1)"}
    skinny = rows["skinny_8_1 (132, 1, 1)"]
    assert (skinny.count, skinny.us, skinny.dram) == (2, [12.345, 12.355], [80.5, 81.5])
    assert skinny.total_us == pytest.approx(24.7)


@pytest.mark.parametrize("text", ["==ERROR== The user does not have permission", HEADER])
def test_no_kernel_is_an_error(text: str) -> None:
    """Catches: a profile that ncu could not make, shown as a step that costs nothing."""
    with pytest.raises(ValueError, match="ncu"):
        read_ncu(text)


def test_the_worst_kernel_comes_first() -> None:
    """Catches: a table ordered by the time of one launch, and a rate that takes microseconds for seconds."""
    rows = [Row("rare", 1, [50.0]), Row("product", 32, [10.0, 11.0, 10.0], weights=40_000_000)]
    lines = table(rows)
    assert [text.split()[0] for text in lines] == ["kernel", "product", "rare", "sum"]
    assert lines[1].split()[1:] == ["32", "10.00", "320.0", "4.00", "-"]
    assert lines[-1].split()[1] == "370.0"


def test_bytes_of_what_is_no_product() -> None:
    """Catches: a rate of weights shown for a kernel that reads none."""
    assert weight_bytes([1, None, 2.0]) == 0


@pytest.mark.parametrize("arguments", [["--rows", "0"], ["--layers", "-1"], ["--chunk", "0"]])
def test_sizes_are_checked(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a size below one that ends in a traceback from the middle of the GPU's work."""
    with pytest.raises(SystemExit):
        main(arguments)
    assert f"{arguments[0]} is {arguments[1]}" in capsys.readouterr().err


class _Nvml:
    """A chip whose power cap holds its clock down from the second sample on, until somebody is content."""

    NVML_CLOCK_SM = 1
    NVMLError = OSError

    def __init__(self, enough: threading.Event) -> None:
        self.enough, self.asked = enough, 0

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByPciBusId(self, bus: bytes) -> bytes:
        return bus

    def nvmlDeviceGetClockInfo(self, handle: bytes, kind: int) -> int:
        self.asked += 1
        if self.asked > 4:
            self.enough.set()
        return 1980 if self.asked == 1 else 1400

    def nvmlDeviceGetPowerUsage(self, handle: bytes) -> int:
        return 699_000

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: bytes) -> int:
        return 0x1 if self.asked == 1 else 0x4 | 0x1


def test_clocks_tell_what_held_the_chip_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: milliwatts told as watts, another reason taken for the power cap, a thread that samples on."""
    enough = threading.Event()
    nvml = _Nvml(enough)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with Clocks("0000:01:00.0") as clocks:
        assert enough.wait(30.0)
    count = len(clocks.samples)
    assert clocks.samples[:2] == [(1980, 699.0, False), (1400, 699.0, True)]
    assert clocks.line.startswith("SM clock 1400 to 1980 MHz, median 1400; 699 W; power cap active in ")
    assert f"{100 * (count - 1) / count:.0f} % of {count} samples" in clocks.line
    assert not clocks._thread.is_alive()  # type: ignore[union-attr]


def test_clocks_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a profile that fails where NVML is not there, or shows a clock that nobody read."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Clocks("0000:01:00.0") as clocks:
        pass
    assert clocks.line.startswith("clock unknown (")


def test_clocks_of_an_nvml_without_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a thread that dies with a traceback beside the table, and a line that does not say why nothing is known,
    where the package names a function otherwise."""
    asked = threading.Event()
    nvml = _Nvml(asked)
    nvml.asked = 4  # the first question is enough
    monkeypatch.delattr(_Nvml, "nvmlDeviceGetCurrentClocksThrottleReasons")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with Clocks("0000:01:00.0") as clocks:
        assert asked.wait(30.0)
    assert clocks.line.startswith("clock unknown (AttributeError")
