"""What code does to elements, seen by what it does to their numbers.

Each element that goes in has a number. Some words are too narrow for it, so the code is run several times over: a pass
shows one digit of all numbers, as wide as the word. Other passes show the same digits with their low bits, their sign,
or both turned over, so that what picks words by their size picks others; and last come words as weights have them. An
output word was moved if it shows one and the same number in every pass, and is a constant if it is one word in all of
them. Whatever else it may be, it was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from deltackpt.torch_views.words import INTS

Fill = Callable[[str, torch.Tensor], None]  # puts the words of an input, by its name, into a flat storage of integers
Run = Callable[[Fill], Mapping[str, torch.Tensor]]  # -> the flat storages of all outputs, as integers
Words = Callable[[torch.Tensor, int], torch.Tensor]  # of numbers [n] int64, by their width: [n] int64, not negative

_USUAL = 2  # passes with words as weights have them


class Computed(Exception):
    """Why outputs are not moved inputs."""


@dataclass(frozen=True)
class Numbered:
    """The words of an input, flat: ``ids`` [n] int64, on the device where the code runs, 0 where nothing goes in, and
    the dtype that they stand for."""

    ids: torch.Tensor
    dtype: torch.dtype


class _Output:
    """``ids``: the number that each word showed, [n] int64; ``moved`` and ``constant``: [n] bool, may it still be?"""

    def __init__(self, words: torch.Tensor, width: int) -> None:
        self.first, self.width = words, width
        self.ids = torch.zeros_like(words)
        self.moved = torch.ones_like(words, dtype=torch.bool)
        self.constant = self.moved.clone()

    def see(self, words: torch.Tensor, width: int) -> None:
        """Raises Computed for an output of another size than in the first pass."""
        if (len(words), width) != (len(self.first), self.width):
            raise Computed("an output has another size for other values")
        self.constant &= words == self.first


def moved(run: Run, inputs: Mapping[str, Numbered], last: int) -> dict[str, torch.Tensor]:
    """{output: [m] int64, the number of the element in each of its words, 0 for a constant}; numbers are 1 to ``last``.

    Raises Computed, and what ``run`` raises.
    """
    widths = {one.dtype.itemsize for one in inputs.values()}
    digits = {width: -(-last.bit_length() // (8 * width)) for width in widths}
    most = max(digits.values(), default=1)
    found: dict[str, _Output] = {}
    for number, show in enumerate(_passes(inputs, digits, most, last)):
        for name, out in _run(run, inputs, show).items():
            words, width = out
            if name not in found and number == 0:
                found[name] = _Output(words, width)
            if name not in found:
                raise Computed("other outputs for other values")
            one = found[name]
            one.see(words, width)
            if width not in widths:  # no input has such words
                one.moved[:] = False
            elif number < digits[width]:
                one.ids |= words << (8 * width * number)
            else:
                known = (one.ids > 0) & (one.ids <= last)
                one.moved &= known & (show(torch.where(known, one.ids, 0), width) == words)
    for name, one in found.items():
        if wrong := int((~(one.moved | one.constant)).sum()):
            raise Computed(f"{wrong:,} of {len(one.first):,} words of {name} are computed")
    return {name: torch.where(one.moved & ~one.constant, one.ids, 0) for name, one in found.items()}


def _run(run: Run, inputs: Mapping[str, Numbered], show: Words) -> dict[str, tuple[torch.Tensor, int]]:
    """{output: its words, [n] int64 and not negative, and their width} of one pass."""

    def fill(name: str, into: torch.Tensor) -> None:
        ids = inputs[name].ids
        words = torch.where(ids > 0, show(ids, into.itemsize), 0)
        into.copy_(_signed(words, into.itemsize))

    found = {}
    for name, words in run(fill).items():
        width = words.itemsize
        found[name] = _unsigned(words, width), width
    return found


def _passes(inputs: Mapping[str, Numbered], digits: Mapping[int, int], most: int, last: int) -> Iterator[Words]:
    for turned in range(4):
        for number in range(most):

            def show(ids: torch.Tensor, width: int, number: int = number, turned: int = turned) -> torch.Tensor:
                bits = 8 * width
                low, sign = (1 << (bits - 1)) - 1, 1 << (bits - 1)
                over = low * (turned & 1) | sign * (turned >> 1)
                if width == 8:
                    return ids ^ (low * (turned & 1))
                digit = ids >> (bits * (number % digits[width]))
                return (digit & (low | sign)) ^ over

            yield show
    for seed in range(_USUAL):
        where = next((one.ids.device for one in inputs.values()), torch.device("cpu"))
        table = torch.zeros(last + 1, dtype=torch.int64, device=where)
        for one in inputs.values():
            here = one.ids > 0
            table[one.ids[here]] = _usual(one.dtype, int(here.sum()), seed).to(where)
        yield lambda ids, width, table=table: table[ids]  # type: ignore[misc]


def _usual(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """[count] int64, the words of numbers as weights and scales have them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        values = (torch.rand(count, generator=generator) * 0.9 + 0.1).to(dtype)
    else:
        values = torch.randint(0, 100, (count,), generator=generator).to(dtype)
    return _unsigned(values.view(INTS[dtype.itemsize]), dtype.itemsize)


def _unsigned(words: torch.Tensor, width: int) -> torch.Tensor:
    wide = words.to(torch.int64)
    return wide if width == 8 else wide & ((1 << (8 * width)) - 1)


def _signed(words: torch.Tensor, width: int) -> torch.Tensor:
    """As `torch.Tensor.copy_` takes them without a loss."""
    bits = 8 * width
    if width == 8:
        return words
    return torch.where(words >> (bits - 1) == 1, words - (1 << bits), words).to(INTS[width])
