"""Which step a set of weights is: by its state digest alone, whatever a name or a version says."""

from __future__ import annotations

from pathlib import Path

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import CheckpointError
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository
from deltackpt.restore.identify import held_in, identify_step


def identify(repo: Repository, origin: str, ref: str = "main") -> Link | None:
    """The newest step of the branch with exactly the weights of a checkpoint directory, which an engine was started
    from. None where ``origin`` is no directory, such as a name on a hub. Raises ChainError ``base-differs`` for weights
    of no step."""
    if not origin or not Path(origin).is_dir():
        return None
    try:
        found = Checkpoint.open(origin)
    except CheckpointError as error:
        if error.code == "checkpoint-empty":
            return None
        raise
    with found:
        held = held_in(found)
    return identify_step(repo, held, ref).link
