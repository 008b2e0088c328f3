"""The files that go with the weights: config, generation config, tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch

from deltackpt.checkpoint.files import MAX_SIDE
from deltackpt.errors import UsageError
from deltackpt.format.names import check_path
from deltackpt.torch_views.adapters import Peft, adapter_config, base_of, untied_by_adapters
from deltackpt.torch_views.wrappers import unwrapped
from deltackpt.util.scratch import temporary_folder

Side = Mapping[str, bytes] | Iterable[Any] | None


def side_files(model: Any, side: Side, dtype: Any = None, peft: Peft | None = None) -> dict[str, bytes]:
    """{path: bytes} of the model's own configs, and of ``side``: a mapping of the same form, or things that have
    ``save_pretrained``, such as a tokenizer. With an adapter alone goes its own config. Raises UsageError
    ``side-unknown``, FormatError ``name-escapes``.
    """
    model = unwrapped(model)
    found: dict[str, bytes] = {}
    with temporary_folder("side") as root:
        parts = [adapter_config(model)] if peft == "adapter" else _configs_of(model, dtype, peft)
        parts = [part for part in parts if part is not None]
        if not isinstance(side, Mapping):
            parts += side or ()
        for part in parts:
            if not hasattr(part, "save_pretrained"):
                have = type(part).__name__
                raise UsageError("side-unknown", where="side", have=have, need="bytes by path, or save_pretrained")
            part.save_pretrained(root)
        for path in sorted(root.rglob("*")):
            if path.is_file() and path.suffix != ".safetensors" and path.stat().st_size <= MAX_SIDE:
                found[path.relative_to(root).as_posix()] = path.read_bytes()
    if isinstance(side, Mapping):
        found.update(side)
    for name in found:
        check_path(name, "side")
    return found


def _configs_of(model: Any, dtype: Any, peft: Peft | None) -> list[Any]:
    base = base_of(model) if peft == "merged" else model
    config = _config_of(base, dtype)
    if peft == "merged" and getattr(config, "tie_word_embeddings", False) and untied_by_adapters(model):
        config.tie_word_embeddings = False
    return [config, getattr(base, "generation_config", None)]


def _config_of(model: Any, dtype: Any) -> Any:
    """The model's config with what `save_pretrained` of the model would add: its class, and the published dtype."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return None
    config = copy.deepcopy(config)
    with suppress(AttributeError):
        config.architectures = config.architectures or [type(model).__name__]
        if isinstance(dtype, torch.dtype):
            config.dtype = str(dtype).removeprefix("torch.")
    return config
