"""How much host memory an engine's update takes, with a cache and without one, and how long it takes.

A random model in bf16 on the CPU, 1 % of every tensor changed by an ULP or so; each way in a process of its own. What
is counted is memory that is no file's (RssAnon), looked at every millisecond, beyond what the process held before the
update; pages of files are the system's, which takes them back when it likes.

    python bench/engine_memory.py [WORK_DIR] [MEBIBYTES] [STEPS]
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent / "tests")  # this file would hide the package of that name

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from support.engine_steps import Run, nudge  # noqa: E402

from deltackpt.engines.receiver import Receiver  # noqa: E402
from deltackpt.engines.sglang.loader import SglangRank  # noqa: E402
from deltackpt.engines.update import Update  # noqa: E402

EACH = 8 << 20  # bytes of a tensor


class Model(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        for i in range(count):
            zeros = torch.zeros(EACH // 4096, 2048, dtype=torch.bfloat16)
            self.register_parameter(f"w{i}", torch.nn.Parameter(zeros, requires_grad=False))

    def load_weights(self, weights: object) -> None:
        for name, weight in weights:  # type: ignore[attr-defined]
            getattr(self, name).data.copy_(weight)


def anonymous() -> int:
    """Bytes of memory that is no file's, now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


class Peak(threading.Thread):
    """The most of it, looked at every millisecond."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.over = anonymous(), threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.001):
            self.most = max(self.most, anonymous())


def receive(root: Path, count: int, steps: int, cached: bool) -> None:
    model, run = Model(count), Run(root)
    model.load_weights(load_file(run.checkpoint(0) / "model.safetensors").items())
    receiver = Receiver(
        SglangRank(model), str(run.url), str(root / "cache") if cached else None, origin=str(run.checkpoint(0))
    )
    model_bytes, found = count * EACH, []
    for step in range(1, steps + 1):
        before, peak = anonymous(), Peak()
        peak.start()
        began = time.monotonic()
        report = receiver.update(Update(step=step))
        seconds = time.monotonic() - began
        peak.over.set()
        peak.join()
        receiver.confirm()
        found.append({"path": report.path, "seconds": round(seconds, 3), "mib": round((peak.most - before) / 2**20, 1)})
    disk = sum(p.stat().st_blocks * 512 for p in (root / "cache").rglob("*") if p.is_file()) if cached else 0
    print(json.dumps({"cached": cached, "model_mib": model_bytes >> 20, "cache_mib": disk >> 20, "steps": found}))


def main(root: Path, mebibytes: int, steps: int) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    count = max(1, (mebibytes << 20) // EACH)
    generator = torch.Generator().manual_seed(0)
    state = {f"w{i}": torch.randn(EACH // 4096, 2048, generator=generator).to(torch.bfloat16) for i in range(count)}
    run = Run(root)
    run.publish(state)
    for step in range(1, steps + 1):
        run.publish(nudge(run.states[step - 1], step, 0.01))
    for cached in (True, False):
        subprocess.run([sys.executable, __file__, str(root), str(count), str(steps), str(int(cached))], check=True)
    shutil.rmtree(root)


if __name__ == "__main__":
    if len(sys.argv) == 5:
        receive(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1")
    else:
        given = [*sys.argv[1:], *["/tmp/deltackpt-engine-memory", "512", "3"][len(sys.argv) - 1 :]]
        main(Path(given[0]), int(given[1]), int(given[2]))
