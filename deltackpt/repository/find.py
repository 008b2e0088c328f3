"""Which step a person means: by number, by number and id, by tag, or the newest."""

from __future__ import annotations

from collections.abc import Callable

from deltackpt.errors import ChainError, ConflictError, NotFoundError, UsageError
from deltackpt.format.manifest import Link
from deltackpt.repository.manifests import FAR, Manifests
from deltackpt.repository.marker import read_marker
from deltackpt.repository.objects import Objects
from deltackpt.repository.refs import EXACT, Ref, Refs, is_ref_name


class StepFinder:
    """Finds steps of a repository; every error names what is there instead."""

    def __init__(self, objects: Objects, refs: Refs, manifests: Manifests, identity: str) -> None:
        self._objects, self._refs, self._manifests, self._identity = objects, refs, manifests, identity
        # Raises where no trusted key vouches for a step that was asked for by its number or id: as one of the branch
        # ``refs/NAME`` where it was not reached from there, None for one of any.
        self.check: Callable[[Link, str | None], None] = lambda link, name: None

    def confirm_place(self) -> None:
        """Ask the store whether this repository is still there, see `Repository.confirm_place`."""
        found = read_marker(self._objects.store)
        if found != self._identity:  # [S-FOL-4]
            raise ChainError(
                "repository-replaced",
                where=self._objects.store.url,
                have=f"repository {found}",
                need=f"repository {self._identity}, which was there before",
                hint="Another repository took its place, and nothing of it was read. Start again if it is meant; a "
                "cache belongs to one repository, so give it a CACHE of its own.",
            )

    def branch(self, name: str) -> Ref | None:
        """The branch, None where nothing was published at all, see `Repository.branch`."""
        if (found := self.head(name)) is not None:
            return found
        if (absent := self.absent(name)).code != "branch-empty":
            raise absent
        return None

    def absent(self, name: str) -> NotFoundError:
        """Why a branch is not there, see `Repository.absent`."""
        self.confirm_place()
        where = f"{self._objects.store.url}, ref {name}"
        if others := sorted(other for other in self._refs.names("refs/") if other != name):
            hint = f"The refs are {', '.join(others[:8])}{' and more' if len(others) > 8 else ''}."
            return NotFoundError("ref-missing", where=where, have="no such ref", need=f"ref {name!r}", hint=hint)
        try:
            self.head(name)
        except NotFoundError as error:
            return error
        have, hint = "a repository without steps", "Nothing was published there yet."
        return NotFoundError("branch-empty", where=where, have=have, need="a first step", hint=hint)

    def head(self, name: str) -> Ref | None:
        """The branch, or None where it begins. Raises NotFoundError ``ref-missing``, see `Repository.head`."""
        if (found := self._refs.branch(name)) is not None or next(self._refs.names("refs/"), None) is not None:
            return found
        for link in reversed(self._manifests.links()):  # a first publish that was killed leaves steps without parents
            if self._manifests.load(link).parent is None:
                continue
            newest = f"{link.step}-{link.id[:12]}"
            raise NotFoundError(
                "ref-missing",
                where=f"{self._objects.store.url}, ref {name}",
                have=f"no ref at all, and steps up to {link.step}",
                need="the ref that led to them",
                hint=f"It was lost, or removed. `deltackpt mirror MIRROR REPO` sets it as a mirror has it. "
                f"`--step {newest}` reads that step; "
                f"`deltackpt write CHECKPOINT_DIR REPO --resume-from {newest}` goes on from it, with a new ref.",
            )
        return None

    def lost(self, name: str) -> NotFoundError:
        """Why a branch is gone, see `Repository.lost`."""
        error = self.absent(name)
        if error.code != "branch-empty":
            return error
        have, need = "nothing: the ref and all steps were removed", "the branch, which was there before"
        return NotFoundError("ref-missing", where=error.where, have=have, need=need)

    def find(self, spec: str | int | Link, ref: str) -> Link:
        """The step that ``spec`` names, see `Repository.find`."""
        if isinstance(spec, Link):
            return spec
        if spec == "latest":
            return self._head_of(ref, "step latest").link
        if isinstance(spec, str) and not (spec.isascii() and spec.isdigit()):
            return self._named(spec)
        found, reached = self._on_branch(int(spec), ref)
        self.check(found, None if reached else f"refs/{ref}")
        return found

    def _named(self, spec: str) -> Link:
        """A step by number and id, or by tag."""
        if (exact := EXACT.fullmatch(spec)) is not None:
            links = self._manifests.numbered(int(exact[1]))
            found = self._only(spec, [link for link in links if link.id.startswith(exact[2])])
            self.check(found, None)
            return found
        if not is_ref_name(spec):
            need = "a number from 0 on, `latest`, NUMBER-ID, or a tag"
            raise UsageError("ref-name", where="step", have=repr(spec)[:120], need=need)
        if (tag := self._refs.tag(spec)) is not None:
            return tag.link
        raise self._missing(f"tag {spec!r}", [])

    def _on_branch(self, number: int, ref: str) -> tuple[Link, bool]:
        """A step by number on a branch or, beyond what was collected, the only one of that number -> it, and whether it
        was reached from the branch's head."""
        head = self._head_of(ref, f"step {number}")
        after = None
        link: Link | None = head.link
        load = self._manifests.loading_ahead(head.link, FAR)
        while link is not None and link.step >= number:
            if link.step == number:
                return link, True
            after = link
            try:
                link = load(link).parent
            except NotFoundError:
                if after == head.link:
                    raise self.gone(after.step) from None
                return self._only(number, self._manifests.numbered(number)), False  # [S-READ-6]
        nearest = [found.step for found in (after, link) if found is not None]
        raise self._missing(f"step {number}", nearest)

    def _head_of(self, ref: str, what: str) -> Ref:
        """The branch on which a step is looked for. Raises what `Repository.branch` raises, and ``step-missing``."""
        if (head := self.branch(ref)) is None:
            raise self._missing(what, [])
        return head

    def _only(self, spec: str | int, found: list[Link]) -> Link:
        if len(found) == 1:
            return found[0]
        if found:
            ids = ", ".join(f"{link.step}-{link.id[:12]}" for link in found[:4])
            have = f"{len(found)} steps that could be meant"
            raise ConflictError(  # [S-REW-3]
                "step-ambiguous", where=self._objects.store.url, have=have, need="one", hint=f"Name one of {ids}."
            )
        raise self.gone(int(str(spec).partition("-")[0]))

    def gone(self, step: int) -> NotFoundError:
        """The error for a step that is not there, or no longer; names the nearest ones that are."""
        steps = [link.step for link in self._manifests.links()]
        nearest = [max((s for s in steps if s < step), default=None), min((s for s in steps if s > step), default=None)]
        return self._missing(f"step {step}", [s for s in nearest if s is not None])

    def _missing(self, what: str, nearest: list[int]) -> NotFoundError:
        hint = "`deltackpt log` lists what is there."
        if nearest:
            hint = f"The nearest step{'s are' if len(nearest) > 1 else ' is'} {' and '.join(map(str, nearest))}."
        return NotFoundError("step-missing", where=self._objects.store.url, have="no such step", need=what, hint=hint)
