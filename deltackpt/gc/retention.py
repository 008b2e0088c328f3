"""Which steps are kept, and why: the policy of a gc. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deltackpt.format.manifest import Link
from deltackpt.repository.paths import Node, branch

GRACE = 3600  # seconds


@dataclass(frozen=True)
class Policy:
    """A step is kept if any of these says so; with none of them set, every step of a branch is.

    ``last``: the newest so many of each branch. ``every``: steps whose number is a multiple. ``within``: steps
    published in the last so many seconds. ``tags``: tags that must be there; all tags are kept, named here or not.
    ``grace``: whatever is younger than so many seconds stays, needed or not. All times are the store's.
    """

    last: int | None = None
    every: int | None = None
    within: int | None = None
    tags: tuple[str, ...] = ()
    grace: int = GRACE

    @property
    def keeps_all(self) -> bool:
        """Whether every step of a branch is kept."""
        return self.last is None and self.every is None and self.within is None

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def kept(
    policy: Policy, nodes: Mapping[str, Node], ages: Mapping[str, float], heads: Iterable[tuple[str, Link]]
) -> dict[str, str]:
    """By id: why the policy keeps a step. ``ages`` are seconds since a manifest was put, ``heads`` name the branches.

    A step that the branches do not lead to, at or above where their history begins, was left behind by a rewind and is
    not kept. Below that, where steps between were collected, that cannot be told, and the policy is applied.
    """
    why: dict[str, str] = {}
    on_branch: set[str] = set()
    begin = 0
    for name, head in heads:
        why.setdefault(head.id, f"head of {name}")
        steps = list(branch(head, nodes))
        on_branch.update(node.link.id for node in steps)
        if steps and steps[-1].parent is not None:
            begin = max(begin, steps[-1].link.step)
        for node in steps[: policy.last or 0]:
            why.setdefault(node.link.id, f"one of the last {policy.last} of {name}")
    for id_, node in nodes.items():
        if id_ not in on_branch and node.link.step >= begin:
            continue
        if policy.keeps_all:
            why.setdefault(id_, "every step of a branch")
        if policy.every is not None and node.link.step % policy.every == 0:
            why.setdefault(id_, f"every {policy.every} steps")
        if policy.within is not None and ages[id_] <= policy.within:
            why.setdefault(id_, f"published within {policy.within} seconds")
    return why
