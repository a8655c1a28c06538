"""GGUF models in several files, as llama.cpp's gguf-split writes them: NAME-00001-of-00003.gguf and so on.

The first file has the metadata and is the one to name; each says its number and the number of files.
"""

from __future__ import annotations

import re
from pathlib import Path

from blink_core.models.errors import ModelError
from blink_core.models.loaders.gguf_file import GGUFFile

NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
MAX_FILES = 99_999  # the name has five digits


def open_split(path: Path) -> list[GGUFFile]:
    """The files of the model whose first file is ``path``; just that one if it is not split.

    Raises ModelError, naming the file, if one is missing, damaged or another model's, or if ``path`` is not the first.
    """
    first = GGUFFile(path)
    count = _number(first, "split.count", 1)
    if count <= 1:
        return [first]
    match = NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count or count > MAX_FILES:
        raise ModelError(f"{path}: one of {count} files, but its name does not end in -00001-of-{count:05}.gguf")
    if _number(first, "split.no", 0) != 0 or int(match[2]) != 1:
        raise ModelError(f"{path}: file {match[2]} of {count}; name the first one, {match[1]}-00001-of-{match[3]}.gguf")
    files = [first]
    for number in range(1, count):
        file = GGUFFile(path.with_name(f"{match[1]}-{number + 1:05}-of-{match[3]}.gguf"))
        if (_number(file, "split.no", -1), _number(file, "split.count", -1)) != (number, count):
            raise ModelError(f"{file.path}: does not say that it is file {number + 1} of {count}")
        files.append(file)
    expected = _number(first, "split.tensors.count", -1)
    found = sum(len(file.tensors) for file in files)
    if expected not in (-1, found):
        raise ModelError(f"{path}: the {count} files hold {found} tensors, split.tensors.count is {expected}")
    return files


def _number(file: GGUFFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"{file.path}: GGUF metadata {key!r} is {value!r}, expected a number")
    return value
