"""The newest step of a branch, for engines that need no cache: one small request a look."""

from __future__ import annotations

from deltackpt.errors import NotFoundError
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository
from deltackpt.sync.backoff import GRACE, check_grace, explaining


class BranchHead:
    """``grace``: seconds for which the repository or the branch may be missing."""

    def __init__(self, repo: Repository, ref: str = "main", grace: float = GRACE) -> None:
        check_grace(grace)
        self._repo, self._ref, self.grace = repo, ref, grace
        self._newest: Link | None = None

    def look(self) -> Link | None:
        """Where the branch is now, if it moved. Raises what `Repository.ref` raises, and that it is not there."""
        before = self._newest
        with explaining(self._repo):
            if (found := self._repo.ref(self._ref)) is None:
                raise self._repo.absent(self._ref)
            self._newest = found.link
        return self._newest if self._newest != before else None

    @property
    def newest(self) -> Link:
        """Where it was at the last look. Raises NotFoundError ``branch-empty`` before the first."""
        if self._newest is None:
            raise NotFoundError("branch-empty", where=self._ref, have="no step yet", need="a step")
        return self._newest
