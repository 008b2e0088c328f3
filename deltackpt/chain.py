"""The graph of steps. Pure: manifests in, plans out, no I/O. Every rule of lineage lives here, and only here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deltackpt.errors import ChainError
from deltackpt.format.manifest import Link, Manifest


@dataclass(frozen=True)
class Plan:
    """How to reach ``target``: from the ``anchor`` (None: from the state that is there), then ``patches`` in order."""

    target: Manifest
    anchor: Manifest | None
    patches: tuple[Manifest, ...]

    @property
    def bytes(self) -> int:
        """Bytes of payload to read."""
        whole = sum(f.size for f in (self.anchor.anchor or ())) if self.anchor else 0
        return whole + sum(f.size for m in self.patches for f in m.patch or ())


def walk(target: Link, load: Callable[[Link], Manifest]) -> list[Manifest]:
    """The chain from ``target`` back to its first step, newest first; each manifest is checked against its child.

    Raises ChainError ``chain-differs`` where a child and its parent do not agree.
    """
    chain: list[Manifest] = []
    link: Link | None = target
    while link is not None:
        manifest = load(link)
        if chain:
            check_parent(chain[-1], manifest)
        chain.append(manifest)
        link = manifest.parent
    return chain


def check_parent(child: Manifest, parent: Manifest) -> None:
    """A child names its parent's repository, step and state; the id is checked where the parent was loaded."""
    have = (parent.repository, parent.step, parent.state)
    need = (child.repository, child.parent.step if child.parent else None, child.base)
    if have != need:
        raise ChainError(
            "chain-differs",
            where=f"step {child.step}",
            have=f"a parent of step {parent.step}, state {parent.state[:16]}, repository {parent.repository}",
            need=f"step {need[1]}, state {(child.base or '')[:16]}, repository {child.repository}",
            hint="`deltackpt verify` shows what is left of the chain.",
        )


def resolve(target: Link, load: Callable[[Link], Manifest], *, have: Link | None = None) -> Plan:
    """The cheapest way, in bytes, to the state of ``target``, for a reader that holds the state of ``have``.

    Walks back from the target until it meets ``have`` or an anchor; beyond the first anchor only ``have`` can be cheaper.
    Raises ChainError ``chain-broken`` where a step has no way from its parent and no anchor.
    """
    chain: list[Manifest] = []
    best: Plan | None = None
    link: Link | None = target
    cost = 0
    while link is not None:
        if have is not None and link.id == have.id:
            plan = Plan(chain[0] if chain else load(link), None, tuple(reversed(chain)))
            return plan if best is None or plan.bytes < best.bytes else best
        manifest = load(link)
        if chain:
            check_parent(chain[-1], manifest)
        if manifest.anchor is not None:
            plan = Plan(chain[0] if chain else manifest, manifest, tuple(reversed(chain)))
            if best is None or plan.bytes < best.bytes:
                best = plan
            if have is None or have.step >= manifest.step:
                return best
        if manifest.patch is None or (best is not None and cost > best.bytes):
            break
        cost += sum(f.size for f in manifest.patch)
        chain.append(manifest)
        link = manifest.parent
    if best is None:
        raise ChainError(
            "chain-broken",
            where=f"step {target.step}",
            have="a chain that reaches no anchor",
            need="an anchor, and patches from there",
            hint="`deltackpt verify` shows which steps can be restored.",
        )
    return best


def index(manifests: Mapping[str, Manifest]) -> Callable[[Link], Manifest]:
    """A loader over manifests that are in memory, by id."""
    return lambda link: manifests[link.id]
