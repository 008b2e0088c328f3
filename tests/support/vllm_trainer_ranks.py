"""A rank of a trainer that uses vLLM's interface, where there are several; the first one has the engine beside it."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
import torch.distributed as dist

from deltackpt.repository import Repository
from support.engine_steps import Run, nudge
from support.fake_vllm import FakeServer, installed
from support.fake_vllm_ranks import NEWEST, TABLE, VLLM, first_state, started
from support.fake_vllm_trainer import Client, ParamMeta, PieceSource, Shard


def pieces(state: dict[str, torch.Tensor], rank: int, world: int) -> dict[str, torch.Tensor]:
    """Rows of "a", columns of "b", all of the head, which every rank has."""
    cuts = {"a": 0, "b": 1}
    return {n: t.chunk(world, cuts[n])[rank].clone() if n in cuts else t.clone() for n, t in state.items()}


def sharded_trainer(rank: int, world: int, root: Path, *, device: str) -> None:
    state = first_state()
    both = {"owners": tuple(range(world)), "mesh_shape": (world,)}
    metas = [
        ParamMeta("a", torch.bfloat16, (16, 16), **both, placements=(Shard(0),)),
        ParamMeta("b", torch.bfloat16, (8, 16), **both, placements=(Shard(1),)),
        ParamMeta("head", torch.bfloat16, (8, 16)),
    ]
    held = pieces(state, rank, world)
    with installed(NEWEST, TABLE[NEWEST]):
        server = model = None
        if rank == 0:
            run = Run(root)
            run.save(state)
            engine, model = started(run, NEWEST)
            server = FakeServer(NEWEST, TABLE[NEWEST], engine)
        client = Client(server.url if server is not None else "http://127.0.0.1:9")  # the others never call it
        trainer = importlib.import_module(f"{VLLM}.trainer")
        factory = importlib.import_module("vllm.distributed.weight_transfer.factory").WeightTransferTrainerFactory
        info = trainer.DeltaTrainerInit(str(root / "repo"), rank=rank, hook={"threads": 1, "timeout": 60})
        sending = factory.trainer_init(info, client=client, source=PieceSource(metas, held))
        for step in range(1, 4):
            state = nudge(state, step, 0.2)
            for name, tensor in pieces(state, rank, world).items():
                held[name].copy_(tensor)
            sending.send_weights()
            if model is not None:
                assert model.is_step(state)
            dist.barrier()
        sending.shutdown()
        if server is not None:
            server.close()
            assert len(Repository.open(root / "repo").log()[0].patch) == world
        else:
            assert not client.calls
