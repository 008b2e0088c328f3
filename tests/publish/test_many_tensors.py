"""90,000 tensors with names of 200 bytes, as many as the largest mixtures of experts have: within every limit."""

import json

import pytest
from support.states import tree

from deltackpt import apply, apply_to_cache, write
from deltackpt.format import layout
from deltackpt.format.layout import Layout, Shard
from deltackpt.format.safetensors_header import Tensor, build_header, parse_header
from deltackpt.publish.write import AnchorPolicy
from deltackpt.repository import Repository

TENSORS, SHARDS, SIZE = 90_000, 9, 4
NEVER = AnchorPolicy(ratio=float("inf"))


def name(i: int) -> str:
    return f"model.layers.{i // 1500:02d}.mlp.experts.{i % 1500:04d}.".ljust(190, "w") + ".weight".rjust(10, "x")


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Two checkpoints; in the second every hundredth tensor has changed."""
    root = tmp_path_factory.mktemp("many")
    each = TENSORS // SHARDS
    for step in (0, 1):
        folder, files = root / str(step), {}
        folder.mkdir()
        for shard in range(SHARDS):
            names = [name(i) for i in range(shard * each, (shard + 1) * each)]
            rows = [Tensor(n, "BF16", (2,), SIZE * i, SIZE * (i + 1)) for i, n in enumerate(names)]
            body = bytearray(b"\x80\x3f" * (2 * each))
            if step:
                for i in range(0, each, 100):
                    body[SIZE * i] += 1
            file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
            (folder / file).write_bytes(build_header(rows, {}) + body)
            files.update(dict.fromkeys(names, file))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return root


def test_the_layout(steps):
    assert len(name(7)) == 200
    shards = []
    for path in sorted((steps / "0").glob("*.safetensors")):
        shards.append(Shard(path.name, parse_header(path.read_bytes(), path.stat().st_size, path.name)))
    raw = Layout(tuple(shards), ()).encode()
    found = layout.decode(raw, "layout")
    assert len(raw) < layout.MAX_LAYOUT
    assert len(found.tensors) == TENSORS
    assert found.encode() == raw


def test_steps_of_it(steps, tmp_path):
    repo = tmp_path / "repo"
    write(steps / "0", repo, threads=2)
    apply_to_cache(repo, tmp_path / "cache", threads=2)
    done = write(steps / "1", repo, base=steps / "0", threads=2, anchor=NEVER)
    assert Repository.open(repo).load(Repository.open(repo).find()).counts.changed == TENSORS // 100
    assert done.step == 1
    apply_to_cache(repo, tmp_path / "cache", threads=2)
    assert tree(tmp_path / "cache/current") == tree(steps / "1")
    apply(repo, tmp_path / "out", threads=2)
    assert tree(tmp_path / "out") == tree(steps / "1")
