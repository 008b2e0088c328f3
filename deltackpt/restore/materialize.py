"""A step as a plain checkpoint directory: built beside, proven tensor by tensor, then renamed into place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from deltackpt import kernels
from deltackpt.checkpoint.batch import hash_rows
from deltackpt.checkpoint.diff import State
from deltackpt.checkpoint.rows import TensorRows
from deltackpt.errors import ConflictError, NotFoundError
from deltackpt.format.digests import UNSTATED, DigestRows, Hashes, TensorDigests, check_digest, hashes, proves
from deltackpt.format.layout import Layout, Shard
from deltackpt.format.manifest import File
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.state_digest import TensorDigest, xxh3
from deltackpt.patch.many import KEPT, RunRoom, TensorRun, runs
from deltackpt.repository import Repository
from deltackpt.repository.chain import Plan
from deltackpt.repository.leases import pinned
from deltackpt.restore.replay import Replay
from deltackpt.util.disk import ensure_space, fsync_dir, fsync_tree, link_or, space_errors
from deltackpt.util.file_server import rename
from deltackpt.util.mapped_file import make_huge, make_huge_span, write_at
from deltackpt.util.parallel import ordered_map, threads_or_default
from deltackpt.util.places import check_local
from deltackpt.util.progress import SILENT, Progress
from deltackpt.util.scratch import scratch

T = TypeVar("T")


@dataclass(frozen=True)
class ApplyResult:
    """What `apply` did. ``anchor`` is the step read whole, None where a state before it was there; ``read`` and
    ``written`` count bytes.

    ``rebuilt`` says why the state that was there could not be updated, if there was one. ``leased`` is False where the
    store is read-only, so that no lease could keep gc waiting.
    """

    path: str
    step: int
    id: str
    state: str
    anchor: int | None
    patches: int
    read: int
    written: int
    seconds: float
    rebuilt: str | None = None
    leased: bool = True

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def apply(
    repo: Repository,
    out: str | os.PathLike[str],
    step: str | int = "latest",
    *,
    ref: str = "main",
    sync: bool = False,
    threads: int | None = None,
    progress: Progress = SILENT,
) -> ApplyResult:
    """Materialize a step into ``out``, which must not exist or be empty.

    With ``sync`` it survives a power cut once this returns; without, it does as soon as the system has written it back,
    as with any copy, and `verify_checkpoint` checks it.
    Raises ConflictError ``output-exists``, NotFoundError ``step-missing``, ChainError, FormatError, NoSpaceError; then
    there is no ``out``.
    """
    began = time.monotonic()
    check_local(out, "OUT")
    out = Path(out)
    with space_errors(out):
        _check_free(out)
    with pinned(repo, step, ref) as (link, held):

        def once() -> tuple[Plan, int]:
            plan = repo.resolve(link)
            layout = repo.layout(plan.target)
            with beside(out) as folder, Replay.open(repo, plan, order=build_order(layout)) as state:
                build(repo, layout, repo.digests(plan.target), state, folder, threads_or_default(threads), progress)
                if sync:
                    fsync_tree(folder)
                _move(folder, out)
                if sync:
                    fsync_dir(out.absolute().parent)
            return plan, layout.size

        plan, written = again_if_gone(repo, once)
    return replace(result(out, plan, written, began), leased=held is not None)


def _check_free(out: Path) -> None:
    """Raise ConflictError ``output-exists`` unless a directory can be renamed to ``out``."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        hint = "Choose another path; `--cache` keeps a directory that follows a repository."
        raise _output_exists(out, link_or(out, "something there"), hint)
    if out.exists() and (out.samefile(os.curdir) or out.is_mount()):
        hint = "The step is built beside it and takes its place at once. Name a directory inside it."
        raise _output_exists(out, "the directory that is worked in, or a mount point", hint)


def _output_exists(out: Path, have: str, hint: str) -> ConflictError:
    return ConflictError("output-exists", where=out, have=have, need="no such path, or an empty directory", hint=hint)


def _move(folder: Path, out: Path) -> None:
    try:
        rename(folder, out)
    except OSError:
        _check_free(out)  # another process may have filled it meanwhile
        with space_errors(out):
            raise


def again_if_gone(repo: Repository, work: Callable[[], T]) -> T:
    """Do ``work``, and again where an object is missing: gc removed steps that are cached here, and others lead there.

    Raises what it raises.
    """
    try:
        return work()
    except NotFoundError as error:
        if error.code != "object-missing":
            raise
        repo.manifests.cache.clear()
        return work()


def result(path: Path, plan: Plan, written: int, began: float) -> ApplyResult:
    """The result of a plan that was carried out since ``began`` (seconds of the monotonic clock)."""
    target = plan.target
    return ApplyResult(
        path=str(path),
        step=target.step,
        id=target.link.id,
        state=target.state,
        anchor=plan.anchor.step if plan.anchor else None,
        patches=len(plan.patches),
        read=plan.bytes,
        written=written,
        seconds=round(time.monotonic() - began, 3),
    )


@contextmanager
def beside(out: Path) -> Iterator[Path]:
    """A new folder next to ``out``, on the same file system; gone again unless it was renamed. What killed processes
    left there of the same ``out`` is removed first."""
    with ExitStack() as stack:
        with space_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(scratch(out.parent, f".{out.name}.tmp-"))
        yield folder


def build_order(layout: Layout) -> Iterator[str]:
    """The names of the tensors in the order in which `build` asks for them."""
    return (tensor.name for shard in layout.shards for tensor in file_order(shard))


def file_order(shard: Shard) -> Sequence[Tensor]:
    """The tensors of a file in the order of their bytes, which is that of a `Header`, whatever its text lists first."""
    return shard.header.tensors


def runs_of(layout: Layout) -> Iterator[tuple[Shard, list[Tensor]]]:
    """The tensors of every file by runs, in the order of their bytes."""
    return ((shard, run) for shard in layout.shards for run in runs(file_order(shard)))


def build(
    repo: Repository,
    layout: Layout,
    digests: Mapping[str, TensorDigest],
    state: State,
    folder: Path,
    threads: int,
    progress: Progress,
    *,
    huge: bool = False,
) -> None:
    """Write every file of the layout into an empty folder, and prove every tensor by its digest.

    ``huge``: the files are to be changed in place, many times, so that huge pages are worth what it takes to find them.
    Raises ChainError ``tensor-differs``, NoSpaceError, and what the state raises.
    """
    ensure_space(folder, layout.size)
    progress.start("apply", layout.size)
    for shard in layout.shards:
        _new_shard(folder, shard, huge)
    room = RunRoom()

    def write(shard: Shard, data: npt.NDArray[np.uint8], start: int) -> None:
        path, at = folder / shard.path, shard.header.data_start + start
        with space_errors(path), _opened(path, os.O_RDWR) as fd:
            if huge:
                make_huge_span(fd, shard.size, (at, at + len(data)))
            write_at(fd, data.data, at)

    def place(item: tuple[Shard, list[Tensor]]) -> int:
        shard, tensors = item
        size = tensors[-1].end - tensors[0].start
        if isinstance(state, Replay) and size > KEPT and len(tensors) == 1:
            want = digests[tensors[0].name].xxh3
            if _by_bands(state, tensors[0], want, lambda data, start: write(shard, data, tensors[0].start + start)):
                return size
        if isinstance(state, Replay) and size:
            run = room.run(tensors, layout.named)
            if state.write_run(run) and unproven(run, digests) is None:
                write(shard, run.data, tensors[0].start)
                return size
        for tensor in tensors:
            data = state.bytes_of(tensor.name)
            check_tensor(tensor.name, data, digests, layout)
            write(shard, data, tensor.start)
            state.release(tensor.name)
        return size

    for count in ordered_map(place, runs_of(layout), threads):
        progress.advance(count)
    for side in layout.side:
        path = folder / side.path
        path.parent.mkdir(parents=True, exist_ok=True)
        save(repo, side.file, path)
        progress.advance(side.file.size)


def _by_bands(state: Replay, tensor: Tensor, want: bytes, write: Callable[[npt.NDArray[np.uint8], int], None]) -> bool:
    """``write`` a tensor band by band, uint8 [n], each with its first byte; False where that is not possible, or
    anything is wrong: then it is to be written again, and what does that says what is wrong."""
    if (bands := state.bands(tensor)) is None:
        return False
    memory, hashed = np.empty(bands.largest, np.uint8), xxhash.xxh3_128()
    for number, (start, end) in enumerate(pairwise(bands.edges)):
        data = memory[: end - start]
        if not state.write_band(tensor, bands, number, data):
            return False
        hashed.update(data.data)
        write(data, start)
    return hashed.digest() == want


def save(repo: Repository, file: File, path: Path) -> None:
    """Write an object to a new file, piece by piece. Raises FormatError ``object-hash``; then a part of it is left."""
    with space_errors(path), path.open("xb") as out:
        for chunk in repo.stream(file):
            out.write(chunk)


def check_tensor(name: str, data: npt.NDArray[np.uint8], digests: Mapping[str, TensorDigest], layout: Layout) -> None:
    """Raise ChainError ``tensor-differs`` unless ``data``, uint8 [n], has the digest of the step's record."""
    hint = "A base or an anchor was changed after it was published. `deltackpt verify` finds out which."
    check_digest(data, layout.tensors[name].dtype, digests[name], where=name[:200], hint=hint)


def unproven(run: TensorRun, digests: Mapping[str, TensorDigest]) -> int | None:
    """The number of the first tensor of a run whose bytes have not the digest of the step's record, if there is one."""
    stated = rows_of(run, digests).xxh3
    for number in np.flatnonzero((stated != hash_run(run)).any(axis=1)).tolist():
        tensor, need = run.tensors[number], stated[number].tobytes()
        if need != UNSTATED or not proves(run.bytes_of(number), tensor.dtype, digests[tensor.name]):
            return int(number)
    return None


def rows_of(run: TensorRun, digests: Mapping[str, TensorDigest]) -> DigestRows:
    """The digests of the tensors of a run."""
    if isinstance(digests, TensorDigests):
        numbers = run.numbers if digests.named is run.named else [digests.named.numbers[t.name] for t in run.tensors]
        return DigestRows(digests.sums[numbers], digests.xxh3[numbers])
    found = [digests[tensor.name] for tensor in run.tensors]
    sums = np.array([digest.sums for digest in found], np.uint64).reshape(-1, 2)
    return DigestRows(sums, hashes([digest.xxh3 for digest in found]))


def hash_run(run: TensorRun) -> Hashes:
    """The xxh3-128 of each tensor of a run: uint8 [tensors, 16]."""
    if kernels.LIB is None:
        return hashes([xxh3(run.bytes_of(number)) for number in range(len(run.tensors))])
    return hash_rows(TensorRows(run.places[:, 0], run.bytes_of), run.places[:, 1])


def _new_shard(folder: Path, shard: Shard, huge: bool) -> None:
    path = folder / shard.path
    path.parent.mkdir(parents=True, exist_ok=True)
    with space_errors(path), _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        write_at(fd, memoryview(shard.header.head), 0)
        os.truncate(fd, shard.size)
        if huge:  # of a copy it takes as long again as to write it
            first = shard.header.data_start
            make_huge(fd, shard.size, [first, *(first + tensor.end for tensor in shard.header.tensors)])


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor for as long as it is needed: a checkpoint may have more files than a process may open."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)
