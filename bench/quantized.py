"""What a step costs once it is quantised: elements that change, and bytes of the patch, beside the bf16 patch's.

Tensors made as in `packed.py`: fp32 masters moved by AdamW and rounded to bf16, here quantised by each recipe. Scales
are told apart from values, and both from their floor given the old exponent (`floor.py`; of packed and integer values,
whose words have no exponent, the floor of positions and steps).

    python bench/quantized.py [--rows 2048] [--columns 2048] [--tensors 3] [--recipe NAME ...]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from floor import EXPONENT, changes_of, entropy_bits, floor_given_exponent, position_bits, tensors
from packed import CHAINS, adamw
from safetensors.torch import save_file

import deltackpt
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--tensors", type=int, default=3)
    parser.add_argument("--recipe", action="append", choices=RECIPES)
    args = parser.parse_args()
    print("| | density | values changed | patch bytes | of bf16's | values, bytes / floor | scales, bytes / floor |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for title, (rate, steps) in CHAINS.items():
        with tempfile.TemporaryDirectory() as temporary:
            root = Path(temporary)
            old, new = pair(root / "bf16", (args.rows, args.columns), args.tensors, rate, steps)
            whole = row(f"{title}, bf16", root / "bf16", old, new, None)
            for name in args.recipe or RECIPES:
                for part in (old, new):
                    quantize_checkpoint(part, root / name / part.name, Recipe(name))
                row(f"{title}, {name}", root / name, root / name / "old", root / name / "new", whole)


if __name__ == "__main__":
    main()
