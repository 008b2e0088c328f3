"""What an adapter of PEFT says of its base model: which layers there have to be, and of which shapes.

An adapter of another model may load without an error: an engine that has room for 64 columns takes 32, and one that
has fewer layers ignores those that it does not have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from deltackpt.errors import ChainError

PREFIX = "base_model.model."
WHOLE = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I8"})  # an element of a weight is one of these
_OTHERS = ("ia3_", "hada_", "lokr_", "oft_", "boft_", "vera_", "fourierft_", "prompt_")  # of no two matrices
_AROUND = frozenset({"base_layer", "modules_to_save", "original_module"})  # what PEFT puts into a name
SHOWN, LONGEST = 3, 300  # layers that an error shows, and characters of each

Shape = tuple[int, ...]


class Form(NamedTuple):
    """Of a tensor: the dtype as safetensors names it, and the shape."""

    dtype: str
    shape: Shape


class AdapterLayer(NamedTuple):
    """A layer that an adapter changes, and the rows and columns that its weight has; None where nothing says it."""

    module: str
    rows: int | None
    columns: int | None


@dataclass(frozen=True)
class BaseModel:
    """The tensors of a base model, by the name in its checkpoint; ``name`` is what errors call it."""

    name: str
    tensors: Mapping[str, Form] = field(repr=False)

    @cached_property
    def _weights(self) -> Mapping[tuple[str, ...], list[tuple[str, Form]]]:
        """By the end of the module's name that starts at its first number: models have other names in front of it
        than their checkpoints."""
        found: dict[tuple[str, ...], list[tuple[str, Form]]] = defaultdict(list)
        for name, form in self.tensors.items():
            module, _, last = name.rpartition(".")
            if last in ("weight", "weight_packed", "qweight") and module:
                found[_end(module)].append((last, form))
        return found

    @cached_property
    def _kinds(self) -> frozenset[str]:
        return frozenset(end[-1] for end in self._weights)

    def weights(self, module: str) -> list[tuple[str, Form]]:
        """What the weight of a layer may be, and the last word of its name."""
        return self._weights.get(_end(module), [])

    def lacks(self, module: str) -> bool:
        """Does it have such a layer elsewhere, and not here? One that it does not know at all may be called otherwise
        in a checkpoint; experts often are."""
        parts = _end(module)
        return len(parts) > 1 and "experts" not in parts and parts not in self._weights and parts[-1] in self._kinds


def _end(module: str) -> tuple[str, ...]:
    parts = module.split(".")
    number = next((i for i, part in enumerate(parts) if i and part.isdigit()), len(parts))
    return tuple(parts[number - 1 :])


def targets(adapter: Mapping[str, Form]) -> Iterator[AdapterLayer]:
    """The layers of an adapter's tensors, in their order."""
    rows: dict[str, int] = {}
    columns: dict[str, int] = {}
    known: dict[str, None] = {}
    for name, form in adapter.items():
        parts = name.removeprefix(PREFIX).split(".")
        at = next((i for i, part in enumerate(parts) if part.startswith("lora_")), None)
        plain = at is None and parts[-1] == "weight" and not any(part.startswith(_OTHERS) for part in parts)
        if (at is None and not plain) or len(form.shape) < 2:
            continue
        module = ".".join(part for part in parts[: -1 if at is None else at] if part not in _AROUND)
        known[module] = None
        if at is None:
            rows[module], columns[module] = form.shape[:2]
        elif (
            "base_layer" in parts or ".experts" in module
        ):  # of a parameter, or of many: these have shapes of their own
            continue
        elif parts[at] in ("lora_A", "lora_embedding_B"):
            columns[module] = form.shape[1 if parts[at] == "lora_A" else 0]
        elif parts[at] in ("lora_B", "lora_embedding_A"):
            rows[module] = form.shape[0 if parts[at] == "lora_B" else 1]
    return (AdapterLayer(module, rows.get(module), columns.get(module)) for module in known)


def misfits(adapter: Mapping[str, Form], base: BaseModel, config: Mapping[str, Any]) -> list[str]:
    """What of an adapter does not fit the base, in words, a layer each; ``config`` is its adapter_config.json."""
    turned = config.get("fan_in_fan_out") is True  # the weight is kept as [columns, rows]
    found, met, numbered = [], 0, 0
    for module, rows, columns in targets(adapter):
        weights = base.weights(module)
        met += bool(weights)
        numbered += len(_end(module)) > 1
        if not weights:
            if base.lacks(module):
                found.append(f"{module}, which the base does not have")
        elif not any(_fits(weight, rows, columns, turned) for weight in weights):
            _, form = weights[0]
            mine = [columns, rows] if turned else [rows, columns]
            found.append(f"{module} of {_shape(mine)}, where the base has {_shape(form.shape)}")
    if not met and numbered and not found:
        first = next(iter(targets(adapter))).module
        found.append(f"{first}, and no layer at all that the base has")
    return found


def _fits(weight: tuple[str, Form], rows: int | None, columns: int | None, turned: bool) -> bool:
    """Of packed values only the rows can be told."""
    last, form = weight
    if len(form.shape) < 2 or last == "qweight" or (last == "weight" and form.dtype not in WHOLE):
        return True
    have = form.shape[:2][::-1] if turned else form.shape[:2]
    return rows in (None, have[0]) and (last != "weight" or columns in (None, have[1]))


def _shape(shape: Any) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def check_fits(adapter: Mapping[str, Form], base: BaseModel, config: Mapping[str, Any], where: str) -> None:
    """Raise ChainError ``adapter-base`` unless each layer of an adapter is one of the base, of the same shape."""
    if odd := misfits(adapter, base, config):
        more = f", and {len(odd) - SHOWN} more" if len(odd) > SHOWN else ""
        raise other_base(where, f"{'; '.join(one[:LONGEST] for one in odd[:SHOWN])}{more}", f"layers of {base.name}")


def other_base(where: str, have: str, need: str) -> ChainError:
    """The error for an adapter of another base."""
    hint = "Load it into an engine that runs the base it was trained on."
    return ChainError("adapter-base", where=where, have=have, need=need, hint=hint)
