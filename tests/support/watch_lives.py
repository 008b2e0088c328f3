"""A trainer and a watch, each killed at random and started again, until all steps are there. A process of its own.

    watch_lives.py plain|transformers ROOT STEPS SEED KEEP

Imports once, and forks for every life, so that a life is the work alone. The trainer saves in place, piece by piece,
and notes a step only after it is whole: one that was killed saves its last step again, as trainers do.
"""

import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np

from deltackpt.publish.manifest import AnchorPolicy
from deltackpt.repository import Repository
from deltackpt.watch import Watch, WatchOptions

SETTLE = 0.02


def weights(step: int) -> dict[str, np.ndarray]:
    """The state of a step: a walk of small changes that depends on the number alone."""
    state = {"a": np.ones((96, 40), np.float16), "b": np.arange(600, dtype=np.int32), "c": np.zeros((), np.float32)}
    rng = np.random.default_rng(5)
    for _ in range(step):
        state["a"].view(np.uint16)[rng.integers(96, size=9), rng.integers(40, size=9)] += 1
        state["b"][rng.integers(600)] ^= 1
    return state


def plain(folder: Path, steps: int, note: Path, marker: str | None) -> None:
    from safetensors.numpy import save

    for step in range(json.loads(note.read_text()) if note.exists() else 0, steps):
        path, state = folder / f"step_{step:04d}", weights(step)
        path.mkdir(exist_ok=True)
        names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        shards = [{"a": state["a"]}, {"b": state["b"], "c": state["c"]}]
        (path / "config.json").write_text(json.dumps({"step": step}))
        for name, shard in zip(names, shards, strict=True):
            data = save(shard)
            with (path / name).open("wb", buffering=0) as file:
                for at in range(0, len(data), 400):
                    file.write(data[at : at + 400])
                    time.sleep(0.001)
        index = {"weight_map": {name: names[i] for i, shard in enumerate(shards) for name in shard}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        if marker:
            (path / marker).touch()
        _done(note, step + 1)


def transformers(folder: Path, steps: int, note: Path, marker: str | None) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes)).to(torch.bfloat16)
    start = json.loads(note.read_text()) if note.exists() else 0
    for step in range(steps):
        for i, parameter in enumerate(model.parameters()):
            flat = parameter.data.view(-1)
            where = torch.randint(len(flat), (3,), generator=torch.Generator().manual_seed(step * 100 + i))
            flat[where] *= 1.01
        if step < start:
            continue
        path = folder / f"step_{step:04d}"
        model.save_pretrained(path, max_shard_size="20KB")
        if marker:
            (path / marker).touch()
        _done(note, step + 1)


def _done(note: Path, step: int) -> None:
    draft = note.with_suffix(".tmp")
    draft.write_text(json.dumps(step))
    draft.replace(note)


def follow(folder: Path, repo: Path, marker: str | None, keep: int | None, once: bool = False) -> None:
    policy = AnchorPolicy(every=20)
    options = WatchOptions(marker=marker, settle=SETTLE, threads=1, anchor=policy, prune_dense=keep)
    watch = Watch(folder, repo, options)
    for _ in watch.run(poll=0.01, once=once):
        pass


def spawn(work, *arguments) -> int:
    if pid := os.fork():
        return pid
    try:
        work(*arguments)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def kill(pid: int) -> int:
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def head(repo: Path) -> int:
    ref = Repository.open(repo).ref() if (repo / "deltackpt.json").exists() else None
    return ref.link.step if ref else -1


def main() -> None:
    kind, root, steps, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    keep = int(sys.argv[5]) or None
    chance, marker = random.Random(seed), "STABLE" if seed % 2 else None
    folder, repo, note = root / "run", root / "repo", root / "note.json"
    folder.mkdir()
    if kind == "transformers":  # before the forks: its import is longer than any life
        importlib.import_module("transformers.models.llama.modeling_llama")
    trainer = {"plain": plain, "transformers": transformers}[kind]
    jobs = [(trainer, folder, steps, note, marker), (follow, folder, repo, marker, keep)]
    pids, kills = [spawn(*job) for job in jobs], [0, 0]
    life = 0.2 if kind == "plain" else 1.0
    while not all(kills) or pids[0] or head(repo) < steps - 1:
        time.sleep(chance.uniform(0.01, life))
        who = chance.randrange(2) if all(kills) else sum(kills)  # each once at first, however fast they are
        if kills[0] and pids[0] and os.waitpid(pids[0], os.WNOHANG)[0]:
            pids[0] = 0
            assert json.loads(note.read_text()) == steps, "the trainer failed"
        if pids[who]:
            assert kill(pids[who]) in (signal.SIGKILL, 0), f"{jobs[who][0].__name__} failed"
            kills[who] += 1
            pids[who] = spawn(*jobs[who])
    kill(pids[1])
    follow(folder, repo, marker, keep, once=True)
    print(json.dumps(kills))


if __name__ == "__main__":
    main()
