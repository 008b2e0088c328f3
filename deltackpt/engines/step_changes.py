"""The changed elements between two steps, tensor by tensor, decoded against the old words; nothing is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from deltackpt.checkpoint.diff import changes
from deltackpt.codecs import Decoded
from deltackpt.errors import ChainError, FormatError
from deltackpt.format.dtypes import DTYPES, uint
from deltackpt.patch.apply import decode_step
from deltackpt.patch.base import Bytes, Known, TensorPatch
from deltackpt.patch.source import PartSource
from deltackpt.repository import Repository
from deltackpt.repository.chain import Plan
from deltackpt.restore.late_source import LateSource, Room
from deltackpt.restore.patch_reader import PatchReader
from deltackpt.restore.replay import Replay
from deltackpt.restore.source import RepositorySource


class StepChanges:
    """What leads to a plan's target. Patches where it begins at a state that is there, all tensors where at an anchor.

    A context manager: every part is fetched and hashed on entry, from ``source``, or the repository if it is None.
    With ``late``, parts of the repository that no anchor precedes are hashed beside what is done within the block:
    that they have their sha256 is known after `join`, which the end of the block does as well, before any other error.
    Where signatures are asked for there is no ``late``. ``room`` as of `LateSource`.
    """

    def __init__(
        self, repo: Repository, plan: Plan, source: PartSource | None = None, *, late: bool = False,
        room: Room | None = None,
    ) -> None:  # fmt: skip
        # Where signatures are asked for, no byte is used before it is proven.  [S-SIG-14]
        late = late and source is None and plan.anchor is None and repo.trust is None
        self._late = LateSource(repo, room=room) if late else None
        self._repo, self._plan, self._source = repo, plan, source or self._late or RepositorySource(repo)
        self._stack = ExitStack()
        self._patches: Sequence[PatchReader] = ()
        self._whole: Replay | None = None

    @property
    def plan(self) -> Plan:
        """What leads to the target."""
        return self._plan

    def begin(self) -> StepChanges:
        """Begin to hash what is hashed late, before the block; `join` ends that too where there is none."""
        if self._late is not None:
            try:
                self._late.begin(file for hop in self._plan.patches for file in hop.files)
            except BaseException:
                self.join()
                raise
        return self

    def __enter__(self) -> StepChanges:
        if self._plan.anchor is not None:
            self._whole = self._stack.enter_context(Replay.open(self._repo, self._plan))
            return self
        try:
            self._patches = self._stack.enter_context(PatchReader.open_all(self._source, self._plan.patches))
        except BaseException:
            self.join()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self.join()

    def join(self) -> None:
        """Wait until all parts were hashed. Raises FormatError ``object-hash``."""
        if self._late is not None:
            self._late.join()

    @property
    def patches(self) -> Sequence[PatchReader]:
        """Of the plan's hops, in order; none where the plan begins at an anchor."""
        return self._patches

    def hop(self, number: int) -> StepChanges:
        """The changes of one hop alone: what leads from the state before it to the one after."""
        one = StepChanges(self._repo, self._plan, self._source)
        one._late = self._late
        one._patches = self._patches[number : number + 1]
        return one

    @property
    def names(self) -> Iterable[str]:
        """Of the tensors that may differ."""
        if self._whole is not None:
            return self._whole.tensors
        return sorted(set().union(*(patch.names for patch in self._patches)), key=str.encode)

    def bytes_of(self, name: str) -> Bytes:
        """All bytes of a tensor at the target, uint8, not proven, where the plan begins at an anchor."""
        assert self._whole is not None, "a plan that begins at an anchor"
        return self._whole.bytes_of(name)

    def of(self, name: str, old: Bytes, known: Known) -> Decoded:
        """The elements of a tensor that end up changed: [n] flat positions, int64 and sorted, and [n] unsigned words.

        ``old``: its bytes now, uint8, of dtype and shape ``known``. Raises ChainError ``tensor-shape`` for one that is
        another tensor at the target, ``base-differs`` where ``old`` is not what the patches apply to.
        """
        words = old.view(uint(DTYPES[known[0]].width))
        if self._whole is not None:
            return _difference(words, self._whole.bytes_of(name).view(words.dtype))
        steps = [found for patch in self._patches if (found := patch.tensor(name)) is not None]
        if len(steps) == 1:
            return changed_elements(name, old, known, steps[0])
        new = old.copy()
        for found in steps:
            _step(name, new, known, found).write_to(new.view(words.dtype))
        return _difference(words, new.view(words.dtype))


OF_BYTES = ("tile-checksum", "tensor-checksum", "object-short")  # whatever the old values are


@contextmanager
def base_blamed(where: str) -> Iterator[None]:
    """Decoding parts that have their sha256, or tiles that have their checksums: where they do not decode, the old
    values must be the wrong ones.

    Raises ChainError ``base-differs`` then, and FormatError for bytes that do not have the checksum of their table."""
    try:
        yield
    except FormatError as error:
        if error.code in OF_BYTES:
            raise
        have, need = f"old values that a patch does not apply to [{error.code}]", "those of the step before"
        hint = "Other code wrote to the weights. Load them again."
        raise ChainError("base-differs", where=where, have=have, need=need, hint=hint) from error


def changed_elements(name: str, old: Bytes, known: Known, found: TensorPatch) -> Decoded:
    """What one patch changes of a tensor: see `StepChanges.of`, also for ``old``, its bytes, and what is raised."""
    return _sorted(_step(name, old, known, found), np.dtype(uint(DTYPES[known[0]].width)))


def _step(name: str, old: Bytes, known: Known, found: TensorPatch) -> Decoded:
    with base_blamed(name[:80]):
        decoded = decode_step(old, known, found)
    if decoded is None:  # [F-APPLY-5]: the set of tensors is the layout's
        raise ChainError("tensor-shape", where=name[:80], have="another tensor of this name", need="the same tensor")
    return decoded


def _sorted(decoded: Decoded, width: np.dtype[Any]) -> Decoded:
    positions, values = decoded.positions, decoded.values.view(width)
    if positions is None:
        return Decoded(np.arange(len(values), dtype=np.int64), values)
    positions = positions.astype(np.int64, copy=False)
    if np.all(positions[:-1] < positions[1:]):
        return Decoded(positions, values)
    order = np.argsort(positions)
    return Decoded(positions[order], values[order])


def _difference(old: Bytes, new: Bytes) -> Decoded:
    positions, _, values = changes(old, new)
    return Decoded(positions, values)
