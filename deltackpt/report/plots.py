"""What a report shows, one section after the other: a figure, what it says in words, and the table behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deltackpt.report.figures import (
    FONT,
    INK,
    SERIES,
    byte_axis,
    drawn,
    heat_map,
    legend,
    log_axis,
    printable,
    series,
    short_bytes,
    step_axis,
)
from deltackpt.report.ulp_steps import CLASSES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from deltackpt.report.history import History

Cell = str | int | float | None


@dataclass(frozen=True)
class Section:
    """``text`` may have `code`; ``headers`` name the unit of each column."""

    key: str
    title: str
    text: str
    svg: str
    headers: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]


def sections(history: History) -> list[Section]:
    """Those that there is something to show in."""
    found = [_density(history), _layers(history), _bytes(history), _bits(history), _encodings(history), _ulp(history)]
    found += [_restore(history), _milestones(history), _arrivals(history), _holders(history), _storage(history)]
    return [section for section in found if section is not None and section.rows]


def _density(history: History) -> Section:
    steps, values = [s.step for s in history.steps], [s.density for s in history.steps]

    def draw(axes: Axes) -> None:
        series(axes, steps, [None if v is None else 100 * v for v in values])
        step_axis(axes, "elements changed from the step before, %", steps)
        axes.set_ylim(bottom=0)

    rows = [(s.step, s.changed, s.elements, None if s.density is None else 100 * s.density) for s in history.steps]
    text = "Share of all elements whose bits differ from the step before. A step without a patch has none."
    headers = ("step", "changed, elements", "all, elements", "density, %")
    return Section("density", "Density", text, drawn("density", draw), headers, rows)


def _layers(history: History) -> Section | None:
    if not history.tables:
        return None
    svg, names = heat_map(history)
    patches = sum(s.patch_bytes is not None for s in history.steps)
    unread = f" {history.unread} could not be read; `deltackpt verify` says why." if history.unread else ""
    text = (
        f"Of {len(history.tables):,} of the {patches:,} steps with a patch, from the tables of their parts; colors by "
        f"powers of ten, blank where nothing changed. Layers are in the order of the model.{unread}"
    )
    totals = {name: sum(table.layers.get(name, 0) for table in history.tables) for name in names}
    newest = history.tables[-1]
    rows = [
        (
            name,
            size := history.layers.get(name),
            totals[name],
            100 * totals[name] / size / len(history.tables) if size else None,
            100 * newest.layers.get(name, 0) / size if size else None,
        )
        for name in names
    ]
    headers = ("layer", "elements", "changed in these steps, elements", "mean density, %", f"at step {newest.step}, %")
    return Section("layers", "Density by layer", text, svg, headers, rows)


def _bytes(history: History) -> Section:
    steps = [s.step for s in history.steps]

    def draw(axes: Axes) -> None:
        series(axes, steps, [s.patch_bytes for s in history.steps], label="patch")
        anchors = [(s.step, s.anchor_bytes) for s in history.steps if s.anchor_bytes is not None]
        axes.plot(
            *zip(*anchors, strict=True), "s", color=SERIES[1], markersize=4, label="anchor", clip_on=False
        ) if anchors else None
        sizes = [size for s in history.steps for size in (s.patch_bytes, s.anchor_bytes) if size]
        if sizes and max(sizes) > 20 * min(sizes):
            log_axis(axes)
        step_axis(axes, "bytes stored for a step", steps)
        byte_axis(axes)
        legend(axes)

    rows = [(s.step, s.patch_bytes, s.anchor_bytes) for s in history.steps]
    text = "What each step added to the repository, apart from records; an anchor is the checkpoint as a whole."
    return Section("bytes", "Bytes a step", text, drawn("bytes", draw), ("step", "patch, bytes", "anchor, bytes"), rows)


def _bits(history: History) -> Section:
    steps, values = [s.step for s in history.steps], [s.bits_per_change for s in history.steps]

    def draw(axes: Axes) -> None:
        series(axes, steps, values, color=2)
        step_axis(axes, "bits of patch for each changed element", steps)

    rows = [(s.step, s.bits_per_change) for s in history.steps]
    text = "Whole patches, headers and tables included: position and new value of a change together."
    return Section("bits", "Bits a change", text, drawn("bits", draw), ("step", "bits a change"), rows)


def _encodings(history: History) -> Section | None:
    if not history.tables:
        return None
    steps = [table.step for table in history.tables]
    names = sorted({name for table in history.tables for name in table.encodings})
    size = {n: [t.encodings[n].bytes if n in t.encodings else 0 for t in history.tables] for n in names}
    total = np.maximum(np.sum([size[n] for n in names], axis=0), 1) if names else np.ones(len(steps))

    def draw(axes: Axes) -> None:
        shares = [100 * np.array(size[n]) / total for n in names]
        if len(steps) > 1:
            axes.stackplot(steps, shares, labels=names, colors=SERIES[: len(names)], alpha=0.85)
        else:
            for i, name in enumerate(names):
                below = sum((share for share in shares[:i]), np.zeros(1))
                axes.bar([str(steps[0])], shares[i], bottom=below, color=SERIES[i], label=name, width=0.4)
        step_axis(axes, "share of a patch's bytes, %", steps)
        axes.set_ylim(0, 100)
        legend(axes)

    rows = [
        (t.step, n, t.encodings[n].entries, t.encodings[n].changed, t.encodings[n].bytes)
        for t in history.tables
        for n in sorted(t.encodings)
    ]
    text = "How the changes of a step are stored; `removed` stands for tensors that a step takes away."
    headers = ("step", "encoding", "entries", "changed, elements", "bytes")
    return Section("encodings", "Encodings", text, drawn("encodings", draw), headers, rows)


def _ulp(history: History) -> Section | None:
    if not history.ulp:
        return None
    up = np.sum([step.up for step in history.ulp], axis=0)
    down = np.sum([step.down for step in history.ulp], axis=0)
    total = max(1, int(up.sum() + down.sum()))

    def draw(axes: Axes) -> None:
        at = np.arange(len(CLASSES))
        axes.bar(at - 0.2, 100 * up / total, 0.38, color=SERIES[0], label="up")
        axes.bar(at + 0.2, 100 * down / total, 0.38, color=SERIES[1], label="down")
        axes.set_xticks(at, CLASSES)
        axes.set_xlabel("distance, ULP (neighboring floats)")
        axes.set_title("share of changed floats, %", loc="left", fontsize=FONT)
        axes.grid(axis="x", visible=False)
        legend(axes)

    rows = [(step.step, name, step.up[i], step.down[i]) for step in history.ulp for i, name in enumerate(CLASSES)]
    text = f"Sign and size of the steps of {len(history.ulp)} steps, whose payloads were read and decoded."
    headers = ("step", "distance, ULP", "up, elements", "down, elements")
    return Section("ulp", "ULP steps", text, drawn("ulp", draw), headers, rows)


def _restore(history: History) -> Section:
    steps = [cost.step for cost in history.restore]

    def draw(axes: Axes) -> None:
        series(axes, steps, [cost.bytes for cost in history.restore], color=3)
        step_axis(axes, "bytes read to restore a step from nothing", steps)
        axes.set_ylim(bottom=0)
        byte_axis(axes)

    rows = [(cost.step, cost.bytes, cost.hops) for cost in history.restore]
    text = "The cheapest way from an anchor through patches and folds. `deltackpt compact` makes it shorter."
    headers = ("step", "restore, bytes", "patches and folds")
    return Section("restore", "Cost to restore", text, drawn("restore", draw), headers, rows)


def _milestones(history: History) -> Section | None:
    marks = history.milestones
    steps = [s.step for s in history.steps]
    kinds = ("anchor", "fold", "tag", "branch")

    def draw(axes: Axes) -> None:
        for mark in marks:
            y = -kinds.index(mark.kind)
            if mark.kind == "fold" and mark.start is not None:
                axes.plot([mark.start, mark.step], [y, y], color=SERIES[2], linewidth=5, alpha=0.5)
            else:
                style = {"color": SERIES[kinds.index(mark.kind)], "clip_on": False}
                axes.plot([mark.step], [y], "sxDo"[kinds.index(mark.kind)], **style)
        named = [mark for mark in marks if mark.name]
        for mark in named[-12:]:
            name = printable(mark.name)[:20]
            axes.annotate(
                name, (mark.step, -kinds.index(mark.kind)), (0, 6), textcoords="offset points", color=INK,
                fontsize=FONT - 2.5, ha="right" if mark.step > (steps[0] + steps[-1]) / 2 else "left",
            )  # fmt: skip
        axes.set_yticks([-i for i in range(4)], ["anchors", "folds", "tags", "branches"])
        axes.set_ylim(-3.5, 0.6)
        step_axis(axes, "", steps)
        if steps[0] != steps[-1]:  # so that a mark at either end stands clear of the names of the rows
            room = 0.03 * (steps[-1] - steps[0])
            axes.set_xlim(steps[0] - room, steps[-1] + room)
        axes.grid(axis="y", visible=False)

    rows = [(mark.kind, mark.step, mark.start, mark.name, mark.bytes) for mark in marks]
    text = "Where a reader can begin (anchors), what spares it patches (folds), and what is named."
    headers = ("kind", "step", "from step", "name", "bytes")
    return Section("marks", "Anchors, folds and tags", text, drawn("marks", draw, 210), headers, rows)


def _arrivals(history: History) -> Section | None:
    names = list(dict.fromkeys(arrival.follower for arrival in history.arrivals))

    def draw(axes: Axes) -> None:
        steps = sorted({arrival.step for arrival in history.arrivals})
        for i, name in enumerate(names):
            mine = sorted((a.step, a.lag) for a in history.arrivals if a.follower == name)
            style = "o-" if len(mine) <= 40 else "-"
            label = printable(name)[:32] if i < len(SERIES) else None
            axes.plot(*zip(*mine, strict=True), style, color=SERIES[i % len(SERIES)], markersize=3, label=label)
        if min(a.lag for a in history.arrivals) > 0:
            log_axis(axes)
        step_axis(axes, "seconds from published to in use", steps)
        legend(axes, 1 if max(map(len, names)) > 14 else 3)

    rows = [(a.follower, a.step, a.lag, a.pause) for a in history.arrivals]
    text = "From the events of followers, by the clocks of the writer and of each host."
    headers = ("follower", "step", "lag, s", "engine paused, s")
    svg = drawn("arrivals", draw) if rows else ""
    return Section("arrivals", "From published to in use", text, svg, headers, rows)


def _holders(history: History) -> Section:
    rows = [(h.holder, h.step, h.behind, h.seconds) for h in history.holders]
    text = "Who reads or writes right now, by the leases that are alive, and how far each is behind the head."
    headers = ("holder", "step", "behind, steps", "behind, s")
    return Section("holders", "Readers", text, "", headers, rows)


def _storage(history: History) -> Section:
    folders = sorted(history.storage, key=lambda name: -history.storage[name])

    def draw(axes: Axes) -> None:
        axes.barh(folders[::-1], [history.storage[f] for f in folders[::-1]], color=SERIES[0], height=0.55)
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_formatter(lambda value, _: short_bytes(value))
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_title("bytes of all objects, by folder", loc="left", fontsize=FONT)
        axes.grid(axis="y", visible=False)

    text = (
        "A gc would refuse: a ref or tag cannot be restored; `deltackpt verify` tells why."
        if history.gc_frees is None
        else f"A gc without a policy, which keeps every step of a branch, would free {history.gc_frees:,} bytes, "
        f"{history.gc_steps or 0:,} steps."
    )
    rows: list[tuple[Cell, ...]] = [(folder, history.storage[folder]) for folder in folders]
    rows.append(("what gc would free", history.gc_frees))
    return Section("storage", "Storage", text, drawn("storage", draw, 210), ("folder", "bytes"), rows)
