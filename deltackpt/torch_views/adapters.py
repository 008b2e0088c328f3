"""Models with adapters of PEFT: merged into the weights of the base model, or the adapter alone, as PEFT saves them.

PEFT's own code merges and names. A layer is merged into a copy of its weights, and everything is put back: the bits of
the training do not change, which adding and taking away would not promise.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch

from deltackpt.errors import UsageError
from deltackpt.torch_views.wrappers import is_a, unwrapped

Peft = Literal["merged", "adapter"]

MODEL = "peft.peft_model.PeftModel"
TUNER = "peft.tuners.tuners_utils.BaseTuner"
LAYER = "peft.tuners.tuners_utils.BaseTunerLayer"
WRAPPER = "peft.utils.other.AuxiliaryTrainingWrapper"
TRAINED_COPY = "peft.utils.other.ModulesToSaveWrapper"


def has_adapters(model: Any) -> bool:
    """Is it PEFT's model, or one of Transformers with adapters of PEFT?"""
    return is_a(model, MODEL) or bool(getattr(model, "_hf_peft_config_loaded", False))


def check_choice(source: Any, peft: Peft | None, renamed: bool) -> None:
    """Raise UsageError ``peft-choice`` for a model with adapters of which it is not said what goes out, and for one
    without them of which it is. With `rename=` the caller says it of each tensor."""
    model = unwrapped(source)
    if has_adapters(model):
        if peft is None and not renamed:
            hint = "peft='merged' publishes the base model with the adapter merged, peft='adapter' the adapter alone."
            raise _choice("a model with adapters of PEFT", "what of it is to be published", hint)
        if peft is not None and len(_active(model)) != 1:
            have = f"{len(_active(model))} active adapters"
            raise _choice(have, "one", "Choose it with `model.set_adapter(name)`.")
        if peft == "merged" and model.peft_config[_active(model)[0]].is_prompt_learning:
            raise _choice("learned prompts, which are of no layer", "an adapter that can be merged", _ALONE)
    elif peft is not None:
        have = f"{type(model).__name__}, without adapters of PEFT" if isinstance(model, torch.nn.Module) else "no model"
        raise _choice(have, f"a model for peft={peft!r}", "Give the hook the PeftModel itself.")


def _choice(have: str, need: str, hint: str) -> UsageError:
    return UsageError("peft-choice", where="the trainer hook", have=have, need=need, hint=hint)


def base_of(model: Any) -> Any:
    """The model that the adapters are for."""
    return model.get_base_model() if is_a(model, MODEL) else model


def _active(model: Any) -> list[str]:
    found = model.active_adapters
    names = found() if callable(found) else found  # a method of Transformers, a property of PEFT
    return [names] if isinstance(names, str) else list(names)


def adapter_state(model: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What PEFT's ``save_pretrained`` makes of a state dict of the model: the adapter's tensors, by its names."""
    from peft import get_peft_model_state_dict

    [name] = _active(model)

    def convert(state: dict[str, Any]) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says which embeddings go with it
            found = get_peft_model_state_dict(model, state_dict=state, adapter_name=name)
        prefix = "" if is_a(model, MODEL) else "base_model.model."
        return {prefix + key: value for key, value in found.items()}

    return convert


def adapter_config(model: Any) -> Any:
    """The adapter's config, as PEFT's ``save_pretrained`` writes it."""
    [name] = _active(model)
    config = copy.deepcopy(model.peft_config[name])
    base = base_of(model)
    config.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
    config.inference_mode = True
    if config.task_type is None:
        known = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
        config.auto_mapping = known
    return config


def untied_by_adapters(model: Any) -> bool:
    """Do adapters give the embeddings of a model that ties them values of their own?"""
    base = base_of(model)
    layers = [get() for get in (getattr(base, f"get_{side}_embeddings", None) for side in ("input", "output")) if get]
    return any(is_a(layer, LAYER, WRAPPER) for layer in layers)


def merged_state(model: Any, state: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """{name in the base model: (name in ``state``, value)}, the active adapter merged into a copy of what it changes.

    ``state`` is the model's, without what wrappers of torch add. Raises UsageError ``peft-choice`` for an adapter that
    cannot be merged, ``placement-unknown`` for one whose weights are sharded.
    """
    found: dict[str, tuple[str, Any]] = {}
    merged: dict[int, dict[int, torch.Tensor]] = {}
    for name, value in state.items():
        own, layer, tensor = _follow(model, name)
        if own is None:
            continue
        if layer is not None and tensor is not None and not layer.merged:
            if hasattr(value, "to_local"):
                need, hint = "whole weights", "peft='adapter' publishes shards as they are."
                have = "a shard of a weight that an adapter is merged into"
                raise UsageError("placement-unknown", where=name, have=have, need=need, hint=hint)
            if id(layer) not in merged:
                merged[id(layer)] = _merged(layer)
            value = merged[id(layer)].get(id(tensor), value)
        found[own] = (name, value)
    return found


def _follow(model: Any, name: str) -> tuple[str | None, Any, Any]:
    """(name in the base model or None for what is an adapter's, the outermost tuner's layer around it, the tensor)."""
    kept: list[str] = []
    layer: Any = None
    at: Any = model
    parts = iter(name.split("."))
    for part in parts:
        at = unwrapped(at)
        if (is_a(at, MODEL) and part == "base_model") or (is_a(at, TUNER) and part == "model"):
            at = getattr(at, part)
        elif is_a(at, LAYER):
            if part != "base_layer":
                return None, None, None
            layer = at if layer is None else layer
            at = at.base_layer
        elif is_a(at, WRAPPER):
            at, layer = _inside(at, part, parts, layer)
            if at is None:
                return None, None, None
        else:
            kept.append(part)
            modules = getattr(at, "_modules", {})
            at = modules[part] if part in modules else getattr(at, part, None)
    return ".".join(kept), layer, at


def _inside(wrapper: Any, part: str, parts: Iterator[str], layer: Any) -> tuple[Any, Any]:
    """Of a module that is trained as a copy: the copy. Of one of which some rows are: the layer that has these."""
    if not is_a(wrapper, TRAINED_COPY):
        return (wrapper.token_adapter, layer) if part == "token_adapter" else (None, None)
    [active] = wrapper.active_adapters
    if active not in wrapper.modules_to_save:
        return (wrapper.original_module, layer) if part == "original_module" else (None, None)
    if part == "modules_to_save" and next(parts, "") == active:
        return wrapper.modules_to_save[active], layer
    return None, None


def _merged(layer: Any) -> dict[int, torch.Tensor]:
    """{id of a parameter: its value with the active adapter}, by PEFT's ``merge`` on copies."""
    inner = layer.get_base_layer()
    if isinstance(inner, torch.nn.MultiheadAttention):
        raise _choice("an adapter of a MultiheadAttention", "one that merges in place", _ALONE)
    with torch.no_grad(), _put_back(layer, inner):
        before = dict(inner.named_parameters())
        for parameter in before.values():
            parameter.data = parameter.data.clone()
        try:
            while is_a(layer, LAYER):  # those of several parameters of a module are around each other
                layer.merge()
                layer = layer.base_layer
        except (ValueError, RuntimeError, NotImplementedError) as error:
            have = f"an adapter that PEFT cannot merge: {error!r:.200}"
            raise _choice(have, "one that can be merged", _ALONE) from error
        after = dict(inner.named_parameters())
        return {id(parameter): after[name].data for name, parameter in before.items()}


_ALONE = "peft='adapter' publishes the adapter alone."


@contextmanager
def _put_back(layer: Any, inner: torch.nn.Module) -> Iterator[None]:
    modules = [(module, dict(module._parameters)) for module in inner.modules()]
    values = [(p, p.data) for p in inner.parameters()]
    layers: list[tuple[Any, list[str], Any]] = []
    while is_a(layer, LAYER):
        layers.append((layer, list(layer.merged_adapters), dict(getattr(layer, "_caches", {}))))
        layer = layer.base_layer
    try:
        yield
    finally:
        for module, parameters in modules:
            module._parameters.clear()
            module._parameters.update(parameters)
        for parameter, value in values:
            parameter.data = value
        for known, adapters, caches in layers:
            known.merged_adapters = adapters
            if hasattr(known, "_caches"):
                known._caches = caches
