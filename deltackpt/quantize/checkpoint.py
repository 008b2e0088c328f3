"""A checkpoint directory, quantised into another one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import CheckpointError
from deltackpt.quantize.pieces import Quantizer
from deltackpt.quantize.recipe import Recipe
from deltackpt.torch_views.extract import Piece, pieces_of
from deltackpt.util.scratch import temporary_folder

CONFIG, INDEX = "config.json", "model.safetensors.index.json"


def quantize_checkpoint(source: str | os.PathLike[str], target: str | os.PathLike[str], recipe: Recipe) -> None:
    """Write the checkpoint of ``source`` to the folder ``target``, which is made, as ``recipe`` has it.

    Shards keep their names, side files are copied, `config.json` gets its `quantization_config`. A shard at a time is
    in memory, and its quantised form. Raises CheckpointError ``quantize-already``, ``quantize-shape``,
    ``quantize-nonfinite``, UsageError ``quantize-option``, ``quantize-missing``, and what `Checkpoint.open` raises.
    """
    from safetensors.torch import load_file, save_file

    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    with Checkpoint.open(source) as opened:
        kept: set[str] = set()
        found: dict[str, str] = {}
        total, quantised = 0, 0
        for shard in opened.shards:
            state = load_file(opened.root / shard.path)
            pieces, left = _quantized(recipe, state)
            kept |= left
            quantised += len(pieces) - len(state)
            (folder / shard.path).parent.mkdir(parents=True, exist_ok=True)
            save_file({piece.name: piece.tensor for piece in pieces}, folder / shard.path, {"format": "pt"})
            found.update(dict.fromkeys((piece.name for piece in pieces), shard.path))
            total += sum(piece.nbytes for piece in pieces)
        if not quantised:
            recipe.refuse_nothing(len(kept))
        opened.verify_unchanged()
        for path in opened.side:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(opened.root / path, folder / path)
    if (folder / INDEX).exists():
        weight_map = {name: found[name] for name in sorted(found)}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    config = folder / CONFIG
    config.write_bytes(with_config(config.read_bytes() if config.exists() else None, recipe, kept))


@contextmanager
def quantized_copy(source: str | os.PathLike[str], recipe: Recipe) -> Iterator[Path]:
    """A quantised copy of a checkpoint directory where the system keeps temporary files, gone at the end."""
    with temporary_folder("quantize") as folder:
        quantize_checkpoint(source, folder, recipe)
        yield folder


def with_config(config: bytes | None, recipe: Recipe, kept: Iterable[str]) -> bytes:
    """The bytes of a config.json, or of one that there was not, with the recipe's `quantization_config`.

    Raises CheckpointError ``quantize-already`` if it has one.
    """
    read: dict[str, Any] = {} if config is None else json.loads(config)
    if "quantization_config" in read:
        have = f"a quantization_config of {read['quantization_config'].get('quant_method', 'a method')}"
        hint = "Publish it as it is, without a recipe."
        raise CheckpointError(
            "quantize-already", where=CONFIG, have=have, need="weights that are not quantised", hint=hint
        )
    read["quantization_config"] = recipe.config(kept)
    return f"{json.dumps(read, indent=2, sort_keys=True)}\n".encode()


def with_side(side: Mapping[str, bytes], recipe: Recipe, kept: Iterable[str]) -> dict[str, bytes]:
    """Side files by path, config.json among them as `with_config` has it."""
    return {**side, CONFIG: with_config(side.get(CONFIG), recipe, kept)}


def _quantized(recipe: Recipe, state: dict[str, Any]) -> tuple[list[Piece], frozenset[str]]:
    """The pieces of one shard, and the modules that keep their weights; a shard may have nothing to quantise."""
    quantizer = Quantizer(recipe, lambda: pieces_of(state), nothing=True)
    return quantizer(), quantizer.kept
