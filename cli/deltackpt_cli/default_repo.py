"""The repository of a call that names none: DELTACKPT_REPO."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

REPOSITORY = "DELTACKPT_REPO"
PLACES = ("repo", "target")  # the arguments that it can stand for


class RepoCommand(TyperCommand):
    """A command whose REPO, first or last of its words, may be left out where the environment names it.

    It is left out where a call has a word less than the command needs, or begins with a word that is no place, where
    more words may follow (``tag best 12``). A call that names one is never changed.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for parameter in self.params:  # whether a path can be read is for the library to say, with its own exit code
            kind: Any = parameter.type
            if getattr(kind, "readable", False):
                kind.readable = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = os.environ.get(REPOSITORY)
        if named:
            args = self._completed(ctx, args, named)
        return super().parse_args(ctx, args)

    def _completed(self, ctx: Any, args: list[str], named: str) -> list[str]:
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        places = [i for i, p in enumerate(arguments) if p.name in PLACES and p.required]
        if not places:
            return args
        values, _, _ = self.make_parser(ctx).parse_args(list(args))
        words = [word for p in arguments if isinstance(word := values.get(p.name or ""), str | tuple | list)]
        needed = sum(p.required for p in arguments)
        short = len(words) == needed - 1
        first = places[0] == 0
        if not short and not (first and len(arguments) > needed == 1 and _is_name(words[0])):
            return args
        return [named, *args] if first else [*args, named]


def _is_name(word: Any) -> bool:
    return isinstance(word, str) and "/" not in word and not Path(word).exists()
