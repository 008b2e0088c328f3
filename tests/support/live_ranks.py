"""Processes of the live tests: an engine's rank and a trainer, each of which may die or stand still at a phase."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from deltackpt.hooks import TrainerHook
from deltackpt.live import LiveEvent, Session, join
from support.forked import forked
from support.live import TOKEN, Engine, make_model, nudge, raw, until


def digest(model: torch.nn.Module) -> str:
    """Of all bytes of a model."""
    found = hashlib.sha256()
    for name, data in sorted(raw(model).items()):
        found.update(name.encode() + data)
    return found.hexdigest()


def note(path: Path, **what: Any) -> None:
    """Say something to the test, atomically."""
    path.with_suffix(".new").write_text(json.dumps(what))
    path.with_suffix(".new").replace(path)


def noted(path: Path) -> dict[str, Any]:
    """What a process said last; {} before that."""
    return json.loads(path.read_text()) if path.exists() else {}


def wait_for_note(path: Path, step: int) -> None:
    """Wait until a process says that it is at a step."""
    until(lambda: noted(path).get("step") == step)


def wait_for_member(live: Session, engine: str) -> None:
    """Wait until an engine is in."""
    until(lambda: any(m.engine == engine for m in live._members.all()))


def at_phase(phase: str, step: int, how: int):
    """A report that ends or stops this process as a phase of a step begins, once."""
    left = [True]

    def report(event: LiveEvent) -> None:
        if left and (event.kind, event.step) == (phase, step):
            left.clear()
            os.kill(os.getpid(), how)

    return report


def engine(out: str, address: str, name: str, phase: str, step: int, how: int, rank: int, ranks: int) -> None:
    """An engine's rank, from zeros on. It notes its step and the digest of its weights whenever they change."""
    torch.set_num_threads(1)
    model, path = make_model(zeros=True), Path(out)
    options = {"token": TOKEN, "timeout": 20.0, "engine": name, "rank": (rank, ranks)}
    receiver = join(model, address, report=at_phase(phase, step, how), **options)
    note(path, step=receiver.step, digest=digest(model), way="join")
    while True:
        found = receiver.receive(0.1)
        if found is not None:
            note(path, step=found.step, digest=digest(model), way=found.way)


def trainer(
    out: str, repo: str, address: str, phase: str, step: int, how: int, steps: int, carrier: str = "tcp"
) -> None:
    """A trainer that makes ``steps`` steps for one engine, and notes each."""
    torch.set_num_threads(1)
    model, path = make_model(), Path(out)
    report = at_phase(phase, step, how)
    live = Session(address, token=TOKEN, mode="sync", carrier=carrier, engines=1, timeout=10.0, report=report)
    with TrainerHook(model, repo, threads=1, live=live) as hook:
        note(path, address=live.address, step=-1)
        for number in range(steps):
            if number:
                nudge(model, number)
            hook.step(number)
            note(path, address=live.address, step=number, digest=digest(model))
        live.wait_for(99, 2.0)


def sharded(rank: int, world: int, root: Path, carrier: str, *, device: str) -> None:
    """A rank of a trainer with FSDP 2: every rank offers what it owns; the first one has an engine in a thread."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor

    model, whole, mesh = make_model(), make_model(), init_device_mesh(device, (world,))
    fully_shard(model, mesh=mesh)
    live = Session("127.0.0.1:0", token=TOKEN, mode="sync", carrier=carrier, engines=1, timeout=60.0)
    with TrainerHook(model, root / "repo", threads=1, timeout=100, live=live) as hook:
        reader = Engine(make_model(zeros=True), live.address) if rank == 0 else None
        for step in range(3):
            nudge(whole, step)
            for name, value in model.state_dict().items():
                full = whole.state_dict()[name]
                if isinstance(value, DTensor):
                    value.to_local().copy_(distribute_tensor(full, mesh, value.placements).to_local())
                else:
                    value.copy_(full)
            hook.step(step)
            if reader is not None:
                reader.reach(step)
                assert raw(reader.model) == raw(whole)
                assert reader.steps[-1].way == "live"
            dist.barrier()
        if reader is not None:
            reader.close()


def start(work, *args: Any):
    """In a process of its own."""
    process = forked(work, *args, daemon=True)
    process.start()
    return process


def end(process) -> None:
    """Kill a process, stopped ones too."""
    if process.is_alive():
        process.kill()
    process.join(30)


def slices(out: str, address: str, layout: str, rank: int, ranks: int, steps: int) -> None:
    """An engine's rank that holds slices: it notes each step that it took, and what it then holds, until the last."""
    from support.live_layouts import LAYOUTS, moved

    torch.set_num_threads(1)
    model, path = LAYOUTS[layout](rank, ranks), Path(out)
    options = {"token": TOKEN, "timeout": 60.0, "engine": layout, "rank": (rank, ranks), "load": model.load_weights}
    receiver = join(model, address, **options)
    while receiver.step != steps - 1:
        found = receiver.receive(1.0)
        if found is not None:
            what = {"way": found.way, "elements": found.elements, "received": found.received}
            what["decoded"] = getattr(receiver._rank_state._weights, "decoded", None)
            note(path.with_suffix(f".{found.step}.json"), **what, moved=moved(model), digest=digest(model))
    receiver.close()


def fsdp_to_slices(
    rank: int, world: int, root: Path, carrier: str, layouts: list[str], ranks: int, engine: Any = None, *,
    device: str,
) -> None:  # fmt: skip
    """A rank of a trainer with FSDP 2; the first one starts an engine of ``ranks`` processes for each layout."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from support.live_layouts import expected, nudge_state, whole_state

    mesh, whole, steps, limit = init_device_mesh(device, (world,)), whole_state(), 3, 300.0
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    wanted = len(layouts) * ranks
    live = Session(
        "127.0.0.1:0", token=TOKEN, mode="sync", carrier=carrier, engines=wanted, timeout=limit, load_timeout=limit
    )
    started: dict[tuple[str, int], Any] = {}
    with TrainerHook(state, root / "repo", threads=1, timeout=limit, live=live) as hook:
        for layout in layouts if rank == 0 else ():
            for one in range(ranks):
                out = str(root / f"{layout}-{one}.json")
                started[layout, one] = start(engine or slices, out, live.address, layout, one, ranks, steps)
        try:
            for step in range(steps):
                if step:
                    nudge_state(whole, step)
                    for name, tensor in whole.items():
                        local = distribute_tensor(tensor, mesh, [Shard(0)]).to_local()
                        state[name].to_local().copy_(local)
                hook.step(step)
                for layout, one in started:
                    path = root / f"{layout}-{one}.{step}.json"
                    found = until(lambda path=path: noted(path))
                    assert found["digest"] == digest(expected(layout, one, ranks, whole)), (layout, one, step)
                    assert found["way"] == "live", found
                    if engine is not None and step and layout != "wide":  # on a card, in the tensor's own words
                        assert found["decoded"]["card"] > 0, found
                    assert found["moved"], found
                    assert found["elements"] > 0, found
                    assert found["received"] > 0, found
                dist.barrier()
        finally:
            for process in started.values():
                end(process)


def waiting_slices(out: str, address: str, layout: str, rank: int, ranks: int, phase: str, step: int, how: int) -> None:
    """An engine's rank that holds slices, until it is ended: it dies, or stands still, as a phase of a step begins."""
    from support.live_layouts import LAYOUTS

    torch.set_num_threads(1)
    model, path = LAYOUTS[layout](rank, ranks), Path(out)
    options = {"token": TOKEN, "timeout": 20.0, "engine": "e", "rank": (rank, ranks), "load": model.load_weights}
    receiver = join(model, address, report=at_phase(phase, step, how), **options)
    note(path, step=receiver.step)
    while True:
        if receiver.receive(0.1) is not None:
            note(path, step=receiver.step)


def sharded_trainer(out: str, root: str, rank: int, world: int) -> None:
    """A rank of a trainer whose tensors are cut by rows: two steps, the second when it is told to. It notes each, and
    what the second ended with."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from support.live_layouts import nudge_state, whole_state

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=world)
    mesh, whole, path = init_device_mesh("cpu", (world,)), whole_state(), Path(out)
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    live = Session("127.0.0.1:0", token=TOKEN, mode="sync", engines=1, timeout=10.0, load_timeout=60.0)
    hook = TrainerHook(state, Path(root) / "repo", threads=1, timeout=20.0, live=live)
    note(path, address=live.address, step=-1)
    hook.step(0)
    hook.flush()
    note(path, address=live.address, step=0)
    until((Path(root) / "go").exists)
    nudge_state(whole, 1)
    for name, tensor in whole.items():
        state[name].to_local().copy_(distribute_tensor(tensor, mesh, [Shard(0)]).to_local())
    failed = ""
    try:
        hook.step(1)
    except Exception as error:
        failed = getattr(error, "code", type(error).__name__)
    note(path, address=live.address, step=1, failed=failed, live=live.step)
    until((Path(root) / "end").exists)
    os._exit(0)
