"""What the options are called and mean: those of every command, and those that several share."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltackpt_cli import units
from deltackpt_cli.completion import branches, steps
from deltackpt_cli.console import Output
from deltackpt_cli.default_repo import REPOSITORY

if TYPE_CHECKING:
    from deltackpt.repository import Repository
    from deltackpt.signing.policy import TrustPolicy

Repo = Annotated[
    str,
    typer.Argument(
        metavar="REPO",
        show_default=False,
        help=f"The repository: a local directory or a URL. May be left out where {REPOSITORY} names it.",
    ),
]
Ref = Annotated[str, typer.Option(metavar="NAME", autocompletion=branches, help="The branch.")]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, max=1024, show_default=False, help="Threads to use; all processors if not given."),
]
Step = Annotated[
    str,
    typer.Option(metavar="N|latest|TAG", autocompletion=steps, help="The step: a number, `latest`, or a tag."),
]

ObjectCache = Annotated[
    Path | None,
    typer.Option(
        "--object-cache",
        metavar="DIR",
        envvar="DELTACKPT_OBJECT_CACHE",
        show_default=False,
        help="Read a remote repository through this folder, which all processes of a host share.",
    ),
]
ObjectCacheSize = Annotated[
    str,
    typer.Option(
        "--object-cache-size", metavar="SIZE", envvar="DELTACKPT_OBJECT_CACHE_SIZE", help="What it may grow to."
    ),
]


def number(value: float | None) -> float | None:
    """The callback of an option that takes a number: NaN is above no bound, and below none."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is not a number")
    return value


def read_through(url: str, folder: Path | None, size: str, trust: TrustPolicy | None = None) -> Repository:
    """The repository at a URL, read through a cache of objects if a folder for it was given, and by ``trust``, or as
    the environment says."""
    from deltackpt.repository import repository
    from deltackpt.store import open_store

    limit = units.size(size, "--object-cache-size")
    store = open_store(url)
    if folder is not None and not store.capabilities.local:
        from deltackpt.store.object_cache import ObjectCache
        from deltackpt.store.read_through import ReadThrough

        store = ReadThrough(store, ObjectCache(folder, limit))
    return repository.Repository.at(store).secure(trust)


class Encoding(Enum):
    """The names of `deltackpt.codecs.CHOICES`, which would cost an import of numpy; a test holds them equal."""

    auto = "auto"
    packed = "packed"
    index = "index"
    nan = "nan"
    planes = "planes"
    full = "full"


Shares = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        show_default=False,
        help="Cut finer tiles, so that each of N ranks of an engine (2, 4, 8 or 16) reads its share and little else.",
    ),
]


def encoding_of(encoding: Encoding, shares: int | None) -> str:
    """What `parse_choice` takes."""
    return encoding.value if shares is None else f"{encoding.value}@{shares}"


def _common(
    json: Annotated[bool, typer.Option("--json", help="Print the result, or the error, as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="More detail; a traceback with an error.")] = False,
) -> Output:
    return Output(json=json, quiet=quiet, verbose=verbose)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A command with the options that all share; its first parameter is the `Output` that they make, and no option."""

    def run(**values: Any) -> None:
        output = _common(**{name: values.pop(name) for name in shared})
        function(output, **values)

    shared = inspect.signature(_common, eval_str=True).parameters
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own, *shared.values())]
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    return run
