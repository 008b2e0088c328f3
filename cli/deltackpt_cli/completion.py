"""What a shell offers where a step, a tag, a branch or a tensor is asked for: what is in the repository of the call.

Nothing is said and nothing fails: without an answer in time there is nothing to offer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from threading import Thread
from typing import TYPE_CHECKING, Any

import typer

from deltackpt_cli.default_repo import PLACES, REPOSITORY

if TYPE_CHECKING:
    from deltackpt.repository import Repository

PATIENCE = 3.0  # seconds that a shell's user waits for a store
MOST = 500  # names that are offered at once


def rejoin_words() -> None:
    """bash cuts words at `:` and `=` before it asks: put ``s3://bucket/run`` and ``--step=1`` of the environment
    together again. What it puts in place of the last piece is what follows the `=`, as it is offered."""
    words, at = os.environ.get("COMP_WORDS", ""), os.environ.get("COMP_CWORD", "")
    if "\n" not in words or not at.isdigit():
        return
    found: list[str] = []
    place, glue = 0, False
    for number, word in enumerate(words.split("\n")):
        cut = bool(word) and not word.strip(":=")
        if len(found) > 1 and (cut or glue):
            found[-1] += word
        else:
            found.append(word)
        glue = cut
        place = len(found) - 1 if number == int(at) else place
    os.environ.update(COMP_WORDS="\n".join(found), COMP_CWORD=str(place))


def steps(ctx: typer.Context, incomplete: str) -> list[str]:
    """`latest`, the tags, and the numbers of the steps, newest first."""

    def found(repo: Repository) -> Iterable[str]:
        numbers = dict.fromkeys(str(link.step) for link in reversed(repo.steps()))
        return ["latest", *repo.ref_names("tags/"), *numbers]

    return _offer(ctx, incomplete, found)


def tags(ctx: typer.Context, incomplete: str) -> list[str]:
    """The tags."""
    return _offer(ctx, incomplete, lambda repo: repo.ref_names("tags/"))


def branches(ctx: typer.Context, incomplete: str) -> list[str]:
    """The branches."""
    return _offer(ctx, incomplete, lambda repo: repo.ref_names())


def tensor_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The tensors of the step of the call."""

    def found(repo: Repository) -> Iterable[str]:
        link = repo.find(ctx.params.get("step") or "latest", ctx.params.get("ref") or "main")
        return repo.layout(repo.load(link)).tensors

    return _offer(ctx, incomplete, found)


def _offer(ctx: typer.Context, incomplete: str, names: Callable[[Repository], Iterable[str]]) -> list[str]:
    url = _place(ctx)
    offered: list[str] = []
    if url is None:
        return offered

    def ask() -> None:
        from deltackpt.repository import Repository

        try:
            offered.extend([name for name in names(Repository.open(url)) if name.startswith(incomplete)][:MOST])
        except Exception:  # whatever it is, it is no answer, and a prompt is no place to say so
            return

    # A thread of its own, left alone when it takes too long: a store may wait for a network for minutes.
    thread = Thread(target=ask, name="deltackpt-completion", daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return list(offered)


def _place(ctx: typer.Context) -> Any:
    """The repository of a call that is not finished, None if it names none yet."""
    for name in ("against", "repo", "target"):
        if ctx.params.get(name):
            return ctx.params[name]
    # An option whose value is missing ends the parser before the words are given to the arguments.
    arguments = [p for p in ctx.command.params if p.param_type_name == "argument"]
    at = next((i for i, p in enumerate(arguments) if p.name in PLACES), None)
    if at is None:
        return None
    named = os.environ.get(REPOSITORY)
    if named and len(ctx.args) < sum(p.required for p in arguments):
        return named
    return ctx.args[at] if at < len(ctx.args) else named
