"""The report as one page: HTML without a script, that asks the network for nothing, and says so to the browser."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from deltackpt.report.figures import printable, require_matplotlib, short_bytes
from deltackpt.report.plots import Cell, Section, sections
from deltackpt.util.moments import utc

if TYPE_CHECKING:
    from deltackpt.report.history import History

MINUTE = "%Y-%m-%d %H:%M UTC"
BEGIN = "<!DOCTYPE html><!-- deltackpt report -->"

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60656c; --page: #fbfbfa; --card: #ffffff; --rule: #dcdedf;
  --c1: #2563ad; --c2: #d9480f; --c3: #2b8a3e; --c4: #8a3ffc; --c5: #b8860b; --c6: #0b7285; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --soft: #a0a6ad; --page: #14171a; --card: #1c2024;
  --rule: #3a4047; --c1: #6cb2ff; --c2: #ff9a5c; --c3: #69d27f; --c4: #c5a3ff; --c5: #e6c04a; --c6: #4fd1dd; } }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --page: #fff; --card: #fff; --rule: #bbb;
  --c1: #2563ad; --c2: #d9480f; --c3: #2b8a3e; --c4: #8a3ffc; --c5: #b8860b; --c6: #0b7285; }
  .facts div { break-inside: avoid; } details:not([open]) { display: none; } .scroll { max-height: none; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 1.2rem clamp(.8rem, 3vw, 2rem); background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
header h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .2rem; overflow-wrap: anywhere; }
header p, figcaption p, footer { color: var(--soft); margin: 0; overflow-wrap: anywhere; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(45%, 240px), 1fr)); gap: .7rem;
  margin: 1rem 0; padding: 0; }
.facts div, section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: .7rem .9rem; }
.facts dt { color: var(--soft); font-size: .82rem; }
.facts dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.facts small { display: block; color: var(--soft); font-size: .78rem; }
main { columns: 2 430px; column-gap: .9rem; }
section { break-inside: avoid; margin-bottom: .9rem; }
@media (max-width: 900px) { main { columns: 1; } }
figure { margin: 0; }
h2 { font-size: 1.05rem; margin: 0; }
figcaption p { font-size: .85rem; margin-bottom: .4rem; }
svg { display: block; width: 100%; height: auto; color: var(--ink); overflow: visible; }
svg text { font-family: inherit !important; }
details { margin-top: .4rem; font-size: .85rem; }
summary { cursor: pointer; color: var(--soft); }
.scroll { overflow: auto; max-height: 22rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { text-align: right; padding: .15rem .5rem; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { position: sticky; top: 0; background: var(--card); font-weight: 600; white-space: normal; vertical-align: bottom; }
th.t, td.t { text-align: left; }
td.t { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }
footer { font-size: .82rem; margin-top: 1rem; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(history: History) -> str:
    """The whole page. Raises ExtraMissingError ``extra-missing`` without matplotlib."""
    require_matplotlib()
    return "".join(_page(history, sections(history) if history.steps else []))


def _page(history: History, shown: Sequence[Section]) -> Iterator[str]:
    name = history.repository.rstrip("/").rpartition("/")[2] or history.repository
    yield (
        f'{BEGIN}\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(name)}, {_text(history.ref)}: deltackpt report</title>\n"
        f"<style>{_STYLE}</style></head>\n<body>\n"
        f"<header><h1>{_text(name)}, branch {_text(history.ref)}</h1>\n"
        f"<p>{_text(history.repository)}, repository {history.id}, at {utc(history.now, MINUTE)}</p></header>\n"
    )
    yield '<dl class="facts">'
    for label, value, more in facts(history):
        yield f"<div><dt>{_text(label)}</dt><dd>{_text(value)}<small>{_text(more)}</small></dd></div>\n"
    yield "</dl>\n<main>\n"
    for section in shown:
        yield from _section(section)
    yield "</main>\n<footer><p>Made by <code>deltackpt report</code> from manifests, listings and tables of parts.</p>"
    yield "</footer>\n</body></html>\n"


def facts(history: History) -> list[tuple[str, str, str]]:
    """What stands at the top: label, value, and what it is of."""
    if not history.steps:
        return [("head", "no step yet", f"on {history.ref}")]
    first, head = history.steps[0], history.steps[-1]
    patches = [s.patch_bytes for s in history.steps if s.patch_bytes is not None]
    changed = [(s.changed, s.elements, s.patch_bytes) for s in history.steps if s.changed and s.patch_bytes]
    elements = sum(all_ for _, all_, _ in changed)
    some, stored = sum(c for c, _, _ in changed), sum(size for _, _, size in changed)
    spans = history.now - head.time
    restore = history.restore[-1]
    return [
        ("head", f"step {head.step:,}", f"published {_ago(spans)} ago"),
        ("steps", f"{len(history.steps):,}", f"{first.step:,} to {head.step:,}"),
        ("density", f"{100 * some / elements:.3g} %" if elements else "-", "mean of steps with a patch"),
        ("a patch", short_bytes(sum(patches) / len(patches)) if patches else "-", "mean"),
        ("bits a change", f"{8 * stored / some:.2f}" if some else "-", "over all patches"),
        ("model", f"{head.elements:,}", "elements"),
        (
            "restore the head",
            "-" if restore.bytes is None else short_bytes(restore.bytes),
            "no whole way" if restore.hops is None else f"an anchor and {restore.hops:,} patches",
        ),
        ("stored", short_bytes(sum(history.storage.values())), f"{sum(history.storage.values()):,} bytes"),
    ]


def _section(section: Section) -> Iterator[str]:
    label = f'<svg role="img" aria-label="{_text(section.title)}"'
    yield f'<section id="{section.key}"><figure><figcaption><h2>{_text(section.title)}</h2>'
    said = re.sub(r"`([^`]*)`", r"<code>\1</code>", _text(section.text))
    yield f"<p>{said}</p></figcaption>\n{section.svg.replace('<svg', label, 1)}\n</figure>"
    opened = "" if section.svg else " open"
    yield f"<details{opened}><summary>Table, {len(section.rows):,} rows</summary><div class=scroll><table><thead>"
    words = [any(isinstance(row[i], str) for row in section.rows) for i in range(len(section.headers))]
    yield _row("th", section.headers, words)
    yield "</thead><tbody>\n"
    for row in section.rows:
        yield _row("td", map(_cell, row), words) + "\n"
    yield "</tbody></table></div></details></section>\n"


def _row(kind: str, cells: Iterable[str], words: Sequence[bool]) -> str:
    shown = (f"<{kind}{' class=t' if left else ''}>{_text(c)}" for c, left in zip(cells, words, strict=True))
    return f"<tr>{''.join(shown)}"


def _cell(value: Cell) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _text(value: str) -> str:
    """As the text of the page: a name is never markup, and what cannot be shown is an escape."""
    return escape(printable(value))


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{max(0.0, seconds):,.0f} seconds"
