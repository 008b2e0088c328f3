"""slime's first layout, which was deleted upstream: read.

`weight_v000007/rank0000_flush000000.safetensors` hold `__positions__`, `__values__` of many parameters, and what lies
where as JSON in `__metadata__`. Values are absolute, in one dtype for a file, and cast back to that of each parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import State
from deltackpt.errors import ChainError, FormatError
from deltackpt.format.canonical import loads_strict
from deltackpt.format.dtypes import DTYPES
from deltackpt.interop.changes import check_positions, elements_of, from_gaps, same_length, tensor_of, width_of
from deltackpt.interop.files import ZSTD, Tensors, field_error, gap_error, inflate, numbered, read_bytes
from deltackpt.interop.protocol import Bytes, LayoutUpdate, Step, Touched
from deltackpt.interop.slime import DIRECTORY
from deltackpt.interop.slime_v1_checksum import check_sum

FILE: Final = re.compile(r"rank([0-9]{4})_flush([0-9]{6})\.safetensors")
ENCODINGS: Final = ("indices", "deltas", "deltas_zstd")
NAMES: Final = {
    **{"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "complex64": "C64", "bool": "BOOL"},
    **{f"{'u' * u}int{n}": f"{'IU'[u]}{n}" for u in (0, 1) for n in (8, 16, 32, 64)},
    **{f"float8_{torch}": f"F8_{name}" for torch, name in (("e4m3fn", "E4M3"), ("e5m2", "E5M2"), ("e8m0fnu", "E8M0"))},
    **{f"float8_{name}": f"F8_{name.upper()}" for name in ("e4m3fnuz", "e5m2fnuz")},
}  # torch's name to safetensors'
EXACT: Final = {("F32", "BF16"), ("F32", "F16"), ("F64", "F32")}  # promoted, and back without a loss


def detect(root: Path) -> bool:
    """Does a directory hold versions of slime's first layout?"""
    return any(
        FILE.fullmatch(p.name) for path in numbered(root, DIRECTORY).values() for p in path.glob("*.safetensors")
    )


def dtype_name(value: object, where: object) -> str:
    """`torch.bfloat16` or `BF16` as safetensors calls it. Raises FormatError ``foreign-field``."""
    text = value.removeprefix("torch.") if isinstance(value, str) else ""
    name = NAMES.get(text, text)
    if name not in DTYPES:
        raise field_error(where, f"dtype {value!r}", "a dtype of safetensors or torch")
    return name


class SlimeV1Reader:
    """Versions of slime's first layout, changes alone."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def steps(self) -> list[Step]:
        """Every directory is a change to the one before; ChainError ``foreign-gap`` where a version is missing."""
        found: list[Step] = []
        for number, path in numbered(self._root, DIRECTORY).items():
            if found and found[-1].number != number - 1:
                raise gap_error(path, f"version {found[-1].number} before it", f"version {number - 1}")
            proof = "checksum of positions and values; unverifiable: no parent, no digest of the result"
            found.append(Step(number, number - 1, path, proof))
        return found

    def whole(self, step: Step, into: Path, base: Checkpoint | None) -> Path:
        """Never called: every step is a change."""
        raise AssertionError("there are no whole steps")

    def prove(self, step: Step, new: State) -> None:
        """Nothing more: the checksum of positions and values was checked as they were read."""

    def read(self, step: Step, base: Checkpoint) -> Iterator[Touched]:
        """The tensors in the step's files; at most some 32 times the size of ``base`` are decompressed."""
        files = sorted(step.path.glob("*.safetensors"))
        _check_files(step.path, files)
        limit = 32 * sum(shard.size for shard in base.shards) + (1 << 20)
        for path in files:
            data = read_bytes(path)
            packed = data[:4].tobytes() == ZSTD
            tensors = Tensors(inflate(data, str(path), at_most=limit) if packed else data, str(path))
            if tensors.metadata.get("encoding") not in ENCODINGS:
                raise field_error(path, f"encoding {tensors.metadata.get('encoding')!r}", ", ".join(ENCODINGS))
            for key, need in (("current_version", step.number), ("prev_version", step.number - 1)):
                version = tensors.metadata.get(key, "")  # the second is in early files alone
                if version.isdigit() and int(version) != need:
                    raise gap_error(path, f"{key} {version[:20]} in its metadata", f"{need}")
            yield from _updates(tensors, base)


def _check_files(path: Path, files: list[Path]) -> None:
    """Every rank's flushes from 0, without a gap. Which ranks there should be is not in the files."""
    flushes: dict[int, list[int]] = {}
    for file in files:
        match = FILE.fullmatch(file.name)
        if match is None:
            raise FormatError("foreign-names", where=file, have="another file", need="rank…_flush….safetensors alone")
        flushes.setdefault(int(match[1]), []).append(int(match[2]))
    for rank, numbers in flushes.items():
        if numbers != list(range(len(numbers))):
            raise FormatError("foreign-missing", where=path, have=f"flushes {numbers[:8]} of rank {rank}", need="all")


def _updates(tensors: Tensors, base: Checkpoint) -> Iterator[Touched]:
    where = tensors.where
    positions, values = tensors.words("__positions__", {"U8": "u1"}), tensors.tensors.get("__values__")
    if values is None or len(values.shape) != 1 or len(tensors.tensors) != 2:
        raise field_error(where, "other tensors", "__positions__ and __values__")
    data = tensors.bytes_of("__values__")
    words = data.view(f"<u{DTYPES[values.dtype].width}")
    if (check := tensors.metadata.get("checksum")) is not None:
        check_sum(positions, data, values.dtype, check, where)
    params = loads_strict(
        tensors.metadata.get("params", "").encode(), limit=100_000_000, where=f"{where}, params", allow_floats=True
    )
    if not isinstance(params, list) or not all(isinstance(p, dict) for p in params):
        raise field_error(f"{where}, params", "another kind of JSON", "a list of objects")
    absolute = tensors.metadata["encoding"] == "indices"
    for p in params:
        name = p.get("name")
        if not isinstance(name, str):
            raise field_error(f"{where}, params", "no name", "that of the tensor")
        yield Touched(name, partial(_update, name, p, absolute, positions, words, values.dtype, base, where))


def _update(
    name: str,
    p: dict[str, Any],
    absolute: bool,
    positions: Bytes,
    words: npt.NDArray[Any],
    dtype: str,
    base: Checkpoint,
    at: str,
) -> LayoutUpdate:
    where = f"{at}, {name[:80]!r}"
    ends = [p.get(key) for key in ("pos_start", "pos_end", "val_start", "val_end")]
    wide = 4 if absolute else p.get("pos_width")
    if wide not in (2, 4) or not all(type(e) is int for e in ends):
        raise field_error(where, "missing or broken fields", "pos_width 2 or 4, and four offsets")
    a, b, c, d = (int(e) for e in ends if e is not None)
    if not (0 <= a <= b <= len(positions) and 0 <= c <= d <= len(words)) or (b - a) % wide:
        raise FormatError("foreign-length", where=where, have=f"{a}:{b}, {c}:{d}", need="offsets inside of the file")
    tensor = tensor_of(base, name, where)
    if dtype_name(p.get("dtype"), where) != tensor.dtype or p.get("shape") != list(tensor.shape):
        have, need = f"{p.get('dtype')!r} {str(p.get('shape'))[:40]}", f"{tensor.dtype} {list(tensor.shape)}"
        raise ChainError("foreign-shape", where=where, have=have, need=need)
    raw = positions[a:b].view(f"<{'i' if absolute else 'u'}{wide}")
    found = (check_positions if absolute else from_gaps)(raw, elements_of(tensor), where)
    same_length(d - c, len(found), where)
    return LayoutUpdate(name, width_of(tensor, where), found, _cast(words[c:d], dtype, tensor.dtype, where))


def _cast(words: npt.NDArray[Any], have: str, need: str, where: str) -> npt.NDArray[Any]:
    """Back to the parameter's dtype, where that loses nothing. Raises ChainError ``foreign-dtype``."""
    if have == need:
        return words
    if (have, need) not in EXACT:
        raise ChainError("foreign-dtype", where=where, have=f"{have} values", need=need)
    if need == "BF16":
        lost = (words & np.uint32(0xFFFF)).any()
        new: npt.NDArray[Any] = (words >> np.uint32(16)).astype("<u2")
    else:
        wide = words.view("<f4" if have == "F32" else "<f8")
        with np.errstate(all="ignore"):
            narrow: npt.NDArray[Any] = wide.astype("<f2" if need == "F16" else "<f4")
            lost = (narrow.astype(wide.dtype).view(words.dtype) != words).any()
        new = narrow.view(f"<u{narrow.itemsize}")
    if lost:
        raise ChainError("foreign-dtype", where=where, have=f"{have} values that are no {need}", need="exact ones")
    return new
