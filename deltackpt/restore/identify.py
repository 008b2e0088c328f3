"""Which step a set of weights is: by the state digest of what they are, never by a number or a name."""

from __future__ import annotations

from collections.abc import Mapping

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import ChainError, NotFoundError
from deltackpt.format import state_digest
from deltackpt.format.digests import proves
from deltackpt.format.dtypes import DTYPES, uint
from deltackpt.format.manifest import Link, Manifest
from deltackpt.format.state_digest import Sums
from deltackpt.repository import Repository, chain
from deltackpt.util.parallel import ordered_map

Held = Mapping[str, tuple[str, tuple[int, ...], Sums]]  # by name: dtype, shape, and the sums of its words


def state_of(held: Held) -> str:
    """The state digest of weights, 64 hex digits."""
    return state_digest.state((name, dtype, shape, sums) for name, (dtype, shape, sums) in held.items())


def held_in(checkpoint: Checkpoint) -> Held:
    """The weights of a checkpoint directory; reads all of it."""
    held = {}
    for name, tensor in checkpoint.tensors.items():
        words = checkpoint.bytes_of(name).view(uint(DTYPES[tensor.dtype].width))
        held[name] = tensor.dtype, tuple(tensor.shape), state_digest.of_run(words)
        checkpoint.release(name)
    return held


def step_of_state(repo: Repository, head: Link, state: str) -> Manifest | None:
    """The newest step with a state digest on the chain of ``head``, as far as that was not collected."""
    newest = repo.load(head)
    if newest.state == state:
        return newest
    return next((step for step in chain.walk(head, repo.load, repo.edges()) if step.state == state), None)


def identify_step(repo: Repository, held: Held, ref: str = "main") -> Manifest:
    """The newest step of a branch that has exactly these weights.

    Raises ChainError ``base-differs`` where there is none; it names tensors that differ from the newest step.
    """
    want, head = state_of(held), repo.ref(ref)
    if head is not None and (found := step_of_state(repo, head.link, want)) is not None:
        return found
    raise ChainError(
        "base-differs",
        where=repo.store.url,
        have=f"weights of state {want[:16]}{_unlike(repo, repo.load(head.link), held) if head else ''}",
        need=f"those of a step on {ref!r}",
        hint="Load a step of this repository first: `deltackpt apply REPO DIR`.",
    )


def has_weights(repo: Repository, step: Manifest, checkpoint: Checkpoint, threads: int) -> bool:
    """Has a checkpoint exactly the weights of a step? Decided by hashes; side files do not count."""
    digests = repo.digests(step)
    need = {name: (t.dtype, t.shape) for name, t in repo.layout(step).tensors.items()}
    if {name: (t.dtype, t.shape) for name, t in checkpoint.tensors.items()} != need:
        return False

    def same(name: str) -> bool:
        found = proves(checkpoint.bytes_of(name), checkpoint.tensors[name].dtype, digests[name])
        checkpoint.release(name)
        return found

    return all(ordered_map(same, checkpoint.tensors, threads))


def _unlike(repo: Repository, step: Manifest, held: Held) -> str:
    """Against the newest step: which tensors are others, or which only have other values."""
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
