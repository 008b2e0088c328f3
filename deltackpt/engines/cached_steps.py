"""The steps of a repository as an engine's rank reads them: all that it asks of the repository and of the host's cache.

A source of steps other than a repository comes in here, and nowhere else in a rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deltackpt.cache.cache import find_current
from deltackpt.cache.layout import CacheLayout
from deltackpt.checkpoint import Checkpoint
from deltackpt.engines.identify import identify
from deltackpt.engines.shared_cache import ensure_cached, reading
from deltackpt.engines.step_changes import StepChanges
from deltackpt.errors import NotFoundError
from deltackpt.format.manifest import Link
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.state_digest import TensorDigest
from deltackpt.patch.source import PartSource
from deltackpt.repository import Repository
from deltackpt.repository.chain import Plan
from deltackpt.restore.journal import Journal
from deltackpt.restore.materialize import check_tensor
from deltackpt.restore.replay import Replay
from deltackpt.restore.source import RepositorySource

ReadTensor = Callable[[str], npt.NDArray[np.uint8]]  # a tensor's bytes in row-major order, by its name


@dataclass(frozen=True)
class Slot:
    """A whole, proven checkpoint in the cache. ``table``: its tensors by name, in the order of the layout."""

    root: Path
    table: Mapping[str, Tensor]
    read: ReadTensor


class Steps(Protocol):
    """What a rank asks of the steps that it may come to; `RepositorySteps`, `CachedSteps` and `OwnSteps` say how."""

    def find(self, step: int | str) -> Link:
        """A step by its number, number and id, or ``latest``."""

    def identify(self, origin: str) -> Link | None:
        """The step that a checkpoint directory is."""

    def state(self, link: Link) -> str:
        """The state digest of a step, hexadecimal."""

    def shapes(self, link: Link) -> dict[str, tuple[str, tuple[int, ...]]]:
        """{name: (dtype, shape)} of every tensor of a step."""

    def load_order(self, link: Link) -> Iterator[Tensor]:
        """The tensors of a step in the order of its files."""

    def table(self, link: Link) -> Mapping[str, Tensor]:
        """The tensors of a step by name."""

    def ensure(self, link: Link) -> None:
        """Have a step on this host, if whole steps are kept there."""

    def ensure_any(self, link: Link) -> None:
        """The same, unless another one is there."""

    def held(self, link: Link, folder: str) -> AbstractContextManager[None]:
        """Within the block ``folder`` is the whole checkpoint of a step."""

    def prepare(self, link: Link | None) -> None:
        """Have ready what `folder` of a step takes long to make: it is about to be asked for. None: it is not."""

    def folder(self, link: Link) -> AbstractContextManager[Path]:
        """The directory of a step's checkpoint."""

    def slot(self, link: Link | None) -> AbstractContextManager[Slot | None]:
        """A step whose bytes are on this host; None where they are not."""

    def journal(self, start: Link, end: Link) -> Journal | None:
        """What changed between two steps, where that was kept."""

    def digests(self, link: Link) -> Mapping[str, TensorDigest] | None:
        """What weights are held against where no step's bytes are kept, or where the weights are on a card."""

    def read(self, link: Link, names: Sequence[str]) -> dict[str, npt.NDArray[np.uint8]]:
        """All bytes of some tensors of a step, proven."""


class RepositorySteps:
    """What the branch ``ref`` of a repository says of its steps, whatever of them is on this host."""

    def __init__(self, repo: Repository, ref: str = "main") -> None:
        self._repo, self.ref = repo, ref

    def find(self, step: int | str) -> Link:
        """A step by its number, number and id, or ``latest``. Raises NotFoundError ``step-missing``."""
        return self._repo.find(step, self.ref)

    def identify(self, origin: str) -> Link | None:
        """The step that a checkpoint directory is, found by `identify.identify`."""
        return identify(self._repo, origin, self.ref)

    def state(self, link: Link) -> str:
        """The state digest of a step, hexadecimal."""
        return self._repo.load(link).state

    def shapes(self, link: Link) -> dict[str, tuple[str, tuple[int, ...]]]:
        """{name: (dtype, shape)} of every tensor of a step."""
        return {name: (t.dtype, tuple(t.shape)) for name, t in self.table(link).items()}

    def load_order(self, link: Link) -> Iterator[Tensor]:
        """The tensors of a step in the order of its files, as a loader meets them."""
        for shard in self._repo.layout(self._repo.load(link)).shards:
            yield from shard.header.tensors

    def table(self, link: Link) -> Mapping[str, Tensor]:
        """The tensors of a step by name, in the order of its layout."""
        return self._repo.layout(self._repo.load(link)).tensors

    def plan(self, start: Link, end: Link) -> Plan:
        """What is read to come from one step to another, found by `Repository.resolve`."""
        return self._repo.resolve(end, have=start)

    def changes(self, plan: Plan, *, late: bool = False) -> StepChanges:
        """The changed elements of a plan, to be entered; with ``late`` parts are hashed beside."""
        return StepChanges(self._repo, plan, late=late)

    def parts(self) -> PartSource:
        """The bytes of all parts."""
        return RepositorySource(self._repo, self.ref)

    def digests(self, link: Link) -> Mapping[str, TensorDigest] | None:
        """Those of a step's tensors, by name: what the engine's memory is held against."""
        return self._repo.digests(self._repo.load(link))

    def read(self, link: Link, names: Sequence[str]) -> dict[str, npt.NDArray[np.uint8]]:
        """All bytes of some tensors of a step, [bytes] uint8 of the caller's own, each proven by its digest. Raises
        what `restore.materialize.apply` raises of reading."""
        plan, found = self._repo.resolve(link), {}
        layout, digests = self._repo.layout(plan.target), self._repo.digests(plan.target)
        with Replay.open(self._repo, plan, order=names) as state:
            for name in names:
                data = state.bytes_of(name)
                check_tensor(name, data, digests, layout)
                found[name] = data.copy()
                state.release(name)
        return found


class CachedSteps(RepositorySteps):
    """Implements `Steps` with the managed cache at ``cache`` that the engines of a host share."""

    def __init__(self, repo: Repository, cache: str | os.PathLike[str], ref: str = "main") -> None:
        super().__init__(repo, ref)
        self.cache = Path(cache)

    @classmethod
    def open(cls, url: str, cache: str | os.PathLike[str], ref: str = "main") -> CachedSteps:
        """With the keys to trust that the environment names, if it names any. Raises what `Repository.open` and
        `Repository.secure` raise."""
        return cls(Repository.open(url).secure(), cache, ref)

    def ensure(self, link: Link) -> None:
        """Move the cache to a step, unless it is there. Raises what `apply_to_cache` raises."""
        ensure_cached(self._repo, self.cache, link)

    def prepare(self, link: Link | None) -> None:
        """It is a slot, which is there."""

    def ensure_any(self, link: Link) -> None:
        """Move the cache to a step if it has none yet."""
        try:
            find_current(self.cache)
        except NotFoundError:
            self.ensure(link)

    @contextmanager
    def held(self, link: Link, folder: str) -> Iterator[None]:
        """The cache has the step itself."""
        yield

    @contextmanager
    def folder(self, link: Link) -> Iterator[Path]:
        """The directory of a step's slot, there or not, while no process moves the cache."""
        with reading(self.cache) as cache:
            yield cache.slot(link)

    @contextmanager
    def slot(self, link: Link | None) -> Iterator[Slot | None]:
        """The slot of a step while no process moves the cache. None where it is not there, or not proven."""
        with reading(self.cache) as cache:
            root = cache.slot(link) if link is not None else None
            if link is None or root is None or not root.is_dir() or not cache.trusted:
                yield None
                return
            with Checkpoint.open(root) as found:
                yield Slot(root, self.table(link), found.bytes_of)

    def read(self, link: Link, names: Sequence[str]) -> dict[str, npt.NDArray[np.uint8]]:
        """As `RepositorySteps.read`, [bytes] uint8 each, from the step's slot if there is one."""
        with self.slot(link) as slot:
            if slot is not None:
                return {name: slot.read(name).copy() for name in names}
        return super().read(link, names)

    def journal(self, start: Link, end: Link) -> Journal | None:
        """What changed from one step to the next, where the last move of the cache was just that, else None. To be
        called while no process moves the cache, as in `slot`."""
        journal = Journal.read(CacheLayout(self.cache).journal)
        return journal if journal is not None and (journal.start, journal.end) == (start, end) else None
