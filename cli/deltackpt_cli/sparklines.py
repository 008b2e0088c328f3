"""A report in a terminal: the figures of the page as rows of blocks, each with its unit and its range."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from deltackpt_cli import format as text

if TYPE_CHECKING:
    from deltackpt.report.history import History

BLOCKS = "▁▂▃▄▅▆▇█"
MOST_LAYERS = 40  # rows
Value = float | int | None


def spark(values: Sequence[Value], width: int, low: float | None = None, high: float | None = None) -> str:
    """A block for each value, or for the mean of neighbors where there are more than ``width``; a space for none."""
    cells = _binned(values, width)
    known = [cell for cell in cells if cell is not None]
    bottom = min(known, default=0.0) if low is None else low
    top = max(known, default=0.0) if high is None else high
    span = top - bottom

    def block(cell: float | None) -> str:
        if cell is None:
            return " "
        level = 0 if span <= 0 else int((cell - bottom) / span * (len(BLOCKS) - 1) + 0.5)
        return BLOCKS[max(0, min(len(BLOCKS) - 1, level))]

    return "".join(map(block, cells))


def _binned(values: Sequence[Value], width: int) -> list[float | None]:
    if len(values) <= width:
        return [None if value is None else float(value) for value in values]
    cells: list[float | None] = []
    for i in range(width):
        some = [v for v in values[i * len(values) // width : (i + 1) * len(values) // width] if v is not None]
        cells.append(sum(some) / len(some) if some else None)
    return cells


def lines(history: History, width: int | None = None) -> Iterator[str]:
    """All rows; ``width`` in characters is the terminal's if not given."""
    from deltackpt.report.page import facts

    width = max(20, min(160, (width or shutil.get_terminal_size((100, 24)).columns) - 2))
    yield from text.fields([(label, f"{value}  ({more})") for label, value, more in facts(history)])
    if not history.steps:
        return
    steps = history.steps
    rows: list[tuple[str, Sequence[Value], Callable[[Value], str]]] = [
        ("density", [s.density for s in steps], text.share),
        ("patch", [s.patch_bytes for s in steps], text.short),
        ("bits/change", [s.bits_per_change for s in steps], text.bits),
        ("restore", [cost.bytes for cost in history.restore], text.short),
    ]
    room = max(10, width - 12 - 24)
    for label, values, shown in rows:
        known = [value for value in values if value is not None]
        span = f"{shown(min(known))} to {shown(max(known))}" if known else "none"
        yield ""
        yield f"{label:12}{spark(values, room)}  {span}"
    yield f"{'':12}{_timeline(history, room)}  A anchor, F fold, T tag"
    yield from _layers(history, room)
    yield from _encodings(history)
    yield from _ulp(history)
    yield from _readers(history)
    yield ""
    gc = "would refuse" if history.gc_frees is None else f"would free {text.size(history.gc_frees)}"
    yield f"gc {gc}"


def _timeline(history: History, width: int) -> str:
    """Where anchors, folds and tags are: a letter in the place of its step, of several the last in this order."""
    place = {step.step: i for i, step in enumerate(history.steps)}
    cells = [" "] * min(width, len(history.steps))
    for kind, letter in (("fold", "F"), ("anchor", "A"), ("tag", "T")):
        for mark in history.milestones:
            if mark.kind == kind:
                cells[place[mark.step] * len(cells) // len(history.steps)] = letter
    return "".join(cells).rstrip()


def _layers(history: History, width: int) -> Iterator[str]:
    """Density by layer, all rows on one scale of powers of ten; a space where nothing changed."""
    if not history.tables:
        return
    names = list(history.layers)
    rows = {n: [t.layers.get(n, 0) / max(1, history.layers[n]) for t in history.tables] for n in names}
    known = [value for row in rows.values() for value in row if value] or [1.0]
    low, high = math.log10(min(known)), math.log10(max(known))
    longest = max((min(len(name), 32) for name in names), default=0)
    yield ""
    span = f"{text.share(min(known))} to {text.share(max(known))}, a block for as many times as the one before"
    yield f"density by layer, of {text.count(len(history.tables))} steps: {span}"
    for name in names[:MOST_LAYERS]:
        yield f"  {name[-32:]:{longest}}  {spark([math.log10(v) if v else None for v in rows[name]], width, low, high)}"
    if len(names) > MOST_LAYERS:
        yield f"  and {len(names) - MOST_LAYERS} layers more"


def _encodings(history: History) -> Iterator[str]:
    total: dict[str, int] = {}
    for table in history.tables:
        for name, share in table.encodings.items():
            total[name] = total.get(name, 0) + share.bytes
    if whole := sum(total.values()):
        shares = sorted(total.items(), key=lambda item: -item[1])
        yield ""
        yield f"encodings by bytes: {', '.join(f'{name} {100 * size / whole:.1f} %' for name, size in shares)}"


def _ulp(history: History) -> Iterator[str]:
    if not history.ulp:
        return
    from deltackpt.report.ulp_steps import CLASSES

    up, down = ([sum(column) for column in zip(*rows, strict=True)] for rows in _sides(history))
    whole = max(1, sum(up) + sum(down))
    yield ""
    yield f"ULP steps, of {len(history.ulp)} steps"
    for name, more, less in zip(CLASSES, up, down, strict=True):
        yield f"  {name:>5}  up {100 * more / whole:6.2f} %  down {100 * less / whole:6.2f} %"


def _sides(history: History) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    return [step.up for step in history.ulp], [step.down for step in history.ulp]


def _readers(history: History) -> Iterator[str]:
    if history.holders:
        yield ""
        rows = [
            [h.holder, text.count(h.step), text.count(h.behind), "-" if h.seconds is None else f"{h.seconds:.0f} s"]
            for h in history.holders
        ]
        yield from text.table(["lease of", ">step", ">steps behind", ">for"], rows)
    followers = dict.fromkeys(arrival.follower for arrival in history.arrivals)
    if followers:
        yield ""
    for name in followers:
        lags = [arrival.lag for arrival in history.arrivals if arrival.follower == name]
        yield f"{name[:40]}  {spark(lags, 40)}  {min(lags):.2f} to {max(lags):.2f} s from published to in use"
