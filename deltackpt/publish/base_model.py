"""What a step of an adapter says of the weights that it was trained over (spec/NOTES.md, "Adapters")."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from deltackpt.format.manifest import Link
from deltackpt.repository import Repository

BASE = "base_model"  # the field of a step's metadata


@dataclass(frozen=True)
class BaseRecord:
    """A step of the base model: ids of repository and manifest, branch, number, and state digest."""

    repository: str
    ref: str
    step: int
    id: str
    state: str

    @classmethod
    def of(cls, value: Any) -> BaseRecord | None:
        """From a step's metadata; None for what is none, such as another tool's field of that name."""
        texts = ("repository", "ref", "id", "state")
        if not isinstance(value, dict) or not all(isinstance(value.get(name), str) for name in texts):
            return None
        step = value.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            return None
        return cls(step=step, **{name: value[name] for name in texts})

    @property
    def link(self) -> Link:
        """The step."""
        return Link(self.step, self.id)


def over_base(
    repository: str | os.PathLike[str] | Repository, step: int | str = "latest", *, ref: str = "main"
) -> dict[str, Any]:
    """The metadata of an adapter that is trained over a step of a base model's repository.

        TrainerHook(model, "runs/adapter", peft="adapter", metadata=over_base("runs/base", 12))

    `serve-adapters --base-model` refuses one of other weights. Raises what `Repository.open` and `Repository.find`
    raise.
    """
    repo = repository if isinstance(repository, Repository) else Repository.open(repository)
    found = repo.load(repo.find(step, ref))
    link = found.link
    return {BASE: asdict(BaseRecord(repo.id, ref, link.step, link.id, found.state))}
