"""Some tensors of a step as one safetensors file: no bytes of others are read, and each is proven by its digest."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from deltackpt.errors import ConflictError, NotFoundError, UsageError
from deltackpt.format.layout import Layout
from deltackpt.format.safetensors_header import Tensor, build_header
from deltackpt.patch.tensor import PartsPatch
from deltackpt.repository import Repository
from deltackpt.repository.chain import Hop, Plan
from deltackpt.repository.leases import pinned
from deltackpt.restore.anchor import Anchor
from deltackpt.restore.materialize import again_if_gone, beside, check_tensor
from deltackpt.restore.patch_reader import ranged_parts
from deltackpt.restore.replay import Replay
from deltackpt.restore.source import FETCHES
from deltackpt.util.disk import ensure_space, fsync_dir, link_or, space_errors
from deltackpt.util.file_server import link, rename
from deltackpt.util.parallel import ordered_map
from deltackpt.util.places import check_local
from deltackpt.util.progress import SILENT, Progress

NAMED = 8  # names that a hint lists


@dataclass(frozen=True)
class SelectedTensors:
    """What `apply_tensors` did: ``tensors`` are the names in the file, in its order, ``written`` its bytes.

    ``leased`` is False where the store is read-only, so that no lease could keep gc waiting.
    """

    path: str
    step: int
    id: str
    tensors: tuple[str, ...]
    patches: int
    written: int
    seconds: float
    leased: bool = True

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def apply_tensors(
    repo: Repository,
    out: str | os.PathLike[str],
    patterns: Sequence[str],
    step: str | int = "latest",
    *,
    ref: str = "main",
    sync: bool = False,
    progress: Progress = SILENT,
) -> SelectedTensors:
    """Some tensors of a step as the safetensors file ``out``, which must not exist.

    ``patterns``: names, or globs over names (``*``, ``?``, ``[…]``; a name is taken as it is where there is one). Of
    anchors and patches the ranges of these tensors are read, and no part is read whole, unless signatures are asked
    for; every tensor is proven by the step's digest. Memory is that of the largest one. With ``sync`` the file survives
    a power cut once this returns.

    Raises NotFoundError ``tensor-unknown`` for a pattern that fits no tensor, ConflictError ``output-exists``, and what
    `apply` raises; then there is no ``out``.
    """
    began = time.monotonic()
    check_local(out, "OUT")
    path = Path(out)
    if not patterns:
        raise UsageError("usage", where="patterns", have="none", need="a tensor's name, or a glob")
    with space_errors(path):
        _check_free(path)
    with pinned(repo, step, ref) as (link, held):

        def once() -> tuple[Plan, list[Tensor], int]:
            plan = repo.resolve(link)
            layout = repo.layout(plan.target)
            wanted = _file_order(layout, select(layout.tensors, patterns, f"step {link.step}, {repo.store.url}"))
            return plan, wanted, _write(repo, plan, layout, wanted, path, sync=sync, progress=progress)

        plan, wanted, written = again_if_gone(repo, once)
    made = SelectedTensors(
        path=str(path),
        step=link.step,
        id=link.id,
        tensors=tuple(t.name for t in wanted),
        patches=len(plan.patches),
        written=written,
        seconds=round(time.monotonic() - began, 3),
    )
    return replace(made, leased=held is not None)


def select(names: Mapping[str, Any], patterns: Sequence[str], where: str) -> set[str]:
    """The names that a pattern is, or fits. Raises NotFoundError ``tensor-unknown`` for a pattern without any."""
    found: set[str] = set()
    for pattern in patterns:
        some = {pattern} if pattern in names else {name for name in names if fnmatchcase(name, pattern)}
        if not some:
            near = get_close_matches(pattern, names, NAMED, cutoff=0.5)
            hint = f"Near it: {', '.join(near)}." if near else "`deltackpt inspect` lists what a step changed."
            have, need = f"no tensor {pattern[:120]!r}", "a tensor's name, or a glob that fits one"
            raise NotFoundError("tensor-unknown", where=where, have=have, need=need, hint=hint)
        found |= some
    return found


def _file_order(layout: Layout, names: set[str]) -> list[Tensor]:
    return [tensor for shard in layout.shards for tensor in shard.header.tensors if tensor.name in names]


def _write(
    repo: Repository, plan: Plan, layout: Layout, wanted: list[Tensor], out: Path, *, sync: bool, progress: Progress
) -> int:
    """-> bytes of the file, which takes its place when it is whole."""
    at, moved = 0, []
    for tensor in wanted:
        moved.append(tensor._replace(start=at, end=at + tensor.end - tensor.start))
        at = moved[-1].end
    metadata = layout.shards[0].header.metadata if layout.shards else {}
    head = build_header(moved, metadata)
    digests = repo.digests(plan.target)
    ensure_space(out, len(head) + at)
    progress.start("apply", at)
    with beside(out) as folder, ExitStack() as stack:
        anchor = Anchor(repo, plan.anchor or plan.target, plan.whole, [t.name for t in wanted])
        stack.callback(anchor.close)
        state = Replay(anchor, _patches(repo, plan.patches), layout)
        with space_errors(out), (folder / "tensors").open("xb") as file:
            file.write(head)
            for tensor in wanted:
                data = state.bytes_of(tensor.name)
                check_tensor(tensor.name, data, digests, layout)
                file.write(data.data)
                state.release(tensor.name)
                progress.advance(len(data))
            file.flush()
            if sync:
                os.fsync(file.fileno())
        _move(folder / "tensors", out)
    if sync:
        fsync_dir(out.absolute().parent)
    return len(head) + at


def _patches(repo: Repository, hops: Sequence[Hop]) -> list[PartsPatch]:
    """The patches, of which headers and tables are read now, and payloads by range when they are decoded."""

    def opened(hop: Hop) -> PartsPatch:
        return PartsPatch(ranged_parts(repo, hop))

    return list(ordered_map(opened, hops, 1 if repo.store.capabilities.local else FETCHES))


def _check_free(out: Path) -> None:
    if out.is_symlink() or out.exists():
        hint = "With --tensor, OUT is one safetensors file: choose another path."
        have = link_or(out, "a directory" if out.is_dir() else "something there")
        raise ConflictError("output-exists", where=out, have=have, need="no such path", hint=hint)


def _move(made: Path, out: Path) -> None:
    """Unlike a rename, a link never replaces what another process put there; where there are no links, it is looked."""
    try:
        link(made, out)
    except OSError:
        _check_free(out)
        with space_errors(out):
            rename(made, out)
