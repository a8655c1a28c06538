"""Every block of code in `docs/` that claims to work is run, and the map names what is there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.docs.conftest import Clone
from tests.docs.runner import GuideError, blocks, run_block

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
GUIDES = [name for name in PAGES if name not in ("rules.md", "gpu.md")]  # nothing to run, and not without a GPU
_LONGEST = ("add_a_mutant.md", "add_a_model.md", "add_a_property.md")  # compiles; the others start engines


@pytest.fixture(scope="session")
def walks(request: pytest.FixtureRequest, new_clone: Clone) -> Iterator[dict[str, Future[None]]]:
    """The selected guides, each followed in a clone of its own, two at a time: most of it is processes that start."""

    def walk(name: str) -> None:
        folder, environment = new_clone(name)
        for block in blocks(DOCS / name):
            run_block(block, folder, environment)

    selected = {name for item in request.session.items for name in GUIDES if item.name == f"test_guide_works[{name}]"}
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(walk, name) for name in sorted(selected, key=lambda name: name not in _LONGEST)}
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(1800)  # a guide may have to wait for the others
@pytest.mark.parametrize("name", GUIDES)
def test_guide_works(name: str, walks: dict[str, Future[None]]) -> None:
    """Catches: a guide that was right once: a renamed function, a moved file, a command that prints something else."""
    assert blocks(DOCS / name), f"{name} has nothing that can be run"
    if name == "ring_model.md" and shutil.which("spin") is None:
        pytest.skip("Spin is not installed: apt-get install -y spin")
    walks[name].result()


def test_readme_links_the_guides() -> None:
    """Catches: a guide that nobody finds."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in PAGES if f"docs/{name}" not in readme] == []
    wanted = {"map.md", *(f"add_a_{what}.md" for what in ("property", "fault", "mutant", "model", "rig"))}
    assert wanted <= set(GUIDES)


@pytest.mark.parametrize("name", PAGES)
def test_named_files_are_there(name: str) -> None:
    """Catches: a path in a guide that was moved or renamed; one that the guide itself makes is excepted."""
    text = (DOCS / name).read_text(encoding="utf-8")
    made = {block.options["file"] for block in blocks(DOCS / name) if "file" in block.options}
    paths = set(re.findall(r"`((?:blink_core|verification|hil_rigs|tests|docs|examples)/[\w./-]*)`", text))
    assert [path for path in sorted(paths - made) if not (ROOT / path).exists()] == []


def test_map_names_every_part_of_the_suite() -> None:
    """Catches: a package or a suite file that was added and that the map does not know."""
    text = (DOCS / "map.md").read_text(encoding="utf-8")
    folders = {path.parent for path in (ROOT / "verification").glob("*/*") if path.suffix != ".pyc"}
    parts = {f"`verification/{folder.name}/`" for folder in folders if folder.name != "__pycache__"}
    suites = {f"`{path.name}`" for path in (ROOT / "verification" / "suite").glob("test_*.py")}
    assert len(parts) > 15
    assert [name for name in sorted(parts | suites) if name not in text] == []


def guide(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "guide.md"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```console exec\n$ false\n```\n", "line 1: false\nended with 1, not 0"),
        ("\n```console exec\n$ echo one two\none three\n```\n", "line 2: echo one two\nprinted no line like"),
        ("```python exec\nassert 1 == 2\n```\n", "AssertionError"),
        ("```python file=a.txt\nx\n```\n```python insert=a.txt after=y\nz\n```\n", "stands in 0 lines"),
        ("```rust exec\nfn main() {}\n```\n", "a block of rust cannot be run"),
        ("```console run\n$ true\n```\n", "unknown words after the language: run"),
    ],
)
def test_a_wrong_guide_is_noticed(tmp_path: Path, text: str, message: str) -> None:
    """Catches: a runner that passes whatever a guide says."""
    import os

    with pytest.raises(GuideError) as caught:
        for block in blocks(guide(tmp_path, text)):
            run_block(block, tmp_path, dict(os.environ))
    assert message in str(caught.value)


def test_a_right_guide_passes(tmp_path: Path) -> None:
    """Catches: a runner that cannot pass; order, insertion and `...` that do not work."""
    import os

    text = (
        "```text\nnot run\n```\n```python file=a.txt\none\nthree\n```\n```python insert=a.txt before=three\ntwo\n```\n"
        "```console exec\n$ cat \\\na.txt\none\nt...o\nthree\n$ true\n```\n```console exec exit=3\n$ exit 3\n```\n"
    )
    for block in blocks(guide(tmp_path, text)):
        run_block(block, tmp_path, dict(os.environ))
    assert (tmp_path / "a.txt").read_text() == "one\ntwo\nthree\n"
