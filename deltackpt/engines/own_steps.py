"""The steps of a repository as a rank reads them that has no cache: the engine is its own base.

What is on the host is a patch, the tensor that is decoded, and for an engine that has to load everything a checkpoint
in a temporary folder: from when that is known, mostly while the engine still works, until it has loaded it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from deltackpt.checkpoint import Checkpoint
from deltackpt.engines.cached_steps import RepositorySteps, Slot
from deltackpt.errors import UsageError
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository
from deltackpt.restore.journal import Journal
from deltackpt.restore.materialize import apply
from deltackpt.util.scratch import temporary_folder


class OwnSteps(RepositorySteps):
    """The branch ``ref`` of a repository. Implements `cached_steps.Steps`."""

    def __init__(self, repo: Repository, ref: str = "main", *, alone: bool = True) -> None:
        """``alone``: no other rank shares what `folder` makes, so that it can be made ahead."""
        super().__init__(repo, ref)
        self._held: tuple[Link, Path] | None = None  # a step that is whole on this host now
        self._alone, self._ahead = alone, ExitStack()
        self._made: tuple[Link, Path] | None = None  # what is in `_ahead`

    @classmethod
    def open(cls, url: str, ref: str = "main", *, trusted: bool = False, alone: bool = True) -> OwnSteps:
        """``alone`` as of the constructor; ``trusted``: only with signatures of keys that the environment of the engine
        names. Raises what `Repository.open` and `Repository.secure` raise, UsageError ``trust-file`` where it names
        none."""
        repo = Repository.open(url).secure()
        if trusted and repo.trust is None:
            have, need = "no DELTACKPT_TRUST", "the keys that serve-updates trusts, or CACHE"
            hint = "Without CACHE the engine itself reads the repository, and has to know whom to trust."
            raise UsageError("trust-file", where="the engine's environment", have=have, need=need, hint=hint)
        return cls(repo, ref, alone=alone)

    def ensure(self, link: Link) -> None:
        """A step is read when it is decoded."""

    def ensure_any(self, link: Link) -> None:
        """As `ensure`."""

    @contextmanager
    def held(self, link: Link, folder: str) -> Iterator[None]:
        """Within the block ``folder`` is the whole checkpoint of a step, as the engine was started from it."""
        before, self._held = self._held, (link, Path(folder))
        try:
            yield
        finally:
            self._held = before

    def prepare(self, link: Link | None) -> None:
        """Make the checkpoint that `folder` gives while the engine works, and keep it until it was asked for. None: no
        step's. Raises what `apply` raises."""
        if not self._alone or (self._made is not None and self._made[0] == link):
            return
        self._made = None
        self._ahead.close()
        if link is not None:
            with ExitStack() as stack:
                self._made = link, stack.enter_context(self._checkpoint(link))
                self._ahead = stack.pop_all()

    @contextmanager
    def folder(self, link: Link) -> Iterator[Path]:
        """The checkpoint of a step in a temporary folder (TMPDIR), gone at the end. Raises what `apply` raises."""
        made, self._made = self._made, None
        with self._ahead as stack:
            folder = made[1] if made is not None and made[0] == link else stack.enter_context(self._checkpoint(link))
            with self.held(link, str(folder)):
                yield folder

    @contextmanager
    def _checkpoint(self, link: Link) -> Iterator[Path]:
        with temporary_folder("step") as parent:
            folder = parent / f"{link.step:08d}-{link.id}"
            apply(self._repo, folder, f"{link.step}-{link.id}", ref=self.ref)
            yield folder

    @contextmanager
    def slot(self, link: Link | None) -> Iterator[Slot | None]:
        """The step within `held` or `folder` of it; else None."""
        if link is None or self._held is None or self._held[0] != link:
            yield None
            return
        with Checkpoint.open(self._held[1]) as found:
            yield Slot(self._held[1], self.table(link), found.bytes_of)

    def journal(self, start: Link, end: Link) -> Journal | None:
        """There is none."""
        return None
