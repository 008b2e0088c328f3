"""The case "vllm" of bench/live_cards.py: vLLM's own engines `nccl` and `sparse_nccl` between two of its ranks.

vLLM's classes do all of it, both sides of them, with a module whose loader copies each tensor into its parameter; calls
go over the store of the ranks. Between turns comes the plain broadcast; `--cases pair vllm` has live steps beside them.
Only on cards: both engines broadcast on CUDA's streams, which a host has not. `sparse_nccl` is told what changed: its
time is without a diff.
"""

from __future__ import annotations

import json
import threading
import time
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from live_card_ranks import Child

ENGINES = ("nccl", "sparse_nccl")
WHERE = "vllm.distributed.weight_transfer"


def cannot(c: Child) -> str:
    """Why vLLM's engines do not run here; "" where they do."""
    if c.cpu:
        return "vLLM's nccl and sparse_nccl broadcast on cards alone"
    if c.o.trainers != 1:
        return "vLLM's nccl and sparse_nccl have one sender: --trainers 1"
    if not all(find_spec(name) for name in ("vllm", "pybase64")):
        return "no vLLM in this environment"
    return "" if find_spec(f"{WHERE}.sparse_nccl_engine") else "a vLLM without sparse_nccl, which 0.26 has"


class Remote:
    """vLLM's client, whose engines are the other ranks: each call is done by all of them, and waited for."""

    def __init__(self, c: Child, name: str) -> None:
        self._c, self._name, self._calls = c, name, 0

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        """As vLLM's `LLM` has it, and the next three."""
        self.call("init_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        """Nothing to prepare: the module is loaded by plain copies."""

    def update_weights(self, update_info: Any) -> None:
        """Receive what is broadcast meanwhile."""
        self.call("receive_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Nothing is left."""

    def call(self, method: str, info: Any = None) -> None:
        """Have every engine do something."""
        self._calls += 1
        key = f"vllm-{self._name}-{self._calls}"
        self._c.store.set(key, json.dumps([method, info]))
        for rank in range(1, self._c.world):
            if wrong := self._c.store.get(f"{key}-{rank}").decode():
                raise RuntimeError(f"engine {rank}: {wrong}")


def serve(c: Child, name: str, module: torch.nn.Module) -> None:
    """An engine's rank: do what it is told until the end."""
    engine = _engine(c, name, module)
    for number in range(1, 1 << 30):
        key = f"vllm-{name}-{number}"
        method, info = json.loads(c.store.get(key).decode())
        wrong = ""
        if method == "end":
            engine.shutdown()
        try:
            if method == "init_transfer_engine":
                engine.init_transfer_engine(engine.parse_init_info(info))
            elif method == "receive_weights":
                engine.receive_weights(engine.parse_update_info(info))
                torch.cuda.synchronize()
        except Exception as error:
            wrong = repr(error)[:300]
        c.store.set(f"{key}-{c.rank}", wrong)
        if method == "end":
            return


def _engine(c: Child, name: str, module: torch.nn.Module) -> Any:
    from importlib import import_module

    from vllm.config.weight_transfer import WeightTransferConfig

    kind = {"nccl": "NCCLWeightTransferEngine", "sparse_nccl": "SparseNCCLWeightTransferEngine"}[name]
    made = getattr(import_module(f"{WHERE}.{name}_engine"), kind)
    ranks = SimpleNamespace(data_parallel_index=0, world_size=c.o.engines, rank=c.rank - 1)
    around = SimpleNamespace(parallel_config=ranks, model_config=None)
    return made(WeightTransferConfig(backend=name), around, c.device, module)


class EarlierSender:
    """The trainer's side of releases whose engines have the function `trainer_send_weights` alone, as 0.26's."""

    def __init__(self, engine: Any, module: torch.nn.Module, client: Remote, where: dict[str, Any]) -> None:
        self._engine, self._module, self._client = engine, module, client
        init = threading.Thread(target=client.call, args=("init_transfer_engine", {**where, "rank_offset": 1}))
        init.start()
        self._group = engine.trainer_init(where)
        init.join()

    def send_weights(self, sparse: list[Any] | None = None) -> None:
        """Dense in its packed form, which is the faster one; sparse as it is."""
        sent = list(self._module.named_parameters()) if sparse is None else [(p.name, p.values) for p in sparse]
        own = dict(self._module.named_parameters())
        info: dict[str, Any] = {
            "names": [n for n, _ in sent],
            "dtype_names": [str(t.dtype).removeprefix("torch.") for _, t in sent],
            "shapes": [list(own[n].shape) for n, _ in sent],
        }
        if sparse is None:
            info["packed"] = True
        else:
            info["num_updates_list"] = [p.values.numel() for p in sparse]
        taken = threading.Thread(target=self._client.call, args=("receive_weights", info))
        taken.start()
        # The group is one of CUDA's current stream, and both forms take an iterator.
        self._engine.trainer_send_weights(iter(sparse or sent), {"group": self._group, "packed": sparse is None})
        taken.join()

    def shutdown(self) -> None:
        """Let go of the group."""
        self._group = None


def sender(c: Child, name: str, module: torch.nn.Module) -> tuple[Any, Remote]:
    """The trainer's side. -> it, and the engines' client"""
    from importlib import import_module

    from vllm.utils.network_utils import get_open_port

    client, where = Remote(c, name), {"master_address": "127.0.0.1", "master_port": get_open_port()}
    kind = {"nccl": "NCCL", "sparse_nccl": "SparseNCCL"}[name]
    room = import_module(f"{WHERE}.{name}_engine")
    if not hasattr(room, f"{kind}TrainerWeightTransferEngine"):
        engine = getattr(room, f"{kind}WeightTransferEngine")
        return EarlierSender(engine, module, client, {**where, "world_size": c.world}), client
    from vllm.distributed.weight_transfer.base import ModuleSource

    if name == "nccl":
        info = room.NCCLTrainerInitInfo(rank=0, world_size=c.world, **where)
        source = ModuleSource(module)
        return room.NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=source), client
    info = room.SparseNCCLTrainerInitInfo(rank=0, world_size=c.world, **where)
    return room.SparseNCCLTrainerWeightTransferEngine.trainer_init(info, client=client), client


def patches(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> list[Any]:
    """What `sparse_nccl` sends."""
    from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseWeightPatch

    found = []
    fields = SparseWeightPatch.__dataclass_fields__
    for name, tensor in new.items():
        flat = tensor.view(-1)
        at = (flat.view(torch.int16) != old[name].view(-1).view(torch.int16)).nonzero().view(-1)
        shape = {"shape": tuple(tensor.shape)} if "shape" in fields else {}
        found.append(SparseWeightPatch(name, at.to(torch.int32), flat[at], **shape))
    return found


def turns(c: Child) -> None:
    """Every engine some steps, each followed by the plain broadcast of all weights."""
    from gpu_engine import Tree
    from gpu_hook import change
    from token_bucket import Bucket

    if why := cannot(c):
        if c.rank == 0:
            c.say(case="vllm", cannot=why)
        return
    module = Tree(c.state())
    own = dict(module.named_parameters())
    module.load_weights = lambda weights: [own[name].data.copy_(w) for name, w in weights]  # type: ignore[assignment]
    for name in ENGINES:
        if c.rank:
            serve(c, name, module)
        else:
            made, client = sender(c, name, module)
        for step in range(c.o.turns + 1):
            if c.rank == 0:
                weights = {n: p.detach() for n, p in own.items()}
                old = {n: t.clone() for n, t in weights.items()} if name == "sparse_nccl" else {}
                change(weights, c.o.density)
                given = [patches(old, weights)] if old else []
                del old
                c.wait()
                began = time.monotonic()
                made.send_weights(*given)
                c.wait()
                if step:  # the first one connects
                    c.say(engine=name, seconds=time.monotonic() - began)
        if c.rank == 0:
            client.call("end")
            made.shutdown()
        _same(c, name, own)
        for _ in range(c.o.turns):
            taken = c.baseline({n: p.detach() for n, p in own.items()}, Bucket())
            if c.rank == 0:
                c.say(engine="plain broadcast", beside=name, seconds=taken)


def _same(c: Child, name: str, own: dict[str, Any]) -> None:
    """The engines have the trainer's bits."""
    sums = c.sums({n: p.detach() for n, p in own.items()})
    c.store.set(f"vllm-sums-{name}-{c.rank}", sums)
    assert sums == c.store.get(f"vllm-sums-{name}-0").decode(), f"other bits by {name}"
