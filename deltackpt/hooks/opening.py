"""What a hook opens before it looks at the weights: the process groups, the repository, what is known of the names."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import DeltackptError, NotFoundError, UsageError
from deltackpt.hooks.options import HookOptions, require
from deltackpt.hooks.process_group import Processes, ProcessGroup, SingleProcess, collect, share
from deltackpt.quantize.pieces import Quantizer
from deltackpt.repository import Repository
from deltackpt.torch_views.extract import Extractor, Source
from deltackpt.torch_views.naming import Known, Table
from deltackpt.torch_views.wrappers import unwrapped

T = TypeVar("T")
U = TypeVar("U")
Target = str | os.PathLike[str] | Repository


def process_groups(sharded: bool | None, timeout: float) -> tuple[ProcessGroup, ProcessGroup]:
    """One group for the thread that trains, one for the thread that publishes: their messages must not mix."""
    import torch.distributed as dist

    running = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if sharded is False or not running:
        if sharded:
            need = "torch.distributed, initialized, with more than one rank"
            raise UsageError("not-distributed", where="the trainer hook", have="one process", need=need)
        return SingleProcess(), SingleProcess()
    return Processes(timeout), Processes(timeout)


def everyones(group: ProcessGroup, work: Callable[[], T], about: Callable[[T], U]) -> tuple[T, list[U]]:
    """What ``work`` returns here, and what there is to say ``about`` it at each rank; an error of one is raised at all
    of them."""
    mine: list[T] = []
    said: list[U] = []
    error: Exception | None = None
    try:
        mine.append(work())
        said.append(about(mine[0]))
    except Exception as failed:
        error = failed
    found: list[list[U]] = group.broadcast(collect(group, said, error))
    return mine[0], [value for [value] in found]


def secured(repo: Repository, options: HookOptions) -> Repository:
    """A repository that signs, and asks for signatures, as the hook was told. What it was before stays otherwise."""
    if (options.sign, options.trust) == (None, None):
        return repo
    return repo.secure(options.trust, sign=options.sign)


def existing(group: ProcessGroup, repository: Target, options: HookOptions) -> Repository | None:
    """The repository, at rank 0 and where one was given; None where there is none yet: it is made for the first weights
    that can be published."""
    if isinstance(repository, Repository):
        return secured(repository, options)
    require("repository", repository, isinstance(repository, str | os.PathLike), "a URL, a directory, or a Repository")
    found: list[Repository] = []

    def first() -> None:
        with suppress(NotFoundError):
            found.append(secured(Repository.open(repository), options))

    share(group, first)
    return found[0] if found else None


def extractor(
    group: ProcessGroup, repo: Repository | None, source: Source, options: HookOptions
) -> Extractor | Quantizer:
    """What gives the pieces of ``source``, alike at all ranks."""
    recipe = options.recipe
    extract = Extractor(
        source,
        dtype=options.dtype,
        rename=options.rename,
        locate=options.locate,
        # What was published quantised says nothing of the names and dtypes of the model's own weights.
        known=_known_of(
            group, None if recipe else repo, options.ref, source if options.model is None else options.model
        ),
        peft=options.peft,
        model=options.model,
    )
    if recipe is None:
        return extract
    return Quantizer(recipe, extract, lambda value, error: group.broadcast(collect(group, value, error)))


def _known_of(group: ProcessGroup, repo: Repository | None, ref: str, source: Any) -> Known:
    """The tensors of the ref's step, and of the checkpoint that the model was loaded from: rank 0's, at all ranks."""

    def first() -> Known:
        head = repo.head(ref) if repo is not None else None
        parent: Table = {}
        if repo is not None and head is not None:
            layout = repo.layout(repo.load(head.link))
            parent = {name: (t.dtype, tuple(t.shape)) for name, t in layout.tensors.items()}
        return Known(parent, _base_of(unwrapped(source)))

    return share(group, first)


def _base_of(model: Any) -> Table:
    """Of a directory of safetensors files; what comes from elsewhere is not looked for."""
    path = getattr(getattr(model, "config", None), "_name_or_path", None)
    if not isinstance(path, str) or not path or not Path(path).is_dir():
        return {}
    with suppress(DeltackptError, OSError):
        base = Checkpoint.open(path)
        try:
            return {name: (t.dtype, tuple(t.shape)) for name, t in base.tensors.items()}
        finally:
            base.close()
    return {}
