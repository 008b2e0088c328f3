"""The changes of a step, which may still have to be encoded when it is put into the queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from deltackpt.torch_views.delta import Delta


class LateDeltas(Mapping[str, Delta]):
    """Deltas by name, made by whoever looks at them first, in any thread; an error is raised to that one, and the next
    one tries again."""

    def __init__(self, make: Callable[[], dict[str, Delta]]) -> None:
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

    def off_card(self) -> LateDeltas:
        """The same without what cards hold of them."""
        return LateDeltas(lambda: off_card(self.all()))


def off_card(deltas: Mapping[str, Delta]) -> dict[str, Delta]:
    """Deltas without what cards hold of them."""
    return {name: d if d.on_card is None else replace(d, on_card=None) for name, d in deltas.items()}
