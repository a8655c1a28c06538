"""Takes prompts and generated tokens out of what a bundle keeps; lengths and salted digests stay.

Everything is withheld unless it is known to be harmless: numbers are kept only where a word says that they count or
name something of the engine (slot, page, step ...), strings only where they are known words. The salt is drawn per
process and is written nowhere, so a digest shows that two prompts of one run are equal and nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import EnumMeta
from functools import cache
from typing import Any

from blink_core.abi import enums
from verification.certificate import required
from verification.certificate.jsonable import jsonable
from verification.result import Verdict

_DIGEST_CHARS = 12
_SHORTEST_SECRET = 8  # characters; shorter texts (a stop string " the") would blank half of every line

# Names whose integers are places and counts of the engine, never token ids.
PLACES = frozenset(
    "request requests slot slots generation ring rings step steps page pages index row rows position positions layer "
    "layers head heads count n sq_index seq at owner refs free running entry entries epoch after max_tokens min_tokens "
    "status exit_status line pid ms us seed tag choice priority limit length prompt_len prompt_length wait tables "
    "worst_row finished refused preemptions accepted published bytes number".split()
)
# How requests end, in the words of the ABI and of fault scenarios: no content wherever they stand.
_ENDS = frozenset(
    {*enums.FinishReason.__members__, *enums.ErrorReason.__members__, *"OPEN FINISHED ERROR DISCONNECTED".split()}
)
_ABI = frozenset(name for kind in vars(enums).values() if isinstance(kind, EnumMeta) for name in kind.__members__)
# Clauses that the suite's checks name. One that is missing here is withheld, never shown by mistake.
CLAUSES = frozenset(
    "bounded-wait cache capture conservation control coverage delivery divergence fifo framing goodput hit invariance "
    "k-rows lease limits linearisability log logits logprob logprobs lru meanwhile one-state oracle order outcome "
    "owner quarantine recovery refs release replay reservation rows same sampler sequence stop terminal text ties "
    "tokens usage v-rows vocabulary".split()
)


@cache
def _properties() -> frozenset[str]:
    """Properties that a required set of this package names."""
    return frozenset(name for rig in required.known_rigs() for name in required.load(rig).properties)


@cache
def _faults() -> frozenset[str]:
    """Names of the faults that can be injected."""
    from verification.faults.model import known_faults  # loads modules of the rig, which no other failure needs

    return frozenset(known_faults())


# What the strings under a name may be; any other string under it is withheld as everywhere.
NAMES: Mapping[str, Callable[[str], bool]] = {
    "kind": _ABI.__contains__,
    "reason": _ABI.__contains__,
    "state": _ABI.__contains__,
    "verdict": frozenset(str(verdict) for verdict in Verdict).__contains__,
    "clause": CLAUSES.__contains__,
    "property": lambda text: text in _properties(),
    "fault": lambda text: text in _faults(),
}
_COUNTED = (
    "pages? requests? rows? steps? entries events? slots? rings? tokens positions layers heads bytes times characters "
    "chunks numbers programs? snapshots? answers cases reasons? references checks s ms seconds %".replace(" ", "|")
)
_NUMBER = re.compile(rf"(?<![\w.])(?<!\d[eE][-+])-?\d+(?![\w.]*\w)(?=(?P<unit>\s+(?:{_COUNTED})(?!\w)|%)?)")
_WORD_BEFORE = re.compile(r"([A-Za-z_]+)[\s=:#]*$")
_QUOTED = re.compile(r"""(?<!\w)[bru]{0,2}(?P<q>['"])(?:\\.|(?!(?P=q))[^\\])*(?P=q)(?!\w)""", re.DOTALL)
_LIST = re.compile(r"[\[({]\s*-?\d+(?:\s*,\s*-?\d+)*\s*,?\s*[\])}]")
_TIME = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} )", re.MULTILINE)
_SOURCE = re.compile(r"[\w./@+-]*/\w+\.py")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,63}")


class Redactor:
    """Removes what users wrote and what models answered. With `show` it lets everything through."""

    def __init__(self, *, show: bool = False, salt: bytes | None = None) -> None:
        self.show = show
        self._salt = salt or secrets.token_bytes(32)
        self._secrets: set[str] = set()
        self._longest_first: list[str] = []

    def learn(self, texts: Iterable[str]) -> None:
        """Texts that are to be removed wherever they stand, also without quotes around them."""
        for text in texts:
            forms = {text, text.strip(), repr(text)[1:-1], json.dumps(text)[1:-1]}
            self._secrets |= {form for form in forms if len(form) >= _SHORTEST_SECRET}
        self._longest_first = sorted(self._secrets, key=lambda form: (-len(form), form))

    def digest(self, value: object) -> str:
        """A salted digest, the same for equal values of one process."""
        raw = value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")
        return hmac.new(self._salt, raw, hashlib.sha256).hexdigest()[:_DIGEST_CHARS]

    def tokens(self, ids: Sequence[int]) -> Any:
        """Token ids: their number and digest."""
        plain = [int(i) for i in ids]
        return plain if self.show else {"tokens": len(plain), "digest": self.digest(plain)}

    def token(self, token: int) -> int | str:
        """One token id: a digest by which equal ids of one run can be told."""
        return int(token) if self.show else f"token:{self.digest(int(token))}"

    def text(self, text: str) -> str:
        """Free text (a message, a line of a log) with strings, lists and numbers that may be content taken out."""
        if self.show:
            return text
        parts = _TIME.split(text)  # times of process logs, at odd places, are no content
        return "".join(part if n % 2 else self._masked(part) for n, part in enumerate(parts))

    def _masked(self, text: str) -> str:
        for secret in self._longest_first:
            if secret in text:
                text = text.replace(secret, self._text_mark(secret))
        text = _QUOTED.sub(lambda found: self._text_mark(found.group()[1:-1]), text)
        text = _LIST.sub(lambda found: f"<{found.group().count(',') + 1} numbers {self.digest(found.group())}>", text)
        return _NUMBER.sub(self._number, text)

    def value(self, value: Any, key: str = "") -> Any:
        """A JSON value, e.g. a witness, by the names in it."""
        if self.show:
            return jsonable(value)
        return self._value(jsonable(value), key)

    # ---- parts

    def _text_mark(self, text: str) -> str:
        if _SOURCE.fullmatch(text):  # of a traceback: which file is no secret, where it lies is of no use
            return text.rpartition("/")[2]
        return f"<text of {len(text)} characters {self.digest(text)}>"

    @staticmethod
    def _number(found: re.Match[str]) -> str:
        before = _WORD_BEFORE.search(found.string, max(0, found.start() - 40), found.start())
        if found.group("unit") or (before is not None and before.group(1).lower() in PLACES):
            return found.group()
        return "<n>"

    def _value(self, value: Any, key: str) -> Any:
        if value is None or isinstance(value, (bool, float)):
            return value
        if isinstance(value, Mapping):
            return {self._key(str(name)): self._value(item, str(name)) for name, item in value.items()}
        place = key in PLACES or key.rpartition("_")[2] in PLACES
        if isinstance(value, list):
            numbers = [item for item in value if isinstance(item, int) and not isinstance(item, bool)]
            if numbers and len(numbers) == len(value) and not place:
                return self.tokens(numbers)
            return [self._value(item, key) for item in value]
        if isinstance(value, int):
            return value if place else self.token(value)
        if value.upper() in _ENDS or (key in NAMES and NAMES[key](value)):
            return value
        return self._text_mark(value)

    def _key(self, name: str) -> str:
        return name if _IDENTIFIER.fullmatch(name) or name in PLACES else self._text_mark(name)
