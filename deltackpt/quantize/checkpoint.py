"""A checkpoint directory, quantised into another one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltackpt.checkpoint.checkpoint import Checkpoint, CheckpointShard
from deltackpt.errors import CheckpointError, FormatError
from deltackpt.quantize.pieces import Quantizer
from deltackpt.quantize.recipe import Recipe
from deltackpt.torch_views.extract import Piece, pieces_of
from deltackpt.torch_views.words import NAMES
from deltackpt.util.disk import space_errors
from deltackpt.util.scratch import temporary_folder

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
_TORCH = {name: dtype for dtype, name in NAMES.items()}


def quantize_checkpoint(
    source: str | os.PathLike[str], target: str | os.PathLike[str], recipe: Recipe
) -> tuple[tuple[str, str], ...]:
    """Write the checkpoint of ``source`` to the folder ``target``, which is made, as ``recipe`` has it.

    Shards keep their names, side files are copied, `config.json` gets its `quantization_config`. A shard at a time is
    in memory, and its quantised form. Returns (path, reason) of what is in ``source`` and is not carried. Raises
    CheckpointError ``quantize-already``, ``quantize-shape``, ``quantize-nonfinite``, ``checkpoint-slices``,
    ``link-escapes``, UsageError ``quantize-option``, ``quantize-missing``, NoSpaceError, StoreError ``not-writable``,
    and what `Checkpoint` raises.
    """
    folder = Path(target)
    with Checkpoint.open(source) as opened:
        opened.check_whole()
        side = {path: opened.side_bytes(path) for path in opened.side}
        config = side.pop(CONFIG, None)
        with_config(config, recipe, ())  # refused before a shard is read
        kept: set[str] = set()
        taken: set[str] = set()
        naming = [False] * len(recipe.ignore)
        found: dict[str, str] = {}
        total, quantised = 0, 0
        for shard in opened.shards:
            state = _state(opened, shard)
            pieces, quantizer = _quantized(recipe, state)
            kept, taken = kept | quantizer.kept, taken | quantizer.taken
            naming = [a or b for a, b in zip(naming, quantizer.naming or naming, strict=True)]
            quantised += len(pieces) - len(state)
            _save({piece.name: piece.tensor for piece in pieces}, folder / shard.path)
            found.update(dict.fromkeys((piece.name for piece in pieces), shard.path))
            total += sum(piece.nbytes for piece in pieces)
        if not quantised:
            recipe.refuse_nothing(len(kept))
        recipe.refuse_unnamed(naming)
        last = with_config(config, recipe, kept, taken)
        opened.verify_unchanged()
        left_out = opened.left_out
    if INDEX in side:
        weight_map = {name: found[name] for name in sorted(found)}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        side[INDEX] = f"{json.dumps(index, indent=2)}\n".encode()
    for path, data in {**side, CONFIG: last}.items():
        with space_errors(folder / path):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
    return left_out


@contextmanager
def quantized_copy(
    source: str | os.PathLike[str], recipe: Recipe
) -> Iterator[tuple[Path, tuple[tuple[str, str], ...]]]:
    """A quantised copy of a checkpoint directory where the system keeps temporary files, gone at the end; and what
    `quantize_checkpoint` returns."""
    with ExitStack() as stack:
        with space_errors(Path(os.environ.get("TMPDIR", os.curdir))):
            folder = stack.enter_context(temporary_folder("quantize"))
        yield folder, quantize_checkpoint(source, folder, recipe)


def _state(opened: Checkpoint, shard: CheckpointShard) -> dict[str, torch.Tensor]:
    """The tensors of a shard, copied: a file that is cut short under way is found by its checkpoint."""
    found = {}
    for tensor in shard.header.tensors:
        if tensor.dtype not in _TORCH:
            have, need = tensor.dtype, "a dtype that torch has"
            raise CheckpointError("dtype-unpublishable", where=tensor.name, have=have, need=need)
        shape = (*tensor.shape[:-1], tensor.shape[-1] // 2) if tensor.dtype == "F4" else tensor.shape
        copied = torch.from_numpy(np.array(opened.bytes_of(tensor.name)))
        found[tensor.name] = copied.view(_TORCH[tensor.dtype]).reshape(shape)
        opened.release(tensor.name)
    return found


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """A safetensors file. Raises NoSpaceError, StoreError ``not-writable``: its library has one error for all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with space_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file(tensors, path, {"format": "pt"})
        except SafetensorError as error:
            if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def with_config(config: bytes | None, recipe: Recipe, kept: Iterable[str], taken: Iterable[str] = ()) -> bytes:
    """The bytes of a config.json, or of one that there was not, with the recipe's `quantization_config`; modules that
    are ``kept`` and ``taken``.

    Raises CheckpointError ``quantize-already`` if it has one, UsageError ``quantize-option`` for tied embeddings that
    are taken, FormatError ``json-syntax``.
    """
    read = _read(config)
    if (found := read.get("quantization_config")) is not None:  # null, as some tools write, is none
        have = f"a quantization_config of {found.get('quant_method', 'a method') if isinstance(found, dict) else found}"
        hint = "Publish it as it is, without a recipe."
        raise CheckpointError(
            "quantize-already", where=CONFIG, have=have, need="weights that are not quantised", hint=hint
        )
    text = read.get("text_config")
    if any(isinstance(part, dict) and part.get("tie_word_embeddings") is True for part in (read, text)):
        recipe.refuse_tied(taken)
    read["quantization_config"] = recipe.config(kept)
    return f"{json.dumps(read, indent=2, sort_keys=True)}\n".encode()


def _read(config: bytes | None) -> dict[str, Any]:
    try:
        value = json.loads(config or b"{}")
    except (ValueError, RecursionError) as error:
        raise FormatError("json-syntax", where=CONFIG, have=f"not JSON ({error})", need="one JSON value") from error
    if not isinstance(value, dict):
        raise FormatError("json-syntax", where=CONFIG, have=type(value).__name__, need="an object")
    return value


def with_side(side: Mapping[str, bytes], recipe: Recipe, kept: Iterable[str], taken: Iterable[str]) -> dict[str, bytes]:
    """Side files by path, config.json among them as `with_config` has it."""
    return {**side, CONFIG: with_config(side.get(CONFIG), recipe, kept, taken)}


def _quantized(recipe: Recipe, state: dict[str, torch.Tensor]) -> tuple[list[Piece], Quantizer]:
    """The pieces of one shard, and what made them; a shard may have nothing to quantise."""
    quantizer = Quantizer(recipe, lambda: pieces_of(state), nothing=True)
    return quantizer(), quantizer
