"""Whatever is a patch does the same to a tensor: parts in memory, by ranges, squashed, and what a writer remembers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support.states import FORMS, Memory, State, changed, part_of, random_bytes
from support.tile_by_tile import PARTS

from deltackpt.checkpoint.diff import difference
from deltackpt.codecs.base import Effect
from deltackpt.errors import ChainError, DeltackptError, FormatError
from deltackpt.format.dtypes import DTYPES
from deltackpt.format.manifest import Link
from deltackpt.patch.apply import decode_step, replace_whole, write_step
from deltackpt.patch.base import Patch
from deltackpt.patch.in_memory import InMemoryPatch
from deltackpt.patch.squashed import SquashedPatch
from deltackpt.restore.patch_reader import PatchReader

SHAPES = {"a": ("BF16", (40, 64)), "b": ("F32", (7,)), "c": ("I64", (3, 5)), "d": ("U8", ())}


def chain(steps: int) -> list[State]:
    """States of the same tensors; one of them stays as it is."""
    rng = np.random.default_rng(9)
    state: State = {name: (dtype, shape, random_bytes(rng, dtype, shape)) for name, (dtype, shape) in SHAPES.items()}
    states = [state]
    for _ in range(steps):
        shares = {"a": 0.1, "b": 0.9, "c": 0.0, "d": 1.0}
        state = {name: changed(rng, value, shares[name]) for name, value in state.items()}
        states.append(state)
    return states


def parts_patch(states: Sequence[State]) -> Patch:
    return PatchReader([PARTS["streamed"](part_of(states[0], states[-1]))])


def squashed(states: Sequence[State]) -> Patch:
    pairs = zip(states, states[1:], strict=False)
    return SquashedPatch([PatchReader([PARTS["streamed"](part_of(*pair))]) for pair in pairs])


def squashed_ahead(states: Sequence[State]) -> Patch:
    """All tensors went through the patches before; each is given once."""
    new = {name: np.frombuffer(data, np.uint8).copy() for name, (_, _, data) in states[-1].items()}
    patch = squashed(states)
    assert isinstance(patch, SquashedPatch)
    return SquashedPatch(patch.patches, lambda name: new[name].copy())


def remembered(states: Sequence[State]) -> InMemoryPatch:
    patch = InMemoryPatch(Link(0, "0" * 64))
    old, new = Memory(states[0]), Memory(states[-1])
    for name in states[0]:
        patch.add(difference(name, old, new), new.tensors.get(name))
    return patch


def half_remembered(states: Sequence[State]) -> Patch:
    patch = remembered(states)
    del patch._tensors["a"]
    return patch.over(parts_patch(states))


KINDS: dict[str, Callable[[Sequence[State]], Patch]] = {
    "parts": parts_patch,
    **{f"a part, {name}": lambda s, read=read: read(part_of(s[0], s[-1])) for name, read in PARTS.items()},
    "squashed": squashed,
    "squashed, ahead": squashed_ahead,
    "in memory": remembered,
    "in memory over parts": half_remembered,
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def patch_of(request: pytest.FixtureRequest) -> Callable[[Sequence[State]], Patch]:
    return request.param


@pytest.mark.parametrize("steps", [1, 3])
def test_a_patch_of_any_kind(patch_of: Callable[[Sequence[State]], Patch], steps: int) -> None:
    states = chain(steps)
    patch = patch_of(states)
    assert patch.names == {name for name in SHAPES if states[0][name] != states[-1][name]}
    assert patch.tensor("c") is None
    for name in patch.names:
        dtype, shape, data = states[0][name]
        found, known, old = patch.tensor(name), (dtype, shape), np.frombuffer(data, np.uint8)
        assert found is not None
        assert (found.name, found.dtype, found.shape) == (name, DTYPES[dtype], shape)
        decoded = decode_step(old, known, found)
        assert decoded is not None
        assert len(decoded.values) <= found.changes or len(decoded.values) == len(old) // found.dtype.width
        expected, written = old.copy(), old.copy()
        decoded.write_to(expected.view(decoded.values.dtype))
        assert expected.tobytes() == states[-1][name][2]
        assert write_step(written, known, found)
        assert written.tobytes() == states[-1][name][2]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_tensor_that_is_not_what_it_applies_to(patch_of: Callable[[Sequence[State]], Patch], steps: int) -> None:
    found = patch_of(chain(steps)).tensor("a")
    assert found is not None
    assert found.effect is Effect.CHANGES
    for known in (("F16", (40, 64)), ("BF16", (64, 40))):
        with pytest.raises(ChainError) as error:
            decode_step(np.zeros(40 * 64 * 2, np.uint8), known, found)
        assert error.value.code == "base-shape"
    with pytest.raises(ChainError) as error:
        replace_whole(found)
    assert error.value.code == "base-shape"


def test_tensors_that_come_and_go() -> None:
    """What replaces or removes is no change of elements; a chain that does so in between is not squashed."""
    old, new = chain(1)
    grown: State = {**new, "a": ("BF16", (80, 64), new["a"][2] * 2)}
    del grown["b"]
    patch = parts_patch([old, grown])
    gone, whole = patch.tensor("b"), patch.tensor("a")
    assert gone is not None
    assert whole is not None
    assert (gone.effect, whole.effect) == (Effect.REMOVES, Effect.REPLACES)
    assert replace_whole(gone) == (None, None)
    data, known = replace_whole(whole)
    assert data is not None
    assert (data.tobytes(), known) == (grown["a"][2], ("BF16", (80, 64)))
    for name in ("a", "b"):
        value = old[name]
        assert decode_step(np.frombuffer(value[2], np.uint8), value[:2], patch.tensor(name)) is None
        assert not write_step(np.frombuffer(value[2], np.uint8).copy(), value[:2], patch.tensor(name))
    both = squashed([old, new, grown])
    for name in ("a", "b"):
        value, held = old[name], both.tensor(name)
        with pytest.raises(DeltackptError) as error:
            decode_step(np.frombuffer(value[2], np.uint8), value[:2], held)
        assert error.value.code == "slot-unusable"
    kept = remembered([old, grown])
    assert kept.names == {"d"}
    assert not kept.whole


def test_parts_of_two_versions():
    """[F-META-5]: each is sound by itself."""
    old, new = chain(1)
    parts = [part_of({k: old[k]}, {k: new[k]}, form=form) for k, form in zip("ab", FORMS, strict=False)]
    for some in (parts[:1], parts[1:]):
        assert len(PatchReader([PARTS["streamed"](part) for part in some]).names) == 1
    with pytest.raises(FormatError) as error:
        PatchReader([PARTS["streamed"](part) for part in parts])
    assert error.value.code == "version-mixed"
