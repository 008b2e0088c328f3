"""Numbers and tables as plain text; None is a dash."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def short(value: int | float | None) -> str:
    """Bytes for people: three figures and a decimal unit, as `--limit` and the like take them."""
    if value is None:
        return "-"
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:,.0f} {unit}" if unit == "bytes" or value >= 99.95 else f"{value:.3g} {unit}"


def size(value: int | None) -> str:
    """Bytes exactly, and from a million on for people beside it."""
    exact = f"{count(value)} bytes"
    return exact if value is None or value < 1_000_000 else f"{exact} ({short(value)})"


def share(value: float | None) -> str:
    """A share as percent."""
    return "-" if value is None else f"{100 * value:.3f} %"


def bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def shape(dims: Iterable[int]) -> str:
    return f"[{', '.join(map(str, dims))}]"


def fields(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Labels and values."""
    width = max(len(label) for label, _ in rows)
    return [f"{label:{width}}  {value}".rstrip() for label, value in rows]


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns two spaces apart; a header that starts with ``>`` sets its column to the right."""
    cells = [[header.removeprefix(">") for header in headers], *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [header.startswith(">") for header in headers]
    lines = []
    for row in cells:
        some = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        lines.append("  ".join(some).rstrip())
    return lines


def steps(numbers: Iterable[int]) -> str:
    """`step 4`, or `steps 1, 4 to 7`: three in a row and more are a range."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"step{'s' * (sum(map(len, runs)) > 1)} {', '.join(parts)}"
