"""What the options are called and mean: those of every command, and those that several share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any

import typer

from deltackpt_cli.console import Voice

Repo = Annotated[
    str, typer.Argument(metavar="REPO", show_default=False, help="The repository: a local directory or a URL.")
]
Ref = Annotated[str, typer.Option(metavar="NAME", help="The branch.")]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, show_default=False, help="Threads to use; all processors if not given."),
]
Step = Annotated[str, typer.Option(metavar="N|latest|TAG", help="The step: a number, `latest`, or a tag.")]


class Encoding(Enum):
    """The names of `deltackpt.codecs.CHOICES`, which would cost an import of numpy; a test holds them equal."""

    auto = "auto"
    packed = "packed"
    index = "index"
    nan = "nan"
    planes = "planes"
    full = "full"


def _common(
    json: Annotated[bool, typer.Option("--json", help="Print the result, or the error, as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="More detail; a traceback with an error.")] = False,
) -> Voice:
    return Voice(json=json, quiet=quiet, verbose=verbose)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A command with the options that all share; its first parameter is not on the line, but the voice they make."""

    def run(**values: Any) -> None:
        voice = _common(**{name: values.pop(name) for name in shared})
        function(voice, **values)

    shared = inspect.signature(_common, eval_str=True).parameters
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own, *shared.values())]
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    return run
