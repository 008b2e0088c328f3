"""From a trainer's step() to an engine's weights on one card, 8 B shapes, by a repository in memory-backed storage.

A hook publishes; a module is refreshed; a receiver without a cache moves a model that is laid out as vLLM does (fused
rows, a padded vocabulary). All are on one card; the weights and changes are bench/gpu_hook.py's. Every result is
compared with the trainer's weights bit by bit. Without a GPU small shapes run in Triton's interpreter: no figures.

"compiled late" counts the kernels that were compiled after those that hook and receivers compile from their making on
had ended: none should be. Each step is printed at once; none is begun after --seconds.

    python bench/gpu_engine.py [--density 0.001 0.01 0.05] [--size 8b|1b|small|tiny] [--repeat 2] [--seconds 240]
                               [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

if not torch.cuda.is_available():
    import os

    os.environ["TRITON_INTERPRET"] = "1"

from gpu_hook import SIZES, change, model, scratch

from deltackpt.engines import card, card_memory
from deltackpt.engines.receiver import Receiver
from deltackpt.engines.sglang.loader import SglangRank
from deltackpt.engines.transformers import prepare, refresh
from deltackpt.engines.update import Update
from deltackpt.gpu import compile_ahead
from deltackpt.hooks import TrainerHook
from deltackpt.publish.manifest import AnchorPolicy

AIMS = {  # at 1 %
    "step() blocks": 120.0, "step() to durable": 200.0, "refresh, next": 40.0, "staged without a cache": 150.0,
    "pause": 25.0, "step() called to refresh proven": 350.0, "memory beyond weights: refresh": 1.0,
    "memory beyond weights: staged": 1.0, "first step() blocks": 2000.0, "refresh, first": 2000.0, "compiled late": 0.0,
}  # fmt: skip
CUDA = torch.cuda.is_available()


class Tree(torch.nn.Module):
    """A module whose state dict has these names."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        children: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in state.items():
            head, _, rest = name.partition(".")
            if rest:
                children.setdefault(head, {})[rest] = tensor
            else:
                self.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
        for head, below in children.items():
            self.add_module(head, Tree(below))


class Laid(torch.nn.Module):
    """The same weights as vLLM lays them out."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        fused: dict[str, list[str]] = {}
        for name in state:
            layer, _, part = name.rpartition(".")
            into = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}.get(part, part)
            fused.setdefault(f"{layer}_{into}" if layer else into, []).append(name)
        self.of: dict[str, tuple[str, int]] = {}
        for into, names in fused.items():
            first = state[names[0]]
            rows = sum(state[name].shape[0] for name in names) + (64 if into in ("embed", "head") else 0)
            made = torch.zeros(rows, *first.shape[1:], dtype=first.dtype, device=first.device)
            self.register_parameter(f"w_{into}", torch.nn.Parameter(made, requires_grad=False))
            at = 0
            for name in names:
                self.of[name] = f"w_{into}", at
                at += state[name].shape[0]
        self.load_weights(state.items())

    def view(self, name: str, rows: int) -> torch.Tensor:
        into, at = self.of[name]
        return getattr(self, into).data[at : at + rows]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            self.view(name, weight.shape[0]).copy_(weight)
            if name in ("embed", "head"):
                getattr(self, self.of[name][0]).data[weight.shape[0] :].fill_(0)


def compiled() -> int:
    """How many kernels this process has compiled or loaded, of all that Triton makes of ours."""
    import importlib
    import pkgutil

    from deltackpt.gpu import triton as ours

    found = 0
    for module in pkgutil.iter_modules(ours.__path__):
        for value in vars(importlib.import_module(f"{ours.__name__}.{module.name}")).values():
            for cache in getattr(value, "device_caches", {}).values():
                found += len(cache[0])
    return found


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


class Row:
    """Milliseconds, and GB, by name."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.wrong: list[str] = []

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        wait()
        began = time.perf_counter()
        yield
        wait()
        self.values[name] = 1e3 * (time.perf_counter() - began)

    @contextmanager
    def memory(self, name: str) -> Iterator[None]:
        if not CUDA:
            yield
            return
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield
        self.values[name] = (torch.cuda.max_memory_allocated() - held) / 1e9

    def part(self, name: str, work: Callable[[], Any]) -> None:
        """What goes wrong is told in full, and the next part goes on."""
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            self.wrong.append(f"{name}: {type(error).__name__}: {error}")


class Bench:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.url = args, folder / "repo"
        self.where = torch.device("cuda" if CUDA else "cpu")
        self.state = self.sized(model(args.size, self.where), folder)
        self.start = Row()
        self.module: Tree | None = None
        self.hook: TrainerHook | None = None
        self.receiver: Receiver | None = None
        self.ahead = 0

    def sized(self, state: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
        """As many tensors as the storage has room for: an anchor and the patches."""
        room, some = 0.7 * shutil.disk_usage(folder).free, dict[str, torch.Tensor]()
        for name, tensor in state.items():
            if sum(t.nbytes for t in some.values()) + tensor.nbytes <= room:
                some[name] = tensor
        if len(some) < len(state):
            print(f"storage has room for {len(some)} of {len(state)} tensors", flush=True)
        return some

    def begin(self) -> None:
        start = self.start
        with start.time("hook made"):
            options = {"anchor": AnchorPolicy(ratio=1e9), "on_device": True, "shard_bytes": 1 << 30}
            self.hook = TrainerHook(self.state, self.url, **options)
        with start.time("anchor published"):
            self.hook.step(0)
            self.hook.flush()
        self.module, laid = Tree(self.state), Laid(self.state)
        origin = next(path for path in (self.url / "anchors").iterdir() if path.is_dir())
        with start.time("receiver attached"):
            self.receiver = Receiver(SglangRank(laid), str(self.url), None, origin=str(origin))
        proof = self.receiver.proof
        print(f"receiver: {proof.summary() if proof else None}; {self.receiver.why}", flush=True)
        begun = [*self.hook.compiling, *prepare(self.module)]
        with start.time("waited for kernels"):
            for ahead in begun:
                ahead.wait(60)
        self.ahead = compiled()
        start.values["compiled ahead"] = self.ahead
        for ahead in begun:
            print(f"compiled ahead: {ahead.seconds} s {ahead.error}", flush=True)
        print(json.dumps(start.values), flush=True)

    def step(self, density: float, first: bool) -> Row:
        row, hook = Row(), self.hook
        assert hook is not None
        change(self.state, density)
        wait()
        began = time.perf_counter()
        with row.time("first step() blocks" if first else "step() blocks"):
            hook.step()
        hook.flush()
        row.values["step() to durable"] = 1e3 * (time.perf_counter() - began)

        def follow() -> None:
            name = "refresh, first" if first else "refresh, next"
            with row.memory("memory beyond weights: refresh"), row.time(name):
                result = refresh(self.module, hook.repo)
            row.values["changed, million"], row.values["part, MB"] = result.changed / 1e6, result.read / 1e6
            if not first:
                row.values["step() called to refresh proven"] = row.values["step() to durable"] + row.values[name]
            held = self.module.state_dict()
            self.compare("refresh", {name: held[name] for name in self.state})

        row.part("refresh", follow)
        row.part("receiver", lambda: self.receive(row))
        row.values["compiled late"], self.ahead = compiled() - self.ahead, compiled()
        print(f"{density:.1%}{' first' if first else ''}", json.dumps(row.values), flush=True)
        return row

    def receive(self, row: Row) -> None:
        receiver = self.receiver
        with row.memory("memory beyond weights: staged"), row.time("staged without a cache"):
            receiver.update(Update(phase="stage"))
            receiver._staged.join()
        with row.time("pause"):
            report = receiver.update(Update())
        if report.path != "patches":
            row.wrong.append(f"the receiver went by {report.path}: {report.reason}")
        row.values["decoded on the card, tensors"] = report.decoded.get("card", 0)
        row.values["decoded on the host, tensors"] = report.decoded.get("host", 0)
        laid = receiver.engine.model
        self.compare("receiver", {name: laid.view(name, tensor.shape[0]) for name, tensor in self.state.items()})
        with row.time("all weights checked on the card"):
            report = receiver.update(Update(phase="check"))
        print(f"checked: {report.checked}", flush=True)
        receiver.confirm()

    def compare(self, what: str, held: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.state.items():
            if not torch.equal(held[name].view(torch.int16), tensor.view(torch.int16)):
                raise RuntimeError(f"{what}: other words of {name}")


def medians(rows: list[Row]) -> dict[str, float]:
    names = {name: None for row in rows for name in row.values}
    return {n: sorted(v := [r.values[n] for r in rows if n in r.values])[len(v) // 2] for n in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.001, 0.05])
    parser.add_argument("--size", choices=SIZES, default="8b" if CUDA else "tiny")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not CUDA:
        for module in (card, card_memory, compile_ahead):
            module.has_kernels = lambda device: True
    name = torch.cuda.get_device_name() if CUDA else "CPU, interpreted: no figures"
    began = time.perf_counter()
    found: dict[str, dict[str, float]] = {}
    wrong: list[str] = []
    with scratch() as folder:
        bench = Bench(args, folder)
        size = sum(t.nbytes for t in bench.state.values())
        print(f"{name}; torch {torch.__version__}; {args.size}, {size / 1e9:.2f} GB; milliseconds, GB\n", flush=True)
        bench.begin()
        found["start"] = bench.start.values
        first = bench.step(args.density[0], True)
        found["first"] = first.values
        wrong += first.wrong
        for density in args.density:
            rows = [
                bench.step(density, False) for _ in range(args.repeat) if time.perf_counter() - began < args.seconds
            ]
            if not rows:
                print(f"no time for {density:.1%}", flush=True)
                continue
            found[f"{density:.1%}"] = medians(rows)
            wrong += [line for row in rows for line in row.wrong]
            print(density, json.dumps(found[f"{density:.1%}"]), f"{time.perf_counter() - began:.0f} s", flush=True)
        bench.hook.close()
    names = {n: None for row in found.values() for n in row}
    print("\n| | aim at 1 % | " + " | ".join(found) + " |\n| --- | ---: |" + " ---: |" * len(found))
    for n in names:
        cells = [f"{row[n]:,.2f}" if n in row else "" for row in found.values()]
        print(f"| {n} | {AIMS.get(n, '')} | " + " | ".join(cells) + " |")
    print("\n".join(["", *wrong]) if wrong else "\nevery step is the trainer's, bit by bit")
    if args.json:
        args.json.write_text(json.dumps({"card": name, "rows": found, "wrong": wrong}, indent=1) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
