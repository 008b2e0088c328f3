"""TRL's delta branches: read, every form that there was.

`anchors/step_000001.safetensors` are dense, `deltas/…` sparse, though some of each are the other: what is in a file
decides. Positions are `{p}.indices` (I32), or `{p}.idx` as I32 (raw) or U16 or U32 (what is between them), values
`{p}.values` or `{p}.val`. Nothing names a parent, shapes, dtypes or a digest, but for the earliest branch's checksum.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import State
from deltackpt.errors import ChainError, FormatError, UsageError
from deltackpt.format.safetensors_header import Header, head_size, parse_header
from deltackpt.interop.changes import (
    check_positions,
    dense,
    elements_of,
    from_gaps,
    same_length,
    tensor_of,
    width_of,
)
from deltackpt.interop.files import Tensors, field_error, gap_error, numbered
from deltackpt.interop.protocol import UNVERIFIABLE, LayoutUpdate, Step, Touched
from deltackpt.interop.working import rebuild
from deltackpt.util.file_server import make_folder, symlink

ANCHORS, DELTAS = "anchors", "deltas"
FILE: Final = re.compile(r"step_([0-9]{6,12})\.safetensors")
SUFFIXES: Final = ((".indices", ".values"), (".idx", ".val"))
ENCODINGS: Final = {"raw": {"I32"}, "gap_delta": {"U16", "U32"}, "nvcomp_cascaded": {"U8"}}
CLOCK: Final = 60 * 10**9  # ns by which a later step's file may be older


def detect(root: Path) -> bool:
    """Does a directory hold TRL's anchors or deltas?"""
    return any(numbered(root / folder, FILE) for folder in (ANCHORS, DELTAS))


def pairs(names: Mapping[str, object], where: str) -> dict[str, tuple[str, str]] | None:
    """Parameter to its two keys, if the keys are pairs; None where none is of one. Raises FormatError
    ``foreign-names`` for a mixture."""
    found: dict[str, tuple[str, str]] = {}
    for first, second in SUFFIXES:
        for name in names:
            stem = name.removesuffix(first)
            if stem != name and stem + second in names:
                if stem in found:
                    raise FormatError("foreign-twice", where=where, have=f"{stem[:80]!r} twice", need="each once")
                found[stem] = (name, stem + second)
    left = len(names) - 2 * len(found)
    if found and left:
        have = f"{left} keys beside the pairs of positions and values"
        raise FormatError("foreign-names", where=where, have=have, need="pairs, or whole tensors")
    return found or None


class TrlReader:
    """``trust_numbers``: a missing number is a step without changes, for which TRL writes no file; nor do the files'
    times speak of a second run."""

    def __init__(self, root: Path, *, trust_numbers: bool = False) -> None:
        self._root, self._trust = root, trust_numbers

    def steps(self) -> list[Step]:
        """Anchors and deltas in order of number. Raises FormatError or ChainError ``foreign-*``."""
        anchors, deltas = numbered(self._root / ANCHORS, FILE), numbered(self._root / DELTAS, FILE)
        if both := sorted(anchors.keys() & deltas.keys()):
            have = f"an anchor and a delta of step {both[0]}"
            raise FormatError("foreign-twice", where=self._root, have=have, need="one of them")
        found: list[Step] = []
        newest = 0
        for number, path in sorted((anchors | deltas).items()):
            metadata = _header(path).metadata
            before = found[-1].number if found else None
            self._check_number(path, number, before, metadata)
            time = path.stat().st_mtime_ns
            if not self._trust and time < newest - CLOCK:
                have = "a file older than that of the step before"
                raise gap_error(path, have, "files in order of time", _HINT + " This one looks like another run's.")
            newest = max(newest, time)
            proof = UNVERIFIABLE
            if metadata.get("checksum_sha256"):
                proof = "sha256 of all parameters; unverifiable: no parent"
            if before is None and path.parent.name == ANCHORS:
                found.append(Step(number, None, path, f"{proof}; nothing lists the tensors that it should have"))
            else:
                found.append(Step(number, number - 1 if before is None else before, path, proof))
        return found

    def _check_number(self, path: Path, number: int, before: int | None, metadata: Mapping[str, str]) -> None:
        previous = metadata.get("prev_model_version", "-1")
        known = previous.isascii() and previous.isdigit()
        if known and before is not None and int(previous) != before:
            raise gap_error(path, f"prev_model_version {previous[:20]}", f"{before}", "A file is missing.")
        if before is not None and number != before + 1 and not known and not self._trust:
            raise gap_error(path, f"step {before} before it", f"step {number - 1}", _HINT)

    def whole(self, step: Step, into: Path, base: Checkpoint | None) -> Path:
        """An anchor with the base's layout at ``into``; without a base, a link there to the anchor's one file."""
        if base is not None:
            rebuild(base, self.read(step, base), into, str(step.path))
            return into
        tensors = Tensors.open(step.path)
        if pairs(tensors.tensors, tensors.where):
            raise ChainError("foreign-gap", where=step.path, have="changes alone", need="a whole state, or --base DIR")
        make_folder(into)
        symlink(into / "model.safetensors", step.path.absolute())
        return into

    def read(self, step: Step, base: Checkpoint) -> Iterator[Touched]:
        """The tensors of one file: dense ones of an anchor, or pairs of positions and values."""
        tensors = Tensors.open(step.path)
        keys = None if tensors.tensors.keys() <= base.tensors.keys() else pairs(tensors.tensors, tensors.where)
        if keys is None:
            for name, t in tensors.tensors.items():
                tensor = tensor_of(base, name, tensors.where)
                data = tensors.bytes_of(name)
                yield Touched(name, partial(dense, name, tensor, t.dtype, t.shape, data, tensors.where))
            return
        encoding = tensors.metadata.get("encoding")
        for name, (positions, values) in keys.items():
            yield Touched(name, partial(_sparse, tensors, base, name, positions, values, encoding))

    def prove(self, step: Step, new: State) -> None:
        """The earliest branch's checksum: sha256 over all bytes, in order of name."""
        need = _header(step.path).metadata.get("checksum_sha256")
        if not need:
            return
        digest = hashlib.sha256()
        for name in sorted(new.tensors):
            digest.update(new.bytes_of(name).data)
            new.release(name)
        if digest.hexdigest() != need:
            have, hint = f"sha256 {digest.hexdigest()[:16]}…", "Is --base the checkpoint that the run began with?"
            raise ChainError("foreign-digest", where=step.path, have=have, need=f"{need[:16]}…", hint=hint)


_HINT = (
    "TRL writes no file for a step without changes, and starts at 1 again when it is resumed: the files do not "
    "say which. If you know, --trust-numbers takes the files as one run."
)


def _sparse(
    tensors: Tensors, base: Checkpoint, name: str, positions: str, values: str, encoding: str | None
) -> LayoutUpdate:
    where = f"{tensors.where}, {name[:80]!r}"
    tensor = tensor_of(base, name, where)
    kinds = tensors.tensors[positions], tensors.tensors[values]
    if encoding is not None and kinds[0].dtype not in ENCODINGS.get(encoding, set()):
        raise field_error(where, f"{kinds[0].dtype} positions", f"those of encoding {encoding[:40]!r}")
    if kinds[0].dtype == "U8":
        raise UsageError(
            "foreign-codec",
            where=where,
            have="positions under nvcomp, which only a GPU unpacks",
            need="raw or gap_delta",
            hint="Set the trainer's encoding to gap_delta, or have it write an anchor.",
        )
    if kinds[1].dtype != tensor.dtype or len(kinds[1].shape) != 1:
        raise ChainError("foreign-shape", where=where, have=f"{kinds[1].dtype} values", need=f"flat {tensor.dtype}")
    words = tensors.bytes_of(values).view(f"<u{width_of(tensor, where)}")
    count = elements_of(tensor)
    if kinds[0].dtype == "I32":
        where_at = check_positions(tensors.words(positions, {"I32": "<i4"}), count, where)
    else:
        where_at = from_gaps(tensors.words(positions, {"U16": "<u2", "U32": "<u4"}), count, where)
    same_length(len(words), len(where_at), where)
    return LayoutUpdate(name, words.dtype.itemsize, where_at, words)


def _header(path: Path) -> Header:
    """The header alone: of an anchor that is the model."""
    with path.open("rb") as file:
        size = path.stat().st_size
        first = file.read(8)
        return parse_header(first + file.read(head_size(first, size, str(path)) - 8), size, str(path))
