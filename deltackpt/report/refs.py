"""The names by which steps are found: branches and tags, with the steps that they are at."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from deltackpt.errors import DeltackptError, StoreError
from deltackpt.repository import Repository


@dataclass(frozen=True)
class NamedStep:
    """``kind`` is branch or tag; ``time`` is when the step was published, in seconds since 1970.

    ``error`` is the code of what is wrong with the ref or the manifest that it names, and then fields may be None.
    """

    kind: str
    name: str
    step: int | None
    id: str | None
    time: int | None
    error: str | None


@dataclass(frozen=True)
class NamedSteps:
    """All of them: branches, then tags, each by step and name."""

    repository: str
    id: str
    refs: tuple[NamedStep, ...]

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def refs(repo: Repository) -> NamedSteps:
    """The branches and tags; a damaged one is listed with what is wrong. Raises StoreError."""
    found = [_read(repo, kind, name) for kind in ("branch", "tag") for name in repo.ref_names(_FOLDERS[kind])]
    found.sort(key=lambda ref: (ref.kind, -1 if ref.step is None else ref.step, ref.name))
    return NamedSteps(repo.store.url, repo.id, tuple(found))


_FOLDERS = {"branch": "refs/", "tag": "tags/"}


def _read(repo: Repository, kind: str, name: str) -> NamedStep:
    link = None
    try:
        ref = repo.ref(name) if kind == "branch" else repo.tag(name)
        link = ref.link if ref else None
        time, error = (repo.load(link).time, None) if link else (None, "ref-missing")
    except StoreError:
        raise
    except DeltackptError as damage:
        time, error = None, damage.code
    return NamedStep(kind, name, link.step if link else None, link.id if link else None, time, error)
