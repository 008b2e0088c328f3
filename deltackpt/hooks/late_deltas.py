"""The changes of a step, which may still have to be encoded when it is put into the queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from deltackpt.torch_views.delta import CardDelta, Delta


class LateDeltas(Mapping[str, Delta]):
    """Deltas by name, made by whoever looks at them first, in any thread; an error is raised to that one, and the next
    one tries again."""

    def __init__(
        self, make: Callable[[], dict[str, Delta]], there: Callable[[], list[CardDelta] | None] = lambda: None
    ) -> None:  # fmt: skip
        """``there`` gives what cards have of them, as `on_card` has it."""
        self._there = there
        self._make: Callable[[], dict[str, Delta]] | None = make
        self._made: dict[str, Delta] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Delta:
        return self.all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.all())

    def __len__(self) -> int:
        return len(self.all())

    def all(self) -> dict[str, Delta]:
        """Them all."""
        with self._lock:
            if self._make is not None:
                self._made = self._make()
                self._make = None  # with all that it refers to
            return self._made

    def on_card(self) -> list[CardDelta] | None:
        """Them all as they were found, before any of them is made; None where that is not kept, or not any more."""
        return self._there()

    def off_card(self) -> LateDeltas:
        """The same without what cards hold of them."""
        return LateDeltas(lambda: off_card(self.all()))


def on_card(deltas: Mapping[str, Delta]) -> list[CardDelta] | None:
    """All changes where a card has them, by any order of names; None where it does not have each."""
    if isinstance(deltas, LateDeltas) and (found := deltas.on_card()) is not None:
        return found
    there = [delta.there() for delta in deltas.values()]
    held = [one for one in there if one is not None]
    return held if held and len(held) == len(there) else None


def off_card(deltas: Mapping[str, Delta]) -> dict[str, Delta]:
    """Deltas without what cards hold of them."""
    return {name: d if d.on_card is None else replace(d, on_card=None) for name, d in deltas.items()}
