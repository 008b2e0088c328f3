"""The parts of a patch that one rank writes: what changed, encoded, cut into files, several of them stored at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field

from deltackpt.codecs import SCAN_LIMIT, Encoded, Entry
from deltackpt.format.manifest import File
from deltackpt.format.state_digest import Sums
from deltackpt.hooks.encode import entry_of, sums_of
from deltackpt.patch.part import Origin, PartWriter
from deltackpt.torch_views.delta import Delta
from deltackpt.util.parallel import ordered_map

BYTES = 32 << 20  # encoded, after which a part is stored and the next one begun
AT_ONCE = 4  # parts that are on their way

Put = Callable[[int, PartWriter], File]  # the part's index and what it holds -> the stored file


@dataclass
class Parts:
    """What was stored of a step. ``sums``: what the tensors' sums gain; ``changed``: elements by tensor."""

    files: list[File] = field(default_factory=list)
    sums: dict[str, Sums] = field(default_factory=dict)
    xxh3: dict[str, bytes] = field(default_factory=dict)
    encodings: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def put_parts(
    deltas: Mapping[str, Delta],
    origin: Origin,
    names: set[str],
    put: Put,
    check: Callable[[], None],
    *,
    encoding: str = "auto",
    scan_limit: int = SCAN_LIMIT,
    threads: int = 1,
) -> Parts:
    """Encode all deltas and store them, sorted by name. ``names``: of all tensors of the state.

    ``put`` is called from up to AT_ONCE threads; an error of one is raised when all of them are done. ``check`` raises
    to stop.
    """
    parts = Parts()
    encoded = 0.0

    def encode(delta: Delta) -> tuple[Delta, tuple[Entry, Encoded], Sums]:
        check()
        return delta, entry_of(delta, names, encoding=encoding, scan_limit=scan_limit), sums_of(delta)

    def writers() -> Generator[tuple[int, PartWriter], None, None]:
        nonlocal encoded
        began, index, writer = time.monotonic(), 0, PartWriter(origin)
        order = [deltas[name] for name in sorted(deltas, key=str.encode)]
        for delta, (entry, made), sums in ordered_map(encode, order, threads):
            writer.add(entry, made)
            parts.sums[delta.name] = sums
            if delta.xxh3 is not None:
                parts.xxh3[delta.name] = delta.xxh3
            parts.encodings[entry.encoding] = parts.encodings.get(entry.encoding, 0) + 1
            parts.changed[delta.name] = len(delta.positions)
            if writer.size >= BYTES:
                encoded += time.monotonic() - began
                yield index, writer
                began, index, writer = time.monotonic(), index + 1, PartWriter(origin)
        encoded += time.monotonic() - began
        if len(writer):
            yield index, writer

    began = time.monotonic()
    with closing(writers()) as items:
        parts.files = list(ordered_map(lambda item: put(*item), items, min(threads, AT_ONCE), ahead=0))
    parts.seconds = {"encode": encoded, "put": time.monotonic() - began - encoded}
    return parts
