"""Which step a checkpoint directory is that an engine was started from."""

from __future__ import annotations

from pathlib import Path

from deltackpt.checkpoint import Checkpoint
from deltackpt.engines.base import find_base
from deltackpt.errors import CheckpointError
from deltackpt.format import state_digest
from deltackpt.format.dtypes import DTYPES
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository


def identify(repo: Repository, origin: str, ref: str = "main") -> Link | None:
    """By content: the newest step of the branch with exactly these weights. None where ``origin`` is no directory,
    such as a name on a hub. Raises ChainError ``base-differs`` for weights of no step."""
    if not origin or not Path(origin).is_dir():
        return None
    try:
        found = Checkpoint.open(origin)
    except CheckpointError as error:
        if error.code == "checkpoint-empty":
            return None
        raise
    with found:
        held = {}
        for name, tensor in found.tensors.items():
            words = found.bytes_of(name).view(f"<u{DTYPES[tensor.dtype].width}")
            held[name] = tensor.dtype, tuple(tensor.shape), state_digest.of_run(words)
            found.release(name)
    return find_base(repo, held, ref).link
