"""A real vLLM on a card follows a synthetic training, without a cache: is it the step, and how fast?

A trainer's weights of a random Qwen3, or of one with experts, lie on the same card; a hook publishes every step, as it
is or quantised. After each step all weights are proven by the engine's own check; at the first, a middle and the last
step vLLM itself loads what `apply` makes of the step, and all parameters have to be what they were, and the answers
too, where they repeat. After the last one a fresh engine, of a process of its own, has to have the same parameters and
answers. Every case is a process of its own; what goes wrong in one is told in full, and the next one
follows.

    python bench/vllm_card.py [--case NAME ...] [--steps 12] [--size full|8b|tiny] [--tp 1|2] [--cache]
        [--timeout 130]

Needs a vLLM with the plugin; on a host without a package index it is brought along in pieces. `--size tiny` is for
trying it on a CPU, `8b` gives dense models the sizes of Qwen3 8B. `--tp 2`: two ranks on two cards, each of which
decodes its share; with `--cache` they follow by a cache of the host. Each step is printed at once, and a case ends
after --timeout seconds.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)
sys.path.insert(1, str(HERE.parent / "tests"))
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "deltackpt", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"), "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}  # fmt: skip

DENSE = {
    "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
LARGE = {
    "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
}  # fmt: skip
EXPERTS = {
    "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 512,
    "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 16,
    "num_experts_per_tok": 4, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
CASES: dict[str, tuple[str, dict[str, Any], bool, str | None]] = {  # kind, sizes, CUDA graphs, what it is quantised to
    "dense-tied-graphs": ("Qwen3", {**DENSE, "tie_word_embeddings": True}, True, None),
    "dense-untied-eager": ("Qwen3", DENSE, False, None),
    "experts-eager": ("Qwen3Moe", EXPERTS, False, None),
    "experts-graphs": ("Qwen3Moe", EXPERTS, True, None),
    "dense-fp8-block": ("Qwen3", DENSE, False, "fp8-block"),
    "dense-fp8-channel": ("Qwen3", DENSE, False, "fp8-channel"),
    "experts-fp8-block": ("Qwen3Moe", EXPERTS, False, "fp8-block"),
}


def words_of_rank(worker: Any) -> dict[str, str]:
    """In a rank: xxh3 of every parameter."""
    import torch
    import xxhash

    found = {}
    for name, parameter in worker.model_runner.get_model().named_parameters():
        data = parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
        found[name] = xxhash.xxh3_128_hexdigest(data)
    return found


def started(path: Path, graphs: bool, cuda: bool, tp: int) -> Any:
    from vllm import LLM

    options: dict[str, Any] = {"enforce_eager": True}
    if graphs:
        how = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
        options = {"enforce_eager": False, "compilation_config": how}
    if cuda:
        options["gpu_memory_utilization"] = 0.3
    return LLM(
        str(path), dtype="bfloat16", max_model_len=512, seed=0, tensor_parallel_size=tp,
        distributed_executor_backend="uni" if tp == 1 else "mp",
        weight_transfer_config={"backend": "deltackpt"}, **options,
    )  # fmt: skip


def trained(folder: Path, kind: str, size: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """The trainer's weights, on the card if there is one; config and tokenizer into a folder."""
    import torch
    from safetensors.torch import load_file
    from support.vllm_tiny import model_of, tiny, tokenizer

    where = "cuda" if torch.cuda.is_available() else "cpu"
    if size == "tiny":
        sizes = {**FEW} if kind == "Qwen3Moe" else {"tie_word_embeddings": sizes.get("tie_word_embeddings", False)}
    elif kind == "Qwen3":  # made where it is: a file has other names only for experts
        tokenizer(folder)
        with torch.device(where):
            model: Any = model_of(kind, **{**sizes, **(LARGE if size == "8b" else {})})
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        if where == "cuda":
            torch.cuda.empty_cache()  # of what it was made from
        tied = model.config.tie_word_embeddings
        return {k: v.detach() for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    tiny(folder, kind, **sizes)
    state: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= {name: tensor.to(where) for name, tensor in load_file(path).items()}
        path.unlink()
    return state


class Case:
    def __init__(self, name: str, root: Path, size: str, tp: int, cache: bool) -> None:
        import torch
        from support.engine_steps import NEVER

        from deltackpt.hooks import TrainerHook

        self.torch, self.root, self.cuda, self.tp = torch, root, torch.cuda.is_available(), tp
        self.cache = cache
        kind, sizes, graphs, recipe = CASES[name]
        self.state = trained(root / "side", kind, size, sizes)
        side = {path.name: path.read_bytes() for path in (root / "side").iterdir() if path.is_file()}
        side.pop("model.safetensors.index.json", None)
        self.hook = TrainerHook(self.state, root / "repo", side=side, anchor=NEVER, quantize=recipe)
        self.hook.step(0)
        self.hook.flush()
        began = time.monotonic()
        self.llm = started(self.applied(0), graphs and self.cuda, self.cuda, tp)
        total = sum(t.nbytes for t in self.state.values()) / 1e9
        print(f"{name}: {total:.2f} GB, engine up in {time.monotonic() - began:.1f} s", flush=True)
        self.attach("report", 0)

    def applied(self, step: int) -> Path:
        """What `apply` makes of a step."""
        from deltackpt.repository import Repository
        from deltackpt.restore.materialize import apply

        folder = self.root / f"applied-{step}"
        if not folder.exists():
            apply(Repository.open(self.root / "repo"), folder, str(step))
        return folder

    def attach(self, phase: str, step: int, mode: str = "auto") -> None:
        info = {"repository": str(self.root / "repo"), "reports": str(self.root / "reports")}
        info |= {"step": step, "mode": mode}
        if self.cache:
            info["cache"] = str(self.root / "cache")
        self.llm.init_weight_transfer_engine({"init_info": {**info, "token": "s", "phase": phase}})

    def report(self, token: str) -> Any:
        from deltackpt.engines.update import read_reports

        held: list[Any] = []
        for _ in range(60_000):
            held += read_reports(self.root / "reports", token)
            if wrong := [report.error for report in held if report.error]:
                raise RuntimeError(f"the engine's report: {wrong[0]}")
            if len(held) == self.tp:
                return held[0]
            time.sleep(0.001)
        raise TimeoutError(f"no report {token}")

    def peak(self) -> float:
        return self.torch.cuda.max_memory_allocated() / 1e9 if self.cuda else 0.0

    def step(self, number: int, mode: str = "auto") -> dict[str, Any]:
        """Change the trainer's weights, publish, and move the engine."""
        generator = self.torch.Generator(next(iter(self.state.values())).device).manual_seed(number)
        for tensor in self.state.values():
            flat = tensor.view(-1).view(self.torch.int16)
            count = max(1, flat.numel() // 100)
            where = self.torch.randint(flat.numel(), (count,), generator=generator, device=flat.device)
            flat[where] ^= 1
        began = time.monotonic()
        self.hook.step(number)
        self.hook.flush()
        durable = time.monotonic()
        if self.cuda:
            self.torch.cuda.reset_peak_memory_stats()
        held = self.torch.cuda.memory_allocated() / 1e9 if self.cuda else 0.0
        self.attach("stage", number, mode)
        staged = self.report("s-staged")
        ready = time.monotonic()
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"step": number, "mode": mode, "token": "a"}})
        named = inspect.signature(self.llm.finish_weight_update).parameters
        self.llm.finish_weight_update(*([str(number)] if named else []))
        self.llm.reset_prefix_cache()
        done = time.monotonic()
        report = self.report("a")
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"step": number, "phase": "check", "token": "c"}})
        self.llm.finish_weight_update(*([str(number)] if named else []))
        checked = self.report("c").checked
        return {
            "step": number, "mode": report.mode, "path": report.path, "reason": report.reason,
            "decoded": report.decoded, "elements": report.elements,
            "durable": durable - began, "staged": ready - durable, "pause": done - ready,
            "seconds": report.seconds, "staging": staged.seconds, "checked": checked,
            "memory, GB": self.peak() - held,
        }  # fmt: skip

    def words(self) -> dict[str, str]:
        """xxh3 of every parameter of every rank."""
        ranks = self.llm.collective_rpc(words_of_rank)
        return {f"{rank}: {name}": value for rank, found in enumerate(ranks) for name, value in found.items()}

    def proven(self, step: int) -> dict[str, Any]:
        """vLLM itself loads the whole step, and nothing may change."""
        from support.vllm_tiny import answers

        before, said = self.words(), answers(self.llm)
        self.llm.reset_prefix_cache()
        repeats = answers(self.llm) == said
        folder = self.applied(step)
        began = time.monotonic()
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        took = time.monotonic() - began
        after = self.words()
        wrong = [name for name in before if before[name] != after[name]]
        if wrong or len(before) != len(after):
            raise RuntimeError(f"step {step}: {len(wrong)} parameters are not what vLLM loads, such as {wrong[:3]}")
        self.llm.reset_prefix_cache()
        same = answers(self.llm) == said
        if repeats and not same:  # it computes with something that is no parameter
            raise RuntimeError(f"step {step}: other answers from equal parameters")
        told = {"step": step, "parameters equal": len(before), "answers equal": same, "answers repeat": repeats}
        return {**told, "vllm reload_weights": round(took, 3)}

    def fresh(self, name: str, step: int) -> dict[str, Any]:
        """An engine that is started from what `apply` makes of a step, beside this one."""
        from support.vllm_tiny import answers

        out = self.root / "fresh.json"
        line = [sys.executable, __file__, "--case", name, "--tp", str(self.tp), "--root", str(self.root)]
        subprocess.run([*line, "--fresh", str(self.applied(step)), "--out", str(out)], check=True)
        there = json.loads(out.read_text())
        self.llm.reset_prefix_cache()
        said = json.loads(json.dumps(answers(self.llm)))
        if there["words"] != self.words():
            raise RuntimeError(f"step {step}: other parameters than those of a fresh engine")
        if there["answers"] != said:
            raise RuntimeError(f"step {step}: other answers than those of a fresh engine")
        return {"step": step, "as a fresh engine": len(there["words"]), "answers equal": True}


def tell_fresh(name: str, folder: Path, out: Path, tp: int) -> None:
    """In a process of its own: what an engine is and says that is started from a checkpoint."""
    import torch
    from support.vllm_tiny import answers

    llm = started(folder, CASES[name][2] and torch.cuda.is_available(), torch.cuda.is_available(), tp)
    ranks = llm.collective_rpc(words_of_rank)
    words = {f"{rank}: {key}": value for rank, found in enumerate(ranks) for key, value in found.items()}
    out.write_text(json.dumps({"words": words, "answers": answers(llm)}))


def run(name: str, root: Path, steps: int, size: str, tp: int, cache: bool) -> None:
    case = Case(name, root, size, tp, cache)
    rows = []
    for number in range(1, steps + 1):
        row = case.step(number, "reload" if number == steps - 1 else "auto")
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
        rows.append(row)
        if number in (1, steps // 2, steps):
            print(json.dumps(case.proven(number)), flush=True)
    ours = [row for row in rows[1:] if row["mode"] != "reload"]
    middle = {k: round(statistics.median(r[k] for r in ours), 4) for k in ("durable", "staged", "pause") if ours}
    paths = [row["path"] for row in rows]
    ways = (("patches", "patches"), ("shares", "shares"), ("journal", "the cache"))
    counts = f"of {steps} " + ", ".join(f"{paths.count(path)} by {words}" for path, words in ways)
    print(f"{name}: {counts}; medians, s: {middle}", flush=True)
    print(json.dumps(case.fresh(name, steps)), flush=True)
    case.hook.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--size", choices=["full", "8b", "tiny"], default="full")
    parser.add_argument("--tp", type=int, choices=[1, 2], default=1, help="ranks, each on a card")
    parser.add_argument("--cache", action="store_true", help="the engine follows by a cache of the host")
    parser.add_argument("--timeout", type=int, default=130, help="seconds of a case")
    parser.add_argument("--root", type=Path, help="of one case, which then runs in this process")
    parser.add_argument("--fresh", type=Path, help="a checkpoint, of which one process tells")
    parser.add_argument("--out", type=Path, help="where it does")
    args = parser.parse_args()
    if args.tp == 2:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # for ranks on a CPU
    if args.fresh is not None:
        tell_fresh(args.case[0], args.fresh, args.out, args.tp)
        return
    if args.root is not None:
        run(args.case[0], args.root, args.steps, args.size, args.tp, args.cache)
        return
    sys.path.insert(2, str(HERE))
    from gpu_hook import scratch

    failed = []
    for name in args.case:
        began = time.monotonic()
        with scratch() as folder:
            command = [sys.executable, __file__, "--case", name, "--root", str(folder), "--steps", str(args.steps)]
            try:
                command += ["--size", args.size, "--tp", str(args.tp), *(["--cache"] if args.cache else [])]
                code = subprocess.run(command, timeout=args.timeout, check=False).returncode
            except subprocess.TimeoutExpired:
                code = -1
        print(f"== {name}: {'ok' if code == 0 else f'FAILED ({code})'}, {time.monotonic() - began:.0f} s", flush=True)
        failed += [name] if code else []
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
