"""One rank's share of a step: its changes encoded, cut into parts, and handed to a sink."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain

from deltackpt.codecs import Encoded, Entry
from deltackpt.format.manifest import File
from deltackpt.format.state_digest import Sums
from deltackpt.hooks.encode import batches, encode_together, entry_of, sums_of
from deltackpt.patch.part import Origin, PartWriter
from deltackpt.publish.sink import EncodedPart, PartSink
from deltackpt.publish.step import PART_BYTES, EncodeOptions
from deltackpt.torch_views.delta import Delta
from deltackpt.util.parallel import ordered_map

Traffic = tuple[int, int, int]  # bytes of an anchor: sent to other ranks, received from them, stored


@dataclass
class Share:
    """What one rank did of a step. ``sums``: what the tensors' sums gain by it, or are, where no patch leads to the
    step. ``changed``: elements by tensor. ``parts`` and ``anchor`` (by path) are durable. ``seconds`` by stage.
    """

    parts: list[File] = field(default_factory=list)
    anchor: dict[str, File] = field(default_factory=dict)
    sums: dict[str, Sums] = field(default_factory=dict)
    xxh3: dict[str, bytes] = field(default_factory=dict)
    encodings: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    traffic: Traffic = (0, 0, 0)
    seconds: dict[str, float] = field(default_factory=dict)
    nonfinite: int = 0  # elements of the weights


def encode_deltas(
    sink: PartSink,
    origin: Origin,
    deltas: Mapping[str, Delta],
    names: set[str],
    options: EncodeOptions,
    *,
    number: Callable[[int], int] = lambda index: index + 1,
    check: Callable[[], None] = lambda: None,
) -> Share:
    """Encode all deltas, sorted by name, and hand parts to ``sink`` as they fill up.

    ``names`` are of all tensors of the state; ``origin`` goes into every part. ``number`` gives the
    number of this rank's part of an index. ``check`` is called for each tensor, and raises to stop. Raises what the
    sink raises.
    """
    share = Share()
    began, put = time.monotonic(), 0.0

    def encode(batch: list[Delta]) -> list[tuple[Delta, tuple[Entry, Encoded], Sums]]:
        made = []
        for delta in encode_together(batch, options.encoding):
            check()
            made.append((delta, entry_of(delta, names, encoding=options.encoding), sums_of(delta)))
        return made

    def hand_over(index: int, writer: PartWriter) -> float:
        start = time.monotonic()
        sink.put(EncodedPart.of(writer, number(index)))
        return time.monotonic() - start

    index, writer = 0, PartWriter(origin)
    order = [deltas[name] for name in sorted(deltas, key=str.encode)]
    for delta, (entry, encoded), sums in chain.from_iterable(ordered_map(encode, batches(order), options.threads)):
        writer.add(entry, encoded)
        share.sums[delta.name] = sums
        if delta.xxh3 is not None:
            share.xxh3[delta.name] = delta.xxh3
        share.encodings[entry.encoding] = share.encodings.get(entry.encoding, 0) + 1
        share.changed[delta.name] = len(delta.positions)
        if writer.size >= sink.part_bytes(PART_BYTES):
            put += hand_over(index, writer)
            index, writer = index + 1, PartWriter(origin)
    if len(writer):
        put += hand_over(index, writer)
    share.seconds = {"encode": time.monotonic() - began - put, "put": put}
    return share
