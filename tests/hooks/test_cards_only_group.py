"""A training whose group moves cards' memory alone, as NCCL's does: the hook's messages go over a group of its own."""

import os
import traceback

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from support.forked import forked  # noqa: E402

from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.hooks.process_group import Processes  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402
from deltackpt.restore.materialize import apply  # noqa: E402

ROWS = 8


class CardsOnly(dist.ProcessGroup):
    """Refuses whatever it is asked for: here all is in host memory."""

    def __init__(self, rank, size):
        super().__init__(rank, size)

    def getBackendName(self):
        return "cardsonly"

    def _refuse(self, *_):
        raise RuntimeError("No backend type associated with device type cpu")

    allreduce = broadcast = send = recv = allgather = gather = scatter = barrier = _refuse


def rank_of(rank, world, root):
    """Three steps of rows that `locate` knows."""
    dist.Backend.register_backend(
        "cardsonly", lambda store, rank, size, timeout: CardsOnly(rank, size), devices=["cpu"]
    )
    dist.init_process_group("cardsonly", init_method=f"file://{root}/meet", rank=rank, world_size=world)
    try:
        dist.all_reduce(torch.zeros(1))
        raise AssertionError("a group that takes host memory")
    except RuntimeError:
        pass
    mine = torch.arange(ROWS * 4, dtype=torch.float32).view(ROWS, 4) + 100 * rank
    with TrainerHook(
        {"w": mine}, root / "repo", threads=1, timeout=60, locate=lambda name, t: ((rank * ROWS, 0), (world * ROWS, 4))
    ) as hook:
        for step in range(3):
            mine[step] += 1
            hook.step(step)
    (root / f"rank-{rank}.pt").write_bytes(mine.numpy().tobytes())


def _main(rank, world, root):
    torch.set_num_threads(1)
    failed = ""
    try:
        rank_of(rank, world, root)
    except BaseException:
        failed = traceback.format_exc()
    (root / f"rank-{rank}.txt").write_text(failed)
    os._exit(0)


@pytest.mark.filterwarnings("ignore")
def test_the_hook_needs_no_backend_for_host_memory(tmp_path):
    world = 2
    processes = [forked(_main, rank, world, tmp_path) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    assert [(tmp_path / f"rank-{rank}.txt").read_text() for rank in range(world)] == [""] * world
    apply(Repository.open(tmp_path / "repo"), tmp_path / "out", threads=1)
    from safetensors.numpy import load_file

    found = load_file(next((tmp_path / "out").glob("*.safetensors")))["w"]
    assert found.tobytes() == b"".join((tmp_path / f"rank-{rank}.pt").read_bytes() for rank in range(world))


def test_a_torch_without_gloo_is_told_in_words(monkeypatch):
    from deltackpt.errors import UsageError

    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    with pytest.raises(UsageError) as error:
        Processes(1.0)
    assert error.value.code == "hook-option"
    assert "Gloo" in error.value.need
