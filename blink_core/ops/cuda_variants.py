"""Ways to lay out a decode step's kernels that give the same results and differ in speed alone (design section 7).

What they trade: a kernel's block starts beside a block of the kernel before it only where the multiprocessor's 228 KiB
of shared memory hold both, and only then does the weight stream go on over the boundary between them. But the blocks of
a product must not fit twice: then they pack two on the first free multiprocessor and leave another empty.
`python -m hil_rigs.gpu.step_ab` measures them against each other.
"""

from __future__ import annotations

from dataclasses import dataclass

WARPS = 8  # of a block of gemm_skinny.cu
PAIR_KIB = 114  # a block of more shared memory than this is alone among its kind
OWN = {"RING": 20, "NORM_RING": 16, "GATE_UP_RING": 14, "STAGES": 3, "LEAVE": 0, "JOINED": 0}  # of the sources


@dataclass(frozen=True, slots=True)
class Variants:
    """ring, norm_ring: KiB in flight of a warp of gemm_skinny.cu, without and with a norm, in products of up to
    ``few_rows`` rows; those of more have the sources' own. gate_up_ring: of one token's
    first MoE kernel.

    attention_stages: tiles in flight of a warp of attention_decode.cu; the first is for steps of up to ``few_rows``
    rows, the other for all others. leave: its blocks without work end at once. join_rows: it does what
    rope_kv.cu does in steps of up to so many rows.
    ahead_kib: of the layer after it, what each block of one token's first MoE kernel asks the L2 for while the router
    decides; 0: nothing. Raises ValueError for rings of which two blocks find room.
    """

    ring: int = 15
    norm_ring: int = 21
    gate_up_ring: int = 11
    attention_stages: tuple[int, int] = (4, 3)
    few_rows: int = 8
    leave: bool = False
    join_rows: int = 8
    ahead_kib: int = 16

    def __post_init__(self) -> None:
        for name in ("ring", "norm_ring"):
            kib = getattr(self, name)
            if not PAIR_KIB < WARPS * kib <= 200:
                raise ValueError(f"{name} is {kib} KiB of a warp, expected 15 to 25: one block at a time")
        if not 8 <= self.gate_up_ring <= 14:
            raise ValueError(f"gate_up_ring is {self.gate_up_ring} KiB of a warp, expected 8 to 14")
        if not all(2 <= stages <= 4 for stages in self.attention_stages):
            raise ValueError(f"attention_stages are {self.attention_stages}, expected 2 to 4 each")
        if self.ahead_kib < 0 or self.ahead_kib % 4:
            raise ValueError(f"ahead_kib is {self.ahead_kib}, expected a multiple of 4")

    def rings(self, rows: int) -> dict[str, int]:
        """KiB in flight of a warp of gemm_skinny.cu in a product of so many rows, by macro."""
        few = rows <= self.few_rows
        return {"RING": self.ring, "NORM_RING": self.norm_ring} if few else {n: OWN[n] for n in ("RING", "NORM_RING")}

    def skinny(self, rows: int) -> dict[str, int]:
        """Macros of gemm_skinny.cu that differ from its own."""
        return _others(self.rings(rows))

    @property
    def one(self) -> dict[str, int]:
        """Macros of moe_one.cu that differ from its own."""
        return _others({"GATE_UP_RING": self.gate_up_ring})

    def stages(self, rows: int) -> int:
        """Tiles in flight of a warp of decode attention in a step of at most so many rows."""
        return self.attention_stages[0 if rows <= self.few_rows else 1]

    def attention(self, rows: int, *, joined: bool) -> dict[str, int]:
        """Macros of attention_decode.cu that differ from its own."""
        return _others({"STAGES": self.stages(rows), "LEAVE": int(self.leave), "JOINED": int(joined)})


def _others(macros: dict[str, int]) -> dict[str, int]:
    return {name: value for name, value in macros.items() if value != OWN[name]}


DEFAULT = Variants()
