"""Mutation operators on C++ text: every place of a header where one of them applies, as a guarded expression.

The text is read as tokens, without comments and preprocessor lines. An operator's region is the expression around it,
up to the next bracket, comma, semicolon, assignment or conditional of the same depth, which C++ lets stand alone; what
does not compile is found out by the compiler (`automatic`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

# Begin what a host compiler leaves out, where a mutant would be the product itself: all of them are run on the host.
_GPU_ONLY = ("#if defined(__CUDACC__)", "#if defined(__CUDA_ARCH__)")
_TOKEN = re.compile(
    r"(?P<skip>//[^\n]*|/\*.*?\*/|^[ \t]*\#[^\n]*(?:\\\n[^\n]*)*|\s+)"
    r"|(?P<string>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')"
    r"|(?P<number>(?:0[xX][0-9a-fA-F]+|\d+\.\d+f?|\d+)(?:[uUlLfF]*))"
    r"|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<mark><<=|>>=|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|::|.)",
    re.MULTILINE | re.DOTALL,
)
REPLACED: dict[str, tuple[str, ...]] = {
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
    "&&": ("||",),
    "||": ("&&",),
    "+": ("-",),
    "-": ("+",),
    "*": ("/",),
    "/": ("*",),
    "%": ("/",),
    "<<": (">>",),
    ">>": ("<<",),
}
OPERATOR_OF = {
    **dict.fromkeys(("<", "<=", ">", ">=", "==", "!="), "relational"),
    **dict.fromkeys(("&&", "||"), "logical"),
    **dict.fromkeys(("+", "-", "*", "/", "%", "<<", ">>"), "arithmetic"),
}
_ENDS = frozenset({",", ";", "{", "}", "?", ":", "=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="})
# Not deleted: jumps, declarations, and what is over once it compiles.
_NO_STATEMENT = frozenset(
    (
        "return break continue if else for while do switch case default const constexpr static struct namespace using "
        "static_assert "
        "template inline extern enum class public private bool int uint32_t uint64_t int32_t int64_t float auto"
    ).split()
)


class Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Site:
    """One mutant by one operator: text [start, end) becomes `new`. what: operator and change, for a reader."""

    operator: str
    start: int
    end: int
    new: str
    kind: Literal["expression", "statement"]
    what: str


def tokens(source: str) -> list[Token]:
    """Tokens of a text but comments, preprocessor lines and what only a GPU compiler sees."""
    hidden = _hidden(source)
    out = []
    for match in _TOKEN.finditer(source):
        kind = match.lastgroup or "skip"
        if kind != "skip" and not any(a <= match.start() < b for a, b in hidden):
            out.append(Token(kind, match.group(), match.start(), match.end()))
    return out


def _hidden(source: str) -> list[tuple[int, int]]:
    """Lines that only a GPU compiler sees; an `#else` of theirs is the host's."""
    out: list[tuple[int, int]] = []
    open_: list[bool] = []
    at = 0
    for line in source.splitlines(keepends=True):
        if line.startswith("#if"):
            open_.append(line.startswith(_GPU_ONLY))
        elif line.startswith("#else"):
            open_[-1] = False
        elif line.startswith("#endif"):
            open_.pop()
        if any(open_):
            out.append((at, at + len(line)))
        at += len(line)
    return out


def sites(source: str) -> list[Site]:
    """All mutants of one text, in order of place."""
    words = tokens(source)
    partner = _partners(words)
    bodies = _bodies(words, partner)
    found: list[Site] = []
    for at, token in enumerate(words):
        if not any(a < at < b for a, b in bodies):
            continue
        found += _at(source, words, partner, at, token)
    return sorted(found, key=lambda site: (site.start, site.end, site.operator, site.new))


def _at(source: str, words: list[Token], partner: dict[int, int], at: int, token: Token) -> Iterator[Site]:
    if token.kind == "mark" and token.text in REPLACED and _binary(source, words, at):
        region = _region(words, partner, at)
        for other in REPLACED[token.text]:
            yield _replaced(source, region, OPERATOR_OF[token.text], token, other)
    elif token.kind == "number" and "x" not in token.text.lower() and "." not in token.text:
        value = int(re.sub(r"[uUlLfF]", "", token.text))
        suffix = token.text.lstrip("0123456789")
        for near in sorted({value + 1, max(0, value - 1)} - {value}):
            yield _replaced(source, (token.start, token.end), "constant", token, f"{near}{suffix}")
    elif token.kind == "word" and token.text in ("true", "false"):
        yield _replaced(
            source, (token.start, token.end), "constant", token, "false" if token.text == "true" else "true"
        )
    elif token.kind == "word" and token.text in ("if", "while") and words[at + 1].text == "(":
        inside = words[at + 1].end, words[partner[at + 1]].start
        text = source[slice(*inside)]
        yield Site("condition", *inside, f"!({text})", "expression", f"negated: {text}")
    elif token.text in ("++", "--"):
        other = "--" if token.text == "++" else "++"
        region = _region(words, partner, at)
        yield _replaced(source, region, "increment", token, other)
    elif token.text in ("+=", "-="):
        whole = _statement(words, partner, at)
        if whole is not None:
            other = "-=" if token.text == "+=" else "+="
            yield _replaced(source, whole, "assignment", token, other, "statement")
    if token.text == ";":
        whole = _statement(words, partner, at)
        if whole is not None:
            text = source[slice(*whole)]
            yield Site("deletion", *whole, ";", "statement", f"deleted: {' '.join(text.split())}")


def _replaced(
    source: str,
    region: tuple[int, int],
    operator: str,
    token: Token,
    other: str,
    kind: Literal["expression", "statement"] = "expression",
) -> Site:
    start, end = region
    new = source[start : token.start] + other + source[token.end : end]
    shown = " ".join(source[start:end].split())
    return Site(operator, start, end, new, kind, f"{token.text} -> {other} in: {shown}")


def _binary(source: str, words: list[Token], at: int) -> bool:
    """Whether a mark is a binary operator: our style sets it off by blanks, which templates and signs do not have."""
    token = words[at]
    before, after = source[token.start - 1], source[token.end : token.end + 1]
    return before in " \n" and after in " \n" and words[at - 1].text != "operator"


def _partners(words: list[Token]) -> dict[int, int]:
    """The other bracket of each bracket, by place."""
    out: dict[int, int] = {}
    open_: list[int] = []
    for at, token in enumerate(words):
        if token.text in ("(", "[", "{"):
            open_.append(at)
        elif token.text in (")", "]", "}") and open_:
            other = open_.pop()
            out[at], out[other] = other, at
    return out


def _bodies(words: list[Token], partner: dict[int, int]) -> list[tuple[int, int]]:
    """Places of the braces of function bodies."""
    out = []
    for at, token in enumerate(words):
        if token.text == "{" and at in partner and at > 0:
            before = words[at - 1].text
            if before == ")" or (before == "const" and words[at - 2].text == ")"):
                out.append((at, partner[at]))
    return out


def _region(words: list[Token], partner: dict[int, int], at: int) -> tuple[int, int]:
    first = last = at
    while first > 0:
        before = words[first - 1]
        if before.text in (")", "]", "}"):
            if before.text == "}" or first - 1 not in partner:
                break
            first = partner[first - 1]
        elif before.text in _ENDS or before.text in ("(", "[", "return"):
            break
        else:
            first -= 1
    while last + 1 < len(words):
        after = words[last + 1]
        if after.text in ("(", "["):
            last = partner.get(last + 1, last + 1)
        elif after.text in _ENDS or after.text in (")", "]", "{"):
            break
        else:
            last += 1
    return words[first].start, words[last].end


def _statement(words: list[Token], partner: dict[int, int], at: int) -> tuple[int, int] | None:
    """The simple statement, with its semicolon, in which a token stands; None for a declaration or a jump."""
    if any(words[a].text == "(" and a < at < b for a, b in partner.items()):
        return None  # of a `for`, or of a function's arguments
    first = at - 1 if words[at].text == ";" else at
    while first >= 0 and words[first].text not in (";", "{", "}"):
        first -= 1
    first += 1
    head = words[first].text if first < len(words) else ";"
    if head in _NO_STATEMENT or (first >= at and words[at].text != ";"):
        return None
    if words[first + 1].kind == "word" or words[first + 1].text in ("::", "&", "*", "<", "{"):
        return None  # a declaration
    last = at
    while words[last].text != ";":
        last += 1
        if words[last].text in ("{", "}"):
            return None
    return words[first].start, words[last].end
