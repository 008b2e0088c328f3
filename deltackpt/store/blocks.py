"""The body of a put, cut into the parts of an upload and hashed on the way."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator

from deltackpt.store.base import Buffer, flat


class HashedBlocks:
    """The chunks of a put as blocks of ``size`` bytes, the last one shorter.

    ``digest`` is the sha256 of, and ``size`` counts, the bytes of all blocks so far.
    """

    def __init__(self, chunks: Iterable[Buffer], size: int) -> None:
        self.digest = hashlib.sha256()
        self.size = 0
        self._chunks = chunks
        self._block = size

    def blocks(self) -> Iterator[bytes]:
        """The blocks, in order. An exception out of the chunks is passed on as it is."""
        gathered, size = io.BytesIO(), 0
        for chunk in self._chunks:
            view = flat(chunk)
            self.digest.update(view)
            self.size += len(view)
            while size + len(view) >= self._block:
                rest = self._block - size
                gathered.write(view[:rest])
                view = view[rest:]
                yield gathered.getvalue()  # shared, not copied, until the next write
                gathered, size = io.BytesIO(), 0
            gathered.write(view)
            size += len(view)
        if size:
            yield gathered.getvalue()
