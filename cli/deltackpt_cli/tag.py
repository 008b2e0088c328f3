"""`deltackpt tag`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from deltackpt.errors import UsageError
from deltackpt_cli import format as text
from deltackpt_cli.completion import steps, tags
from deltackpt_cli.console import Output
from deltackpt_cli.options import Ref, Repo
from deltackpt_cli.signing_options import Sign, opened

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]", show_default=False, autocompletion=tags, help="The tag; all are listed without one."
    ),
]
Step = Annotated[
    str, typer.Argument(metavar="[STEP]", autocompletion=steps, help="The step: a number, `latest`, or a tag.")
]
Delete = Annotated[bool, typer.Option("--delete", help="Remove the tag; its step stays until gc.")]


@dataclass(frozen=True)
class Tags:
    """Tags and their steps."""

    tags: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        return {"tags": list(self.tags)}


def tag(
    output: Output,
    repo: Repo,
    name: Name = None,
    step: Step = "latest",
    ref: Ref = "main",
    delete: Delete = False,
    sign: Sign = None,
) -> None:
    """Name a step, so that gc keeps it."""
    from deltackpt.repository.leases import pinned

    if delete and name is None:
        raise UsageError("usage", where="--delete", have="no tag", need="the name of one")
    source = opened(repo, sign=sign)
    if name is None:
        found = sorted(source.refs("tags/"), key=lambda each: (each.link.step, each.name))
    elif delete:
        found = [source.delete_tag(name)]
    else:
        with pinned(source, step, ref) as (link, _):
            found = [source.put_tag(name, link)]
    listed = Tags(tuple({"name": each.name, **each.link.to_dict()} for each in found))
    rows = [[str(each.link.step), each.name, each.link.id if output.verbose else each.link.id[:12]] for each in found]
    output.result(listed, lambda: text.table([">step", "tag", "id"], rows) if rows else [])
