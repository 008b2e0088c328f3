"""A live PyTorch module, such as one of Transformers, moved to another step in place: changed elements only."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from deltackpt.engines.card import CardChanges, card_of, decode_on
from deltackpt.engines.card_compile import compile_for
from deltackpt.engines.module import ModuleWrite, WeightPlace, places, weights_of
from deltackpt.engines.scatter import Scatter
from deltackpt.engines.step_changes import StepChanges
from deltackpt.errors import ChainError, DeltackptError
from deltackpt.format import state_digest
from deltackpt.format.digests import TensorDigests
from deltackpt.format.dtypes import uint
from deltackpt.format.layout import TensorsByName
from deltackpt.format.manifest import Link, Manifest
from deltackpt.format.state_digest import Sums, TensorDigest
from deltackpt.gpu.compile_ahead import CompileAhead
from deltackpt.gpu.transfers import PinnedBuffer
from deltackpt.repository import Repository
from deltackpt.repository.chain import Plan
from deltackpt.repository.leases import pinned
from deltackpt.restore.identify import identify_step
from deltackpt.restore.late_source import Room
from deltackpt.torch_views.names import Rename
from deltackpt.util.garbage import collections_put_off


@dataclass(frozen=True)
class RefreshResult:
    """``base`` is the step that the module was at; ``changed`` counts elements that were written, ``read`` bytes;
    ``seconds`` in all.
    """

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
        """By the names of its fields."""
        return asdict(self)


@dataclass
class _Known:
    """What a module was proven to be, last time; ``written`` tells whether anything was written to it since."""

    repository: str
    link: Link
    sums: dict[str, Sums]
    written: dict[str, tuple[int, int]] = field(default_factory=dict)


_MODULES: WeakKeyDictionary[torch.nn.Module, _Known] = WeakKeyDictionary()


def _weights_in(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """All parameters and buffers."""
    yield from model.parameters()
    yield from model.buffers()


def prepare(model: torch.nn.Module) -> Sequence[CompileAhead]:
    """Begin, in the background, to compile the kernels that `refresh` needs for a module on a card: 10 s and more in a
    process that finds none in Triton's cache. A `refresh` waits for them, and begins it by itself if nobody did. -> of
    each card, what compiles: ``wait()``, ``seconds``, ``error``.
    """
    return compile_for(_weights_in(model))


def refresh(
    model: torch.nn.Module,
    repo: Repository,
    step: str | int = "latest",
    *,
    ref: str = "main",
    rename: Rename | None = None,
    full: bool = False,
) -> RefreshResult:
    """Move a module's weights to a step, in place and bit by bit; addresses stay.

    The first time, or with ``full``, all weights are digested to find the step that they are, and where torch says that
    one was written to since, as by `load_state_dict` (not through ``.data``). Else the check is in O(changes): the
    digest of every tensor, moved by what is read out of the module and what will be written, has to be the step's. It
    is made before anything is written. ``rename`` gives the checkpoint's name for a module's, or
    None to leave one out. Raises CheckpointError ``model-differs``, ChainError ``base-differs``, ``tied-differs``, and
    what reading raises; the module then is what it was.
    """
    with collections_put_off():
        return _refresh(model, repo, (step, ref), rename, full)


def _refresh(
    model: torch.nn.Module, repo: Repository, wanted: tuple[str | int, str], rename: Rename | None, full: bool
) -> RefreshResult:
    began, (step, ref) = time.monotonic(), wanted
    known = _MODULES.get(model)
    if known is None:
        prepare(model)
    if known is not None and (full or known.repository != repo.id):
        known = None
    with ExitStack() as stack:
        link, _ = stack.enter_context(pinned(repo, step, ref, have=known.link if known else None))
        room = _room(model)
        likely = _likely(repo, link, known, room)
        if likely is not None:
            stack.callback(likely.join)
        target = repo.load(link)
        found = places(model, repo.layout(target).tensors, rename)
        if known is not None and known.written != _written(found):
            known = likely = None
        if known is None:
            weights = weights_of(found)
            base = identify_step(repo, weights, ref).link
            known = _Known(repo.id, base, {name: value[2] for name, value in weights.items()})
        if known.link == link:
            known.written = _written(found)
            _MODULES[model] = known
            return RefreshResult(link.step, link.id, target.state, link.step, 0, None, 0, 0, _since(began))
        changes = likely or StepChanges(repo, repo.resolve(link, have=known.link), late=True, room=room)
        plan = changes.plan
        with changes:
            changed = _move(repo, plan, changes, found, known)
    base, known.link = known.link, link
    known.written = _written(found)
    _MODULES[model] = known
    return RefreshResult(
        step=link.step,
        id=link.id,
        state=target.state,
        base=base.step,
        patches=len(plan.patches),
        anchor=plan.anchor.step if plan.anchor else None,
        changed=changed,
        read=plan.bytes,
        seconds=_since(began),
    )


def _room(model: torch.nn.Module) -> Room | None:
    """Pinned memory for parts, of a module on a GPU."""
    used = next(_weights_in(model), None)
    return PinnedBuffer().bytes if used is not None and used.device.type == "cuda" else None


def _likely(repo: Repository, link: Link, known: _Known | None, room: Room | None) -> StepChanges | None:
    """What leads to a step, if the module is still what it was: its parts are hashed from now on, which takes longer
    than anything else. None where nothing does; what is wrong then is raised when it is needed."""
    if known is None or known.link == link:
        return None
    try:
        return StepChanges(repo, repo.resolve(link, have=known.link), late=True, room=room).begin()
    except DeltackptError:
        return None


def _written(found: Mapping[str, WeightPlace]) -> dict[str, tuple[int, int]]:
    """Of each weight its address, and torch's count of writes to it, which those of `torch.inference_mode` have not."""
    return {
        name: (place.tensor.data_ptr(), 0 if place.tensor.is_inference() else place.tensor._version)
        for name, place in found.items()
    }


Changes = dict[str, ModuleWrite]  # by name


def _move(repo: Repository, plan: Plan, changes: StepChanges, found: dict[str, WeightPlace], known: _Known) -> int:
    """Write what leads to a plan's target, and advance the sums of ``known``. -> how many elements.

    On a card hop by hop, each proven before it is written: a patch is decoded in the light of what it applies to.
    """
    card = card_of(found) if changes.patches else None
    written: list[Scatter] = []
    sums, spent = known.sums, 0
    try:
        if card is None:
            sums = _hop(plan.target, repo, changes, found, known, written, CardChanges())
        else:
            for number, hop in enumerate(plan.patches):
                target, start = repo.load(hop.end), _Known(known.repository, hop.start, sums)
                decoded = decode_on(card, changes.patches[number], found, spent, repo.layout(target).named)
                spent = decoded.spent
                if number == len(plan.patches) - 1:
                    decoded.look()  # while the parts are still being hashed
                sums = _hop(target, repo, changes.hop(number), found, start, written, decoded)
    except BaseException:
        for scatter in reversed(written):
            scatter.rollback()
        raise
    known.sums = sums
    return sum(scatter.elements for scatter in written)


def _hop(
    target: Manifest, repo: Repository, changes: StepChanges, found: dict[str, WeightPlace], known: _Known,
    written: list[Scatter], card: CardChanges,
) -> dict[str, Sums]:  # fmt: skip
    """Prove and write one move, whose scatter joins ``written``; -> the sums after it."""
    writes = _prepare(changes, found, card.gained.keys())
    sums = _check(target, repo.digests(target), repo.layout(target).named, found, writes, known, card.gained)
    changes.join()  # the parts have their sha256
    written.append(Scatter([*writes.values(), *card.writes]))
    written[-1].write()
    return sums


def _prepare(changes: StepChanges, found: dict[str, WeightPlace], done: AbstractSet[str]) -> Changes:
    """What is written where, with the old words of those places, but for tensors that are ``done``. Nothing is
    written."""
    writes: Changes = {}
    for name in changes.names:
        if name in done:
            continue
        if name not in found:  # [F-APPLY-5]
            have, need = "a tensor that was added or removed", "the same tensors"
            raise ChainError("tensor-shape", where=name[:80], have=have, need=need)
        place = found[name]
        old = place.read()
        new = changes.of(name, old, place.known)
        assert new.positions is not None
        words = old.view(uint(place.dtype.width))[new.positions]
        writes[name] = ModuleWrite(place, new.positions, new.values, words)
    return writes


def _check(
    target: Manifest,
    digests: Mapping[str, TensorDigest],
    named: TensorsByName,
    found: dict[str, WeightPlace],
    changes: Changes,
    known: _Known,
    gained: Mapping[str, Sums],
) -> dict[str, Sums]:
    """The sums of every tensor after the change, which have to be the target's. Nothing was written yet."""
    sums = known.sums | {name: state_digest.add(known.sums[name], gain) for name, gain in gained.items()}
    for name, w in changes.items():
        sums[name] = state_digest.add(sums[name], state_digest.of_change(w.positions, w.old, w.new))
    assert found.keys() == named.numbers.keys(), "what `places` has seen to"
    have = np.array([*map(sums.__getitem__, named.names)], np.uint64).reshape(-1, state_digest.LANES)
    if not np.array_equal(have, TensorDigests.of(named, digests).sums):  # [F-APPLY-5]
        name = next(name for name, want in digests.items() if sums[name] != want.sums)
        raise ChainError(
            "base-differs",
            where=name[:80],
            have=f"weights that do not lead to step {target.step}",
            need=f"those of step {known.link.step}",
            hint="Other code wrote to the module. Load it again; `full=True` digests all of it.",
        )
    state = named.state_text.digest(have)
    if state != target.state:  # [F-APPLY-5]
        raise ChainError("base-differs", where="the model", have=f"state {state[:16]}", need=target.state[:16])
    check_ties(found, changes)
    return sums


def check_ties(found: dict[str, WeightPlace], changes: Changes) -> None:
    """Names that share memory have to change alike. Raises ChainError ``tied-differs``."""
    owners: dict[Any, str] = {}
    for name, place in found.items():
        if not place.shared:
            continue
        first = owners.setdefault(place.alias, name)
        if first != name and not _same(changes.get(first), changes.get(name)):
            have, need = f"values that differ from those of {first[:80]!r}", "one value for tensors that share memory"
            hint = "The model ties them and the step does not. Load it with untied weights."
            raise ChainError("tied-differs", where=name[:80], have=have, need=need, hint=hint)


def _same(a: ModuleWrite | None, b: ModuleWrite | None) -> bool:
    if a is None or b is None:
        return not any(w is not None and w.elements for w in (a, b))
    return a.same(b)


def _since(began: float) -> float:
    return round(time.monotonic() - began, 3)
