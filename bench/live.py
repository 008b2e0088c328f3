"""A live step against sending all weights, between two network namespaces of one rate.

    sudo python bench/live.py --gigabytes 1.2 --rate 1gbit --density 0.01

Both go through the same pair of virtual cards, whose rate `tc` (a token bucket filter) holds down in both directions:
the step from the call of `TrainerHook.step` until the engine's word that it is written and proven is back, and as the
baseline all weights by torch.distributed over Gloo, received into the tensors themselves, without any proof. NCCL's
broadcast and vLLM's engines `nccl` and `sparse_nccl` need cards: bench/live_cards.py has them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

TOKEN = "a secret of the benchmark"
TRAINER, ENGINE = "10.77.0.1", "10.77.0.2"
WIDTH = 2048


def make_model(gigabytes: float, zeros: bool) -> torch.nn.Module:
    """Square bf16 layers that come to so many gigabytes."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    for i in range(max(1, round(gigabytes * 1e9 / (2 * WIDTH * WIDTH)))):
        shape = (WIDTH, WIDTH)
        values = torch.zeros(shape) if zeros else torch.randn(shape) * 0.02
        model.register_parameter(f"layer_{i}", torch.nn.Parameter(values.bfloat16(), requires_grad=False))
    return model


def change(model: torch.nn.Module, step: int, density: float) -> None:
    """A share of all elements by one unit in the last place."""
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        words = p.data.view(torch.int16).view(-1)
        at = torch.randint(0, len(words), (round(len(words) * density),), generator=generator)
        words[at] += (torch.randint(0, 2, (len(at),), generator=generator) * 2 - 1).to(torch.int16)


def trainer(options: argparse.Namespace) -> None:
    """In the first namespace: the steps, and then the baseline."""
    from deltackpt.hooks import TrainerHook
    from deltackpt.live import Session

    model = make_model(options.gigabytes, zeros=False)
    events: list[Any] = []
    live = Session(
        f"{TRAINER}:7700", token=TOKEN, mode="sync", durable=options.durable, carrier=options.carrier, engines=1,
        timeout=300, report=events.append,
    )  # fmt: skip
    seconds, cpu, size = [], [], 0
    with TrainerHook(model, Path(options.out, "repo"), live=live) as hook:
        began = time.monotonic()
        hook.step(0)
        first = time.monotonic() - began
        hook.flush()
        for step in range(1, options.steps + 1):
            change(model, step, options.density)
            began, worked = time.monotonic(), time.process_time()
            hook.step(step)
            seconds.append(time.monotonic() - began)
            cpu.append(time.process_time() - worked)
            hook.flush()
            assert live.step == step
            assert any(e.kind == "live" and e.step == step and e.text.startswith("1 ") for e in events)
            size = hook.metrics.bytes if hook.metrics else 0
    whole = [_all_weights(model, options, 0) for _ in range(options.turns)]
    note = {"first": first, "steps": seconds, "cpu": cpu, "bytes": size, "whole": whole, "weights": _size(model)}
    Path(options.out, "trainer.json").write_text(json.dumps(note))


def engine(options: argparse.Namespace) -> None:
    """In the second namespace: from zeros on, and then the baseline's receiver."""
    from deltackpt.live import join

    model = make_model(options.gigabytes, zeros=True)
    receiver = None
    while receiver is None:
        with suppress(Exception):
            receiver = join(model, f"{TRAINER}:7700", token=TOKEN, timeout=300)
        time.sleep(0.2)
    cpu = []
    while receiver.step != options.steps:
        worked = time.process_time()
        if receiver.receive(1.0) is not None:
            cpu.append(time.process_time() - worked)
    received = receiver.received
    receiver.close()
    for _ in range(options.turns):
        _all_weights(model, options, 1)
    Path(options.out, "engine.json").write_text(json.dumps({"received": received, "cpu": cpu[1:]}))


def _size(model: torch.nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def _all_weights(model: torch.nn.Module, options: argparse.Namespace, rank: int) -> float:
    """Every tensor to the other rank, and one byte back. -> seconds"""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = f"dlive{rank}"
    dist.init_process_group("gloo", init_method=f"tcp://{TRAINER}:7711", rank=rank, world_size=2)
    done = torch.zeros(1, dtype=torch.uint8)
    dist.barrier()
    began = time.monotonic()
    for p in model.parameters():
        data = p.data.view(torch.uint8)
        dist.send(data, 1) if rank == 0 else dist.recv(data, 0)
    dist.recv(done, 1) if rank == 0 else dist.send(done, 0)
    took = time.monotonic() - began
    dist.barrier()
    dist.destroy_process_group()
    return took


def network(rate: str) -> None:
    """Two namespaces, a pair of virtual cards between them, and a rate for each direction."""
    lines = [
        "ip netns add dlive0",
        "ip netns add dlive1",
        "ip link add dlive0 netns dlive0 type veth peer name dlive1 netns dlive1",
    ]
    for i, address in enumerate((TRAINER, ENGINE)):
        lines += [
            f"ip -n dlive{i} address add {address}/24 dev dlive{i}",
            f"ip -n dlive{i} link set lo up",
            f"ip -n dlive{i} link set dlive{i} up",
            f"ip netns exec dlive{i} tc qdisc add dev dlive{i} root tbf rate {rate} burst 1mb latency 50ms",
        ]
    for line in lines:
        subprocess.run(line.split(), check=True)


def take_down() -> None:
    """Remove the namespaces."""
    for i in range(2):
        subprocess.run(["ip", "netns", "delete", f"dlive{i}"], check=False, stderr=subprocess.DEVNULL)


def main() -> None:
    """Both sides, and a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.2)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--carrier", default="tcp", choices=["tcp", "gloo"])
    parser.add_argument("--durable", default="first", choices=["first", "behind"])
    parser.add_argument("--out", default="")
    parser.add_argument("--side", default="")
    options = parser.parse_args()
    if options.side:
        (trainer if options.side == "0" else engine)(options)
        return
    with tempfile.TemporaryDirectory() as out:
        try:
            network(options.rate)
            given = [a for a in sys.argv[1:] if not a.startswith("--out")] + ["--out", out]
            run = [sys.executable, __file__, *given, "--side"]
            sides = [subprocess.Popen(["ip", "netns", "exec", f"dlive{i}", *run, str(i)]) for i in range(2)]
            for side in sides:
                if side.wait() != 0:
                    raise SystemExit("a side failed")
        finally:
            take_down()
        found, other = (json.loads(Path(out, f"{side}.json").read_text()) for side in ("trainer", "engine"))
    step, whole = min(found["steps"]), min(found["whole"])
    print(f"weights            {found['weights']:>14,} bytes, {options.density:.2%} changed, {options.rate} each way")
    print("limiter            tc, a token bucket filter on both virtual cards, under carrier and baseline")
    print(f"all weights, Gloo  {whole:>14.2f} s   of {', '.join(f'{s:.2f}' for s in found['whole'])}")
    print(f"first load, live   {found['first']:>14.2f} s")
    print(f"live step          {step:>14.2f} s   of {', '.join(f'{s:.2f}' for s in found['steps'])}")
    print(f"of it, processor   {min(found['cpu']):>14.2f} s at the trainer, {min(other['cpu']):.2f} s at the engine")
    print(f"patch              {found['bytes']:>14,} bytes")
    print(f"faster             {whole / step:>14.1f} times ({options.carrier}, durable {options.durable})")


if __name__ == "__main__":
    main()
