"""A live PyTorch module, such as one of Transformers, brought to another step in place: changed elements only."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.codecs import Decoded
from deltackpt.engines.module import WeightPlace, held, places
from deltackpt.engines.moves import Moves
from deltackpt.errors import ChainError
from deltackpt.format import state_digest
from deltackpt.format.dtypes import uint
from deltackpt.format.manifest import Link
from deltackpt.format.state_digest import Sums
from deltackpt.repository import Repository
from deltackpt.repository.chain import Plan
from deltackpt.repository.leases import pinned
from deltackpt.restore.identify import identify_step, state_of
from deltackpt.torch_views.names import Rename

Words = npt.NDArray[Any]


@dataclass(frozen=True)
class RefreshResult:
    """``base`` is the step that the module was at; ``changed`` counts elements that were written, ``read`` bytes."""

    step: int
    id: str
    state: str
    base: int
    patches: int
    anchor: int | None
    changed: int
    read: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Known:
    """What a module was proven to be, last time."""

    repository: str
    link: Link
    sums: dict[str, Sums]


_MODULES: WeakKeyDictionary[torch.nn.Module, _Known] = WeakKeyDictionary()


def refresh(
    model: torch.nn.Module,
    repo: Repository,
    step: str | int = "latest",
    *,
    ref: str = "main",
    rename: Rename | None = None,
    full: bool = False,
) -> RefreshResult:
    """Bring a module's weights to a step, in place and bit by bit; addresses stay.

    The first time, or with ``full``, all weights are digested to find the step that they are. From then on the check
    is in O(changes): the digest of every tensor, moved by what is read out of the module and what will be written, has
    to be the step's. It is made before anything is written. ``rename`` gives the checkpoint's name for a module's, or
    None to leave one out. Raises CheckpointError ``model-differs``, ChainError ``base-differs``, ``tied-differs``, and
    what reading raises; the module then is what it was.
    """
    began = time.monotonic()
    known = _MODULES.get(model)
    if known is not None and (full or known.repository != repo.id):
        known = None
    with pinned(repo, step, ref, have=known.link if known else None) as (link, _):
        target = repo.load(link)
        found = places(model, repo.layout(target).tensors, rename)
        if known is None:
            weights = held(found)
            base = identify_step(repo, weights, ref).link
            known = _Known(repo.id, base, {name: value[2] for name, value in weights.items()})
        if known.link == link:
            _MODULES[model] = known
            return RefreshResult(link.step, link.id, target.state, link.step, 0, None, 0, 0, _since(began))
        plan = repo.resolve(link, have=known.link)
        with Moves(repo, plan) as moves:
            changes = _prepare(moves, found)
        sums = _check(repo, plan, found, changes, known)
        _write(found, changes)
    base = known.link
    _MODULES[model] = _Known(repo.id, link, sums)
    return RefreshResult(
        step=link.step,
        id=link.id,
        state=target.state,
        base=base.step,
        patches=len(plan.patches),
        anchor=plan.anchor.step if plan.anchor else None,
        changed=sum(len(new.values) for new, _ in changes.values()),
        read=plan.bytes,
        seconds=_since(began),
    )


Changes = dict[str, tuple[Decoded, Words]]  # by name: new elements, and the old words in their places


def _prepare(moves: Moves, found: dict[str, WeightPlace]) -> Changes:
    changes: Changes = {}
    for name in moves.names:
        if name not in found:
            raise ChainError(
                "tensor-shape", where=name[:80], have="a tensor that came or went", need="the same tensors"
            )
        old = found[name].read()
        new = moves.of(name, old, found[name].known)
        changes[name] = new, old.view(uint(found[name].dtype.width))[new.positions]
    return changes


def _check(
    repo: Repository, plan: Plan, found: dict[str, WeightPlace], changes: Changes, known: _Known
) -> dict[str, Sums]:
    """The sums of every tensor after the change, which have to be the target's. Nothing was written yet."""
    digests = repo.digests(plan.target)
    sums = dict(known.sums)
    for name, (new, old) in changes.items():
        assert new.positions is not None
        sums[name] = state_digest.add(sums[name], state_digest.of_change(new.positions, old, new.values))
    for name, want in digests.items():
        if sums[name] != want.sums:
            raise ChainError(
                "base-differs",
                where=name[:80],
                have=f"weights that do not lead to step {plan.target.step}",
                need=f"those of step {known.link.step}",
                hint="Somebody else wrote to the module. Load it again; `full=True` digests all of it.",
            )
    state = state_of({name: (*place.known, sums[name]) for name, place in found.items()})
    if state != plan.target.state:
        raise ChainError("base-differs", where="the model", have=f"state {state[:16]}", need=plan.target.state[:16])
    owners: dict[Any, str] = {}
    for name, place in found.items():
        first = owners.setdefault(place.alias, name)
        if first != name and not _same(changes.get(first), changes.get(name)):
            have, need = f"values that differ from those of {first[:80]!r}", "one value for tensors that share memory"
            hint = "The model ties them and the step does not. Load it with untied weights."
            raise ChainError("tied-differs", where=name[:80], have=have, need=need, hint=hint)
    return sums


def _same(a: tuple[Decoded, Words] | None, b: tuple[Decoded, Words] | None) -> bool:
    if a is None or b is None:
        return not any(x is not None and len(x[0].values) for x in (a, b))
    p, q = a[0].positions, b[0].positions
    assert p is not None
    assert q is not None
    return np.array_equal(p, q) and np.array_equal(a[0].values, b[0].values)


def _write(found: dict[str, WeightPlace], changes: Changes) -> None:
    done: list[str] = []
    try:
        for name, (new, _) in changes.items():
            done.append(name)
            assert new.positions is not None
            found[name].write(new.positions, new.values)
    except BaseException:
        for name in done:
            new, old = changes[name]
            assert new.positions is not None
            found[name].write(new.positions, old)
        raise


def _since(began: float) -> float:
    return round(time.monotonic() - began, 3)
