"""Which step a set of weights is: by its state digest alone, whatever a name or a version says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import ChainError, CheckpointError, NotFoundError
from deltackpt.format import state_digest
from deltackpt.format.dtypes import DTYPES
from deltackpt.format.manifest import Link, Manifest
from deltackpt.format.state_digest import Sums
from deltackpt.repository import Repository, chain

Held = Mapping[str, tuple[str, tuple[int, ...], Sums]]  # by name: dtype, shape, and the sums of its words


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
        held = {}
        for name, tensor in found.tensors.items():
            words = found.bytes_of(name).view(f"<u{DTYPES[tensor.dtype].width}")
            held[name] = tensor.dtype, tuple(tensor.shape), state_digest.of_run(words)
            found.release(name)
    return find_base(repo, held, ref).link


def state_of(held: Held) -> str:
    """The state digest of weights, hexadecimal."""
    return state_digest.state((name, dtype, shape, sums) for name, (dtype, shape, sums) in held.items())


def find_base(repo: Repository, held: Held, ref: str = "main") -> Manifest:
    """The newest step of a branch that has exactly these weights.

    Raises ChainError ``base-differs`` where there is none, with the tensors that come nearest to blame.
    """
    want, head = state_of(held), repo.ref(ref)
    newest = None
    if head is not None:
        for step in chain.walk(head.link, repo.load, repo.edges()):
            newest = newest or step
            if step.state == want:
                return step
    raise ChainError(
        "base-differs",
        where=repo.store.url,
        have=f"weights of state {want[:16]}{_unlike(repo, newest, held) if newest else ''}",
        need=f"those of a step on {ref!r}",
        hint="Load a step of this repository first: `deltackpt apply REPO DIR`.",
    )


def _unlike(repo: Repository, step: Manifest, held: Held) -> str:
    """Against the newest step: which tensors are others, which only have other values."""
    try:
        layout, digests = repo.layout(step), repo.digests(step)
    except NotFoundError:
        return ""
    table = {name: (t.dtype, t.shape) for name, t in layout.tensors.items()}
    other = sorted(name for name in table.keys() ^ held.keys())
    other += [name for name in table.keys() & held.keys() if held[name][:2] != table[name]]
    if other:
        return f"; against step {step.step} another model: {len(other)} tensors, such as {other[0][:80]!r}"
    values = [name for name in table if held[name][2] != digests[name].sums]
    return f"; against step {step.step}, {len(values)} tensors differ, such as {values[0][:80]!r}" if values else ""
