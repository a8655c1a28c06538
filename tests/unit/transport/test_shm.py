"""Shared-memory segments and the one-sided transport over them (design sections 2 and 3)."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import blink_core
from blink_core import _native
from blink_core.transport import shm
from blink_core.transport.interface import TransportError, deadline_after
from blink_core.transport.shm import SHM_DIR, Segment, ShmTransport, remove_dead_segments, shm_available

ROOT = Path(blink_core.__file__).parents[1]
DEADLINE_S = 60.0


@pytest.fixture
def name() -> Iterator[str]:
    name = f"blink-test-{os.getpid()}-{secrets.token_hex(4)}"
    yield name
    (SHM_DIR / name).unlink(missing_ok=True)


@pytest.fixture
def segment(name: str) -> Iterator[Segment]:
    made = Segment(name, 4096)
    yield made
    made.close()


# ---- segments


def test_owner_creates_and_unlinks(name: str) -> None:
    """Catches: a name left behind after its engine, or removed by one who only opened it."""
    made = Segment(name, 1000)
    assert made.buffer[:] == bytes(1000)
    assert (SHM_DIR / name).stat().st_mode & 0o777 == 0o600
    other = Segment(name)
    assert other.nbytes == 1000
    other.buffer[10] = 7
    assert made.buffer[10] == 7
    other.close()
    assert (SHM_DIR / name).exists()
    made.close()
    made.close()
    assert not (SHM_DIR / name).exists()


def test_creation_is_exclusive(segment: Segment) -> None:
    """Catches: a second engine that takes over the memory of a running one."""
    with pytest.raises(TransportError, match=f"{segment.name}: File exists"):
        Segment(segment.name, 4096)
    assert (SHM_DIR / segment.name).exists()


def test_missing_segment(name: str) -> None:
    """Catches: opening the memory of a dead engine that silently makes a new one."""
    with pytest.raises(TransportError, match=f"{name}: No such file"):
        Segment(name)
    assert not (SHM_DIR / name).exists()


@pytest.mark.parametrize("bad", ["", "blink-", "x", "blink-../etc", "blink-a/b", "blink-" + "x" * 81, "blink-a\n"])
def test_malformed_names(bad: str) -> None:
    """Catches: a name that escapes the folder of shared memory."""
    with pytest.raises(TransportError, match="does not match"):
        Segment(bad, 4096)


def test_full_shared_memory_is_an_error(name: str) -> None:
    """Catches: memory that is promised and not there, which kills the engine with SIGBUS at its first write."""
    total = shutil.disk_usage(SHM_DIR).total
    with pytest.raises(TransportError, match=rf"{name} of {total + (1 << 20)} bytes: .*[Nn]o space"):
        Segment(name, total + (1 << 20))
    assert not (SHM_DIR / name).exists(), "the name of a segment that could not be made is left behind"
    assert shm_available() > 0


CREATOR = """
import sys
from pathlib import Path
from blink_core.transport import shm
shm.SHM_DIR = Path(sys.argv[2])
segment = shm.Segment(sys.argv[1], 4096)
print("made", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of segments that nobody else clears up: any engine that starts on this machine does so, also that of a
    test in another process, and a segment that it has removed is not among those that are removed here."""
    monkeypatch.setattr(shm, "SHM_DIR", tmp_path)
    return tmp_path


def test_segment_of_a_killed_creator_is_removed_and_no_other(own_folder: Path, segment: Segment) -> None:
    """Catches: memory that killed engines leave until the machine boots; the memory of a live engine taken away."""
    name = f"{segment.name}-other"
    creator = subprocess.Popen(
        [sys.executable, "-c", CREATOR, name, str(own_folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        assert creator.stdout is not None
        assert creator.stdout.readline() == b"made\n"
        reader = Segment(name)  # another process that maps it does not keep it
        assert name not in remove_dead_segments()
        assert (own_folder / name).exists()
    finally:
        creator.kill()
        creator.communicate(timeout=DEADLINE_S)
    removed = remove_dead_segments()
    assert name in removed
    assert segment.name not in removed
    assert not (own_folder / name).exists()
    assert (own_folder / segment.name).exists()
    assert reader.nbytes == 4096


def test_segment_about_to_be_made_is_not_removed(own_folder: Path, name: str) -> None:
    """Catches: a clean-up between a segment's name and its lock that takes it from the engine that is starting."""
    (own_folder / name).touch()
    assert name not in remove_dead_segments()
    assert (own_folder / name).exists()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_size_must_be_positive(name: str, nbytes: int) -> None:
    """Catches: an empty segment, or a name left behind by a failed creation."""
    with pytest.raises(TransportError, match=f"of {nbytes} bytes"):
        Segment(name, nbytes)
    assert not (SHM_DIR / name).exists()


# ---- transport


@pytest.mark.parametrize(("base", "nbytes"), [(0, 4097), (4096, 8), (-8, 16), (0, -1), (4088, 16)])
def test_ring_outside_the_segment(segment: Segment, base: int, nbytes: int) -> None:
    """Catches: a ring mapped over the end of its segment."""
    with pytest.raises(TransportError, match="outside segment of 4096 bytes"):
        ShmTransport(segment, base, nbytes)


def test_ring_must_be_aligned(segment: Segment) -> None:
    """Catches: ordering words that straddle two cache lines, which are then seen in halves."""
    with pytest.raises(TransportError, match="4 is not aligned"):
        ShmTransport(segment, 4, 64)


def test_transfers_stay_inside_the_ring(segment: Segment) -> None:
    """Catches: a transfer that reaches the neighbour ring."""
    ring = ShmTransport(segment, 1024, 64)
    for offset, nbytes in ((-1, 4), (61, 4), (64, 1), (0, 65), (1 << 62, 8)):
        with pytest.raises(TransportError, match="outside ring of 64 bytes"):
            ring.post_write(offset, bytes(nbytes))
        with pytest.raises(TransportError, match="outside ring of 64 bytes"):
            ring.post_read(offset, nbytes)
    with pytest.raises(TransportError, match="outside ring"):
        ring.post_read(32, -8)
    with pytest.raises(TransportError, match="outside ring"):
        ring.wait_word(64, 0, 0.0)
    with pytest.raises(TransportError, match="not aligned"):
        ring.wait_word(4, 0, 0.0)
    assert segment.buffer[:] == bytes(4096)
    ring.post_write(0, bytes(64))
    ring.post_write(64, b"")


def test_write_then_read(segment: Segment) -> None:
    """Catches: bytes at the wrong place or in the wrong order, for words (8 aligned bytes) and for runs."""
    ring = ShmTransport(segment, 512, 256)
    ring.post_write(8, b"\x01\x02\x03\x04\x05\x06\x07\x08")
    ring.post_write(17, b"abc")
    ring.post_write(33, bytes(range(8)))  # eight bytes, not aligned: no word
    assert segment.buffer[520:528] == b"\x01\x02\x03\x04\x05\x06\x07\x08"
    last = deadline_after(1.0)
    assert ring.wait(ring.post_read(8, 8), last) == b"\x01\x02\x03\x04\x05\x06\x07\x08"
    assert ring.wait(ring.post_read(16, 5), last) == b"\0abc\0"
    assert ring.wait(ring.post_read(33, 8), last) == bytes(range(8))
    assert ring.wait(ring.post_write(0, b"x"), last) == b""
    assert ring.wait_word(8, 0, 1.0) == 0x0807060504030201


def test_unknown_work(segment: Segment) -> None:
    """Catches: waiting for a transfer that was never posted."""
    ring = ShmTransport(segment, 0, 64)
    work = ring.post_write(0, b"x")
    for unknown in (0, -1, work + 1):
        with pytest.raises(TransportError, match=f"work id {unknown} was never posted"):
            ring.wait(unknown, deadline_after(1.0))


def test_wait_word_has_a_deadline(segment: Segment) -> None:
    """Catches: a wait for a word nobody writes that never ends, or that ends with another value."""
    ring = ShmTransport(segment, 0, 64)
    for timeout in (0.0, -1.0, 0.02):
        assert ring.wait_word(0, 0, timeout) == 0
    ring.post_write(0, (5).to_bytes(8, "little"))
    assert ring.wait_word(0, 4, 0.0) == 5


def test_wait_word_sees_another_thread(segment: Segment) -> None:
    """Catches: a wait that holds the interpreter's lock, so that the writer in this process never runs."""
    ring = ShmTransport(segment, 0, 64)
    thread = threading.Thread(target=lambda: ring.post_write(0, (9).to_bytes(8, "little")))
    thread.start()
    assert ring.wait_word(0, 0, 30.0) == 9
    thread.join()


def test_payload_is_visible_with_its_word(segment: Segment) -> None:
    """Catches: an ordering word that overtakes the payload written before it."""
    ring, rounds = ShmTransport(segment, 0, 2048), 3000
    torn: list[int] = []

    def consume() -> None:
        reader, seen = ShmTransport(segment, 0, 2048), 0
        while seen < rounds:
            seen = reader.wait_word(0, seen, 30.0)
            payload = reader.wait(reader.post_read(64, 1024), deadline_after(1.0))
            reader.post_write(8, seen.to_bytes(8, "little"))
            if payload != bytes([seen & 0xFF]) * 1024:
                torn.append(seen)

    thread = threading.Thread(target=consume)
    thread.start()
    for i in range(1, rounds + 1):
        ring.post_write(64, bytes([i & 0xFF]) * 1024)
        ring.post_write(0, i.to_bytes(8, "little"))
        assert ring.wait_word(8, i - 1, 30.0) == i
    thread.join()
    assert torn == []


def test_threads_get_their_own_reads(segment: Segment) -> None:
    """Catches: the polling thread and a submitting thread that receive each other's data."""
    ring = ShmTransport(segment, 0, 1024)
    for i in range(4):
        ring.post_write(64 * i, bytes([i + 1]) * 64)
    wrong: list[tuple[int, bytes]] = []

    def read(i: int) -> None:
        for _ in range(4000):
            got = ring.wait(ring.post_read(64 * i, 64), deadline_after(5.0))
            if got != bytes([i + 1]) * 64:
                wrong.append((i, got))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


def test_release_and_acquire_of_words(segment: Segment) -> None:
    """Catches: a word stored or loaded in part."""
    for value in (0, 1, 2**32, 2**63, 2**64 - 1):
        _native.store_release(segment.address + 64, value)
        assert _native.load_acquire(segment.address + 64) == value
        assert int.from_bytes(segment.buffer[64:72], "little") == value
    assert np.frombuffer(segment.buffer, np.uint8).sum() == 8 * 255
