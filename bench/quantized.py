"""What a step costs once it is quantised: elements that change, and bytes of the patch, beside the bf16 patch's.

Tensors made as in `packed.py`: fp32 masters moved by AdamW and rounded to bf16, here quantised by each recipe. Scales
are told apart from values, and both from their floor given the old exponent (`floor.py`; of packed and integer values,
whose words have no exponent, the floor of positions and steps).

--parts prints where a patch's bytes are instead: headers and tables, positions, steps, scales, and the floor of each.

    python bench/quantized.py [--rows 2048] [--columns 2048] [--tensors 3] [--recipe NAME ...] [--parts]
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from floor import EXPONENT, Words, changes_of, entropy_bits, floor_given_exponent, position_bits, tensors
from packed import CHAINS, adamw
from safetensors.torch import save_file

import deltackpt
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.patch.part import PartReader
from deltackpt.quantize import RECIPES, Recipe
from deltackpt.quantize.checkpoint import quantize_checkpoint
from deltackpt.report.inspection import inspect_step


def pair(folder: Path, shape: tuple[int, int], count: int, rate: float, steps: int) -> tuple[Path, Path]:
    """A checkpoint before and after a step."""
    old, new = {}, {}
    for i in range(count):
        before, after = adamw((shape[0] + 128 * i, shape[1]), rate, steps)
        for state, words in ((old, before), (new, after)):
            state[f"layers.{i}.weight"] = torch.from_numpy(words.view("<i2")).view(torch.bfloat16).reshape(-1, shape[1])
    for name, state in (("old", old), ("new", new)):
        (folder / name).mkdir(parents=True)
        save_file(state, folder / name / "model.safetensors", {"format": "pt"})
    return folder / "old", folder / "new"


def floor_bits(old: Path, new: Path, scales: bool) -> float:
    """Of the scales, or of the values."""
    total, after = 0.0, tensors(new)
    for name, (dtype, words) in tensors(old).items():
        if ("scale" in name) != scales:
            continue
        if dtype in EXPONENT:
            total += floor_given_exponent(words, after[name][1], dtype).bits
        else:
            steps = changes_of(words, after[name][1], dtype)
            total += position_bits(len(words), len(steps)) + entropy_bits(np.unique(steps, return_counts=True)[1])
    return total


def step_bits(detail: ListIndex, old: Words, new: Words, dtype: str) -> int:
    """Bits of the third run of a tensor's tiles, the values: a sign for each change, and sizes where a class has them
    (FORMAT section "Steps"). The rest of a payload says where the changes are."""
    at = np.flatnonzero(old != new)
    if detail.scale.sized == 0:
        return len(at)
    distance = np.abs(changes_of(old[at], new[at], dtype)) - 1
    lengths = np.ceil(np.log2(distance + 1)).astype(np.int64)  # bit lengths: 0 of 0, 1 of 1, 2 of 2 and 3
    first, width = EXPONENT[dtype]
    exponent = ((old[at] >> old.dtype.type(first)) & old.dtype.type((1 << width) - 1)).astype(np.int64)
    raw = np.clip(detail.scale.anchor - exponent, 0, 8 * old.itemsize - 1)
    sizes = np.where(lengths <= raw, raw, lengths - 1)
    return len(at) + int(sizes[detail.scale.class_of(exponent) >= detail.scale.first].sum())


def parts_row(title: str, work: Path, old: Path, new: Path, bf16: int | None) -> int:
    """Publish the pair, and print what its bytes are; -> bytes of the patch."""
    deltackpt.write(old, work / "repo")
    done = deltackpt.write(new, work / "repo", base=old)
    repo = deltackpt.Repository.open(work / "repo")
    before, after, found, floors = tensors(old), tensors(new), Counter[str](), Counter[str]()
    for file in repo.load(repo.find("latest")).patch or ():
        data = memoryview((work / "repo" / file.name).read_bytes())
        part = PartReader(data, file.name)
        found["tables"] += len(data)
        for entry in part.entries:
            dtype, words = before[entry.name]
            payload = part.payload_of(entry)
            found["tables"] -= payload[1] - payload[0]
            floor = floor_given_exponent(words, after[entry.name][1], dtype)
            if "scale" in entry.name:
                found["scales"] += payload[1] - payload[0]
                floors["scales"] += math.ceil(floor.bits / 8)
                continue
            assert entry.encoding == "packed", entry.encoding
            steps = step_bits(entry.detail, words, after[entry.name][1], dtype) // 8
            found["steps"] += steps
            found["positions"] += payload[1] - payload[0] - steps
            floors["steps"] += round(floor.step_bits / 8)
            floors["positions"] += round(floor.position_bits / 8)
    assert sum(found.values()) == done.patch_bytes
    whole = bf16 or done.patch_bytes
    shares = [
        f"{found[kind]:,} / {floors[kind]:,} ({found[kind] / whole:.3f})" for kind in ("positions", "steps", "scales")
    ]
    least, size = sum(floors.values()) / whole, done.patch_bytes
    print(f"| {title} | {done.changed:,} | {size:,} ({size / whole:.3f}) | {' | '.join(shares)} "
          f"| {found['tables']:,} ({found['tables'] / whole:.3f}) | {least:.3f} |", flush=True)  # fmt: skip
    return done.patch_bytes


def row(title: str, work: Path, old: Path, new: Path, bf16: int | None) -> int:
    """Publish the pair, and print what it took; -> bytes of the patch."""
    repo = work / "repo"
    deltackpt.write(old, repo)
    done = deltackpt.write(new, repo, base=old)
    entries = inspect_step(deltackpt.Repository.open(repo), "latest").tensors
    scales = sum(entry.bytes for entry in entries if "scale" in entry.name)
    values = sum(entry.bytes for entry in entries if "scale" not in entry.name)
    changed = sum(entry.changed for entry in entries if "scale" not in entry.name)
    floors = [floor_bits(old, new, which) / 8 for which in (False, True)]
    share = "" if bf16 is None else f"{done.patch_bytes / bf16:.3f}"
    print(f"| {title} | {done.density:.3%} | {changed:,} | {done.patch_bytes:,} | {share} "
          f"| {values:,} / {floors[0]:,.0f} | {scales:,} / {floors[1]:,.0f} |", flush=True)  # fmt: skip
    return done.patch_bytes


def headings() -> None:
    print("| | density | values changed | patch bytes | of bf16's | values, bytes / floor | scales, bytes / floor |")
    print("| --- | --- | --- | --- | --- | --- | --- |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--tensors", type=int, default=3)
    parser.add_argument("--recipe", action="append", choices=RECIPES)
    parser.add_argument("--parts", action="store_true")
    args = parser.parse_args()
    if args.parts:
        print(
            "| | changes | patch, of bf16's | positions, bytes / floor | steps | scales | tables | floor, of bf16's |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    else:
        headings()
    print_row: Callable[..., int] = parts_row if args.parts else row
    for title, (rate, steps) in CHAINS.items():
        with tempfile.TemporaryDirectory() as temporary:
            root = Path(temporary)
            old, new = pair(root / "bf16", (args.rows, args.columns), args.tensors, rate, steps)
            whole = print_row(f"{title}, bf16", root / "bf16", old, new, None)
            for name in args.recipe or RECIPES:
                for part in (old, new):
                    quantize_checkpoint(part, root / name / part.name, Recipe(name))
                print_row(f"{title}, {name}", root / name, root / name / "old", root / name / "new", whole)


if __name__ == "__main__":
    main()
