"""A model, or a state dict, as the pieces that this process holds of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch

from deltackpt.errors import CheckpointError, UsageError
from deltackpt.format.dtypes import DType, storage_shape
from deltackpt.torch_views.adapters import Peft
from deltackpt.torch_views.boxes import Box
from deltackpt.torch_views.conversion import Computed, Slice, cut, whole_view
from deltackpt.torch_views.memory_spans import MemorySpan, spans_of
from deltackpt.torch_views.names import Rename, listed
from deltackpt.torch_views.naming import Known, Named, Naming
from deltackpt.torch_views.real import check_real
from deltackpt.torch_views.ties import local_of
from deltackpt.torch_views.words import dtype_of, run_of, shape_of, words

Source: TypeAlias = Any  # a torch.nn.Module, a state dict, or a function that gives one
Cast: TypeAlias = "torch.dtype | Mapping[str, torch.dtype] | Callable[[str, torch.Tensor], torch.dtype | None] | None"
Locate: TypeAlias = Callable[
    [str, torch.Tensor], "tuple[tuple[int, ...], tuple[int, ...]] | None"
]  # -> (offset, whole shape)

CASTABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Piece:
    """What this process holds of one tensor: ``tensor`` is the box in its own dtype, contiguous unless it is in host
    memory; ``cast`` the published dtype, if that is another."""

    name: str
    dtype: DType
    box: Box
    tensor: torch.Tensor
    cast: torch.dtype | None = None

    @cached_property
    def elements(self) -> int:
        """Storage elements."""
        return int(self.tensor.numel())

    @property
    def nbytes(self) -> int:
        """Bytes as published."""
        return self.elements * self.dtype.width

    @property
    def storage(self) -> tuple[int, ...]:
        """The box's shape in storage elements."""
        return storage_shape(self.dtype, self.box.shape)

    def words(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Storage elements from ``start`` to ``stop`` as integers, cast on the way; a view where there is no cast and
        the tensor is contiguous."""
        flat = run_of(self.tensor.detach(), start, self.elements if stop is None else min(stop, self.elements))
        return words(flat if self.cast is None else flat.to(self.cast), self.dtype)

    @property
    def layout(self) -> tuple[str, Box]:
        """What may not change from step to step."""
        return self.dtype.name, self.box


class PieceForm(NamedTuple):
    """How a piece is made of a state dict: all that there is to say of it but for its tensor, which is ``part`` of
    ``source``, or all of that."""

    name: str
    dtype: DType
    box: Box
    cast: torch.dtype | None
    source: str
    part: Slice | None

    def of(self, state: Mapping[str, Any]) -> Piece:
        """The piece of a state dict that has its tensors where they were."""
        value = state[self.source]
        local = (value if self.part is None else whole_view(value, self.part)).detach()
        return Piece(self.name, self.dtype, self.box, _flat(local), self.cast)


def _flat(local: torch.Tensor) -> torch.Tensor:
    return local if local.device.type == "cpu" else local.contiguous()


def state_dict_of(source: Source) -> dict[str, Any]:
    """Parameters and persistent buffers by the model's own names."""
    found = source.state_dict() if hasattr(source, "state_dict") else source() if callable(source) else source
    if not isinstance(found, Mapping):
        have = type(found).__name__
        raise UsageError("state-unknown", where="the trainer hook", have=have, need="a model, or a state dict")
    return dict(found)


class Extractor:
    """Gives the pieces of a source as it is now: every tensor's, tied weights once, sorted by the bytes of its name.

    Names, shapes and dtypes are those that the model's own ``save_pretrained`` would write, then ``rename``'s.
    ``dtype`` is what floating-point tensors are cast to on the way in; without it each keeps its own. One dtype for all
    leaves alone what the model keeps in fp32, and what ``known``, the parent step or the base checkpoint, has in
    another. ``model`` is the model of a source that is none. ``peft`` says what goes out of a model with adapters. A
    DTensor's piece is its local shard; ``locate`` says where a plain tensor lies, if it is not whole.
    """

    def __init__(
        self,
        source: Source,
        *,
        dtype: Cast = None,
        rename: Rename | None = None,
        locate: Locate | None = None,
        known: Known | None = None,
        peft: Peft | None = None,
        model: torch.nn.Module | None = None,
    ) -> None:
        self._source, self._dtype, self._locate = source, dtype, locate
        self._known = known or Known()
        self._naming = Naming(source if model is None else model, rename, self._known, self._whole_of, peft)
        # What a caller's function or an adapter says may be another thing each time.
        own = peft is None and locate is None and not callable(rename)
        self._recurs = own and (dtype is None or isinstance(dtype, torch.dtype))
        self._last: tuple[list[MemorySpan], list[PieceForm]] | None = None

    def __call__(self) -> list[Piece]:
        """Raises CheckpointError ``names-collide``, ``names-differ``, ``not-tensors``, ``dtype-unpublishable``,
        ``tensor-placeholder``, ``tensor-subclass``; UsageError ``names-unmapped``, ``placement-unknown``.
        """
        state = state_dict_of(self._source)
        spans = spans_of(state) if self._recurs else None
        if spans is not None and self._last is not None and spans == self._last[0]:
            return [form.of(state) for form in self._last[1]]
        found = self._naming.find(state)
        own = found.state
        used = {source for part in found.parts.values() for source in part.sources}
        if odd := [name for name in own if name in used and not isinstance(own[name], torch.Tensor)]:
            hint = "Map each of them to None with `rename=` to leave it out."
            raise CheckpointError("not-tensors", where="the model", have=listed(odd), need="tensors", hint=hint)
        for name in sorted(used):
            check_real(name, local_of(own[name]), found.parameters.get(name))
        self._check_computed(found)
        made = found.compute()
        kept = found.kept(self._dtype)
        pieces = [self._piece(name, found, made.get(name), name in kept) for name in found.parts]
        pieces.sort(key=lambda piece: piece.name.encode())
        if spans is not None and not made:
            self._last = spans, _forms(pieces, found, state)
        return pieces

    def _whole_of(self, name: str, value: torch.Tensor) -> tuple[int, ...] | None:
        """The shape of which a plain tensor is a shard."""
        if self._locate is None or hasattr(value, "to_local"):
            return None
        found = self._locate(name, value)
        return None if found is None else tuple(found[1])

    def _check_computed(self, found: Named) -> None:
        """Raise unless what is computed is computed from whole tensors."""
        for name, part in found.parts.items():
            for source in part.sources if isinstance(part, Computed) else ():
                value = found.state[source]
                if hasattr(value, "to_local") or self._whole_of(source, value) not in (None, tuple(value.shape)):
                    raise _placement(name, f"a tensor that is computed from a shard, of {source!r}")

    def _piece(self, name: str, found: Named, made: torch.Tensor | None, kept: bool) -> Piece:
        local, box = self._held(name, found) if made is None else (made, None)
        to = self._cast(name, local, kept)
        dtype = dtype_of(to or local.dtype, name)
        shape = shape_of(local, dtype)
        box = Box.all_of(shape) if box is None else box
        if box.shape != shape or any(o + n > w for o, n, w in zip(box.offset, box.shape, box.whole, strict=True)):
            raise _placement(name, f"a local shard of shape {shape} at {box.offset} of {box.whole}")
        if box.proper and dtype.bits != 8 * dtype.width:
            raise _placement(name, f"a shard of {dtype.name}")
        return Piece(name, dtype, box, _flat(local.detach()), to)

    def _held(self, name: str, found: Named) -> tuple[torch.Tensor, Box | None]:
        """What this process holds of a tensor that is a slice, and its box; None for the whole of it."""
        part = found.parts[name]
        assert isinstance(part, Slice)
        value = found.state[part.source]
        local = local_of(value)
        box = _box_of_dtensor(name, value) if hasattr(value, "to_local") else None
        if box is None and self._locate is not None:
            at = self._locate(name if found.convert is None else part.source, local)
            dtype = dtype_of(local.dtype, name)
            box = None if at is None else Box(tuple(at[1]), tuple(at[0]), shape_of(local, dtype))
        if part.is_all(found.wholes[part.source]):
            return local, box
        if box is None:
            return whole_view(local, part), None
        held = cut(local, box, part)
        if held is None:
            raise _placement(name, f"a shard of {part.source!r}, of which no box is one of {name!r}")
        return held

    def _cast(self, name: str, tensor: torch.Tensor, kept: bool) -> torch.dtype | None:
        cast = self._dtype
        if cast is None:
            return None
        if isinstance(cast, torch.dtype):
            stays = kept or self._known.keeps(name, tensor.dtype, cast)
            to = cast if tensor.dtype in CASTABLE and not stays else None
        else:
            to = cast.get(name) if isinstance(cast, Mapping) else cast(name, tensor)
        return None if to == tensor.dtype else to


def _forms(pieces: list[Piece], found: Named, state: Mapping[str, Any]) -> list[PieceForm]:
    """How these pieces, none of which is computed, were made of a state dict."""
    called = {id(value): name for name, value in state.items()}
    forms = []
    for piece in pieces:
        part = found.parts[piece.name]
        assert isinstance(part, Slice)
        cut_out = None if part.is_all(found.wholes[part.source]) else part
        source = called[id(found.state[part.source])]
        forms.append(PieceForm(piece.name, piece.dtype, piece.box, piece.cast, source, cut_out))
    return forms


def pieces_of(
    source: Source,
    *,
    dtype: Cast = None,
    rename: Rename | None = None,
    locate: Locate | None = None,
) -> list[Piece]:
    """What an `Extractor` gives, once."""
    return Extractor(source, dtype=dtype, rename=rename, locate=locate)()


def _box_of_dtensor(name: str, value: Any) -> Box:
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(isinstance(placement, Partial) for placement in value.placements):
        raise _placement(name, "a partial sum")
    whole = tuple(value.shape)
    shape, offset = compute_local_shape_and_global_offset(whole, value.device_mesh, value.placements)
    if tuple(shape) == (0,) and not offset:  # this rank is not on the tensor's mesh
        shape, offset = (0,) * len(whole), (0,) * len(whole)
    # An empty shard may be said to start anywhere.
    clipped = tuple(min(o, w - n) for o, w, n in zip(offset, whole, shape, strict=True))
    return Box(whole, clipped, tuple(shape))


def _placement(name: str, have: str) -> UsageError:
    hint = "Say where it lies with `locate=`, or publish from a full state dict."
    return UsageError("placement-unknown", where=name, have=have, need="one box of the tensor", hint=hint)
