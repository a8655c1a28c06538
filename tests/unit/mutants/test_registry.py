"""The registry of seeded faults: every text stands where it should, and somebody can notice every one."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from verification.mutants import matrix, tester, weave
from verification.mutants.automatic import universe
from verification.mutants.checkers import every
from verification.mutants.checkers.base import classes_of, independent
from verification.mutants.model import CLASSES, PRODUCT, Mutant, RegistryError, Span, by_name, load, read

LEAST, LEAST_NATIVE = 100, 55
ENTRY = """
- name: wrong
  class: Q
  summary: a test
  where: python
  file: blink_core/__init__.py
"""


@pytest.mark.parametrize("mutant", load(), ids=lambda m: m.name)
def test_text_stands_in_one_place(mutant: Mutant) -> None:
    """Catches: a mutant whose place in the product has moved on, so that it would no longer be the fault it says."""
    source = mutant.path.read_text(encoding="utf-8")
    assert mutant.apply(source) != source


def test_registry_is_large_and_covers_every_class() -> None:
    """Catches: a class of the corpus without a seeded fault; fewer faults than the certificate promises."""
    mutants = load()
    assert len(mutants) >= LEAST
    assert sum(m.where == "native" for m in mutants) >= LEAST_NATIVE
    assert {m.cls for m in mutants} == set(CLASSES)


def test_every_class_has_independent_checkers() -> None:
    """Catches: a class whose kills all come from one check function, which one mistake in it would lose."""
    for cls in {m.cls for m in load()}:
        able = [one for one in every() if cls in classes_of(one)]
        assert any(independent(a, b) for a, b in combinations(able, 2)), f"class {cls}: {[one.name for one in able]}"


def test_argued_equivalents_exist() -> None:
    """Catches: an argument that excuses a mutant which is no longer there, or one without an argument."""
    named = {m.name for m in load()}
    assert {name for name in matrix.equivalents() if not name.startswith(("auto-", tester.PREFIX))} <= named
    made = {m.name for m in universe()}
    assert {name for name in matrix.equivalents() if name.startswith("auto-")} <= made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ENTRY + "  old: a\n  new: a\n", "the same text"),
        (ENTRY.replace("class: Q", "class: Z") + "  old: a\n  new: b\n", "class 'Z' is none of"),
        (ENTRY.replace("blink_core", "verification") + "  old: a\n  new: b\n", "no product file"),
        (ENTRY + "  old: a\n  new: b\n  kind: statement\n", "kind is for native"),
        (ENTRY + "  old: a\n", "new: Field required"),
        ("name: x", "expected a list"),
        ("- [", "is not YAML"),
    ],
)
def test_bad_entry_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """Catches: a registry file that is misread in silence."""
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RegistryError, match=message):
        read(path)


def made(**fields: object) -> Mutant:
    told = {"name": "a", "class": "Q", "summary": "s", "where": "native", "file": "blink_core/device/kv.hpp"}
    return Mutant.model_validate(told | {"kind": "statement"} | fields)


def test_place_is_found_with_its_indentation() -> None:
    """Catches: a text of several lines that is found only at the depth at which the registry writes it."""
    source = "f() {\n    a;\n      b;\n}\n"
    assert made(old="a;\n  b;", new="c;\n  d;\n").apply(source) == "f() {\n    c;\n      d;\n}\n"


def test_ambiguous_place_is_refused() -> None:
    """Catches: a fault that lands at another place than it was written for."""
    with pytest.raises(RegistryError, match="occurs 2 times"):
        made(old="a", new="b").locate("a a")
    assert made(old="a", new="b", within="x").apply("a x a a") == "a x b a"
    with pytest.raises(RegistryError, match="within occurs 2 times"):
        made(old="a", new="b", within="x").locate("x a x a")


def test_unknown_name_tells_what_comes_near() -> None:
    """Catches: a typing error that runs nothing and says that all is killed."""
    with pytest.raises(RegistryError, match="admit-youngest-first"):
        by_name("admit-youngest")


def woven(source: str, *faults: tuple[int, int, str]) -> str:
    spans = [weave.Fault(i, f"m{i}", "f", Span(a, b, new), "expression") for i, (a, b, new) in enumerate(faults, 1)]
    return weave.render(source, spans).text


def test_faults_are_nested() -> None:
    """Catches: a fault inside another's text that is lost, or in force while it is not active."""
    assert woven("x = a + b;", (4, 9, "1"), (4, 5, "2")) == (
        "x = (mutant_is(1) ? (1) : ((mutant_is(2) ? (2) : (a)) + b));"
    )
    assert woven("a", (0, 1, "1"), (0, 1, "2")) == "(mutant_is(1) ? (1) : ((mutant_is(2) ? (2) : (a))))"


def test_overlapping_faults_are_refused() -> None:
    """Catches: two faults that cut each other's text in two."""
    with pytest.raises(weave.WeaveError, match="m2 overlaps m1"):
        woven("abcdef", (0, 3, "x"), (2, 5, "y"))


def test_rendered_places_are_those_of_the_faults() -> None:
    """Catches: a compiler error that is put down to another fault than the one that it stands in."""
    faults = [weave.Fault(1, "m", "f", Span(2, 3, "NEW"), "statement")]
    made = weave.render("a b c", faults)
    begin, end = made.places[1]
    assert made.text[begin:end] == "NEW"


def test_release_holds_no_mutants() -> None:
    """Catches: a seeded fault, or a hook for one, in what users get."""
    from blink_core import _native

    assert not hasattr(_native, "mutants")
    assert not hasattr(_native, "activate_mutant")
    binary = Path(str(_native.__file__)).read_bytes()
    assert b"mutant" not in binary
    files = [p for p in (PRODUCT / "blink_core").rglob("*") if p.suffix in (".py", ".pyi", ".hpp", ".cpp", ".cu")]
    assert len(files) > 50
    assert [str(p) for p in files if "mutant" in p.read_text(encoding="utf-8").lower()] == []
