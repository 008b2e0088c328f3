"""The names that a model's weights have in a checkpoint: those that its own ``save_pretrained`` would write."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module

from deltackpt.errors import CheckpointError
from deltackpt.torch_views import conversion
from deltackpt.torch_views.adapters import Peft, adapter_state, base_of, check_choice, merged_state
from deltackpt.torch_views.boxes import Shape
from deltackpt.torch_views.conversion import Computed, Convert, Plan, Slice, blank
from deltackpt.torch_views.names import Rename, listed, published_names
from deltackpt.torch_views.ties import left_out, tied_patterns, ties_of
from deltackpt.torch_views.words import NAMES
from deltackpt.torch_views.wrappers import is_a, stripper, unwrapped

Table = Mapping[str, tuple[str, Shape]]  # dtype, as safetensors names it, and shape, by name
Wholes = Callable[[str, Any], "Shape | None"]

TRANSFORMERS = "transformers.modeling_utils.PreTrainedModel"
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True)
class Known:
    """The tensors of the ``parent`` step and of the ``base`` checkpoint, as far as there are any."""

    parent: Table = field(default_factory=dict)
    base: Table = field(default_factory=dict)

    def keeps(self, name: str, dtype: torch.dtype, cast: torch.dtype) -> bool:
        """Is ``name`` there as ``dtype``, among tensors of ``cast``?"""
        table = self.parent if name in self.parent else self.base
        mine = table.get(name, ("", ()))[0]
        if mine not in FLOATS or mine != NAMES.get(dtype) or mine == NAMES.get(cast):
            return False
        return any(other == NAMES.get(cast) for other, _ in table.values())

    def has(self, tensors: Mapping[str, Any]) -> bool:
        """Are these the names and shapes of one of the two?"""
        shapes = {name: tuple(value.shape) for name, value in tensors.items()}
        return any(
            bool(table) and shapes.items() <= {name: shape for name, (_, shape) in table.items()}.items()
            for table in (self.parent, self.base)
        )


@dataclass(frozen=True)
class Named:
    """A state dict under the model's own names (``state``, without what wrappers add), and what each tensor of the
    checkpoint is of it (``parts``). ``wholes``: the tensors without memory, of which the parts are slices."""

    state: Mapping[str, Any]
    parts: Plan
    wholes: Mapping[str, torch.Tensor]
    parameters: Mapping[str, Any]
    convert: Convert | None
    model: Any

    def compute(self) -> dict[str, torch.Tensor]:
        """The tensors that are no slices, by name in the checkpoint."""
        if self.convert is None or not any(isinstance(part, Computed) for part in self.parts.values()):
            return {}
        return conversion.compute(self.convert, self.parts, self.state)

    def kept(self, dtype: Any) -> set[str]:
        """The tensors of ``parts`` that the model keeps in fp32 where it is cast to ``dtype``."""
        patterns = kept_in_fp32(self.model, dtype) if isinstance(dtype, torch.dtype) else None
        if patterns is None:
            return set()
        return {name for name, part in self.parts.items() if any(patterns.search(source) for source in part.sources)}


class Naming:
    """Finds `Named` for each state of a source; the conversion is traced once, until shapes change."""

    def __init__(
        self,
        source: Any,
        rename: Rename | None,
        known: Known,
        wholes: Wholes = lambda name, value: None,
        peft: Peft | None = None,
    ) -> None:
        check_choice(source, peft, rename is not None)
        self._source, self._rename, self._known, self._whole, self._peft = source, rename, known, wholes, peft
        self._model = unwrapped(source)
        self._base = base_of(self._model) if peft == "merged" else self._model
        self._convert = adapter_state(self._model) if peft == "adapter" else _reverting(self._base)
        self._traced: tuple[Any, Plan, dict[str, torch.Tensor]] | None = None

    def find(self, state: Mapping[str, Any]) -> Named:
        """Raises CheckpointError ``names-collide``, ``names-differ``, UsageError ``names-unmapped``, and what
        `merged_state` raises."""
        stripped = stripper(self._source, state)
        own = {stripped(name): value for name, value in state.items()}
        if len(own) < len(state):
            published_names(state, None, stripped)  # raises
        named = self._source.named_parameters(remove_duplicate=False) if isinstance(self._source, Module) else ()
        parameters = {stripped(name): parameter for name, parameter in named}
        if self._peft == "merged":
            merged = merged_state(self._model, own)
            own = {name: value for name, (_, value) in merged.items()}
            parameters = {name: parameters.get(before) for name, (before, _) in merged.items()}
        for name in getattr(self._base, "_keys_to_ignore_on_save", None) or ():
            own.pop(name, None)
        plan, wholes = self._plan(own)
        gone: set[str] = set()
        if self._peft != "adapter":  # PEFT saves each of its names
            patterns = tied_patterns(self._base, stripped if self._base is self._source else str)
            gone = left_out(ties_of(own, parameters), patterns, self._known.parent, self._called(plan))
        stay = {name: part for name, part in plan.items() if not part.sources or not set(part.sources) <= gone}
        names = published_names(stay, self._rename, str)
        parts = {new: plan[name] for name, new in names.items()}
        return Named(own, parts, wholes, parameters, self._convert, self._base)

    def _called(self, plan: Plan) -> dict[str, set[str]]:
        """What each tensor of the model would be called, where there is a parent to be compared with."""
        found: dict[str, set[str]] = {}
        for name, part in plan.items() if self._known.parent else ():
            renamed = self._rename(name) if callable(self._rename) else (self._rename or {}).get(name, name)
            for source in part.sources:
                found.setdefault(source, set()).add(renamed or "")
        return found

    def _plan(self, own: Mapping[str, Any]) -> tuple[Plan, dict[str, torch.Tensor]]:
        convert = self._convert
        tensors = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
        wholes = {name: self._blank(name, value) if convert else blank(value) for name, value in tensors.items()}
        key = [(name, tuple(w.shape), w.stride(), w.dtype) for name, w in wholes.items()]
        if self._traced is not None and self._traced[0] == (key, own.keys()):
            return self._traced[1], self._traced[2]
        plan = self._as_they_are(wholes)
        if convert is not None:
            try:
                plan = conversion.trace(convert, wholes)
            except Exception as error:
                if self._rename is None and not self._known.has(wholes):
                    raise _differ(wholes, self._known, error) from error
        plan |= {name: Slice(name, (), (), 0) for name in own if name not in tensors}
        self._traced = (key, frozenset(own)), plan, wholes  # no view of the tensors, which it would keep
        return plan, wholes

    def _blank(self, name: str, value: torch.Tensor) -> torch.Tensor:
        whole = self._whole(name, value)
        return blank(value) if whole is None else torch.empty(whole, dtype=value.dtype, device="meta")

    @staticmethod
    def _as_they_are(wholes: Mapping[str, torch.Tensor]) -> Plan:
        return {name: Slice(name, tuple(w.shape), tuple(w.stride()), 0) for name, w in wholes.items()}


def _reverting(model: Any) -> Convert | None:
    """What a model of Transformers does to a state dict when it saves; None where that is nothing."""
    if not is_a(model, TRANSFORMERS):
        return None
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before 5: names in memory are those on disk
        return None
    return lambda state: dict(revert_weight_conversion(model, state))


def _differ(wholes: Mapping[str, Any], known: Known, error: Exception) -> CheckpointError:
    table = known.parent or known.base
    odd = [name for name, whole in wholes.items() if table.get(name, ("", None))[1] != tuple(whole.shape)]
    return CheckpointError(
        "names-differ",
        where="the model",
        have=f"names that save_pretrained maps, and cannot be mapped here ({error!r:.200}): {listed(odd, 20)}",
        need="the names that the model's checkpoint has",
        hint="Give them by `rename=`, or publish its base checkpoint first with `deltackpt write`.",
    )


def kept_in_fp32(model: Any, dtype: torch.dtype) -> re.Pattern[str] | None:
    """The names that the model's classes keep in fp32 where they are cast to ``dtype``, None where there are none."""
    words: set[str] = set()
    for module in model.modules() if isinstance(model, Module) else ():
        if dtype == torch.float16:
            words |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
        if dtype in (torch.float16, torch.bfloat16):
            words |= set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    return re.compile("|".join(sorted(word.replace("*", ".*") for word in words))) if words else None
