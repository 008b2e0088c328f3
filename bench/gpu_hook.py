"""The trainer hook on a card: what a step costs on an 8 B model's shapes at 1 % changed, as a table.

Needs torch, numpy, zstandard, xxhash, safetensors and fsspec; without a GPU it runs small shapes on the CPU, which
shows that it works and no more. The weights are normal noise, 90 % of the changes one ULP: speeds and not sizes.
--rounded: changes as rounding of fp32 masters makes them, more of them the smaller the weight. --brief: no more than
what kernels do, each with its time, and what a step blocks.

    python bench/gpu_hook.py [--density 0.01] [--size 8b|1b|small] [--repeat 3] [--rounded] [--brief] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from deltackpt.codecs import Change as HostChange
from deltackpt.codecs import encode as encode_on_host
from deltackpt.format import state_digest
from deltackpt.gpu import digest, pipeline, torch_diff
from deltackpt.gpu.changes import DeviceChanges
from deltackpt.gpu.diff import groups
from deltackpt.gpu.encode import encode, grid_for
from deltackpt.gpu.transfers import CopyStream, copy_stream
from deltackpt.hooks import TrainerHook
from deltackpt.hooks.capture import Capture
from deltackpt.hooks.options import HookOptions
from deltackpt.hooks.parts import encode_deltas
from deltackpt.patch.part import Origin
from deltackpt.publish.manifest import AnchorPolicy
from deltackpt.publish.objects import StepObjects
from deltackpt.publish.step import EncodeOptions
from deltackpt.repository import Repository
from deltackpt.torch_views.extract import Piece, pieces_of
from deltackpt.torch_views.snapshot import Snapshot
from deltackpt.torch_views.words import on_host

SIZES = {  # vocabulary, hidden, intermediate, key and value rows, layers
    "8b": (128_256, 4096, 14_336, 1024, 32),
    "1b": (128_256, 2048, 8192, 512, 16),
    "small": (2048, 512, 1536, 256, 4),
    "tiny": (256, 128, 256, 64, 1),
}
TARGETS = {
    "diff": ("GB/s", 400.0, True),
    "diff + encode": ("GB/s", 300.0, True),
    "step() blocks": ("ms", 120.0, False),
    "diff + encode + part in memory-backed storage": ("GB/s", 60.0, True),
    "state digest": ("GB/s", 300.0, True),
    "pinned snapshot / PCIe copy": ("x", 1.3, False),
    "peak memory beyond weights and snapshot": ("GB", 1.0, False),
}


def model(size: str, where: torch.device) -> dict[str, torch.Tensor]:
    vocabulary, hidden, inner, kv, layers = SIZES[size]
    torch.manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=where).mul_(0.02)

    state = {"embed": weight(vocabulary, hidden), "head": weight(vocabulary, hidden), "norm": weight(hidden)}
    for i in range(layers):
        rows = {"q": hidden, "k": kv, "v": kv, "o": hidden, "gate": inner, "up": inner}
        state |= {f"{i}.{name}": weight(n, hidden) for name, n in rows.items()}
        state |= {f"{i}.down": weight(hidden, inner), f"{i}.norm1": weight(hidden), f"{i}.norm2": weight(hidden)}
    return state


def change(state: dict[str, torch.Tensor], density: float) -> None:
    """Move a share of the weights: nine in ten by one ULP, the rest by up to eight."""
    for tensor in state.values():
        flat = tensor.view(torch.int16).view(-1)
        for at in range(0, flat.numel(), 1 << 26):
            part = flat[at : at + (1 << 26)]
            count = max(1, int(part.numel() * density))
            where = torch.randint(part.numel(), (count,), device=flat.device).unique()
            size = torch.where(torch.rand(where.numel(), device=flat.device) < 0.9, 1, 5)
            size = torch.where(torch.rand(where.numel(), device=flat.device) < 0.5, size, -size)
            part[where] += size.to(torch.int16)


def change_rounded(state: dict[str, torch.Tensor], density: float) -> None:
    """Move hidden fp32 masters by normal noise, and round: about ``density`` of normal weights of .02 change."""
    for tensor in state.values():
        flat = tensor.view(-1)
        for at in range(0, flat.numel(), 1 << 24):
            part = flat[at : at + (1 << 24)]
            bits = part.view(torch.int16).int()
            ulp = torch.ldexp(torch.ones_like(part, dtype=torch.float32), ((bits >> 7) & 255) - 134)
            ulp *= torch.where((bits & 127) == 0, 0.49, 0.98)  # below a power of two they are half as wide
            masters = part.float() + (torch.rand_like(ulp) - 0.5) * ulp
            part.copy_(masters + torch.randn_like(ulp) * (density * 2.5e-5))


class Clock:
    def __init__(self, where: torch.device, repeat: int) -> None:
        self.where, self.repeat = where, repeat

    def wait(self) -> None:
        if self.where.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
        """Median over the repeats, after one that warms up; ``before`` is not counted."""
        taken = []
        for _ in range(self.repeat + 1):
            before()
            gc.collect()
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[1:])


def kernels_of(work: Callable[[], Any], where: torch.device) -> list[str]:
    """Milliseconds on the card by kernel, the longest first; nothing without a card."""
    if where.type != "cuda":
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    spent = [(event.device_time_total / 1e3, event.key) for event in profile.key_averages()]
    return [f"{ms:9.3f} ms  {name[:60]}" for ms, name in sorted(spent, reverse=True)[:20]]


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory-backed storage, where there is some."""
    root = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="deltackpt-", dir=root) as folder:
        yield Path(folder)


def found(pieces: list[Piece], snapshot: Snapshot) -> Iterator[tuple[list[DeviceChanges], Any]]:
    """What changed, a batch at a time, and the group that kernels made of it, if there are kernels."""
    if digest.has_kernels(pieces[0].tensor.device):
        for group in groups(pieces, snapshot):
            yield [group.changes], group
        return
    for batch in torch_diff.batches(pieces, lambda p: torch_diff.find(p, torch_diff.runs(p, snapshot))):
        yield batch, None


def coded(group: Any, snapshot: Snapshot, side: CopyStream | None) -> Any:
    """A job for `interleaved`: the tiles of all that is large enough, by name; without kernels none."""
    if group is None:
        return {}
    pieces, counts = group.changes.pieces, group.changes.counts
    grids = {i: grid_for(piece, counts[i], "auto") for i, piece in enumerate(pieces)}
    which = {i: grid for i, grid in grids.items() if grid is not None}
    made = yield from encode(group, which, snapshot, side)
    return {pieces[i].name: tiles for i, tiles in made.items()}


def check(pieces: list[Piece], snapshot: Snapshot) -> str:
    """The device's bytes and digests are the host's, on tensors that the host can do in a moment."""
    some = [piece for piece in sorted(pieces, key=lambda piece: piece.elements) if piece.elements <= 1 << 25]
    some = some[: len(pieces) // 3 + 3]
    made = {}
    for tiles in pipeline.interleaved(coded(group, snapshot, None) for _, group in found(some, snapshot)):
        made |= tiles
    sums = digest.sums_of_pieces(some)
    for piece, total in zip(some, sums, strict=True):
        words, base = on_host(piece.words(), piece.dtype), on_host(snapshot.of(piece.name), piece.dtype)
        if total != state_digest.of_run(words):
            raise SystemExit(f"gpu_hook: another digest of {piece.name}")
        if piece.name not in made:
            continue
        at = np.flatnonzero(base != words)
        change = HostChange(piece.dtype, piece.storage, at, base[at], words[at], base, words)
        _, want = encode_on_host(change, piece.storage, "packed")
        if b"".join(made[piece.name].payload) != b"".join(want.payload):
            raise SystemExit(f"gpu_hook: other bytes of {piece.name}")
    return f"{len(made)} tensors coded to the same bytes as on the host, and {len(some)} digests agree"


def measure(args: argparse.Namespace) -> tuple[dict[str, float], list[str]]:
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = Clock(where, args.repeat)
    state = model(args.size, where)
    pieces = pieces_of(state)
    size = sum(piece.nbytes for piece in pieces)
    result: dict[str, float] = {"model bytes": float(size)}
    options = HookOptions(threads=4, on_device=True)
    taker = Capture(None, pieces, None, options)  # type: ignore[arg-type]
    taker.capture(pieces)
    snapshot = taker._snapshot
    assert snapshot is not None
    move = change_rounded if args.rounded else change
    move(state, args.density)
    notes = [check(pieces, snapshot)]

    def find() -> int:
        return sum(changes.count for batch, _ in found(pieces, snapshot) for changes in batch)

    changed = find()
    notes.append(f"{changed:,} of {sum(p.elements for p in pieces):,} elements changed")
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if where.type == "cuda" else 0
    result["diff"] = size / clock.seconds(find) / 1e9

    def find_and_encode() -> int:
        side = copy_stream(where)
        jobs = (coded(group, snapshot, side) for _, group in found(pieces, snapshot))
        return sum(tiles.size for made in pipeline.interleaved(jobs) for tiles in made.values())

    payload = find_and_encode()
    result["diff + encode"] = size / clock.seconds(find_and_encode) / 1e9
    notes.append(f"{payload:,} bytes of tiles, {8 * payload / changed:.2f} bits a change")

    deltas: dict[str, Any] = {}

    def take() -> None:
        deltas.clear()
        deltas.update(taker.capture(pieces))

    def begin() -> None:
        """As `step` does: what was found is encoded later."""
        with taker.capturing(pieces, lambda: True) as late:
            deltas[""] = late.deltas

    def again() -> None:
        dict(deltas.pop("", {}))
        move(state, args.density)

    take()  # what changed so far: with what `again` moves, the next step would have twice as much
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    result["step() blocks"] = clock.seconds(begin, again) * 1e3
    result["captured and encoded, ms"] = clock.seconds(take, again) * 1e3
    if where.type == "cuda":
        peak = torch.cuda.max_memory_allocated() - held
        result["peak memory beyond weights and snapshot"] = peak / 1e9
    if args.brief:
        return result, [*notes, *kernels_of(find_and_encode, where)]
    names = {piece.name for piece in pieces}
    with scratch() as folder:
        repo, count = Repository.open_or_create(folder / "store"), iter(range(1 << 30))

        def part() -> None:
            take()
            origin, objects = Origin("ab" * 16, 1, "cd" * 32, "ef" * 32), StepObjects(repo, next(count))
            encode_deltas(objects, origin, deltas, names, EncodeOptions(threads=taker.threads))
            objects.wait()

        result["diff + encode + part in memory-backed storage"] = size / clock.seconds(part, again) / 1e9
    if where.type == "cuda":
        peak = torch.cuda.max_memory_allocated() - held
        result["peak memory beyond weights and snapshot"] = peak / 1e9
    result["state digest"] = size / clock.seconds(lambda: digest.sums_of_pieces(pieces)) / 1e9
    deltas.clear()
    taker = snapshot = None  # type: ignore[assignment]
    gc.collect()
    if where.type == "cuda":
        torch.cuda.empty_cache()
        result |= pinned(state, pieces, clock, args.density, size)
    with scratch() as folder:
        result |= whole(state, pieces, clock, args.density, folder)
    return result, notes


def pinned(
    state: dict[str, torch.Tensor], pieces: list[Piece], clock: Clock, density: float, size: int
) -> dict[str, float]:
    """The snapshot in pinned host memory, against the time that its bytes take over the bus."""
    taker = Capture(None, pieces, None, HookOptions(snapshot="host", threads=4))  # type: ignore[arg-type]
    taker.capture(pieces)
    snapshot = taker._snapshot
    assert snapshot is not None
    buffer = torch.empty(max(p.elements for p in pieces), dtype=torch.int16, device=clock.where)

    def copy() -> None:
        for piece in pieces:
            buffer[: piece.elements].copy_(snapshot.of(piece.name), non_blocking=True)

    bus = clock.seconds(copy)

    def again() -> None:
        change(state, density)
        snapshot.wait()  # what a step would wait for that follows in less time than this

    took = clock.seconds(lambda: taker.capture(pieces), again)
    behind = clock.seconds(snapshot.wait, lambda: (again(), taker.capture(pieces)))
    return {
        "PCIe copy, GB/s": size / bus / 1e9,
        "pinned snapshot / PCIe copy": took / bus,
        "pinned snapshot, written behind, ms": behind * 1e3,
    }


def whole(
    state: dict[str, torch.Tensor], pieces: list[Piece], clock: Clock, density: float, folder: Path
) -> dict[str, float]:
    """The hook itself, on a subset that has room for an anchor: what step() holds up, and what goes on behind."""
    some: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if sum(t.nbytes for t in some.values()) + tensor.nbytes <= 2 << 30:
            some[name] = tensor
    size = sum(t.nbytes for t in some.values())
    blocked, behind = [], []
    with TrainerHook(some, folder / "repo", anchor=AnchorPolicy(ratio=1e9), on_device=True, threads=4) as hook:
        hook.step(0)
        hook.flush()
        for _ in range(clock.repeat + 1):
            change(some, density)
            clock.wait()
            began = time.perf_counter()
            hook.step()
            blocked.append(time.perf_counter() - began)
            hook.flush()
            behind.append(time.perf_counter() - began)
    return {
        "TrainerHook, GB": size / 1e9,
        "TrainerHook.step() blocks, ms": statistics.median(blocked[1:]) * 1e3,
        "TrainerHook, step to durable manifest, ms": statistics.median(behind[1:]) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--size", choices=SIZES, default="8b" if torch.cuda.is_available() else "small")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rounded", action="store_true")
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result, notes = measure(args)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, small shapes: no figures"
    print(f"{card}; torch {torch.__version__}; {args.size}, density {args.density:.2%}\n")
    print("| figure | measured | aim | |\n| --- | ---: | ---: | --- |")
    for name, value in result.items():
        unit, aim, more = TARGETS.get(name, ("", None, True))
        aim = aim if torch.cuda.is_available() else None
        met = "" if aim is None else "met" if (value >= aim) == more else "MISSED"
        shown = "" if aim is None else f"{'>=' if more else '<='} {aim:g} {unit}"
        print(f"| {name} | {value:,.3f} {unit} | {shown} | {met} |")
    print("\n" + "\n".join(notes))
    if args.json:
        args.json.write_text(json.dumps({"card": card, "result": result, "notes": notes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
