"""The trainer's side of vLLM, made of the table of its signatures: base classes, factory, client over HTTP, sources."""

from __future__ import annotations

import dataclasses
import importlib
import json
import urllib.request
from collections.abc import Iterator
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

import torch


def modules(facts: dict[str, Any], class_of: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `base` and `factory` have more, of a release that has a trainer's side."""
    if not facts.get("trainer"):
        return {}, {}
    names = [word.strip().partition("=")[0] for word in facts["trainer"]["methods"]["__init__"].strip("()").split(",")]

    def init(self: Any, **given: Any) -> None:
        assert given.keys() <= {*names[2:]}, names
        vars(self).update({"source": None, "is_sender": True, "rank": 0, **given})

    kind = TypeVar("kind")
    trainer = class_of(
        "TrainerWeightTransferEngine", {**facts["trainer"], "fields": {}}, Generic[kind], __init__=init,
        trainer_init=classmethod(lambda cls, init_info, *, client, source=None: None),
    )  # fmt: skip

    @dataclasses.dataclass
    class TrainerInitInfo:
        backend: ClassVar[str]
        rank: int = dataclasses.field(kw_only=True)

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            assert cls.backend

        @property
        def is_sender(self) -> bool:
            return self.rank == 0

    assert {"backend", "rank"} == {*facts["trainer_info"]["fields"]}
    registry: dict[str, Any] = {}

    def trainer_init(init_info: Any, *, client: Any, source: Any = None) -> Any:
        module, name = registry[init_info.backend]
        made = getattr(importlib.import_module(module), name)
        return made.trainer_init(init_info=init_info, client=client, source=source)

    factory = SimpleNamespace(
        _registry=registry, register_engine=lambda *a: registry.update({a[0]: a[1:]}), trainer_init=trainer_init
    )
    base = {"TrainerWeightTransferEngine": trainer, "TrainerInitInfo": TrainerInitInfo}
    return base, {"WeightTransferTrainerFactory": factory}


class Client:
    """vLLM's own over HTTP, as far as a trainer sees it: four calls, and an error for an answer that is one."""

    def __init__(self, url: str, timeout: float = 60) -> None:
        self.url, self.timeout = url, timeout
        self.calls: list[str] = []

    def _post(self, path: str, body: Any = None) -> None:
        self.calls.append(path)
        data = json.dumps(body or {}).encode()
        asked = urllib.request.Request(f"{self.url}/{path}", data, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=self.timeout):
            pass

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("finish_weight_update", None if weight_version is None else {"weight_version": weight_version})


@dataclasses.dataclass(frozen=True)
class Shard:
    dim: int


@dataclasses.dataclass(frozen=True)
class Replicate:
    """All of it, everywhere."""


@dataclasses.dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[Any, ...] | None = None


class PieceSource:
    """As vLLM 0.33 has them: ``metas`` of all tensors, ``held`` pieces of this rank by name."""

    def __init__(self, metas: list[ParamMeta], held: dict[str, torch.Tensor]) -> None:
        self._metas, self.held = metas, held

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return self._metas

    def implements_iter_local(self) -> bool:
        return True

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.held.items()


class FullSource:
    """As vLLM 0.32 has them: whole tensors, None for one that others hold."""

    def __init__(self, held: dict[str, torch.Tensor | None]) -> None:
        self.held = held

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.held.items() if t is not None]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        yield from self.held.items()
