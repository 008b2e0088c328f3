"""The figures of a report as SVG, drawn by matplotlib in colors that the page's style sheet gives.

Text stays text, so that it can be found, and read at any size; what a repository names is never taken for markup,
neither by matplotlib (whose ``$`` would begin a formula) nor by the page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from deltackpt.errors import ExtraMissingError
from deltackpt.util.extras import install_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from deltackpt.report.history import History

WIDTH, HEIGHT, FONT = 480, 270, 12.5  # units of the viewBox, which a phone shows at three quarters
FEW = 200  # steps; of more, a line shows the median of neighbors, and each one faintly
MOST_LAYERS = 60  # rows of a heat map; more are shown as averages of neighbors

# matplotlib takes no variables: these colors stand for them, and occur nowhere else.
INK, RULE = "#010203", "#010204"
SERIES = ("#0102a1", "#0102a2", "#0102a3", "#0102a4", "#0102a5", "#0102a6")
_VARIABLES = {INK: "currentColor", RULE: "var(--rule)"} | {c: f"var(--c{i})" for i, c in enumerate(SERIES, 1)}


def require_matplotlib() -> None:
    """Raise ExtraMissingError ``extra-missing`` where there is no matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        assert error is not None
        raise ExtraMissingError("matplotlib", "a report as a page", install_line("report")) from error
    assert matplotlib


@contextmanager
def _styled(salt: str) -> Iterator[None]:
    import matplotlib

    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "text.parse_math": False,
        "font.size": FONT,
        "axes.edgecolor": RULE,
        "axes.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.formatter.use_mathtext": False,
        "axes.unicode_minus": False,
        "grid.color": RULE,
        "grid.linewidth": 0.7,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "xtick.major.size": 3,
        "ytick.major.size": 0,
        "legend.frameon": False,
        "lines.linewidth": 1.5,
    }
    with matplotlib.rc_context(style):
        yield


def drawn(name: str, draw: Callable[[Axes], None], height: int = HEIGHT) -> str:
    """An SVG element of what ``draw`` puts on the axes; ``name`` makes its ids differ from those of others."""
    from matplotlib.figure import Figure

    with _styled(name):
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        draw(figure.add_subplot())
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(out.getvalue())


def _inline(svg: str) -> str:
    """Without prolog, size, metadata, and the ids that each figure would repeat."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[A-Za-z0-9.]+_[0-9]+"', "", svg)
    svg = re.sub(
        r"<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>", r'<svg \1 xmlns:xlink="http://www.w3.org/1999/xlink">', svg, count=1
    )
    svg = re.sub(r"'DejaVu Sans'[^;\"]*sans-serif", "inherit", svg)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    return svg.strip()


def printable(value: str) -> str:
    """What cannot be shown, or would turn the text around it, as escapes."""
    return value if value.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)


def step_axis(axes: Axes, label: str, steps: Sequence[int]) -> None:
    """Steps along x, whole numbers; ``label`` says what y is, and its unit."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.set_title(label, loc="left", fontsize=FONT, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="x", visible=False)
    if steps and steps[0] != steps[-1]:
        axes.set_xlim(steps[0], steps[-1])


def byte_axis(axes: Axes) -> None:
    """Bytes along y, with decimal units."""
    axes.yaxis.set_major_formatter(lambda value, _: short_bytes(value))


def log_axis(axes: Axes) -> None:
    """Powers of ten along y, as plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.tick_params(axis="y", which="minor", length=0)


def short_bytes(value: float) -> str:
    """Three figures and a decimal unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:,.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB"


def series(axes: Axes, steps: Sequence[int], values: Sequence[float | None], color: int = 0, label: str = "") -> None:
    """A line, or points where there are few; steps without a value are gaps."""
    known = np.array([np.nan if value is None else value for value in values], float)
    style: dict[str, Any] = {"marker": "o", "markersize": 3.5} if len(steps) <= 40 else {}
    if len(steps) > FEW and np.isfinite(known).any():
        axes.plot(steps, known, color=SERIES[color], linewidth=0.6, alpha=0.45)
        axes.plot(steps, _smooth(known), color=SERIES[color], label=label or None)
        return
    axes.plot(steps, known, color=SERIES[color], label=label or None, **style)


def _smooth(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The median of a window of a hundredth of all: float [n] for float [n]."""
    width = max(5, len(values) // 100 | 1)
    padded = np.pad(values, width // 2, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)
    known = np.isfinite(windows).any(axis=1)
    found = np.full(len(values), np.nan)
    found[known] = np.nanmedian(windows[known], axis=1)
    return found


def legend(axes: Axes, columns: int = 3) -> None:
    """Below the axes, where no line runs."""
    axes.figure.legend(
        loc="outside lower center", ncols=columns, fontsize=FONT - 1, handlelength=1.2, columnspacing=1.2
    )


def heat_map(history: History) -> tuple[str, list[str]]:
    """Density by layer and step, and the names of its rows: colors by powers of ten, blank where nothing changed."""
    steps = [table.step for table in history.tables]
    names = list(history.layers)
    names += sorted({layer for table in history.tables for layer in table.layers} - set(names))
    density = np.zeros((len(names), len(steps)))
    row = {name: i for i, name in enumerate(names)}
    for column, table in enumerate(history.tables):
        for layer, changed in table.layers.items():
            density[row[layer], column] = changed / max(history.layers.get(layer, changed), 1)
    shown, labels = _merged_rows(density, names)

    def draw(axes: Axes) -> None:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import LogNorm

        filled = shown[shown > 0]
        low, high = (float(filled.min()), float(filled.max())) if len(filled) else (1e-4, 1.0)
        norm = LogNorm(min(low, high / 10), min(1.0, max(high, low * 1.01)), clip=True)
        image = ScalarMappable(norm, "viridis").to_rgba(np.where(shown > 0, shown, low))
        image[shown == 0] = 0
        axes.imshow(image, aspect="auto", interpolation="none")
        ticks = sorted({round(i) for i in np.linspace(0, len(labels) - 1, min(len(labels), 16))})
        axes.set_yticks(ticks, [labels[i] for i in ticks], fontsize=FONT - 2.5)
        marks = sorted({round(i) for i in np.linspace(0, len(steps) - 1, min(len(steps), 5))})
        axes.set_xticks(marks, [str(steps[i]) for i in marks])
        axes.grid(visible=False)
        axes.set_xlabel("step")
        axes.set_title("share of a layer's elements that changed", loc="left", fontsize=FONT)
        powers = [digit * 10.0**power for power in range(-12, 1) for digit in (1, 2, 5)]
        at = [value for value in powers if norm.vmin <= value <= norm.vmax]
        bar = axes.figure.colorbar(ScalarMappable(norm, "viridis"), ax=axes, aspect=30, pad=0.02)
        bar.ax.yaxis.set_ticks(at, [f"{100 * value:.3g} %" for value in at])
        bar.ax.yaxis.set_ticks([], minor=True)

    return drawn("heat", draw, min(520, 130 + 17 * max(4, min(len(labels), 22)))), names


def _merged_rows(density: np.ndarray[Any, Any], names: Sequence[str]) -> tuple[np.ndarray[Any, Any], list[str]]:
    """At most MOST_LAYERS rows, float [rows, steps]: neighbors are averaged, and named by the first."""
    labels = [name if len(name) <= 24 else f"…{name[-23:]}" for name in (printable(n) or "(no layer)" for n in names)]
    if len(names) <= MOST_LAYERS:
        return density, labels
    first = np.unique(np.linspace(0, len(names), MOST_LAYERS + 1).astype(int)[:-1])
    counts = np.diff([*first, len(names)])
    return np.add.reduceat(density, first, axis=0) / counts[:, None], [labels[i] for i in first]
