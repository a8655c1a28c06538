"""CUDA mutants: written out here, run on a machine with a GPU by `hil_rigs.gpu.mutants`, which needs neither suite nor
registry.

    python -m verification.mutants.gpu DIR      one folder of kernels a mutant, and `mutants.json`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from verification.mutants.model import PRODUCT, Mutant, by_name, load

KERNELS = PRODUCT / "blink_core" / "device" / "kernels"
# Parts of ops_check that run a file's kernels, and the element types in which.
PARTS: dict[str, tuple[str, str]] = {
    "attention_decode.cu": ("attention,append,far,joined", "bfloat16"),
    "attention_plan.cu": ("attention", "bfloat16"),
    "attention_prefill.cu": ("attention", "bfloat16"),
    "attention_strict.cu": ("attention", "float32"),
    "elementwise.cu": ("rows", "bfloat16"),
    "gemm_fixed.cu": ("fixed", "bfloat16"),
    "gemm_skinny.cu": ("products,own,moe,fixed", "bfloat16"),
    "moe.cu": ("moe", "bfloat16"),
    "moe_choice.cuh": ("one", "bfloat16"),
    "moe_one.cu": ("one", "bfloat16"),
    "philox.cuh": ("sampler", "float32"),
    "rope_kv.cu": ("rope", "bfloat16"),
    "sampler.cu": ("sampler", "float32"),
}


def cuda_mutants() -> tuple[Mutant, ...]:
    """All CUDA mutants, as registered."""
    return tuple(mutant for mutant in load() if mutant.where == "cuda")


def mutated_sources(name: str) -> dict[str, str]:
    """Text of every kernel file by its name, one of them with the mutant's fault. Raises RegistryError."""
    mutant = by_name(name)
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(KERNELS.iterdir()) if path.is_file()}
    file = Path(mutant.file).name
    return texts | {file: mutant.apply(texts[file])}


def write(folder: Path) -> None:
    """One folder of kernels a mutant, and what to run on each."""
    plan = []
    for mutant in cuda_mutants():
        target = folder / mutant.name
        target.mkdir(parents=True, exist_ok=True)
        for file, text in mutated_sources(mutant.name).items():
            (target / file).write_text(text, encoding="utf-8")
        parts, dtypes = PARTS[Path(mutant.file).name]
        told = {"name": mutant.name, "class": mutant.cls, "summary": mutant.summary}
        plan.append({**told, "parts": parts, "dtypes": dtypes})
    (folder / "mutants.json").write_text(json.dumps(plan, indent=1), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    print(f"{len(cuda_mutants())} mutants in {sys.argv[1]}; on the GPU: python -m hil_rigs.gpu.mutants {sys.argv[1]}")
