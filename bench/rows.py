"""The lines of the table that bench/run.py prints, and what machine they are of."""

from __future__ import annotations

import os
import platform
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Row:
    """One line of the table. ``required`` is a limit to stay at or below, or above; None where nothing is promised."""

    figure: str
    measured: float | None
    unit: str
    detail: str
    required: float | None = None
    at_least: bool = False

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "n/a" if self.required is None else "MISSED"
        if self.required is None:
            return ""
        reached = self.measured >= self.required if self.at_least else self.measured <= self.required
        return "ok" if reached else "MISSED"

    def cells(self) -> tuple[str, str, str, str]:
        def shown(value: float | None) -> str:
            return "-" if value is None else f"{value:.3f} {self.unit}" if value < 100 else f"{value:,.0f} {self.unit}"

        limit = "" if self.required is None else f"{'>=' if self.at_least else '<='} {self.required:g} {self.unit}"
        return self.figure, limit, shown(self.measured), self.verdict


def say(what: str) -> None:
    print(f"... {what}", file=sys.stderr, flush=True)


def table(rows: list[Row]) -> str:
    cells = [("figure", "required", "measured", ""), *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(4)]
    lines = []
    for line, detail in zip(cells, ["detail", *(row.detail for row in rows)], strict=True):
        left = "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))
        first, *more = textwrap.wrap(detail, 76) or [""]
        lines += [f"{left}  {first}".rstrip(), *(" " * (len(left) + 2) + text for text in more)]
    lines.insert(1, "-" * (sum(widths) + 8 + 76))
    return "\n".join(lines)


def machine() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
    cores, python = len(os.sched_getaffinity(0)), platform.python_version()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    hardware = f"{cores} cores ({names[0] if names else platform.machine()}), {memory:.0f} GiB"
    return f"{hardware}; Python {python}, numpy {np.__version__}; load at the start {os.getloadavg()[0]:.1f}"
