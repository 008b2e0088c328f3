"""Write one new safetensors file under a header that is given byte for byte."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from deltackpt.disk import space_errors
from deltackpt.errors import ConflictError, FormatError
from deltackpt.format.safetensors_header import parse_header

Bytes = npt.NDArray[np.uint8] | bytes | bytearray | memoryview


class ShardWriter:
    """A context manager: ``with ShardWriter(path, head) as shard: shard.write(...)``, tensors in offset order.

    ``head`` is the length and the JSON, as `Header.head` and `build_header` give them. The file must not exist. Leaving
    the block with an error, or with fewer bytes than the header promises, removes the file: no half of one stays. With
    ``sync`` its content is durable after `close`; its name is after `fsync_dir` of the folder.
    """

    def __init__(self, path: Path, head: bytes, *, sync: bool = True) -> None:
        """Raises ConflictError ``file-exists``, FormatError for the header, NoSpaceError ``no-space``."""
        self.path = path
        self.size = parse_header(head, None, str(path)).file_size
        self.written = 0
        self._sync = sync
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError as error:
            raise ConflictError("file-exists", where=path, have="a file", need="a name never used before") from error
        self._file = os.fdopen(fd, "wb")
        try:
            self.write(head)
        except BaseException:
            self.discard()
            raise

    def write(self, data: Bytes) -> None:
        """Append one tensor, or the next piece of one: C-contiguous bytes.

        Raises FormatError ``offsets-end`` for more bytes than the header promises, NoSpaceError ``no-space``.
        """
        view = data.data if isinstance(data, np.ndarray) else memoryview(data)
        if self.written + view.nbytes > self.size:
            raise self._wrong_size(self.written + view.nbytes)
        with space_errors(self.path):
            self._file.write(view)
        self.written += view.nbytes

    def write_all(self, tensors: Iterable[Bytes]) -> None:
        for tensor in tensors:
            self.write(tensor)

    def close(self) -> None:
        """Finish the file. Raises FormatError ``offsets-end``, and removes it, if bytes are missing."""
        try:
            if self.written != self.size:
                raise self._wrong_size(self.written)
            with space_errors(self.path):
                self._file.flush()
                if self._sync:
                    os.fsync(self._file.fileno())
                self._file.close()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove the unfinished file."""
        self.path.unlink(missing_ok=True)
        with suppress(OSError):  # the buffered rest of a file that is gone may not fit
            self._file.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.discard()

    def _wrong_size(self, have: int) -> FormatError:
        return FormatError("offsets-end", where=self.path, have=f"{have:,} bytes", need=f"{self.size:,} bytes")
