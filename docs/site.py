"""Hooks of mkdocs: pages that are made, links that lead out of docs/, and pages that the navigation does not name."""

from __future__ import annotations

import logging
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
LOG = logging.getLogger("mkdocs.hooks.site")
# A link whose text may have spans of code, or a span of code, in which `a[i](b)` is none.
LINK = re.compile(r"(?<!!)\[((?:`[^`\n]*`|[^\]`])*)\]\(([^)#\s]+)(#[^)\s]*)?\)|`[^`\n]+`")

# Files of the repository that are pages of the site too, with their place there.
TAKEN = {
    **{f"spec/{p.name}": f"spec/{p.name}" for p in sorted((ROOT / "spec").glob("*.md"))},
    **{f"spec/decisions/{p.name}": f"spec/decisions/{p.name}" for p in sorted((ROOT / "spec/decisions").glob("*.md"))},
    "fixtures/README.md": "spec/vectors.md",
    "bench/RESULTS.md": "project/results.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}
SECTIONS = {
    "Specification": ["FORMAT", "STORE", "REGISTRY", "SIGNATURES", "LIVE", "VERSION1", "NOTES", "INTEROP", "vectors"],
    "Project": ["changelog", "contributing", "security", "results"],
}


def on_config(config: Any) -> Any:
    """Name what the navigation leaves out: pages beside others in a folder, and those that are taken."""
    named = set(_paths(config.nav))
    for path in sorted((ROOT / "docs").rglob("*.md")):
        uri = path.relative_to(ROOT / "docs").as_posix()
        if uri not in named:
            _section(config.nav, posixpath.dirname(uri)).append(uri)
    for title, names in SECTIONS.items():
        folder = "spec" if title == "Specification" else "project"
        config.nav.append({title: [f"{folder}/{name}.md" for name in names]})
    decisions = [uri for uri in TAKEN.values() if uri.startswith("spec/decisions/")]
    config.nav[-2]["Specification"].append({"Decisions": decisions})
    return config


def _paths(nav: list[Any]) -> Iterator[str]:
    for item in nav:
        if isinstance(item, str):
            yield item
        else:
            for value in item.values():
                yield from [value] if isinstance(value, str) else _paths(value)


def _section(nav: list[Any], folder: str) -> list[Any]:
    """The list of pages in which those of a folder are; a new one for a new folder."""
    if not folder:
        return nav
    for item in nav:
        for value in item.values() if isinstance(item, dict) else ():
            if isinstance(value, list) and any(posixpath.dirname(path) == folder for path in _paths(value)):
                return value
    nav.append({folder.rpartition("/")[2].capitalize(): []})
    return next(iter(nav[-1].values()))


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are taken, and the reference of the command."""
    for path, uri in TAKEN.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    files.append(File.generated(config, "reference/commands.md", content=commands()))
    return files


def commands() -> str:
    """The reference of the command, from its own help."""
    os.environ["COLUMNS"] = "100"
    from deltackpt_cli.app import app
    from typer.main import get_command

    group: Any = get_command(app)
    text = ["# The command", "Every page below is what `deltackpt COMMAND --help` prints."]
    for name, command in group.commands.items():
        if getattr(command, "hidden", False):
            continue
        context = command.make_context(f"deltackpt {name}", [], resilient_parsing=True)
        text += [f"## deltackpt {name}", f"```text\n{context.get_help().strip()}\n```"]
    return "\n\n".join(text) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files of the repository into links to their pages, or into plain text if they have none."""
    here = page.file.src_uri
    of_site = {uri: path for path, uri in TAKEN.items()}
    path = of_site.get(here, f"docs/{here}")

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if target is None:
            return found[0]
        if target.isdecimal():  # an index and an argument: A[0](1)
            return f"\\[{text}]({target})"
        if re.match(r"[a-z+]+:", target):
            return found[0]
        to = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        uri = TAKEN.get(to) or (to.removeprefix("docs/") if to.startswith("docs/") else None)
        if uri is None and (ROOT / to).exists():
            return text
        return f"[{text}]({posixpath.relpath(uri, posixpath.dirname(here) or '.')}{anchor})" if uri else found[0]

    # The blocks of the specification have names for its tests, which mkdocs takes for something else.
    markdown = re.sub(r"^```(?:json|hex) \w+$", "```text", markdown, flags=re.M)
    pieces = re.split(r"(^```.*?^```$)", markdown, flags=re.S | re.M)  # which have no links
    return "".join(piece if i % 2 else LINK.sub(link, piece) for i, piece in enumerate(pieces))
