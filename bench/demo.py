"""The main job on a real model: train, publish every step as a patch, get every step back, compare byte for byte.

MiniLM is fine-tuned for 20 AdamW steps (bench/chain.py). After each one, `deltackpt write` publishes the bf16 copy; at
the end `deltackpt apply` materializes every step, whose files are compared with the trainer's, and `deltackpt verify`
checks the repository. Exits with 1 at the first difference.

    python bench/demo.py [--steps 20] [--work DIR] [--keep]
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from floor import Floor, floor

HERE = Path(__file__).parent
COLUMNS = "step    density    changed        bytes  bits/change  /floor  smaller  write s  apply s"


@dataclass(frozen=True)
class Step:
    """A published step. ``floor`` is the entropy of its change, None for the anchor."""

    number: int
    original: Path
    size: int  # bytes of the checkpoint's weights
    written: dict[str, Any]
    floor: Floor | None

    @property
    def bytes(self) -> int:
        return int(self.written["patch_bytes"]) if self.floor else self.size

    def line(self, apply_seconds: float) -> str:
        if self.floor is None:
            change = f"{'anchor':>9} {'':>10} {self.bytes:12,} {'':>11}  {'':>6}  {'':>7}"
        else:
            bits, low = (self.floor.per_change(b) for b in (8 * self.bytes, self.floor.bits))
            change = f"{self.floor.density:9.3%} {self.floor.changes:10,} {self.bytes:12,} {bits:11.2f}  "
            change += f"{bits / low if low else 0:6.3f}  {self.size / self.bytes:6.0f}x"
        return f"{self.number:4}  {change}  {self.written['seconds']:7.2f}  {apply_seconds:7.2f}"


def deltackpt(*args: str | Path) -> dict[str, Any]:
    """Run the command as a shell script would; returns what it prints as JSON."""
    command = [str(Path(sys.executable).with_name("deltackpt")), *map(str, args), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"demo: exit code {done.returncode} from: {' '.join(command)}\n{done.stdout}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def publish(work: Path, repo: Path, steps: int) -> list[Step]:
    """Train, and publish every step right after it."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        raise SystemExit("the demo trains with torch and transformers\n\nhint: `make demo` installs them") from None
    from chain import train

    print(f"training and publishing {steps} steps", file=sys.stderr, flush=True)
    disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    done: list[Step] = []
    for number, path in train(work / "trainer", steps, lr=1e-6, dtype="bf16"):
        base: list[str | Path] = ["--base", done[-1].original] if done else []
        written = deltackpt("write", path, repo, "--step", str(number), *base)
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        done.append(Step(number, path, size, written, floor(done[-1].original, path) if done else None))
        if sys.stderr.isatty():
            print(f"\rstep {number}", end="\r", file=sys.stderr, flush=True)
    return done


def differences(a: Path, b: Path) -> list[str]:
    """Files of two directories that are not the same bytes in both."""
    found = [{str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()} for root in (a, b)]
    odd = found[0] ^ found[1]
    return sorted(odd | {name for name in found[0] & found[1] if not filecmp.cmp(a / name, b / name, shallow=False)})


def restore(steps: list[Step], repo: Path, out: Path) -> int:
    """Materialize and compare every step, printing the table; returns how many files were compared."""
    print(COLUMNS)
    files = 0
    for step in steps:
        applied = deltackpt("apply", repo, out, "--step", str(step.number))
        if odd := differences(step.original, out):
            raise SystemExit(f"demo: step {step.number} came back different: {', '.join(odd)}")
        files += sum(path.is_file() for path in out.rglob("*"))
        print(step.line(applied["seconds"]), flush=True)
        shutil.rmtree(out)
    return files


def total(steps: list[Step], repo: Path, files: int) -> str:
    patches = [step for step in steps if step.floor]
    sent, whole = sum(step.bytes for step in patches), sum(step.size for step in patches)
    changes = sum(step.floor.changes for step in patches if step.floor)
    bits = sum(step.floor.bits for step in patches if step.floor)
    stored = sum(path.stat().st_size for path in repo.rglob("*") if path.is_file())
    return (
        f"{len(patches)} patches: {sent:,} bytes instead of {whole:,}, {whole / sent:.0f} times smaller; "
        f"{8 * sent / changes:.2f} bits a change, {8 * sent / bits:.3f} of the entropy floor.\n"
        f"The repository, with anchor, manifests, digests and tokenizer: {stored:,} bytes.\n"
        f"All {len(steps)} steps came back byte for byte: {files} files compared."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--work", type=Path, default=HERE / "work", help="where the files go")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints and the repository there")
    args = parser.parse_args()
    work = args.work.resolve() / "deltackpt-demo"  # a folder of its own: it is emptied without asking
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    repo = work / "repo"
    try:
        steps = publish(work, repo, max(1, args.steps))
        files = restore(steps, repo, work / "out")
        deltackpt("verify", repo)
        print(f"\n{total(steps, repo, files)}\n`deltackpt verify` found nothing wrong.")
    finally:
        if not args.keep:
            shutil.rmtree(work)
    if args.keep:
        print(f"kept: {work}")


if __name__ == "__main__":
    main()
