"""What the ranks of the sharded tests do; run by `spawn`, as torchrun would."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from deltackpt.codecs import select
from deltackpt.hooks import TrainerHook, anchors
from deltackpt.repository import Repository
from support.forked import forked, fresh
from support.training import Ledger, Net, exact_copy, published, raw, train_step

SEEDED = 17


def spawn(world: int, work: Callable[..., None], root: Path, *args: Any, device: str = "cpu") -> list[str]:
    """Run ``work(rank, world, root, *args)`` in as many processes; -> what each failed with, "" if it did not."""
    begin = forked if device == "cpu" else fresh
    processes = [begin(_main, rank, world, work, root, args, device) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()  # one that hangs has written nothing, which fails the test
    return [(root / f"rank-{rank}.txt").read_text() for rank in range(world)]


def _main(rank: int, world: int, work: Callable[..., None], root: Path, args: tuple[Any, ...], device: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=world
    )
    failed = ""
    try:
        work(rank, world, root, *args, device=device)
    except BaseException as error:
        failed = f"{getattr(error, 'code', '')} {type(error).__name__}\n{traceback.format_exc()}"
    (root / f"rank-{rank}.txt").write_text(failed)
    os._exit(0)  # without the group's farewell: others may be gone


def full(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A test's own gather, of what the hook must never gather."""
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}
    return {k: exact_copy(v.detach().cpu()) for k, v in whole.items()}


class Forbidden:
    """While a hook publishes, nobody gathers, and nobody receives more than a piece."""

    def __init__(self, monitored: list[int]) -> None:
        self.monitored = monitored
        self.saved: dict[str, Any] = {}

    def __enter__(self) -> None:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("a gather")

        for name in ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "scatter"):
            self.saved[name] = getattr(dist, name)
            setattr(dist, name, refuse)
        self.saved["full_tensor"], DTensor.full_tensor = DTensor.full_tensor, refuse
        self.saved["recv"] = receive = dist.recv

        def watched(tensor: torch.Tensor, **kwargs: Any) -> Any:
            self.monitored.append(tensor.nbytes)
            return receive(tensor, **kwargs)

        dist.recv = watched

    def __exit__(self, *_: object) -> None:
        DTensor.full_tensor = self.saved.pop("full_tensor")
        for name, value in self.saved.items():
            setattr(dist, name, value)


def state_for(kind: str, rank: int, world: int, device: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], Any]:
    """-> (state dict of this rank, the whole state, ``locate``)."""
    torch.manual_seed(SEEDED)
    shapes = {
        "a.weight": (64, 48),
        "b.weight": (7, 30),
        "c.bias": (33,),
        "d.experts": (4, 24, 16),
        "e": (),
        "f": (2, 5),
    }
    whole = {name: torch.randn(shape).to(torch.bfloat16).to(device) for name, shape in shapes.items()}
    whole["ids"] = torch.arange(9, device=device)
    if kind == "replicated":
        return {k: v.clone() for k, v in whole.items()}, whole, None
    if kind == "plain":  # expert parallel: names of its own; tensor parallel: shards that `locate` knows
        mine = {f"expert{rank}": whole["a.weight"].clone() + rank, "shared": whole["f"].clone()}
        rows = 64 // world
        mine["cut"] = whole["a.weight"][rank * rows : (rank + 1) * rows].clone()
        every = {f"expert{r}": whole["a.weight"] + r for r in range(world)}
        every |= {"shared": whole["f"], "cut": whole["a.weight"]}
        return mine, every, lambda name, t: ((rank * rows, 0), (64, 48)) if name == "cut" else None
    if kind in ("shard0", "shard1", "shard-last"):
        mesh = init_device_mesh(device, (world,))
        dim = {"shard0": 0, "shard1": 1, "shard-last": -1}[kind]

        def cut(t: torch.Tensor) -> Any:
            axis = dim % t.dim() if t.dim() and dim < t.dim() else None
            return distribute_tensor(t, mesh, [Replicate() if axis is None else Shard(axis)])

        return {k: cut(v) for k, v in whole.items()}, whole, None
    mesh = init_device_mesh(device, (2, world // 2), mesh_dim_names=("dp", "tp"))
    places = {"hybrid": [Replicate(), Shard(0)], "grid": [Shard(0), Shard(1)], "twice": [Shard(0), Shard(0)]}[kind]

    def lay(t: torch.Tensor) -> Any:
        fits = all(isinstance(p, Replicate) or p.dim < t.dim() for p in places)
        return distribute_tensor(t, mesh, places if fits else [Replicate(), Replicate()])

    return {k: lay(v) for k, v in whole.items()}, whole, None


def change(state: dict[str, Any], seed: int) -> None:
    """Change some bits of what this rank holds; replicas alike."""
    for name, value in state.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        if not local.numel():
            continue
        generator = torch.Generator().manual_seed(seed * 1000 + len(name))
        hit = (torch.rand(local.shape, generator=generator) < 0.2).to(local.device)
        if local.dtype == torch.int64:
            local += hit
        else:
            local.view(torch.int16).bitwise_xor_(hit.to(torch.int16))


def publish_kind(rank: int, world: int, root: Path, kind: str, *, device: str) -> None:
    """Three steps of a state laid out in some way, compared with the whole one."""
    anchors.PIECE = 512
    options: dict[str, Any] = {}
    if kind.endswith("+device"):  # coded on the device, though the tensors are small
        kind, options = kind.removesuffix("+device"), {"on_device": True}
        select.SMALL = 64
    state, _, locate = state_for(kind, rank, world, device)
    sizes: list[int] = []
    with TrainerHook(state, root / "repo", locate=locate, threads=1, timeout=60, **options) as hook:
        for step in range(3):
            if step:
                change(state, step)
            with Forbidden(sizes):
                hook.step(step)
                hook.flush()
            save_whole(root, step, kind, state, rank, world)
            dist.barrier()
    assert not sizes or max(sizes) <= 512
    if rank == 0:
        check(root, range(3))
    dist.barrier()


def shares(rank: int, world: int, root: Path, *, device: str) -> None:
    """What each rank reads, sends and stores of a state whose tensors are all sharded."""
    anchors.PIECE = 4096
    mesh = init_device_mesh(device, (world,))
    torch.manual_seed(SEEDED)
    whole = {f"{i:02d}": torch.randn(64, 96).to(torch.bfloat16) for i in range(16)}
    state = {k: distribute_tensor(v, mesh, [Shard(i % 2)]) for i, (k, v) in enumerate(whole.items())}
    total = sum(t.nbytes for t in whole.values())
    with TrainerHook(state, root / "repo", shard_bytes=total // world, threads=1, timeout=60) as hook:
        read = sum(t.to_local().nbytes for name, t in state.items() if name in hook._capture.names)
        assert read <= total / world * 1.05
        for step in range(2):
            change(state, step)
            hook.step(step)
            hook.flush()
            save_whole(root, step, "shares", state, rank, world)
        if rank == 0:
            for sent, received, stored in hook.publisher.traffic:
                assert 0 < sent <= total / world * 1.05
                assert 0 < received <= total / world * 1.05
                assert stored <= (total / world + 4096) * 1.05  # with the header
            parts = [f.size for f in Repository.open(root / "repo").log()[0].patch]
            assert len(parts) == world
            assert max(parts) <= sum(parts) / world * 1.05
    if rank == 0:
        check(root, range(2))
    dist.barrier()


def save_whole(root: Path, step: int, kind: str, state: dict[str, Any], rank: int, world: int) -> None:
    found = full(state)
    if kind == "plain":
        every: list[Any] = [None] * world
        dist.all_gather_object(every, found)
        found = {}
        for mine in every:
            for name, t in mine.items():
                found[name] = torch.cat([m["cut"] for m in every]) if name == "cut" else t
    if rank == 0:
        Ledger(root, root / "repo").save(step, found)


def check(root: Path, steps: Any) -> None:
    Ledger(root, root / "repo").check(list(steps))


def fsdp(rank: int, world: int, root: Path, *, device: str) -> None:
    """FSDP 2 with an AdamW loop, fp32 masters published as bf16."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (world,))
    model = Net()
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())  # FSDP unties them
    model = model.to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    model.scale = torch.nn.Parameter(torch.ones(1, device=device))  # FSDP takes no scalars
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sizes: list[int] = []
    with TrainerHook(model, root / "repo", dtype=torch.bfloat16, threads=1, timeout=60) as hook:
        for step in range(4):
            if step:
                train_step(model, optimizer, step)
            with Forbidden(sizes):
                hook.step(step)
                hook.flush()
            state = full(model.state_dict())
            if rank == 0:
                Ledger(root, root / "repo").save(step, cast(state))
            dist.barrier()
    assert not sizes or max(sizes) <= anchors.PIECE
    if rank == 0:
        check(root, range(4))
    dist.barrier()
    # Resumed: the ranks prove together which step their shards are.
    with TrainerHook(model, root / "repo", dtype=torch.bfloat16, threads=1, timeout=60) as hook:
        assert hook.last_step == 3
    dist.barrier()


def optimizer_state(rank: int, world: int, root: Path, *, device: str) -> None:
    """FSDP 2 with AdamW: moments are shards, each rank has generators of its own, and a resumed training goes on."""
    from torch.distributed.fsdp import fully_shard

    from deltackpt.hooks.training_state import TrainingState
    from deltackpt.restore.materialize import apply

    mesh = init_device_mesh(device, (world,))

    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = Net(seed=seed)
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())  # FSDP unties them
        model = model.to(device)
        model.scale = torch.nn.Parameter(torch.ones(1, device=device))  # FSDP takes no scalars
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def bits(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        tensors = TrainingState(optimizer).tensors(model)
        return raw({k: v.to_local() if isinstance(v, DTensor) else v for k, v in tensors.items()})

    torch.manual_seed(rank)
    model, optimizer = made(0)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "threads": 1, "timeout": 60}
    sizes: list[int] = []
    with TrainerHook(model, root / "repo", optimizer=optimizer, **options) as hook:
        for step in range(4):
            if step:
                train_step(model, optimizer, step)
            with Forbidden(sizes):
                hook.step(step)
                hook.flush()
            drawn = torch.get_rng_state()
            torch.rand(rank + 1)
            dist.barrier()
    assert not sizes or max(sizes) <= anchors.PIECE
    if rank == 0:
        apply(Repository.open(root / "repo"), root / "out", ref="main-optimizer", threads=1)
    dist.barrier()
    other, fresh = made(5)
    train_step(other, fresh, 9)
    TrainingState(fresh).load(root / "out", other)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert bits(other, fresh) == bits(model, optimizer)
    for each in ((model, optimizer), (other, fresh)):
        train_step(*each, 4)
    assert bits(other, fresh) == bits(model, optimizer)
    dist.barrier()


def cast(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in state.items()}


def ddp(rank: int, world: int, root: Path, *, device: str) -> None:
    """DDP: the replicas share the work by tensors."""
    model = Net().to(device)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)
    with TrainerHook(wrapped, root / "repo", dtype=torch.bfloat16, threads=1, timeout=60) as hook:
        for step in range(3):
            if step:
                train_step(wrapped, optimizer, step)
            hook.step(step)
            if rank == 0:
                Ledger(root, root / "repo").save(step, {k: v.cpu() for k, v in published(model).items()})
    if rank == 0:
        check(root, range(3))
        parts = [len(m.patch or ()) for m in Repository.open(root / "repo").log()]
        assert parts[0] > 1
    dist.barrier()


def leader_only(rank: int, world: int, root: Path, *, device: str) -> None:
    """DDP with a hook at rank 0 only: the others know nothing of it."""
    model = Net().to(device)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)
    hook = TrainerHook(wrapped, root / "repo", dtype=torch.bfloat16, sharded=False, threads=1) if rank == 0 else None
    for step in range(3):
        if step:
            train_step(wrapped, optimizer, step)
        if hook is not None:
            hook.step(step)
            Ledger(root, root / "repo").save(step, {k: v.cpu() for k, v in published(model).items()})
    if hook is not None:
        hook.close()
        check(root, range(3))
    dist.barrier()


def drifted(rank: int, world: int, root: Path, *, device: str) -> None:
    """Replicas that do not agree are told of, by all ranks, before anything is published."""
    from deltackpt.errors import DeltackptError

    try:
        TrainerHook({"same": torch.ones(3), "w": torch.ones(3) + rank}, root / "repo", threads=1, timeout=60)
    except DeltackptError as error:
        assert error.code in ("replicas-differ", "rank-failed")
        assert "'w'" in str(error)
        assert "'same'" not in str(error)
        return
    raise AssertionError("no error")


def merged(rank: int, world: int, root: Path, *, device: str) -> None:
    """Steps that are merged are merged by all ranks alike."""
    state, _, _ = state_for("shard0", rank, world, device)
    with TrainerHook(state, root / "repo", full="merge", queue=1, threads=1, timeout=60) as hook:
        for step in range(12):
            if step:
                change(state, step)
            hook.step(step)
            save_whole(root, step, "shard0", state, rank, world)
    if rank == 0:
        log = sorted(m.step for m in Repository.open(root / "repo").log())
        assert log[-1] == 11
        check(root, log)
    dist.barrier()


def one_fails(rank: int, world: int, root: Path, *, device: str) -> None:
    """The put of one rank fails once: all ranks are told, nobody loses anything."""
    from deltackpt.errors import StoreError

    state, _, _ = state_for("shard0", rank, world, device)
    hook = TrainerHook(state, root / "repo", threads=1, timeout=60)
    hook.step(0)
    save_whole(root, 0, "shard0", state, rank, world)
    hook.flush()
    put = hook.repo.store.put

    def fails(name: str, chunks: Any) -> Any:
        if rank == world - 1 and name.startswith("patches/"):
            raise StoreError("store-io", where=name, have="no answer", need="an answer")
        return put(name, chunks)

    hook.repo.store.put = fails
    change(state, 1)
    hook.step(1)
    try:
        hook.flush()
        raise AssertionError("no error")
    except StoreError as error:
        assert error.code in ("store-io", "rank-failed"), error
    hook.repo.store.put = put
    change(state, 2)
    hook.step(2)
    save_whole(root, 2, "shard0", state, rank, world)
    hook.close()
    if rank == 0:
        check(root, [0, 2])
    dist.barrier()


def one_dies(rank: int, world: int, root: Path, where: str, *, device: str) -> None:
    """A rank is killed while it publishes: the others get an error, and the step is not there."""
    state, _, _ = state_for("shard0", rank, world, device)
    hook = TrainerHook(state, root / "repo", threads=1, timeout=15)
    hook.step(0)
    save_whole(root, 0, "shard0", state, rank, world)
    hook.flush()
    dist.barrier()
    store, put = hook.repo.store, hook.repo.store.put

    def dies(name: str, chunks: Any) -> Any:
        if where == "before" and name.startswith("patches/"):
            os._exit(9)
        result = put(name, chunks)
        if where == "after" and name.startswith("patches/"):
            os._exit(9)
        return result

    if rank == world - 1:
        (root / f"rank-{rank}.txt").write_text("killed")
        store.put = dies
    change(state, 1)
    hook.step(1)
    hook.flush()
    raise AssertionError("no error")


def one_not_finite(rank: int, world: int, root: Path, *, device: str) -> None:
    """One rank's shard is infinite: no rank captures the step, and all go on with the next."""
    from deltackpt.errors import CheckpointError

    state, _, _ = state_for("shard0", rank, world, device)
    name = next(name for name, t in state.items() if isinstance(t, DTensor) and t.dtype == torch.bfloat16)
    with TrainerHook(state, root / "repo", nonfinite="refuse", threads=1, timeout=60) as hook:
        hook.step(0)
        save_whole(root, 0, "shard0", state, rank, world)
        local = state[name].to_local()
        before = local.clone()
        if rank == world - 1:
            local.fill_(float("inf"))
        try:
            hook.step(1)
            raise AssertionError("no error")
        except CheckpointError as error:
            assert error.code == "not-finite"
            assert name in error.have
        local.copy_(before)
        change(state, 1)
        hook.step(1)
        save_whole(root, 1, "shard0", state, rank, world)
    if rank == 0:
        check(root, range(2))
    dist.barrier()


def one_placeholder(rank: int, world: int, root: Path, *, device: str) -> None:
    """A tensor that one rank does not have: all ranks raise at once."""
    from deltackpt.errors import DeltackptError

    state = {"w": torch.ones(3, device="meta" if rank else "cpu")}
    try:
        TrainerHook(state, root / "repo", threads=1, timeout=60)
    except DeltackptError as error:
        assert error.code == ("tensor-placeholder" if rank else "rank-failed"), error
        assert "meta" in error.have
        return
    raise AssertionError("no error")


class Called(torch.nn.Module):
    """Its own sub-modules have the names that wrappers use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def called_module(rank: int, world: int, root: Path, *, device: str) -> None:
    """DDP, FSDP 1 with a sharded state dict, and FSDP 2, of a model that has a sub-module called module."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType, fully_shard

    names = sorted(Called().state_dict())
    mesh = init_device_mesh(device, (world,))
    second = Called()
    fully_shard(second.module[0], mesh=mesh)
    fully_shard(second, mesh=mesh)
    first = FullyShardedDataParallel(Called(), device_mesh=mesh, use_orig_params=True, device_id=torch.device("cpu"))
    FullyShardedDataParallel.set_state_dict_type(
        first, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)
    )
    sources = {"ddp": torch.nn.parallel.DistributedDataParallel(Called()), "fsdp1": first, "fsdp2": second}
    for kind, source in sources.items():
        with TrainerHook(source, root / kind, threads=1, timeout=60) as hook:
            hook.step(0)
        assert (
            sorted(m for m in Repository.open(root / kind).layout(Repository.open(root / kind).log()[0]).tensors)
            == names
        )
    dist.barrier()


def experts(rank: int, world: int, root: Path, *, device: str) -> None:
    """FSDP 2 over fused experts: the ranks publish what they hold of each expert, under the names on disk."""
    from torch.distributed.fsdp import fully_shard

    from support import library_models

    model, whole = library_models.make("qwen3_moe", torch.float32), library_models.make("qwen3_moe", torch.float32)
    mesh = init_device_mesh(device, (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with TrainerHook(model, root / "repo", dtype=torch.bfloat16, threads=1, timeout=60) as hook:
        for step in range(3):
            library_models.nudge(whole, step)
            parts = whole.state_dict()
            for name, value in model.state_dict().items():
                value.to_local().copy_(distribute_tensor(parts[name], mesh, value.placements).to_local())
            with Forbidden([]):
                hook.step(step)
                hook.flush()
            if rank == 0:
                found = library_models.saved(whole, root / f"saved-{step}")
                Ledger(root, root / "repo").save(step, cast(found))
            dist.barrier()
    if rank == 0:
        check(root, range(3))
    dist.barrier()


class Tied(torch.nn.Module):
    """Five rows, of which the last rank of four has none."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(rows, 8)
        self.body = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, rows, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embed(tokens))))


def tied_uneven(rank: int, world: int, root: Path, rows: int, *, device: str) -> None:
    """Tied weights that FSDP 2 keeps tied, of which a rank may have no row: the ranks agree on one name."""
    from torch.distributed.fsdp import fully_shard

    model = Tied(rows)
    fully_shard(model, mesh=init_device_mesh(device, (world,)))
    assert model.head.weight is model.embed.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for kind, source in (("model", model), ("function", model.state_dict)):
        with TrainerHook(source, root / kind, threads=1, timeout=60) as hook:
            for step in range(2):
                if step:
                    model(torch.arange(rows)).sum().backward()
                    optimizer.step()
                hook.step(step)
                hook.flush()
                state = full(model.state_dict())
                if rank == 0:
                    del state["head.weight"]
                    (root / f"of-{kind}").mkdir(exist_ok=True)
                    Ledger(root / f"of-{kind}", root / kind).save(step, state)
                dist.barrier()
        if rank == 0:
            Ledger(root / f"of-{kind}", root / kind).check([0, 1])
        dist.barrier()
