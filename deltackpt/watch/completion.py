"""Whether a checkpoint directory is complete: its marker decides, or time and two equal hashes; never sizes alone."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.files import INDEX_SUFFIX
from deltackpt.errors import CheckpointError, FormatError
from deltackpt.format import state_digest
from deltackpt.util.parallel import ordered_map
from deltackpt.watch.snapshot import DirectorySnapshot, take_snapshot

_ONE_OF_MANY = re.compile(r".*-\d+-of-(\d+)\.safetensors")

Hashes = dict[str, bytes]


@dataclass(frozen=True)
class Incomplete:
    """Why a directory is not complete. ``soon``: time alone may change that."""

    why: str
    soon: bool = False


_CHANGED = Incomplete("its files changed a moment ago", soon=True)
_TWICE = Incomplete("its weights are to be hashed once more", soon=True)


@dataclass
class _Observed:
    """The last snapshot of a directory, since when it is the same, and the hashes of its weights."""

    snapshot: DirectorySnapshot
    since: float
    hashes: Hashes | None = None
    hashed: float = 0.0


class CompletionDetector:
    """Decides whether directories are complete, from what it found in earlier calls too.

    ``marker`` is the name of a file that the trainer writes last, None where it writes none; ``settle`` the seconds
    for which nothing may change where no marker decides.
    """

    def __init__(self, marker: str | None, settle: float, threads: int) -> None:
        self._marker = marker
        self._settle = settle
        self._threads = threads
        self._observed: dict[int, _Observed] = {}

    def check(self, snapshot: DirectorySnapshot) -> Incomplete | None:
        """None if the directory is complete, and still as in ``snapshot``.

        Raises CheckpointError ``not-readable`` where this user may not read a file, and nothing changes for a while.
        """
        known, now = self._observed.get(snapshot.step), time.monotonic()
        if known is None or known.snapshot != snapshot:
            known = self._observed[snapshot.step] = _Observed(snapshot, now)
        marked = self._marked(snapshot)
        if marked is None:
            return Incomplete(f"there is no {self._marker}")
        if not marked and now - known.since < self._settle:
            return _CHANGED
        try:
            with Checkpoint.open(snapshot.path) as checkpoint:
                if reason := _missing_shards(snapshot, checkpoint):
                    return reason
                if not marked and (reason := self._changing(known, checkpoint)):
                    return reason
        except (CheckpointError, FormatError) as error:
            if isinstance(error.__cause__, PermissionError):  # time alone does not change that
                if now - known.since < self._settle:
                    return _CHANGED
                raise
            return Incomplete(f"it is not whole: {error.sentence()}")
        return None if take_snapshot(snapshot.path, snapshot.step) == snapshot else _CHANGED

    def unchanged(self, step: int) -> float:
        """Seconds for which the directory of a step, as far as it was checked, has been the same."""
        known = self._observed.get(step)
        return time.monotonic() - known.since if known else 0.0

    def forget(self, steps: set[int]) -> None:
        """Drop what is known of all steps but ``steps``."""
        self._observed = {step: known for step, known in self._observed.items() if step in steps}

    def _marked(self, snapshot: DirectorySnapshot) -> bool | None:
        """Whether there is a marker that is no older than the weights: an older one is of an earlier save of the same
        step. None where there should be one, and is none.
        """
        if self._marker is None:
            return False
        files = {name: mtime for name, _, mtime, _ in snapshot.files}
        if self._marker not in files:
            return None
        return all(files[self._marker] >= mtime for name, _, mtime, _ in snapshot.weights)

    def _changing(self, known: _Observed, checkpoint: Checkpoint) -> Incomplete | None:
        """A file that is filled through a mapping has its size from the start: its bytes must be the same twice."""
        now = time.monotonic()
        if known.hashes is not None and now - known.hashed < self._settle:
            return _TWICE
        before, known.hashes, known.hashed = known.hashes, hash_weights(checkpoint, self._threads), now
        return None if before == known.hashes else _TWICE


def hash_weights(checkpoint: Checkpoint, threads: int) -> Hashes:
    """The xxh3-128 of every tensor's bytes, by name; 16 bytes each."""

    def one(name: str) -> tuple[str, bytes]:
        found = state_digest.xxh3(checkpoint.bytes_of(name))
        checkpoint.release(name)
        return name, found

    return dict(ordered_map(one, checkpoint.tensors, threads))


def _missing_shards(snapshot: DirectorySnapshot, checkpoint: Checkpoint) -> Incomplete | None:
    """A shard that is one of several, while the index that names the others is not there yet."""
    indexed = any(name.endswith(INDEX_SUFFIX) and "/" not in name for name, *_ in snapshot.files)
    match = _ONE_OF_MANY.fullmatch(checkpoint.shards[0].path)
    if match and int(match[1]) > 1 and not indexed:
        return Incomplete(f"{checkpoint.shards[0].path} is one of several, and there is no index")
    return None
