"""Loading models: every stored value read as it stands and once, configurations in every spelling; classes M, O, T.

Variants of tiny models are written with safetensors' and gguf's own writers, and read back with them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from verification.mutants.checkers.base import Checker, Finding, Product, found
from verification.mutants.engines import parts_of
from verification.mutants.parts import PartError, Parts
from verification.mutants.references import model_path

F32 = NDArray[np.float32]
Wrong = tuple[str, str] | None
UNTIED, TIED = "mistral-full", "qwen2"
SPELLED = ("llama-rope-llama3", "llama-rope-linear", "qwen2-yarn", "mistral-full")
LOAD = "blink_core.models.model:load_model"
CONFIG = "blink_core.models.load_config:load_config"


@dataclass(frozen=True)
class LoadingChecker:
    """Runs one drawn check."""

    name: str
    functions: frozenset[str]
    clauses: Mapping[str, frozenset[str]]
    check: Callable[[Parts, np.random.Generator, Path], Wrong]
    where: frozenset[str] = frozenset({"python"})
    seconds: float = 30.0

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """What `check` found wrong."""
        wrong = self.check(parts_of(product, deadline), np.random.default_rng([seed, 19]), product.scratch)
        return None if wrong is None else found(self, *wrong)


def variant(scratch: Path, name: str) -> Path:
    """A copy of a tiny model's folder that may be changed."""
    target = Path(tempfile.mkdtemp(dir=scratch)) / name
    shutil.copytree(model_path(name), target)
    return target


def edit(path: Path, **values: Any) -> None:
    """Sets keys of a JSON file; None removes one."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    content |= values
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}), encoding="utf-8")


WEIGHTS = {
    "values of a tensor": frozenset("M"),
    "rows of a GGUF projection": frozenset("M"),
    "a faulty checkpoint is refused": frozenset("M"),
}


def check_weights(parts: Parts, rng: np.random.Generator, scratch: Path) -> Wrong:
    """Tensors in each stored type, and GGUF rows in llama.cpp's order, against what was written; faulty files."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    halves = rng.integers(0, 2**16, (40, 24)).astype(np.uint16) & np.uint16(0xBFFF)  # finite in all three types
    stored = {"BF16": halves, "F16": halves.view(np.float16), "F32": rng.standard_normal((40, 24)).astype(np.float32)}
    exact = {
        "BF16": (halves.astype(np.uint32) * 65536).view(np.float32),
        "F16": stored["F16"].astype(np.float32),
        "F32": stored["F32"],
    }
    for kind, values in stored.items():
        write_tensor(folder / "model.safetensors", kind, values)
        got = read(parts, parts.keep("blink_core.models.loaders.safetensors:SafetensorsSource", folder), "w", (40, 24))
        if got.tobytes() != exact[kind].tobytes():
            at = tuple(int(i) for i in np.argwhere(got.view(np.uint32) != exact[kind].view(np.uint32))[0])
            return "values of a tensor", f"{kind} at {at}: {got[at]!r}, stored {exact[kind][at]!r}"
    return _gguf_rows(parts, rng, folder) or _refusals(parts, rng, scratch)


def write_tensor(path: Path, kind: str, values: NDArray[Any]) -> None:
    """One tensor `w` in a safetensors file; NumPy, and so the package's own writer, has no bfloat16."""
    raw = values.tobytes()
    header = json.dumps({"w": {"dtype": kind, "shape": list(values.shape), "data_offsets": [0, len(raw)]}}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw)


def read(parts: Parts, source: Any, name: str, shape: tuple[int, ...]) -> F32:
    """A whole tensor through the product's blocks of rows."""
    out = np.full((int(np.prod(shape[:-1])), shape[-1]) if len(shape) > 1 else shape, np.nan, np.float32)
    for rows, block in parts.call("builtins:list", source.keep("chunks", name)):
        out[rows] = block
    return out


def _gguf_rows(parts: Parts, rng: np.random.Generator, folder: Path) -> Wrong:
    """llama.cpp stores the rows of query and key heads in pairs (i, i + half): weights and biases alike."""
    heads, dim, hidden = 6, 16, 32
    path = folder / "rows.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    wanted: dict[str, F32] = {}
    for part, name in (("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj")):
        for kind, shape in (("weight", (heads * dim, hidden)), ("bias", (heads * dim,))):
            values = rng.standard_normal(shape).astype(np.float32)
            wanted[f"model.layers.0.self_attn.{name}.{kind}"] = values
            if name != "v_proj":
                order = np.arange(heads * dim).reshape(heads, 2, dim // 2).transpose(0, 2, 1).ravel()
                values = np.ascontiguousarray(values[order])
            writer.add_tensor(f"blk.0.{part}.{kind}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    interleaved = {"q_proj": heads, "k_proj": heads}
    source = parts.keep("blink_core.models.loaders.gguf:GGUFSource", path, names={}, interleaved=interleaved)
    for name, values in wanted.items():
        if read(parts, source, name, values.shape).tobytes() != values.tobytes():
            return "rows of a GGUF projection", f"{name} is not what the converter was given"
    return None


def _refusals(parts: Parts, rng: np.random.Generator, scratch: Path) -> Wrong:
    """Each must be refused with ModelError; the unchanged model loads."""

    def extra(tensors: dict[str, F32]) -> None:
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(160, np.float32)

    def missing(tensors: dict[str, F32]) -> None:
        del tensors["model.layers.1.mlp.down_proj.weight"]

    def shape(tensors: dict[str, F32]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]

    def infinite(tensors: dict[str, F32]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = rng.choice(np.array([np.nan, np.inf]))

    def another_head(tensors: dict[str, F32]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()

    faults = ((UNTIED, (extra, missing, shape, infinite)), (TIED, (another_head,)))
    for name, changes in faults:
        for change in changes:
            folder = variant(scratch, name)
            file = folder / "model.safetensors"
            tensors = {key: value.copy() for key, value in load_file(file).items()}
            change(tensors)
            file.unlink()  # the copy may be a link to the model's own file
            save_file(tensors, file)
            try:
                parts.keep(LOAD, folder)
            except PartError as error:
                if error.kind == "ModelError":
                    continue
                raise
            return "a faulty checkpoint is refused", f"{name} with {change.__name__} was loaded"
    return None


SPELLINGS = {"rotary settings": frozenset("O"), "end-of-sequence ids": frozenset("T")}


def check_spellings(parts: Parts, rng: np.random.Generator, scratch: Path) -> Wrong:
    """A configuration gives the same rotary frequencies in each spelling that transformers reads, and the union of the
    end-of-sequence ids that its files name."""
    theta = float(rng.choice([20000.0, 500000.0]))
    for name in SPELLED:
        settings = json.loads((model_path(name) / "config.json").read_text(encoding="utf-8"))["rope_parameters"]
        scaling = {key: value for key, value in settings.items() if key not in ("rope_type", "rope_theta")}
        kind = settings["rope_type"]
        named = {} if kind == "default" else scaling
        old_kind, new_kind = ({"type": kind}, {"rope_type": kind}) if named else ({}, {"rope_type": "default"})
        spelled: dict[str, dict[str, Any]] = {
            "rope_parameters": {"rope_parameters": {**new_kind, **named, "rope_theta": theta}},
            "rope_scaling and type": {"rope_scaling": {**old_kind, **named} or None, "rope_theta": theta},
            "rope_scaling and rope_type": {"rope_scaling": {**new_kind, **named}, "rope_theta": theta},
        }
        seen: dict[str, bytes] = {}
        for spelling, values in spelled.items():
            folder = variant(scratch, name)
            edit(
                folder / "config.json", **({"rope_parameters": None, "rope_scaling": None, "rope_theta": None} | values)
            )
            try:
                seen[spelling] = parts.keep(CONFIG, folder).call("rope.frequencies").tobytes()
            except PartError as error:
                if error.kind != "ModelError":
                    raise
                return "rotary settings", f"{name} with {spelling} is refused: {error.text}"
        different = [spelling for spelling, value in seen.items() if value != seen["rope_parameters"]]
        if different:
            return "rotary settings", f"{name}: frequencies with {different} are not those of rope_parameters"
    folder = variant(scratch, UNTIED)
    in_config, in_generation = (sorted(int(i) for i in rng.choice(500, 3, replace=False)) for _ in range(2))
    edit(folder / "config.json", eos_token_id=in_config)
    edit(folder / "generation_config.json", eos_token_id=in_generation)
    wanted = tuple(sorted({*in_config, *in_generation, 2}))  # 2: the tokeniser's own
    got = tuple(parts.keep(CONFIG, folder).call("eos_token_ids"))
    if got != wanted:
        return "end-of-sequence ids", f"{got}, the files name {wanted}"
    return None


_HERE = "verification.mutants.checkers.loading."
CHECKERS: tuple[Checker, ...] = (
    LoadingChecker("stored-weights", frozenset({_HERE + "check_weights"}), WEIGHTS, check_weights),
    LoadingChecker("config-spellings", frozenset({_HERE + "check_spellings"}), SPELLINGS, check_spellings),
)
