"""vLLM's own trainer interface: `send_weights` on every rank publishes a step, and the engine takes it."""

import importlib
import itertools
import os
import signal
import urllib.error
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from support import vllm_trainer_killed  # noqa: E402
from support.engine_steps import Run, nudge  # noqa: E402
from support.fake_vllm import FakeServer, installed  # noqa: E402
from support.fake_vllm_ranks import NEWEST, TABLE, VLLM, first_state, started  # noqa: E402
from support.fake_vllm_trainer import Client, FullSource, ParamMeta, PieceSource, Replicate, Shard  # noqa: E402
from support.live import until  # noqa: E402
from support.live_ranks import end, start  # noqa: E402
from support.ranks import spawn  # noqa: E402
from support.vllm_trainer_ranks import sharded_trainer  # noqa: E402

from deltackpt.errors import UsageError  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402

VERSIONS = [version for version, facts in TABLE.items() if facts.get("trainer")]


def test_the_newest_release_has_a_trainer_s_side():
    assert NEWEST in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_made_by_the_calls_that_vllm_makes(version):
    facts = TABLE[version]
    with installed(version, facts):
        module = importlib.import_module(f"{VLLM}.trainer")
        assert not module.DeltaTrainer.__abstractmethods__
        for name in ("send_weights", "shutdown"):
            given = facts["trainer"]["methods"][name].strip("()").split(", ")
            assert getattr(module.DeltaTrainer, name).__code__.co_argcount == len(given)
        assert facts["trainer"]["methods"]["trainer_init"] == "(cls, init_info, *, client, source=None)"
        assert facts["trainer_factory"]["methods"]["trainer_init"] == "(cls, init_info, *, client, source=None)"
        client = facts["http_client"]["methods"]
        for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
            own = getattr(Client, name).__code__
            assert own.co_varnames[: own.co_argcount] == tuple(
                word.strip().partition("=")[0] for word in client[name].strip("()").split(",")
            )
        importlib.import_module(f"{VLLM}.plugin").register()
        factory = importlib.import_module("vllm.distributed.weight_transfer.factory").WeightTransferTrainerFactory
        assert factory._registry["deltackpt"] == ("deltackpt.engines.vllm.trainer", "DeltaTrainer")


class World:
    """A server of an engine that was started from the checkpoint with which training begins, and a trainer."""

    def __init__(self, tmp_path, version=NEWEST, cached=False):
        self.run = Run(tmp_path)
        self.run.save(first_state())
        rank, self.model = started(self.run, version)
        self.server = FakeServer(version, TABLE[version], rank)
        self.client = Client(self.server.url)
        self.trainer = importlib.import_module(f"{VLLM}.trainer")
        self.factory = importlib.import_module("vllm.distributed.weight_transfer.factory").WeightTransferTrainerFactory
        self.info = self.trainer.DeltaTrainerInit(
            str(self.run.url), cache=str(tmp_path / "cache") if cached else None, rank=0, hook={"threads": 1}
        )

    def start(self, source):
        return self.factory.trainer_init(self.info, client=self.client, source=source)


@pytest.fixture
def world(tmp_path):
    with installed(NEWEST, TABLE[NEWEST]):
        made = World(tmp_path)
        yield made
        made.server.close()


@pytest.mark.parametrize("kind", ["pieces", "whole"])
@pytest.mark.parametrize("cached", [False, True], ids=["own base", "cache"])
@pytest.mark.parametrize("version", VERSIONS)
def test_steps_reach_an_engine(tmp_path, version, cached, kind):
    with installed(version, TABLE[version]):
        made = World(tmp_path, version, cached)
        held = {name: tensor.clone() for name, tensor in first_state().items()}
        metas = [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in held.items()]
        engine = made.start(PieceSource(metas, held) if kind == "pieces" else FullSource(held))
        try:
            for step in range(1, 4):
                for name, tensor in nudge(held, step, 0.2).items():
                    held[name].copy_(tensor)
                assert not made.model.is_step(held)
                engine.send_weights()
                assert made.model.is_step(held)
                assert made.server.weight_version == str(step)
            assert [m.step for m in Repository.open(made.run.url).log()] == [3, 2, 1, 0]
        finally:
            engine.shutdown()
            made.server.close()
    assert made.client.calls == [
        "init_weight_transfer_engine",
        *3 * ["start_weight_update", "update_weights", "finish_weight_update"],
    ]


def test_an_engine_that_refuses_takes_all_of_it_with_the_next(world):
    held = {name: tensor.clone() for name, tensor in first_state().items()}
    engine = world.start(FullSource(held))
    before = {name: tensor.clone() for name, tensor in held.items()}
    for name, tensor in nudge(held, 1, 0.2).items():
        held[name].copy_(tensor)
    world.server.refuses.add("/update_weights")
    with pytest.raises(urllib.error.HTTPError):
        engine.send_weights()
    assert world.model.is_step(before)
    assert Repository.open(world.run.url).head().link.step == 1
    for name, tensor in nudge(held, 2, 0.2).items():
        held[name].copy_(tensor)
    engine.send_weights()
    assert world.model.is_step(held)
    assert world.server.weight_version == "2"
    engine.shutdown()


def test_a_trainer_that_begins_anew_goes_on(world):
    held = {name: tensor.clone() for name, tensor in first_state().items()}
    engine = world.start(FullSource(held))
    for name, tensor in nudge(held, 1, 0.2).items():
        held[name].copy_(tensor)
    engine.send_weights()
    engine.hook.abandon()
    again = world.start(FullSource(held))
    for name, tensor in nudge(held, 2, 0.2).items():
        held[name].copy_(tensor)
    again.send_weights()
    assert world.model.is_step(held)
    assert [m.step for m in Repository.open(world.run.url).log()] == [2, 1, 0]
    again.shutdown()


def test_what_it_does_not_take(world):
    with pytest.raises(UsageError) as error:
        world.start(None)
    assert error.value.code == "engine-form"
    world.info.rank = 1
    with pytest.raises(UsageError) as error:
        world.start(FullSource(dict(first_state())))
    assert error.value.code == "not-distributed"
    with pytest.raises(UsageError) as error:
        world.trainer.DeltaTrainerInit("repo", rank=0, hook={"ref": "other"})
    assert error.value.code == "hook-option"
    assert not world.client.calls


@pytest.mark.parametrize("mesh", [(2, 3), (3, 2), (6,)])
@pytest.mark.parametrize("shape", [(7, 10), (4, 5), (13, 2)])
def test_pieces_lie_where_torch_chunk_cuts(mesh, shape):
    """On one dimension, on two, on one twice; every element is somewhere, once for each replica."""
    from deltackpt.engines.vllm.sources import place_of

    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    for placements in itertools.product([Shard(0), Shard(1), Replicate()], repeat=len(mesh)):
        owners = tuple(range(10, 16))
        meta = SimpleNamespace(shape=shape, owners=owners, mesh_shape=mesh, placements=placements)
        seen = torch.zeros(shape)
        for rank in owners:
            piece, at = whole, rank - 10
            for axis, placement in enumerate(placements):
                inner = int(torch.tensor(mesh[axis + 1 :]).prod()) if mesh[axis + 1 :] else 1
                part = at // inner % mesh[axis]
                if isinstance(placement, Shard):
                    chunks = piece.chunk(mesh[axis], placement.dim)
                    piece = chunks[part] if part < len(chunks) else piece.narrow(placement.dim, 0, 0)
            (row, column), known = place_of(meta, rank)
            assert known == shape
            box = (slice(row, row + piece.shape[0]), slice(column, column + piece.shape[1]))
            assert torch.equal(whole[box], piece)
            seen[box] += 1
        copies = int(
            torch.tensor([n for n, p in zip(mesh, placements, strict=True) if isinstance(p, Replicate)]).prod()
        )
        assert (seen == copies).all()


def test_every_rank_sends_what_it_has(tmp_path):
    """Two ranks with pieces on either axis; the engine takes the step of both."""
    assert spawn(2, sharded_trainer, tmp_path) == ["", ""]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("call", ["start_weight_update", "update_weights", "finish_weight_update"])
def test_a_trainer_is_lost_inside_of_send_weights(world, tmp_path, call, how):
    """The engine has the old step or the new one, whole; a trainer that was stopped goes on, another one follows it."""
    states = [first_state()]
    for step in (1, 2, 3):
        states.append(nudge(states[-1], step, 0.2))
    out = tmp_path / "trainer.out"
    process = start(vllm_trainer_killed.trainer, str(world.run.url), world.server.url, call, how, str(out))
    try:
        until(lambda: out.with_suffix(".1").exists() or not process.is_alive())
        if how == signal.SIGKILL:
            process.join(60)
            assert process.exitcode == -signal.SIGKILL
            new = call == "finish_weight_update"  # written, and its version not told yet
            assert world.model.is_step(states[2 if new else 1])
        else:
            until(lambda: stopped(process.pid))
            assert world.model.is_step(states[2 if call == "finish_weight_update" else 1])
            os.kill(process.pid, signal.SIGCONT)
            until(lambda: out.with_suffix(".2").exists())
            process.join(60)
            assert world.model.is_step(states[2])
            assert world.server.weight_version == "2"
    finally:
        end(process)
    held = {name: tensor.clone() for name, tensor in states[2].items()}
    again = world.start(FullSource(held))
    for name, tensor in states[3].items():
        held[name].copy_(tensor)
    again.send_weights()
    assert world.model.is_step(states[3])
    assert world.server.weight_version == str(again.hook.last_step)
    again.shutdown()


def stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
