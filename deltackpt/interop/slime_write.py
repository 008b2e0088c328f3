"""slime's second layout, written so that its receivers read it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import zstandard

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import UsageError
from deltackpt.interop.changes import changes, size_of
from deltackpt.interop.checksums import CHECKSUMS
from deltackpt.interop.files import copy_checkpoint, placed, write_tensors
from deltackpt.interop.protocol import Bytes
from deltackpt.interop.slime import ENCODINGS, INDEX, WRAP
from deltackpt.util.disk import space_errors
from deltackpt.util.file_server import make_folder, rename
from deltackpt.util.parallel import ordered_map

LEVEL = 1
FILE_BYTES = 1 << 30  # compressed bytes after which another file is begun

Row = tuple[str, str, tuple[int, ...], Bytes]


class SlimeWriter:
    """``encoding``: xor, overwrite or xor_sparse; ``checksum``: xxh3-128, blake3 or adler32."""

    consecutive = True
    anchored = True

    def __init__(self, root: Path, *, encoding: str = "xor", checksum: str = "xxh3-128") -> None:
        if encoding not in ENCODINGS or checksum not in CHECKSUMS:
            need = f"{', '.join(ENCODINGS)} and {', '.join(CHECKSUMS)}"
            raise UsageError("usage", where="slime", have=f"{encoding!r} and {checksum!r}", need=need)
        self._root, self._encoding, self._checksum = root, encoding, checksum

    def whole(self, number: int, new: Checkpoint) -> None:
        """A copy of the checkpoint in the directory of this version."""
        with placed(self._root / f"weight_v{number:06d}") as draft:
            copy_checkpoint(new, draft)

    def delta(self, number: int, old: Checkpoint, new: Checkpoint, threads: int) -> str | None:
        """A directory of zstd frames and their index; whole where positions do not fit into 32 bits."""
        reason = next(changes(old, new), None)
        if reason is None and self._encoding == "overwrite":
            large = [name for name, t in new.tensors.items() if size_of(t) > WRAP]
            reason = f"{large[0][:80]!r} is too large for positions of 32 bits" if large else None
        if reason is not None:
            self.whole(number, new)
            return reason
        with placed(self._root / f"weight_v{number:06d}") as draft:
            make_folder(draft)
            self._fill(draft, number, old, new, threads)
        return None

    def _fill(self, draft: Path, number: int, old: Checkpoint, new: Checkpoint, threads: int) -> None:
        def one(name: str) -> tuple[str, Bytes, str] | None:
            blob = encode(self._encoding, old.bytes_of(name), new.bytes_of(name))
            found = None if blob is None else (name, blob, CHECKSUMS[self._checksum](new.bytes_of(name)))
            old.release(name)
            new.release(name)
            return found

        files: list[tuple[list[Row], dict[str, str]]] = []
        size = FILE_BYTES
        weight_map: dict[str, int] = {}
        for found in ordered_map(one, new.tensors, threads):
            if found is None:
                continue
            if size >= FILE_BYTES:
                if files:
                    self._put(draft, len(files) - 1, *files[-1])
                    files[-1][0].clear()
                files.append(([], {}))
                size = 0
            name, blob, digest = found
            files[-1][0].append((name, "U8", (len(blob),), blob))
            files[-1][1][name] = digest
            weight_map[name] = len(files) - 1
            size += len(blob)
        if files:
            self._put(draft, len(files) - 1, *files[-1])
        names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        for i, name in enumerate(names):
            rename(draft / f"{i}.part", draft / name)
        metadata = {
            "version": f"{number:06d}",
            "base_version": f"{number - 1:06d}",
            "delta_encoding": self._encoding,
            "compression_format": "zstd",
            "checksum_format": self._checksum,
        }
        index = {"metadata": metadata, "weight_map": {name: names[i] for name, i in weight_map.items()}}
        with space_errors(draft):
            (draft / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _put(self, draft: Path, i: int, rows: list[Row], metadata: dict[str, str]) -> None:
        write_tensors(draft / f"{i}.part", rows, metadata)


def encode(encoding: str, old: Bytes, new: Bytes) -> Bytes | None:
    """The zstd frame of one tensor, uint8 [bytes], None where nothing changed. ``old``, ``new``: uint8, all bytes."""
    xor = old ^ new
    positions = np.flatnonzero(xor) if encoding != "xor" or not xor.any() else None
    if positions is not None and len(positions) == 0:
        return None
    if encoding == "xor":
        raw: bytes | memoryview = xor.data
    else:
        wide = "<u4" if encoding == "overwrite" else "<u8"
        count = np.array([len(positions)], wide)  # type: ignore[arg-type]
        values = (new if encoding == "overwrite" else xor)[positions]
        raw = count.tobytes() + positions.astype(wide).tobytes() + values.tobytes()  # type: ignore[union-attr]
    return np.frombuffer(zstandard.ZstdCompressor(level=LEVEL).compress(raw), np.uint8)
