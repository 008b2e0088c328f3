"""encoding="auto@8": a step of finer tiles, from every writer; readers need not know."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.patch.part import PartReader  # noqa: E402
from deltackpt.publish.write import write  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402
from deltackpt.restore.materialize import apply  # noqa: E402
from deltackpt.shares import ShareReader  # noqa: E402
from deltackpt.store import MemoryStore  # noqa: E402
from deltackpt.verification import verify_repository  # noqa: E402

SHAPE = (768, 1024)


def state(step):
    generator = torch.Generator().manual_seed(7)
    found = torch.randn(SHAPE, generator=generator).mul(0.02).bfloat16()
    for seed in range(step):
        at = torch.randperm(found.numel(), generator=torch.Generator().manual_seed(seed))[:20_000]
        found.view(-1).view(torch.int16)[at] += 1
    return {"model.experts.0.up.weight": found}


def parts(root):
    repo = Repository.open(root)
    for manifest in repo.log():
        for file in manifest.patch or ():
            yield file, repo.read(file, file.size)


def grids(root):
    for _, data in parts(root):
        for entry in PartReader(memoryview(data), "a part").entries:
            yield (entry.detail.grid.rows, entry.detail.grid.columns)


def by_write(root, encoding):
    for step in range(2):
        folder = root / f"{encoding}-in-{step}"
        folder.mkdir()
        save_file(state(step), folder / "model.safetensors")
        write(folder, root / encoding, step=step, threads=1, encoding=encoding)


def by_hook(root, encoding):
    held = state(0)
    with TrainerHook(held, root / encoding, threads=1, encoding=encoding) as hook:
        hook.step(0)
        for name, tensor in state(1).items():
            held[name].copy_(tensor)
        hook.step(1)


@pytest.mark.parametrize("writer", [by_write, by_hook])
def test_each_of_eight_ranks_reads_its_share(tmp_path, writer):
    for encoding in ("auto", "auto@8"):
        writer(tmp_path, encoding)
        apply(Repository.open(tmp_path / encoding), tmp_path / f"{encoding}-out", 1)
        assert verify_repository(Repository.open(tmp_path / encoding), threads=1).ok
    assert list(grids(tmp_path / "auto")) != [(8, 8)]
    assert list(grids(tmp_path / "auto@8")) == [(8, 8)]
    manifests = [Repository.open(tmp_path / encoding).log()[0] for encoding in ("auto", "auto@8")]
    assert manifests[0].state == manifests[1].state
    ((file, data),) = parts(tmp_path / "auto@8")
    store = MemoryStore()
    store.put(file.name, [data])
    (name,) = state(0)
    whole = sum(entry.payload for entry in PartReader(memoryview(data), "a part").entries)
    for axis in (0, 1):
        for rank in range(8):
            box = [(0, n) for n in SHAPE]
            box[axis] = (SHAPE[axis] * rank // 8, SHAPE[axis] * (rank + 1) // 8)
            share = ShareReader(Source(store), file, {name: [tuple(box)]}, gap=0).share
            assert share.size <= 0.14 * whole
            assert not np.concatenate([one.shared for one in share.entries]).any()


class Source:
    """A store, as a source of parts."""

    url, parallel = "memory", 1

    def __init__(self, store):
        self.store = store

    def ranges(self, file, spans):
        return [self.store.get_range(file.name, a, b - a) for a, b in spans]
