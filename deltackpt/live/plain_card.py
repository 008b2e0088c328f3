"""A step of nothing but plain changes on a card: taken in by few calls, whatever the number of tensors.

What does not change from step to step, where the weights are and all of a part's head and table but for numbers, is
kept. A part that is anything but such a step is left to who takes in all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.codecs.index import IndexCodec
from deltackpt.engines.module import WeightPlace
from deltackpt.gpu.places import fits
from deltackpt.gpu.plain import PlainPlan, side_by_side
from deltackpt.live.card_changes import TOGETHER, PlainChanges, out_of_order
from deltackpt.live.card_part import ArrivingPart, CardPart
from deltackpt.patch.part import Origin
from deltackpt.patch.plain_layout import Form, PlainLayout
from deltackpt.patch.tensor import PartsPatch
from deltackpt.torch_views.words import INTS

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Width:
    """Tensors of a layout whose words have ``width`` bytes: ``which`` they are, int64, ``plan`` of their words, and
    ``at`` and ``new``, which of the layout's plain tensors have their positions and values."""

    width: int
    which: Ints
    plan: PlainPlan
    at: Ints
    new: Ints

    def of(self, body: torch.Tensor, starts: Ints, sizes: Ints, which: Ints, width: int) -> torch.Tensor:
        """Plain tensors ``which`` of a part, whose plain tensors are in ``body``, as words of a ``width``."""
        first, last = int(which[0]), int(which[-1])
        if last - first + 1 == len(which):  # side by side, as where all words are narrower than positions
            data = body[int(starts[first]) : int(starts[last] + sizes[last])].view(INTS[width])
            return side_by_side([data])
        ends = (starts + sizes)[which].tolist()
        return side_by_side(
            [body[start:end].view(INTS[width]) for start, end in zip(starts[which].tolist(), ends, strict=True)]
        )


class PlainSteps:
    """Of the tensors ``places``, by name, whose ``words`` are on a card, flat: those of them that no others share."""

    def __init__(self, places: Mapping[str, WeightPlace], words: Mapping[str, torch.Tensor]) -> None:
        self._places, self._words = places, words
        self._layout: PlainLayout | None = None
        self._widths: list[_Width] = []
        self._keep([(name, place.dtype, place.shape) for name, place in places.items()])

    def changes(self, found: ArrivingPart, origin: Origin) -> list[PlainChanges] | None:
        """Check what a part of ``origin`` holds, and compare it with the words that are there; nothing is written. None
        for one of other tensors, or in other encodings. Raises FormatError ``indices-order``, and what waiting for the
        bytes raises."""
        layout = self._layout
        counts = layout.read(found.head, found.table, origin) if layout is not None else None
        if layout is None or counts is None or counts.changes.sum() > TOGETHER:
            return None
        sizes = layout.sizes(counts.changes)
        body, rest = found.held()
        if len(body) != sizes.sum() or len(rest):
            return None
        starts = np.cumsum(sizes) - sizes
        return [self._of(layout, one, counts.changes, body, starts, sizes, found.where) for one in self._widths]

    def _of(
        self, layout: PlainLayout, one: _Width, changes: Ints, body: torch.Tensor, starts: Ints, sizes: Ints, where: str
    ) -> PlainChanges:
        positions = one.of(body, starts, sizes, one.at, 4)
        new = one.of(body, starts, sizes, one.new, one.width)
        gains = one.plan.look_at(changes[one.which], positions, new)
        names = [layout.forms[i][0] for i in one.which.tolist()]
        for name, wrong in zip(names, gains.wrong, strict=True):
            if wrong:
                raise out_of_order(f"{where}, {name!r}", self._words[name].numel())
        return PlainChanges(dict(zip(names, gains.sums, strict=True)), gains.write)

    def learn(self, patch: PartsPatch) -> None:
        """The next one may be of the same tensors as this, which was taken in another way."""
        (part, *more) = patch.parts
        if more or not isinstance(part, CardPart):
            return
        if all(isinstance(entry.codec, IndexCodec) and not entry.boxed for entry in part.entries):
            self._keep([(entry.name, entry.dtype, entry.shape) for entry in part.entries])

    def _keep(self, forms: list[Form]) -> None:
        known = [(name, (dtype.name, shape)) for name, dtype, shape in forms]
        if not known or any(n not in self._words or self._places[n].known != form for n, form in known):
            return
        if not all(fits(self._words[name].numel()) for name, _ in known):
            return
        forms.sort(key=lambda form: form[0].encode())
        layout = PlainLayout(forms)
        words = [self._words[name] for name, *_ in forms]
        held, widths = np.array([one.element_size() for one in words]), list[_Width]()
        for width in np.unique(held).tolist():
            which = np.flatnonzero(held == width)
            at, new = (_places_of(layout, which, values=values) for values in (False, True))
            widths.append(_Width(width, which, PlainPlan([words[i] for i in which.tolist()]), at, new))
        self._layout, self._widths = layout, widths


def _places_of(layout: PlainLayout, which: Ints, *, values: bool) -> Ints:
    """Which of a layout's plain tensors are those of tensors ``which``, in their order: values, or positions."""
    places = np.zeros(len(layout.forms), np.int64)
    mine = np.flatnonzero(layout.values == values)
    places[layout.tensor[mine]] = mine
    return places[which]
