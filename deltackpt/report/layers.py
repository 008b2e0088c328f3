"""Changes by layer and by encoding, from the tables of a step's parts: no payload is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltackpt.format.dtypes import DTYPES
from deltackpt.format.layout import Layout
from deltackpt.format.manifest import Manifest
from deltackpt.patch.index import PartIndex
from deltackpt.report.comparison import layer_of
from deltackpt.report.entries import sizes
from deltackpt.repository import Repository
from deltackpt.repository.chain import Hop
from deltackpt.restore.patch_reader import ranged_parts


@dataclass(frozen=True)
class EncodingShare:
    """What of a step is stored in one encoding: ``entries`` of tables, ``changed`` elements, ``bytes`` with the rows of
    the table."""

    entries: int
    changed: int
    bytes: int


@dataclass(frozen=True)
class StepTables:
    """One step. ``layers``: changed elements by layer, of layers that have any; ``encodings`` by name."""

    step: int
    layers: dict[str, int]
    encodings: dict[str, EncodingShare]

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**vars(self), "encodings": {name: dict(vars(share)) for name, share in self.encodings.items()}}


def layer_elements(layout: Layout) -> dict[str, int]:
    """Storage elements of every layer, by name, in the order of the model."""
    found: dict[str, int] = {}
    for t in layout.tensors.values():
        layer = layer_of(t.name)
        found[layer] = found.get(layer, 0) + (t.end - t.start) // DTYPES[t.dtype].width
    return {name: found[name] for name in sorted(found, key=model_order)}


def model_order(layer: str) -> tuple[int, list[tuple[int, str]]]:
    """Embeddings, then numbered layers by number, then all else, norms before heads: names alone tell no more."""
    number = re.search(r"\.\d+(\.|$)", f".{layer}")
    place = 1 if number else 0 if re.search(r"emb|wte|wpe", layer) else 3 if "head" in layer else 2
    natural = [(int(p), "") if p.isascii() and p.isdigit() else (-1, p) for p in re.split(r"(\d+)", layer)]
    return place, natural


def read_tables(repo: Repository, step: Manifest, layer: Mapping[str, str]) -> StepTables:
    """The tables of the parts of a step that has a patch; ``layer`` of each tensor's name, where it is known.

    Raises FormatError, ChainError ``part-elsewhere``, NotFoundError ``object-missing``.
    """
    hop = Hop.of(step)
    layers: dict[str, int] = {}
    encodings: dict[str, list[int]] = {}
    for part in ranged_parts(repo, hop):
        for name, encoding, changed, size in _rows(part):
            where = layer.get(name) or layer_of(name)
            if changed:
                layers[where] = layers.get(where, 0) + changed
            share = encodings.setdefault(encoding, [0, 0, 0])
            for i, more in enumerate((1, changed, size)):
                share[i] += more
    return StepTables(step.step, layers, {name: EncodingShare(*share) for name, share in encodings.items()})


def _rows(part: PartIndex) -> Iterable[tuple[str, str, int, int]]:
    """Name, encoding, changed elements and bytes of every entry."""
    found = sizes(part)
    if (table := part.table) is None:
        for entry, size in zip(part.entries, found, strict=True):
            yield entry.name, entry.encoding, 0 if entry.removes else entry.changes, size
        return
    packed = np.flatnonzero(table.row_of >= 0)
    changes = table.rows["changes"][table.row_of[packed]].tolist()
    for number, changed in zip(packed.tolist(), changes, strict=True):
        yield table.names[number], "packed", changed, found[number]
    for number, entry in table.odd.items():
        yield entry.name, entry.encoding, 0 if entry.removes else entry.changes, found[number]
