"""Which step a trainer's weights are: decided by their state digest, never by a step number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deltackpt.errors import ChainError, ConflictError
from deltackpt.format.manifest import Manifest
from deltackpt.format.state_digest import ZERO, Sums
from deltackpt.hooks.options import Resume
from deltackpt.hooks.plan import Global
from deltackpt.hooks.publish import Base
from deltackpt.hooks.state import state_of
from deltackpt.repository import Ref, Repository
from deltackpt.restore.identify import step_of_state
from deltackpt.torch_views.names import listed


def resume_from(
    repo: Repository, ref: str, plan: Mapping[str, Global], sums: Mapping[str, Sums], resume: Resume
) -> tuple[Base | None, Ref | None, bool]:
    """-> the step that the next one follows, the ref as it is now, and whether an anchor has to come first.

    ``plan`` and ``sums`` are those of the trainer's weights. If they are the ref's step, training continues there. If
    they are an earlier step of the chain, "rewind" moves the ref back to it with the next step. If they are no step,
    "anchor" stores the next step whole. Raises ConflictError ``resume-behind``, ChainError ``resume-unknown`` where
    ``resume`` does not say so.
    """
    head = repo.head(ref)
    if head is None:
        return None, None, False
    newest, state = repo.load(head.link), state_of(plan, sums)
    if newest.state == state:
        return _base(repo, newest), head, False
    if resume != "anchor" and (found := step_of_state(repo, head.link, state)) is not None:
        if resume == "rewind":
            return _base(repo, found), head, False
        raise ConflictError(
            "resume-behind",
            where=f"{repo.store.url}, ref {ref}",
            have=f"weights of step {found.step}, and a ref at step {newest.step}",
            need="the weights that the ref names",
            hint=f"resume='rewind' goes on from step {found.step}; the steps after it stay readable until gc.",
        )
    if resume == "anchor":
        return _base(repo, newest), head, True
    raise ChainError(
        "resume-unknown",
        where=f"{repo.store.url}, ref {ref}",
        have=f"weights that are no step of the chain: {_difference(repo, newest, plan, sums)}",
        need=f"those of step {newest.step}, or of one before it",
        hint="Load the checkpoint that was published last, or give resume='anchor' to store the weights whole.",
    )


def _difference(repo: Repository, step: Manifest, plan: Mapping[str, Global], sums: Mapping[str, Sums]) -> str:
    """What tells the weights from a step: other names, dtypes, shapes, or else values."""
    there, digests = repo.layout(step).tensors, repo.digests(step)
    said = []
    if new := sorted(plan.keys() - there.keys()):
        said.append(f"names that step {step.step} does not have, {listed(new, 3)}")
    if gone := sorted(there.keys() - plan.keys()):
        said.append(f"names that only step {step.step} has, {listed(gone, 3)}")
    both = sorted(plan.keys() & there.keys())
    if odd := [f"{n!r} {plan[n].dtype}, not {there[n].dtype}" for n in both if plan[n].dtype != there[n].dtype]:
        said.append(f"other dtypes, {_some(odd)}")
    odd = [f"{n!r} {list(plan[n].shape)}, not {list(there[n].shape)}" for n in both if plan[n].shape != there[n].shape]
    if odd:
        said.append(f"other shapes, {_some(odd)}")
    if not said:
        values = [n for n in both if sums.get(n, ZERO) != digests[n].sums]
        said.append(f"other values in {len(values)} of {len(both)} tensors, {listed(values, 3)}")
    return "; ".join(said)


def _some(found: Sequence[str]) -> str:
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more


def _base(repo: Repository, manifest: Manifest) -> Base:
    return Base(manifest.link, manifest, repo.digests(manifest))
