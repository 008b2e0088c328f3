"""The pieces of a checkpoint, quantised: a weight becomes its values and its scales, all else stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from deltackpt.errors import CheckpointError, UsageError
from deltackpt.quantize.arithmetic import divided, magnitudes, scales_of, values_of, window, without_scale
from deltackpt.quantize.recipe import Recipe
from deltackpt.torch_views.boxes import Box
from deltackpt.torch_views.extract import CASTABLE, Piece
from deltackpt.torch_views.names import listed
from deltackpt.torch_views.words import dtype_of, shape_of

# A value, or why there is none -> the values of all ranks, in their order; raises at all of them if one has failed.
Exchange: TypeAlias = Callable[[Any, "Exception | None"], list[Any]]
Message: TypeAlias = "dict[str, tuple[Box | None, torch.Tensor]]"  # of a weight: cells, and the largest in each
SCALES = ("_scale", "_scale_inv", "_global_scale", "_zero_point", "_scales")  # after the name of what they belong to
PACKED = (".weight", "_packed", ".qweight", "_blocks")  # what quantised values are called, of no float that can be cast
NAMING = ""  # the place of a message that is of no weight: what of the ignore list names something
ROW = 128  # elements of a row that shows what a recipe makes of one


def alone(value: Any, error: Exception | None) -> list[Any]:
    """The `Exchange` of one process."""
    if error is not None:
        raise error
    return [value]


class Quantizer:
    """Gives what ``extract`` gives, quantised; called by all ranks together.

    ``kept`` are the modules whose weights stay as they are, once it was called, ``taken`` the others, and ``naming``
    what of the recipe's ignore list names something. Raises what ``extract`` raises,
    CheckpointError ``quantize-already``, ``quantize-shape``, ``quantize-nonfinite``, UsageError ``quantize-option``
    where the recipe leaves nothing to quantise, or ignores what is not there, unless ``nothing`` allows it,
    ``placement-unknown``.
    """

    def __init__(
        self,
        recipe: Recipe,
        extract: Callable[[], list[Piece]],
        exchange: Exchange = alone,
        *,
        nothing: bool = False,
    ) -> None:
        self.recipe, self.kept, self.taken = recipe, frozenset[str](), frozenset[str]()
        self.naming: list[bool] | None = None
        self._extract, self._exchange, self._nothing = extract, exchange, nothing

    def __call__(self) -> list[Piece]:
        """Sorted by the bytes of their names."""
        pieces: list[Piece] = []
        largest: dict[str, torch.Tensor] = {}
        failed: Exception | None = None
        try:
            pieces = self._extract()
            largest = self._largest(pieces)
        except Exception as error:
            failed = error
        of_others = self._exchange(self._message(pieces, largest), failed)
        if self.naming is None:
            self._check_names([said[NAMING][1] for said in of_others])
        made: list[Piece] = []
        for piece in pieces:
            if piece.name in largest:
                others = [said[piece.name] for said in of_others if piece.name in said]
                made += self._quantized(piece, largest[piece.name], others) if piece.box.size else self._empty(piece)
            else:
                made.append(piece)
        return sorted(made, key=lambda piece: piece.name.encode())

    def _check_names(self, said: Sequence[torch.Tensor]) -> None:
        """Of all ranks together: a stage of a pipeline has some of the modules."""
        self.naming = [bool(any(one)) for one in zip(*(part.tolist() for part in said), strict=True)]
        if not self._nothing:
            self.recipe.refuse_unnamed(self.naming)

    def _largest(self, pieces: Sequence[Piece]) -> dict[str, torch.Tensor]:
        """`magnitudes` of the weights that are quantised, by name."""
        if odd := _quantised(self.recipe, pieces):
            need, hint = "weights that are not quantised", "Publish it as it is, without a recipe."
            raise CheckpointError("quantize-already", where="the model", have=listed(odd), need=need, hint=hint)
        weights = [piece for piece in pieces if _is_weight(piece)]
        taken = [piece for piece in weights if not self.recipe.ignores(_module(piece))]
        self.taken = frozenset(map(_module, taken))
        self.kept = frozenset(map(_module, weights)) - self.taken
        if not taken and not self._nothing:
            self.recipe.refuse_nothing(len(weights))
        for piece in taken:
            self._check(piece)
        found = {piece.name: magnitudes(self.recipe, piece.box, _values(piece)) for piece in taken}
        if odd := [name for name, most in found.items() if not bool(torch.isfinite(most).all())]:
            need = "finite weights: there is no scale for others"
            raise CheckpointError("quantize-nonfinite", where=listed(odd), have="infinite or NaN", need=need)
        return found

    def _check(self, piece: Piece) -> None:
        """Raise unless the recipe fits the shape of a weight, and its box."""
        together, group, box = self.recipe.together, self.recipe.group, piece.box
        if group and box.whole[1] % group:
            hint = f"Leave it alone: ignore=(*IGNORE, {_module(piece)!r})."
            need = f"columns in groups of {group}"
            raise CheckpointError("quantize-shape", where=piece.name, have=str(box.whole), need=need, hint=hint)
        if box.offset[1] % together or box.shape[1] % together:
            have = f"columns {box.offset[1]} to {box.offset[1] + box.shape[1]} at this rank"
            raise UsageError("placement-unknown", where=piece.name, have=have, need=f"multiples of {together} columns")

    def _message(self, pieces: Sequence[Piece], largest: Mapping[str, torch.Tensor]) -> Message:
        """What other ranks have to know of this rank's share of weights, in host memory."""
        said: Message = {}
        if self.naming is None:
            modules = {piece.name.rpartition(".")[0] for piece in pieces}
            said[NAMING] = None, torch.tensor(self.recipe.naming(modules))
        for piece in pieces:
            if piece.name in largest and piece.box.proper:
                box = window(self.recipe, piece.box)
                if divided(self.recipe, piece.box):
                    said[piece.name] = box, largest[piece.name].cpu()
                elif self.recipe.name == "nvfp4" and piece.box.size:
                    said[piece.name] = None, largest[piece.name].amax().cpu()
        return said

    def _quantized(
        self, piece: Piece, largest: torch.Tensor, others: Sequence[tuple[Box | None, torch.Tensor]]
    ) -> list[Piece]:
        recipe, box, stem = self.recipe, piece.box, piece.name.removesuffix("weight")
        touched = window(recipe, box)
        held = Box.all_of(touched.whole) if divided(recipe, box) else touched  # the cells whose scales are stored here
        if divided(recipe, box):
            largest = largest.new_zeros(held.shape)
            for at, part in others:
                if at is not None and at.size:
                    region = at.inside(held)
                    largest[region] = torch.maximum(largest[region], part.to(largest))
        most = None
        if recipe.name == "nvfp4":
            parts = [part.amax().to(largest) for part in (largest, *(part for _, part in others)) if part.numel()]
            most = torch.stack([largest.new_zeros(()), *parts]).amax()
        scales = scales_of(recipe, largest, most)
        if odd := without_scale(recipe, scales):
            have = f"{odd:,} scales that are zero or not finite"
            need = f"weights of a magnitude that {recipe.name} has scales for"
            hint = f"Leave it alone: ignore=(*IGNORE, {_module(piece)!r})."
            raise CheckpointError("quantize-nonfinite", where=piece.name, have=have, need=need, hint=hint)
        used = {**scales, "used": scales["used"].reshape(held.shape)[touched.inside(held)]}
        name, values = values_of(recipe, box, _values(piece), used)
        together = recipe.together
        packed = Box(
            (box.whole[0], box.whole[1] // together), (box.offset[0], box.offset[1] // together), tuple(values.shape)
        )
        made = [_piece(stem + name, values, packed)]
        for name, tensor in scales.items():
            if name != "used":
                by_cell = tuple(tensor.shape) == held.shape and len(held.whole) == tensor.dim()
                made.append(_piece(stem + name, tensor, held if by_cell else Box.all_of(tuple(tensor.shape))))
        if recipe.name == "int4-group":
            made.append(_piece(stem + "weight_shape", torch.tensor(box.whole, dtype=torch.int64), Box.all_of((2,))))
        return made

    def _empty(self, piece: Piece) -> list[Piece]:
        """The same of a rank that holds nothing of a weight: the names and dtypes, and nothing of any."""
        row = piece.tensor.new_zeros((1, self.recipe.group or ROW), dtype=piece.cast or piece.tensor.dtype)
        whole = Piece(piece.name, piece.dtype, Box.all_of(tuple(row.shape)), row)
        made = self._quantized(whole, magnitudes(self.recipe, whole.box, row), [])
        grid, together = window(self.recipe, piece.box).whole, self.recipe.together
        shapes = {"weight": piece.box.whole, "weight_packed": (piece.box.whole[0], piece.box.whole[1] // together)}
        found = []
        for part in made:
            by_cell = part.box.whole == window(self.recipe, whole.box).whole
            shape = shapes.get(part.name[len(piece.name) - 6 :], grid if by_cell else part.box.whole)
            none = (0,) * len(shape)
            found.append(_piece(part.name, part.tensor.new_empty(none), Box(shape, none, none)))
        return found


def _quantised(recipe: Recipe, pieces: Sequence[Piece]) -> list[str]:
    """The tensors of a model that only a quantised one has.

    Values that are no floats of two bytes and more; scales beside such values, or beside a weight whose own scale
    the recipe is to write. A parameter that is merely called so, as the `logit_scale` of CLIP, is none.
    """
    dtypes = {piece.name: piece.tensor.dtype for piece in pieces}

    def is_values(piece: Piece) -> bool:
        dtype = piece.tensor.dtype
        plain = dtype in CASTABLE or dtype is torch.bool or dtype.is_complex
        return not plain and piece.name.endswith(PACKED) and len(piece.box.whole) > 1

    def is_scale(piece: Piece) -> bool:
        for suffix in SCALES:
            stem = piece.name.removesuffix(suffix)
            dtype = dtypes.get(stem, dtypes.get(f"{stem}_packed", dtypes.get(f"{stem}_blocks")))
            if stem == piece.name or dtype is None:
                continue
            if dtype not in CASTABLE or (stem.endswith(".weight") and not recipe.ignores(stem.removesuffix(".weight"))):
                return True
        return False

    return [piece.name for piece in pieces if is_values(piece) or is_scale(piece)]


def _is_weight(piece: Piece) -> bool:
    return (
        piece.name.endswith(".weight")
        and len(piece.box.whole) == 2
        and 0 not in piece.box.whole
        and piece.tensor.dtype in CASTABLE
        and (piece.cast is None or piece.cast in CASTABLE)
    )


def _module(piece: Piece) -> str:
    return piece.name.removesuffix(".weight")


def _values(piece: Piece) -> torch.Tensor:
    """As they would be published without a recipe."""
    local = piece.tensor.detach()
    return local if piece.cast is None else local.to(piece.cast)


def _piece(name: str, tensor: torch.Tensor, box: Box) -> Piece:
    dtype = dtype_of(tensor.dtype, name)
    assert shape_of(tensor, dtype) == box.shape, name
    return Piece(name, dtype, box, tensor.contiguous())
