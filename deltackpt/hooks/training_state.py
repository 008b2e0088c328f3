"""All that a trainer needs to take its next step: weights, masters, moments, and what is around them.

As a checkpoint it is tensors and one JSON file, `training_names.FILE` (spec/NOTES.md, "Training state"):

    model.NAME                 a parameter or persistent buffer of the model, in its own dtype
    master.GROUP.INDEX         a parameter of the optimizer that is none of the model's, such as an fp32 master
    optimizer.PARAMETER.KEY    a tensor of the optimizer's state of that parameter: exp_avg, exp_avg_sq, step
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from deltackpt.errors import CheckpointError, UsageError
from deltackpt.hooks.json_values import dumps
from deltackpt.hooks.random_state import random_state
from deltackpt.hooks.training_files import Target, load_state, save_state
from deltackpt.hooks.training_names import FORMAT, VERSION, class_of, parameters, plain_state
from deltackpt.torch_views.extract import Source

OPTIMIZER = frozenset({"state", "param_groups"})

Gather = Callable[[Any], "list[Any] | None"]


@dataclass(frozen=True)
class TrainingState:
    """What `TrainerHook(optimizer=)` keeps beside the weights; an optimizer alone stands for one with no ``also``.

    ``optimizer``  of torch, or derived from it, whose state is tensors by parameter
    ``also``       {name: what has state_dict() and load_state_dict()}: schedulers, scalers, data loaders; their states
                   are kept as JSON
    ``every``      which steps of the hook are kept: those whose number it divides
    ``snapshot``   where the copy that the next step is compared with is: "host" or "device"
    """

    optimizer: torch.optim.Optimizer
    also: Mapping[str, Any] = field(default_factory=dict)
    every: int = 1
    snapshot: Literal["host", "device"] = "host"

    def __post_init__(self) -> None:
        """Raises UsageError ``hook-option``."""
        need = "a torch.optim.Optimizer, or a TrainingState of one"
        _require("optimizer", self.optimizer, isinstance(self.optimizer, torch.optim.Optimizer), need)
        known = isinstance(self.also, Mapping) and all(
            isinstance(name, str) and hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
            for name, one in self.also.items()
        )
        _require("also", self.also, known, "{name: what has state_dict and load_state_dict}")
        known = isinstance(self.every, int) and not isinstance(self.every, bool) and self.every >= 1
        _require("every", self.every, known, "a whole number from 1 on")
        _require("snapshot", self.snapshot, self.snapshot in ("host", "device"), "'host' or 'device'")

    @classmethod
    def of(cls, given: Any) -> TrainingState | None:
        """Raises UsageError ``hook-option`` for what is neither an optimizer nor a training state."""
        return given if given is None or isinstance(given, cls) else cls(given)

    def tensors(self, source: Source) -> dict[str, torch.Tensor]:
        """All tensors by name, none copied; ``source`` is the model or state dict of the hook.

        Raises CheckpointError ``training-value`` for state that is no tensor by parameter, UsageError
        ``state-unknown``.
        """
        found = {f"model.{name}": value for name, value in plain_state(source).items()}
        state = self.optimizer.state
        for id_, parameter in parameters(self.optimizer, source).items():
            if id_ not in found:
                found[id_] = parameter.detach()
            for key, value in state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    found[_tensor_name(id_, key, value)] = value
        return _unshared(found)

    def document(self, source: Source, gather: Gather = lambda value: [value]) -> bytes | None:
        """What is no tensor, as the JSON file's bytes; every rank calls it, and rank 0 gets it, the others None.

        Raises CheckpointError ``training-value``.
        """
        generators = gather(random_state())
        names = parameters(self.optimizer, source)
        self._check(set(map(id, names.values())))
        by_identity = {id(parameter): id_ for id_, parameter in names.items()}
        groups = [
            {"params": [by_identity[id(p)] for p in group["params"]],
             "options": {key: value for key, value in group.items() if key != "params"}}
            for group in self.optimizer.param_groups
        ]  # fmt: skip
        keys, values = {}, {}
        for id_, parameter in names.items():
            held = self.optimizer.state.get(parameter, {})
            keys[id_] = [key for key, value in held.items() if isinstance(value, torch.Tensor)]
            values[id_] = {key: value for key, value in held.items() if not isinstance(value, torch.Tensor)}
        document = {
            "format": FORMAT,
            "version": VERSION,
            "optimizer": {
                "class": class_of(self.optimizer),
                "groups": groups,
                "tensors": keys,
                "values": {id_: plain for id_, plain in values.items() if plain},
            },
            "also": {name: one.state_dict() for name, one in self.also.items()},
            "random": generators or [],
        }
        made = b"" if generators is None else dumps(document, "the training state")
        return None if generators is None else made

    def save(self, directory: str | os.PathLike[str], source: Source) -> None:
        """Write all of it into ``directory``, which must not exist: a checkpoint that `deltackpt write` publishes.

        Raises what `tensors` and `document` raise, ConflictError ``output-exists``, and UsageError
        ``placement-unknown`` for sharded tensors, which only the hook keeps.
        """
        save_state(directory, self.tensors(source), self.document(source) or b"")

    def load(self, directory: str | os.PathLike[str], source: Source, *, random: bool = True) -> None:
        """Put a step that `apply` has restored into the model, the optimizer, and ``also``, bit for bit.

        ``source`` is the model, or a state dict whose tensors are written in place. All of it is checked first. With
        ``random``, the generators of torch, Python and numpy go on as they would have. Every rank of a sharded training
        calls it with the same directory, and takes its shards. Raises FormatError ``training-json``,
        ``training-field``; CheckpointError ``training-differs``, which names what is not as it was.
        """
        target = Target(self.optimizer, self.also, self.tensors(source), parameters(self.optimizer, source))
        load_state(target, directory, random)

    def _check(self, known: set[int]) -> None:
        """Raise unless all that the optimizer keeps is by parameter, or in its groups."""
        where = f"the optimizer, a {type(self.optimizer).__name__}"
        if odd := [key for key in self.optimizer.state if id(key) not in known]:
            raise _unknown(where, f"state of {odd[0]!r:.80}, which is none of its parameters")
        own = getattr(type(self.optimizer), "state_dict", None)
        if own is not torch.optim.Optimizer.state_dict and (more := set(self.optimizer.state_dict()) - OPTIMIZER):
            raise _unknown(where, f"more state than that of parameters and groups: {', '.join(sorted(map(str, more)))}")


def _unshared(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With copies of what several parameters share, such as one count of steps: a checkpoint has tied tensors once."""
    seen = set()
    for name, value in found.items():
        if not name.startswith("optimizer.") or not isinstance(value, torch.Tensor) or hasattr(value, "to_local"):
            continue
        key = value.data_ptr(), value.dtype, tuple(value.shape)
        if key in seen and value.numel():
            found[name] = value.clone()
        seen.add(key)
    return found


def _tensor_name(id_: str, key: Any, value: torch.Tensor) -> str:
    where = f"the optimizer's state of {id_}, {key!r}"
    if not isinstance(key, str) or "." in key or not key:
        raise _unknown(where, "such a key", "a string without a dot")
    if value.layout != torch.strided:
        raise _unknown(where, f"a tensor of {value.layout}", "a dense tensor")
    if hasattr(value, "__tensor_flatten__") and not hasattr(value, "to_local"):  # as torchao's moments of 8 bits
        raise _unknown(where, f"a {type(value).__name__}, which is several tensors in one", "a plain tensor")
    return f"optimizer.{id_}.{key}"


def _unknown(where: str, have: str, need: str = "dense tensors and JSON values, by parameter") -> CheckpointError:
    hint = "Keep such a state by the trainer's own means; a hook without `optimizer=` publishes the weights."
    return CheckpointError("training-value", where=where, have=have, need=need, hint=hint)


def _require(name: str, value: object, known: bool, need: str) -> None:
    if not known:
        where = "the trainer hook, optimizer=" if name == "optimizer" else f"the training state, {name}="
        raise UsageError("hook-option", where=where, have=repr(value)[:200], need=need)
