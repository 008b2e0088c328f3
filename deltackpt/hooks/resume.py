"""Which step a trainer's weights are: decided by their state digest, never by a step number."""

from __future__ import annotations

from deltackpt.errors import ChainError, ConflictError
from deltackpt.format.manifest import Manifest
from deltackpt.hooks.options import Resume
from deltackpt.hooks.publish import Base
from deltackpt.repository import Ref, Repository
from deltackpt.restore.identify import step_of_state


def resume_from(repo: Repository, ref: str, state: str, resume: Resume) -> tuple[Base | None, Ref | None, bool]:
    """-> the step that the next one follows, the ref as it is now, and whether an anchor has to come first.

    ``state`` is the state digest of the trainer's weights, hex. If it is that of the ref's step, training continues
    there. If it is that of an earlier step of the chain, "rewind" moves the ref back to it with the next step. If it is
    that of no step, "anchor" stores the next step whole. Raises ConflictError ``resume-behind``, ChainError
    ``resume-unknown`` where ``resume`` does not say so.
    """
    head = repo.head(ref)
    if head is None:
        return None, None, False
    newest = repo.load(head.link)
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
        have=f"weights that are no step of the chain (state {state[:16]}…)",
        need=f"those of step {newest.step}, or of one before it",
        hint="Load the checkpoint that was published last, or give resume='anchor' to store the weights whole.",
    )


def _base(repo: Repository, manifest: Manifest) -> Base:
    return Base(manifest.link, manifest, repo.digests(manifest))
