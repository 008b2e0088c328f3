"""A tensor that several threads encode: the bytes of a part do not depend on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.states import make_checkpoint, tree

from deltackpt import apply, write
from deltackpt.publish import encode_batch
from deltackpt.publish.write import AnchorPolicy
from deltackpt.repository import Repository


@pytest.mark.parametrize("share", [0.0001, 0.02, 0.5])
def test_the_parts_are_the_same(tmp_path: Path, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_batch, "SHARED", 1 << 20)
    rng, shape = np.random.default_rng(3), (3000, 1500)  # 9 MB: more than a batch, and pieces
    old = (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old ^ (rng.random(shape) < share)
    states = [{"x": ("BF16", shape, words.astype(np.uint16).tobytes())} for words in (old, new)]
    folders = [make_checkpoint(tmp_path / str(i), state) for i, state in enumerate(states)]
    found = []
    for threads in (1, 8):
        repo = tmp_path / f"repo{threads}"
        write(folders[0], repo)
        write(folders[1], repo, base=folders[0], threads=threads, anchor=AnchorPolicy(ratio=float("inf")))
        opened = Repository.open(repo)
        step = opened.load(opened.find("latest"))
        parts = [(repo / file.name).read_bytes() for file in step.patch or ()]
        found.append([raw[8 + int.from_bytes(raw[:8], "little") :] for raw in parts])  # a header names its repository
        apply(repo, tmp_path / f"out{threads}")
        assert tree(tmp_path / f"out{threads}") == tree(folders[1])
    assert found[0] == found[1]
    assert found[0]
