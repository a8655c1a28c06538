"""Run HuggingFace's model code wholly in float64.

A model loaded with ``dtype=torch.float64`` still computes its norms, its softmax and its rotary angles in float32: the
modelling code says ``.to(torch.float32)``, ``.float()`` and ``dtype=torch.float32`` there. Then the reference carries
float32 errors, and it shares the rotary ones with HuggingFace's own float32 run, so that the yardstick cannot see them:
on SmolLM2 a run with *exact* angles was 17 yardsticks away from that reference (K, layer 0, position 232), and 1.6
away from the reference of this module. The modelling code itself stays HuggingFace's, unmodified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64Islands(TorchFunctionMode):
    """Within this mode a request for float32 is one for float64. ``lifted`` counts the requests it changed."""

    def __init__(self) -> None:
        super().__init__()
        self.lifted = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if func is torch.Tensor.float:
            self.lifted += 1
            func = torch.Tensor.double
        if any(value is torch.float32 for value in args) or torch.float32 in (named.get("dtype"), named.get("type")):
            self.lifted += 1
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            named = {key: torch.float64 if value is torch.float32 else value for key, value in named.items()}
        return func(*args, **named)


def rebuild_rotary(model: torch.nn.Module) -> int:
    """Build the rotary embedding modules of ``model`` anew in float64; returns how many there were.

    ``dtype=`` does not reach their frequencies, which are float32 in a float64 model.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if hasattr(child, "inv_freq") and hasattr(child, "config")
    ]
    for parent, name, child in found:
        with Float64Islands(), torch.no_grad():
            fresh: Any = type(child)(child.config)
            if fresh.rope_type == "longrope":
                # The second table is made, and then kept, by the first call beyond the original maximum: make it here.
                original = fresh.config.rope_parameters["original_max_position_embeddings"]
                for last in (original, 0):
                    fresh(torch.zeros(1, dtype=torch.float64), torch.tensor([[last]]))
        kept = {fresh.inv_freq.dtype, getattr(fresh, "long_inv_freq", fresh.inv_freq).dtype}
        if kept != {torch.float64}:
            raise RuntimeError(f"{type(child).__name__} keeps {kept} frequencies in the float64 oracle")
        setattr(parent, name, fresh)
    return len(found)
