"""Several hops opened as one patch, decoded while their parts are still on their way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import CheckpointError
from deltackpt.patch.squashed import SquashedPatch
from deltackpt.repository import Repository
from deltackpt.repository.chain import Hop
from deltackpt.restore.decode_ahead import DecodeAhead
from deltackpt.restore.patch_reader import PatchReader


@contextmanager
def open_squashed(repo: Repository, hops: Sequence[Hop], folder: Path, threads: int) -> Iterator[SquashedPatch]:
    """The patches of several hops as one; all parts are fetched and hashed on entry.

    What ``folder`` holds, which should be the state that they apply to, goes through them meanwhile. Raises what
    `PatchReader.open_all` raises.
    """
    patches = PatchReader.arriving(repo, hops)
    with ExitStack() as stack:
        try:
            base = stack.enter_context(Checkpoint.open(folder))
        except CheckpointError:  # the caller may have another way, and finds out what the matter is
            yield SquashedPatch(list(patches))
            return
        ahead, opened = stack.enter_context(DecodeAhead.of(base, patches, threads))
        yield SquashedPatch(opened, ahead.take)
