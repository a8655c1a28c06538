"""The epoch word of a ring, by which front ends take it over (design 3; `RingClient.attach`).

Its low 31 bits are the epoch's number, bits 32 to 62 a nonce: two clients that find the same word choose the same
number, not the same word. With bit 31, the fence, it is nobody's epoch: a client clears the ring for the epoch beside
it. The engine follows the word as a whole (rules, R2) and knows nothing of its parts but that 0 is no front end.
"""

from __future__ import annotations

import secrets

FENCE = 1 << 31
_NUMBER = FENCE - 1
_NONCE_BITS, _NONCE_SHIFT = 31, 32


def successor(found: int) -> int:
    """An epoch to follow the word that was found, whatever it is: the next number from 1 on, and a fresh nonce."""
    return secrets.randbits(_NONCE_BITS) << _NONCE_SHIFT | ((found + 1) & _NUMBER or 1)


def number_of(word: int) -> int:
    """The number of an epoch, or of the epoch beside a fence."""
    return word & _NUMBER


def told(word: int) -> str:
    """A word as a message shows it."""
    return f"{number_of(word)}, a fence" if word & FENCE else str(number_of(word))
