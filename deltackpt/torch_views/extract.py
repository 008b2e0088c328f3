"""A model, or a state dict, as the pieces that this process holds of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from deltackpt.errors import CheckpointError, UsageError
from deltackpt.format.dtypes import DType, storage_shape
from deltackpt.torch_views.boxes import Box
from deltackpt.torch_views.names import Rename, listed, published_names
from deltackpt.torch_views.words import dtype_of, shape_of, words

Source: TypeAlias = Any  # a torch.nn.Module, a state dict, or a function that gives one
Cast: TypeAlias = "torch.dtype | Mapping[str, torch.dtype] | Callable[[str, torch.Tensor], torch.dtype | None] | None"
Locate: TypeAlias = Callable[
    [str, torch.Tensor], "tuple[tuple[int, ...], tuple[int, ...]] | None"
]  # -> (offset, whole shape)

CASTABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Piece:
    """What this process holds of one tensor: ``tensor`` is the box, contiguous, in its own dtype; ``cast`` the
    published one, if that is another."""

    name: str
    dtype: DType
    box: Box
    tensor: torch.Tensor
    cast: torch.dtype | None = None

    @property
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
        """Storage elements from ``start`` to ``stop`` as integers, cast on the way; a view where there is no cast."""
        flat = self.tensor.detach().reshape(-1)[start:stop]
        return words(flat if self.cast is None else flat.to(self.cast), self.dtype)

    @property
    def layout(self) -> tuple[str, Box]:
        """What may not change from step to step."""
        return self.dtype.name, self.box


def state_dict_of(source: Source) -> dict[str, Any]:
    """Parameters and persistent buffers by the model's own names."""
    found = source.state_dict() if hasattr(source, "state_dict") else source() if callable(source) else source
    if not isinstance(found, Mapping):
        have = type(found).__name__
        raise UsageError("state-unknown", where="the trainer hook", have=have, need="a model, or a state dict")
    return dict(found)


def pieces_of(
    source: Source,
    *,
    dtype: Cast = None,
    rename: Rename | None = None,
    locate: Locate | None = None,
) -> list[Piece]:
    """Every tensor's piece, tied weights once, sorted by the bytes of its name.

    ``dtype`` is what floating-point tensors are cast to on the way in; without it each keeps its own. A DTensor's
    piece is its local shard; ``locate`` says where a plain tensor lies, if it is not whole. Raises CheckpointError
    ``names-collide``, ``not-tensors``, ``dtype-unpublishable``; UsageError ``names-unmapped``, ``placement-unknown``.
    """
    state = state_dict_of(source)
    names = published_names(_untied(state, source), rename)
    if odd := [name for name in names if not isinstance(state[name], torch.Tensor)]:
        hint = "Map each of them to None with `rename=` to leave it out."
        raise CheckpointError("not-tensors", where="the model", have=listed(odd), need="tensors", hint=hint)
    pieces = [_piece(new, state[name], dtype, locate) for name, new in names.items()]
    return sorted(pieces, key=lambda piece: piece.name.encode())


def _untied(state: Mapping[str, Any], source: Source) -> list[str]:
    """The names without those that are another one's storage; the model says which of them it saves."""
    tied = set(getattr(source, "_tied_weights_keys", None) or ())
    seen: set[tuple[Any, ...]] = set()
    own = []
    for name in sorted(state, key=lambda name: name in tied):  # stable: the first in the model's order stays
        value = state[name]
        if isinstance(value, torch.Tensor) and (local := _local(value)).numel():
            key = (local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride())
            if local.device.type != "meta" and key in seen:
                continue
            seen.add(key)
        own.append(name)
    order = {name: i for i, name in enumerate(state)}
    return sorted(own, key=order.__getitem__)


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.wait() if hasattr(local, "wait") else local


def _piece(name: str, value: Any, cast: Cast, locate: Locate | None) -> Piece:
    local = _local(value)
    to = _cast(name, local, cast)
    dtype = dtype_of(to or local.dtype, name)
    shape = shape_of(local, dtype)
    box = _box_of_dtensor(name, value) if hasattr(value, "to_local") else None
    if box is None:
        found = locate(name, local) if locate else None
        box = Box.all_of(shape) if found is None else Box(tuple(found[1]), tuple(found[0]), shape)
    if box.shape != shape or any(o + n > w for o, n, w in zip(box.offset, box.shape, box.whole, strict=True)):
        have = f"a local shard of shape {shape} at {box.offset} of {box.whole}"
        raise _placement(name, have)
    if box.proper and dtype.bits != 8 * dtype.width:
        raise _placement(name, f"a shard of {dtype.name}")
    return Piece(name, dtype, box, local.detach().contiguous(), to)


def _cast(name: str, tensor: torch.Tensor, cast: Cast) -> torch.dtype | None:
    if cast is None:
        return None
    if isinstance(cast, torch.dtype):
        to = cast if tensor.dtype in CASTABLE else None
    else:
        to = cast.get(name) if isinstance(cast, Mapping) else cast(name, tensor)
    return None if to == tensor.dtype else to


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
