"""A day of a repository, by its commands, in one process: `python -m support.on_a_file_server FOLDER`.

All that is written lies in FOLDER, the files of this user and temporary ones too. What is not as it has to be is
written to its file `wrong`, a line each; an empty one says that all is.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

STEPS = 6


def checkpoint(folder: Path, step: int) -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(0, 15000, (64, 64)).astype(np.uint16)
    for _ in range(step):
        words[rng.integers(0, 64, 20), rng.integers(0, 64, 20)] += 1
    folder.mkdir(parents=True)
    save_file({"a": words.view(np.float16), "b": words[:, :8].copy().view(np.float16)}, folder / "model.safetensors")
    (folder / "sub").mkdir()
    for name in ("config.json", "sub/notes.json"):
        (folder / name).write_text(f'{{"step": {step // 2}}}')


def day(at: Path) -> list[str]:
    """-> what went wrong."""
    from deltackpt_cli.app import run

    wrong: list[str] = []

    def do(*line: object) -> None:
        if (status := run([str(word) for word in line])) != 0:
            wrong.append(f"{line[0]}: {status}")

    def same(out: Path, step: int) -> None:
        for name in ("model.safetensors", "config.json", "sub/notes.json"):
            if (out / name).read_bytes() != (at / f"saved/{step}" / name).read_bytes():
                wrong.append(f"{out.name} is not step {step}")

    repo = at / "repo"
    for step in range(4):
        do("write", at / f"saved/{step}", repo, "--step", step, "--anchor-every", 3)
    do("apply", repo, at / "cache", "--cache")
    for step in (4, 5):
        do("write", at / f"saved/{step}", repo, "--step", step, "--cache", at / "writer")
        do("follow", repo, at / "cache", "--once", "--ready")
        same(at / "cache/current", step)
    do("apply", repo, at / "cache", "--cache", "--step", 1)
    same(at / "cache/current", 1)
    do("apply", repo, at / "out")
    same(at / "out", 5)
    do("apply", repo, at / "a.safetensors", "--tensor", "a")
    do("tag", repo, "best", 4)
    do("compact", repo)
    do("mirror", repo, at / "mirror")
    do("export", repo, "slime", at / "slime")
    do("export", repo, "slime-v1", at / "slime-v1")
    do("import", "slime", at / "slime", at / "imported")
    do("watch", at / "run", at / "watched", "--pattern", "checkpoint-{step}", "--once", "--settle", "0s",
       "--prune-dense", 1)  # fmt: skip
    do("apply", at / "watched", at / "again")
    same(at / "again", 5)
    if (left := sorted(path.name for path in (at / "run").iterdir())) != ["checkpoint-5"]:
        wrong.append(f"the run has {left}")
    do("gc", repo, "--plan", at / "plan.json", "--keep-last", 1, "--grace", "0s")
    do("gc", repo, "--execute", at / "plan.json")
    do("keygen", at / "key")
    do("doctor", repo)
    for found in (repo, at / "mirror", at / "imported", at / "watched"):
        do("verify", found)
        if (leases := [path for path in found.glob("leases/**/*") if path.is_file()]) != []:
            wrong.append(f"leases: {leases}")
    marks = (".tmp-", ".pruned-", "-old", ".draft", ".current", ".side")
    wrong += [f"{path} is left" for path in at.rglob("*") if any(mark in path.name for mark in marks)]
    return wrong


if __name__ == "__main__":
    root = Path(sys.argv[1])
    os.environ["TMPDIR"] = os.environ["HOME"] = tempfile.tempdir = str(root)  # what else asks is Python itself
    found = day(root)
    (root / "wrong").write_text("\n".join(found))
