"""The trainer hook on a real model, three ways: a plain AdamW loop, Transformers' Trainer, and FSDP 2 over two ranks.

MiniLM is fine-tuned in fp32, and its bf16 copy published after every step. A full checkpoint of every step is saved
beside; at the end every step is restored from the repository, and compared with it byte for byte. Exits with 1 at the
first difference.

    python bench/demo_train.py [--steps 8] [--work DIR] [loop] [trainer] [fsdp]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from chain import Batches, loss_of, pretrained

HERE = Path(__file__).parent
LR = 1e-6
WAYS = ("loop", "trainer", "fsdp")


def full(state: dict[str, Any]) -> dict[str, Any]:
    """What a full checkpoint of the step holds; of shards, the demo's own gather."""
    import torch

    whole = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}
    return {k: (v.to(torch.bfloat16) if v.is_floating_point() else v).contiguous() for k, v in whole.items()}


def save(work: Path, step: int, state: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file(full(state), work / f"full-{step}.safetensors")


def loop(work: Path, steps: int) -> list[Any]:
    """Three lines in a training script: the import, the context manager, and `step`."""
    import torch

    from deltackpt.hooks import TrainerHook

    model, tokenizer = pretrained()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    batches, seen, blocked, bare = Batches(tokenizer), [], [], []
    with TrainerHook(model, work / "repo", dtype=torch.bfloat16, side=[tokenizer], report=seen.append) as hook:
        hook.step(0)
        save(work, 0, model.state_dict())
        for step in range(1, steps + 1):
            loss = loss_of(model, batches[step])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hook.flush()  # only so that the two times below are of an idle machine
            bare.append(compare_pass(hook, model))
            began = time.perf_counter()
            hook.step(step)
            blocked.append(time.perf_counter() - began)
            save(work, step, model.state_dict())
    a, b = (statistics.median(times) * 1e3 for times in (blocked, bare))
    print(f"step() blocked the training for {a:.1f} ms; a bare compare pass takes {b:.1f} ms: {a / b:.2f} times that")
    return seen


def compare_pass(hook: Any, model: Any) -> float:
    """Seconds to cast the weights, and to compare them with the snapshot, and nothing else."""
    from deltackpt.checkpoint.diff import Comparison
    from deltackpt.format.dtypes import uint
    from deltackpt.torch_views.words import on_host
    from deltackpt.util.parallel import ordered_map

    snapshot, chunk = hook._capture._snapshot, 1 << 19
    began = time.perf_counter()

    def one(piece: Any) -> int:
        kept, compared = snapshot.array(piece.name), Comparison(min(chunk, piece.elements), uint(piece.dtype.width))
        for at in range(0, piece.elements, chunk):
            compared.add(kept[at : at + chunk], on_host(piece.words(at, at + chunk), piece.dtype), at)
        return len(compared.changes()[0])

    list(ordered_map(one, hook._extract(), hook._capture.threads))
    return time.perf_counter() - began


def trainer(work: Path, steps: int) -> list[Any]:
    """Transformers' Trainer with the callback."""
    import torch
    import transformers

    from deltackpt.hooks.transformers import DeltaCheckpointCallback

    model, tokenizer = pretrained()
    batches, seen = Batches(tokenizer, 32), []

    class Simcse(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            return loss_of(model, inputs)

    class Save(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            save(work, state.global_step, kwargs["model"].state_dict())

        on_step_end = on_train_begin

    arguments = transformers.TrainingArguments(
        str(work / "out"), max_steps=steps, learning_rate=LR, report_to=[], save_strategy="no", logging_steps=1,
        disable_tqdm=True, per_device_train_batch_size=1, use_cpu=True, remove_unused_columns=False,
        lr_scheduler_type="constant",
    )  # fmt: skip
    callback = DeltaCheckpointCallback(work / "repo", dtype=torch.bfloat16, report=seen.append)
    data = [batches[step] for step in range(1, steps + 1)]
    run = Simcse(
        model, arguments, train_dataset=data, data_collator=lambda items: items[0], callbacks=[Save(), callback],
        processing_class=tokenizer,
    )  # fmt: skip
    callback.log_to(run)
    run.train()
    return seen


def fsdp(work: Path, steps: int) -> list[Any]:
    """FSDP 2 over two ranks, gloo: each publishes its shards."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        seen = manager.list()
        ranks = [context.Process(target=_rank, args=(rank, work, steps, seen)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit("demo-train: a rank failed")
        return list(seen)


def _rank(rank: int, work: Path, steps: int, seen: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from deltackpt.hooks import TrainerHook

    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model, tokenizer = pretrained()
    for layer in model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    batches = Batches(tokenizer)
    report = seen.append if rank == 0 else None
    with TrainerHook(model, work / "repo", dtype=torch.bfloat16, side=[tokenizer], report=report) as hook:
        for step in range(steps + 1):
            if step:
                loss = loss_of(model, batches[2 * step + rank])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            hook.step(step)
            state = full(model.state_dict())
            if rank == 0:
                save(work, step, state)
    dist.barrier()
    dist.destroy_process_group()


def check(work: Path, steps: int) -> None:
    """Restore every step, and compare it with the full checkpoint that was saved beside."""
    from deltackpt.format.safetensors_header import head_size, parse_header
    from deltackpt.repository import Repository
    from deltackpt.restore.materialize import apply
    from deltackpt.verify import verify_repository

    def tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        raw = path.read_bytes()
        header = parse_header(raw[: head_size(raw[:8], len(raw), str(path))], len(raw), str(path))
        body = memoryview(raw)[header.data_start :]
        return {t.name: (t.dtype, t.shape, bytes(body[t.start : t.end])) for t in header.tensors}

    repo = Repository.open(work / "repo")
    for step in range(steps + 1):
        out = work / "restored"
        apply(repo, out, step)
        if tensors(out / "model.safetensors") != tensors(work / f"full-{step}.safetensors"):
            raise SystemExit(f"demo-train: step {step} came back different")
        shutil.rmtree(out)
    if not verify_repository(repo).ok:
        raise SystemExit("demo-train: verify found something wrong")


def table(seen: list[Any]) -> None:
    print("step  density     changed       bytes  bits/change  diff ms  behind ms")
    for m in seen:
        behind = sum(m.seconds.get(k, 0) for k in ("encode", "put", "anchor", "commit")) * 1e3
        bits = f"{m.bits_per_change:.2f}" if m.bits_per_change else "anchor"
        took = m.seconds["diff"] * 1e3
        print(f"{m.step:4}  {m.density:7.3%}  {m.changed:10,}  {m.bytes:10,}  {bits:>11}  {took:7.1f}  {behind:9.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", choices=[*WAYS, []], default=[])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--work", type=Path, default=HERE / "work", help="where the files go")
    args = parser.parse_args()
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    root = args.work.resolve() / "deltackpt-demo-train"  # a folder of its own: it is emptied without asking
    for way in args.ways or WAYS:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        print(f"\n{way}: training and publishing {args.steps} steps", file=sys.stderr, flush=True)
        try:
            seen = {"loop": loop, "trainer": trainer, "fsdp": fsdp}[way](root, args.steps)
            table(seen)
            check(root, args.steps)
            print(f"{way}: all {args.steps + 1} steps came back byte for byte")
        finally:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
