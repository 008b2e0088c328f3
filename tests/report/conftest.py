"""A small branch with everything that a report draws."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from deltackpt.compaction.plan import plan_compact
from deltackpt.publish.write import AnchorPolicy, write
from deltackpt.repository import Repository

STEPS = 7


@pytest.fixture(scope="session")
def report_repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven steps, two anchors, a fold, a tag, and a tensor whose name looks like markup. Not to be changed."""
    root = tmp_path_factory.mktemp("history")
    rng = np.random.default_rng(0)
    tensors = {
        "lm_head.weight": rng.normal(size=(32, 16)).astype(np.float16),
        "model.embed_tokens.weight": rng.normal(size=(32, 16)).astype(np.float16),
        "model.layers.0.w": rng.normal(size=(64, 64)).astype(np.float16),
        "model.layers.10.w": rng.normal(size=(64, 64)).astype(np.float32),
        "model.layers.9.w": rng.normal(size=(64, 64)).astype(np.float32),
        "model.norm.weight": np.ones(16, np.float16),
    }
    for step in range(STEPS):
        if step:
            tensors["model.layers.0.w"].view(np.uint16)[step] ^= 1
            tensors["model.layers.10.w"].view(np.uint32)[:2, : 4 * step] += 2
        if step == 4:
            tensors["$x^2$ <b>&amp;\u202e"] = np.ones(3, np.float32)  # what a page or a formula would take for markup
        folder = root / f"step_{step}"
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        write(folder, root / "repo", anchor=AnchorPolicy(every=5, ratio=1e9))
    opened = Repository.open(root / "repo")
    opened.put_tag("best", opened.find(3))
    plan_compact(opened, 0, 4).execute(opened)
    return root / "repo"
