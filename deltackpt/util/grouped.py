"""Items in groups of a bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def grouped(items: Iterable[T], size: Callable[[T], int], most: int, count: int | None = None) -> Iterator[list[T]]:
    """Neighbors together whose sizes add up to ``most`` at most, and ``count`` of them; one that is larger is alone."""
    held, total = list[T](), 0
    for item in items:
        own = size(item)
        if held and (total + own > most or len(held) == count):
            yield held
            held, total = [], 0
        held.append(item)
        total += own
    if held:
        yield held
