"""Is a checkpoint directory written whole? Its marker says so, or time and two hashes do; never its looks alone."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.files import INDEX_SUFFIX
from deltackpt.errors import CheckpointError, FormatError
from deltackpt.format import state_digest
from deltackpt.util.parallel import ordered_map
from deltackpt.watch.snapshot import DirectorySnapshot, look

_ONE_OF_MANY = re.compile(r".*-\d+-of-(\d+)\.safetensors")

Hashes = dict[str, bytes]


@dataclass(frozen=True)
class Wait:
    """Why a directory is not taken yet. ``soon``: time alone may change that."""

    why: str
    soon: bool = False


_CHANGED = Wait("its files changed a moment ago", soon=True)
_TWICE = Wait("its weights are to be hashed once more", soon=True)


@dataclass
class _Memory:
    """How a directory looked, since when, and what its weights were then."""

    sight: DirectorySnapshot
    since: float
    hashes: Hashes | None = None
    hashed: float = 0.0


class CompletionDetector:
    """Says of a directory why it is not finished, or None. Remembers what it saw, so it is asked again and again.

    ``marker`` is the name of a file that the trainer writes last, None where it writes none; ``settle`` the seconds
    for which nothing may change where no marker vouches.
    """

    def __init__(self, marker: str | None, settle: float, threads: int) -> None:
        self._marker = marker
        self._settle = settle
        self._threads = threads
        self._memory: dict[int, _Memory] = {}

    def unfinished(self, sight: DirectorySnapshot) -> Wait | None:
        known, now = self._memory.get(sight.step), time.monotonic()
        if known is None or known.sight != sight:
            known = self._memory[sight.step] = _Memory(sight, now)
        marked = self._marked(sight)
        if marked is None:
            return Wait(f"there is no {self._marker}")
        if not marked and now - known.since < self._settle:
            return _CHANGED
        try:
            with Checkpoint.open(sight.path) as checkpoint:
                if reason := _open_end(sight, checkpoint):
                    return reason
                if not marked and (reason := self._unsteady(known, checkpoint)):
                    return reason
        except (CheckpointError, FormatError) as error:
            return Wait(f"it is not whole: {error.where}: have {error.have}, need {error.need}")
        return None if look(sight.path, sight.step) == sight else _CHANGED

    def unchanged(self, step: int) -> float:
        """Seconds for which a directory that was asked for has looked the same."""
        known = self._memory.get(step)
        return time.monotonic() - known.since if known else 0.0

    def forget(self, steps: set[int]) -> None:
        """Only ``steps`` are still there."""
        self._memory = {step: known for step, known in self._memory.items() if step in steps}

    def _marked(self, sight: DirectorySnapshot) -> bool | None:
        """Does a marker vouch? One older than the weights is left from an earlier save of the same step. None: there
        should be one, and is not.
        """
        if self._marker is None:
            return False
        files = {name: mtime for name, _, mtime, _ in sight.files}
        if self._marker not in files:
            return None
        return all(files[self._marker] >= mtime for name, _, mtime, _ in sight.weights)

    def _unsteady(self, known: _Memory, checkpoint: Checkpoint) -> Wait | None:
        """Sizes say nothing of a file that is filled through a mapping: its bytes must be the same twice."""
        now = time.monotonic()
        if known.hashes is not None and now - known.hashed < self._settle:
            return _TWICE
        before, known.hashes, known.hashed = known.hashes, hash_weights(checkpoint, self._threads), now
        return None if before == known.hashes else _TWICE


def hash_weights(checkpoint: Checkpoint, threads: int) -> Hashes:
    """The xxh3-128 of every tensor."""

    def one(name: str) -> tuple[str, bytes]:
        found = state_digest.xxh3(checkpoint.bytes_of(name))
        checkpoint.release(name)
        return name, found

    return dict(ordered_map(one, checkpoint.tensors, threads))


def _open_end(sight: DirectorySnapshot, checkpoint: Checkpoint) -> Wait | None:
    """A shard that is one of several, while the index that would tell of the others is not there yet."""
    indexed = any(name.endswith(INDEX_SUFFIX) and "/" not in name for name, *_ in sight.files)
    match = _ONE_OF_MANY.fullmatch(checkpoint.shards[0].path)
    if match and int(match[1]) > 1 and not indexed:
        return Wait(f"{checkpoint.shards[0].path} is one of several, and there is no index")
    return None
