"""A training state as a directory: written, and read back into a model and its optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import CheckpointError, ConflictError, FormatError
from deltackpt.format.safetensors_header import build_header
from deltackpt.hooks.json_values import DTYPES, loads
from deltackpt.hooks.plan import SHARD_BYTES, files_of, held_by, plan_state
from deltackpt.hooks.random_state import restorer
from deltackpt.hooks.training_names import FILE, FORMAT, VERSION, class_of
from deltackpt.torch_views.boxes import Box
from deltackpt.torch_views.extract import Extractor
from deltackpt.torch_views.names import listed
from deltackpt.torch_views.ties import local_of, ties_of
from deltackpt.torch_views.words import NAMES, on_host
from deltackpt.util.file_server import rename
from deltackpt.util.scratch import scratch

Copy = Callable[[], object]


@dataclass(frozen=True)
class Target:
    """What a state is put into: ``tensors`` are all that it has now by their names in a checkpoint, ``parameters``
    those of the optimizer."""

    optimizer: torch.optim.Optimizer
    also: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    parameters: Mapping[str, torch.Tensor]


def save_state(directory: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], document: bytes) -> None:
    """See `TrainingState.save`."""
    out = Path(directory)
    if out.is_symlink() or out.exists():
        raise ConflictError("output-exists", where=out, have="something there", need="no such path")
    pieces = {piece.name: piece for piece in Extractor(lambda: tensors)()}
    plan = plan_state([held_by(list(pieces.values()))])
    files = files_of(plan, None, {FILE: document}, SHARD_BYTES)
    with scratch(out.absolute().parent, f".{out.name}.") as folder:
        for shard in files.shards:
            with (folder / shard.path).open("wb") as file:
                file.write(build_header(shard.header.tensors, {"format": "pt"}))
                for tensor in shard.header.tensors:
                    words = on_host(pieces[tensor.name].words(), pieces[tensor.name].dtype)
                    file.write(words.tobytes())
        for path in files.side:
            (folder / path).write_bytes(files.side_bytes(path))
        rename(folder, out)


def load_state(target: Target, directory: str | os.PathLike[str], random: bool) -> None:
    """See `TrainingState.load`."""
    where = f"{Path(directory) / FILE}"
    with Checkpoint.open(directory) as checkpoint:
        if FILE not in checkpoint.side:
            hint = "Restore a step of the branch that a hook with optimizer= publishes, such as main-optimizer."
            raise CheckpointError(
                "training-differs", where=directory, have=f"no {FILE}", need="a training's state", hint=hint
            )
        document = _checked(loads(checkpoint.side_bytes(FILE), where), where)
        loading = _Loading(target, checkpoint, document, where)
        # Schedulers and the like first: their own code may refuse what is theirs, and then nothing is written.
        copies = [*loading.also(), *loading.weights(), *loading.moments(), *loading.groups()]
        if random:
            copies.append(loading.generators())
        with torch.no_grad():
            for copy in copies:
                copy()


def _checked(document: Any, where: str) -> dict[str, Any]:
    """Parse once, at the border. Raises FormatError ``training-field``."""
    optimizer = document.get("optimizer") if isinstance(document, dict) else None
    known = (
        isinstance(optimizer, dict)
        and (document.get("format"), document.get("version")) == (FORMAT, VERSION)
        and isinstance(optimizer.get("class"), str)
        and all(isinstance(optimizer.get(key), dict) for key in ("tensors", "values"))
        and all(isinstance(held, dict) for held in optimizer["values"].values())
        and all(isinstance(keys, list) for keys in optimizer["tensors"].values())
        and all(isinstance(key, str) for keys in optimizer["tensors"].values() for key in keys)
        and isinstance(optimizer.get("groups"), list)
        and all(isinstance(group, dict) and isinstance(group.get("options"), dict)
                and isinstance(group.get("params"), list) for group in optimizer["groups"])
        and isinstance(document.get("also"), dict)
        and isinstance(document.get("random"), list)
    )  # fmt: skip
    if not known:
        need = f"{FORMAT}, version {VERSION}, with all its fields"
        raise FormatError("training-field", where=where, have="other or missing fields", need=need)
    found: dict[str, Any] = document
    return found


def _cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]


class _Loading:
    """What is to be done, all of it checked and nothing of it begun: each method gives the copies of one kind."""

    def __init__(self, target: Target, checkpoint: Checkpoint, document: dict[str, Any], where: str) -> None:
        self._state, self._checkpoint, self._document = target, checkpoint, document
        self._where, self._held, self._parameters = where, document["optimizer"], target.parameters
        self._own = {name: value for name, value in target.tensors.items() if not name.startswith("optimizer.")}
        # The tensors' places, also of those that are tied to another and have none of their own.
        self._boxes = {piece.name: piece.box for piece in Extractor(lambda: self._own)()}

    def weights(self) -> list[Copy]:
        """Of the model and the masters."""
        there = {name for name in self._checkpoint.tensors if not name.startswith("optimizer.")}
        tied = {name: names for names in ties_of(self._own, {}).values() for name in names}
        gone = [name for name in self._own if name not in there and not there.intersection(tied[name])]
        if gone or (more := sorted(there - self._own.keys())):
            have = f"no {listed(sorted(gone), 3)}" if gone else f"{listed(more, 3)} as well"
            raise self._differs(have, "the tensors of this model and optimizer")
        copies: list[Copy] = []
        for name in sorted(there):
            box = self._boxes.get(name) or next(self._boxes[other] for other in tied[name] if other in self._boxes)
            target, located = local_of(self._own[name]), self._checkpoint.tensors[name]
            if located.shape != box.whole or located.dtype != NAMES.get(target.dtype):
                have = f"{name!r} {located.dtype}, {list(located.shape)}"
                raise self._differs(have, f"{NAMES.get(target.dtype)}, {list(box.whole)}")
            copies.append(lambda name=name, box=box, to=target: to.copy_(_cut(self._tensor(name), box)))  # type: ignore[misc]
        return copies

    def moments(self) -> list[Copy]:
        """The optimizer's state, tensors and other values; what it has now goes."""
        keys, values = self._held["tensors"], self._held["values"]
        if self._held["class"] != (mine := class_of(self._state.optimizer)):
            raise self._differs(f"the state of {self._held['class']}", mine)
        states: dict[str, dict[str, Any]] = {id_: {} for id_ in self._parameters}
        stray = ({*keys, *values} - states.keys()) or (
            {name for name in self._checkpoint.tensors if name.startswith("optimizer.")}
            - {f"optimizer.{id_}.{key}" for id_ in keys for key in keys[id_]}
        )
        if stray:
            raise self._differs(f"state of {listed(sorted(stray), 3)}", "that of this optimizer's parameters")
        for id_, parameter in self._parameters.items():
            capturable = self._group_of(parameter)
            for key in keys.get(id_, ()):
                name = f"optimizer.{id_}.{key}"
                if name not in self._checkpoint.tensors:
                    raise self._differs(f"no {name}", "all tensors that it names")
                states[id_][key] = self._placed(name, key, id_, parameter, capturable)
            states[id_].update(values.get(id_, {}))

        def copy() -> None:
            self._state.optimizer.state.clear()
            for id_, parameter in self._parameters.items():
                if states[id_]:
                    self._state.optimizer.state[parameter] = states[id_]

        return [copy]

    def _group_of(self, parameter: torch.Tensor) -> bool:
        """Does the count of steps lie with the parameter? As torch's optimizers have it."""
        for group in self._state.optimizer.param_groups:
            if any(parameter is p for p in group["params"]):
                return bool(group.get("capturable") or group.get("fused"))
        return False

    def _placed(self, name: str, key: str, id_: str, parameter: torch.Tensor, capturable: bool) -> torch.Tensor:
        """A tensor of the state on its parameter's device, sharded as the parameter is."""
        stored = self._tensor(name)
        device = torch.device("cpu") if key == "step" and not capturable else local_of(parameter).device
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None or not stored.ndim:
            return stored.to(device, copy=True)
        box = self._boxes[id_]
        if tuple(stored.shape) != box.whole:
            raise self._differs(
                f"{name!r} of shape {list(stored.shape)}", f"the shape of its sharded parameter, {box.whole}"
            )
        from torch.distributed.tensor import DTensor

        local = _cut(stored, box).contiguous().to(device, copy=True)
        return DTensor.from_local(
            local, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )  # fmt: skip

    def groups(self) -> list[Copy]:
        """The options of the groups: learning rates and all else."""
        held, optimizer = self._held["groups"], self._state.optimizer
        names = {id(parameter): id_ for id_, parameter in self._parameters.items()}
        mine = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        if [group["params"] for group in held] != mine:
            sizes = [len(group["params"]) for group in held]
            need = f"groups of {[len(group) for group in mine]}, of the same names in the same order"
            raise self._differs(f"groups of {sizes} parameters", need)

        def copy() -> None:
            for group, there in zip(optimizer.param_groups, held, strict=True):
                for key in group.keys() - there["options"].keys() - {"params"}:
                    del group[key]
                group.update(there["options"])

        return [copy]

    def also(self) -> list[Copy]:
        """Schedulers and the like."""
        held, mine = self._document["also"], self._state.also
        if held.keys() != mine.keys():
            raise self._differs(f"also {sorted(held)}", f"also {sorted(mine)}")
        return [lambda one=mine[name], state=held[name]: one.load_state_dict(state) for name in mine]  # type: ignore[misc]

    def generators(self) -> Copy:
        """Those of this rank."""
        held, rank, size = self._document["random"], 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if len(held) != size:
            hint = "random=False leaves the generators as they are."
            raise self._differs(f"the generators of {len(held)} ranks", f"those of {size}", hint)
        if not isinstance(held[rank], dict):
            raise FormatError("training-field", where=self._where, have="no generators", need="those of each rank")
        return restorer(held[rank], self._where)

    def _tensor(self, name: str) -> torch.Tensor:
        """A tensor of the checkpoint, in the memory of its file: to be copied, and not to be written to."""
        located = self._checkpoint.tensors[name]
        if located.dtype not in DTYPES:
            raise self._differs(f"{name!r} of {located.dtype}", "a dtype of this torch")
        words = torch.from_numpy(np.array(self._checkpoint.bytes_of(name)))
        return words.view(DTYPES[located.dtype]).reshape(located.shape)

    def _differs(self, have: str, need: str, hint: str = "") -> CheckpointError:
        hint = hint or "Load it into the model, optimizer and `also` that it was made of."
        return CheckpointError("training-differs", where=self._where, have=have, need=need, hint=hint)
