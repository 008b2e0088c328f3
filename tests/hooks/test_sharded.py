"""Ranks that publish together: each what it owns, nobody all of it, and a step only if all were there."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

from support import ranks  # noqa: E402
from support.training import Ledger  # noqa: E402

JOB = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from support import ranks
dist.init_process_group("gloo")
ranks.fsdp(dist.get_rank(), dist.get_world_size(), Path(sys.argv[1]), device="cpu")
dist.destroy_process_group()
"""

GPUS = torch.cuda.device_count()
WHERE = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"))]
pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore")]


def run(world, work, tmp_path, *args, device="cpu"):
    failed = ranks.spawn(world, work, tmp_path, *args, device=device)
    assert not any(failed), "\n".join(failed)


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("kind", ["shard0", "shard1", "shard-last", "replicated", "plain", "shard1+device"])
def test_two_ranks(tmp_path, kind, device):
    run(2, ranks.publish_kind, tmp_path, kind, device=device)


@pytest.mark.parametrize("kind", ["shard0", "grid", "hybrid", "twice", "grid+device"])
def test_four_ranks(tmp_path, kind):
    run(4, ranks.publish_kind, tmp_path, kind)


def test_every_rank_reads_sends_and_stores_its_share(tmp_path):
    run(4, ranks.shares, tmp_path)


@pytest.mark.parametrize("device", WHERE)
def test_fsdp_two_ranks(tmp_path, device):
    run(2, ranks.fsdp, tmp_path, device=device)


@pytest.mark.parametrize("device", WHERE)
def test_a_sharded_optimizer_is_kept_and_resumed(tmp_path, device):
    run(2, ranks.optimizer_state, tmp_path, device=device)


def test_fsdp_four_ranks(tmp_path):
    run(4, ranks.fsdp, tmp_path)


@pytest.mark.parametrize("world", [2, 3])
def test_fused_experts_under_fsdp(tmp_path, world):
    pytest.importorskip("transformers.core_model_loading")
    run(world, ranks.experts, tmp_path)


@pytest.mark.parametrize(("world", "rows"), [(2, 7), (4, 5)])
def test_tied_weights_of_which_a_rank_has_no_row(tmp_path, world, rows):
    run(world, ranks.tied_uneven, tmp_path, rows)


@pytest.mark.parametrize("device", WHERE)
def test_ddp(tmp_path, device):
    run(2, ranks.ddp, tmp_path, device=device)


def test_rank_0_alone_publishes_replicas(tmp_path):
    run(2, ranks.leader_only, tmp_path)


@pytest.mark.parametrize("world", [2, 4])
def test_under_torchrun(tmp_path, world):
    """FSDP 2, as a training is started; `ranks.fsdp` compares every step with full checkpoints."""
    script = tmp_path / "train.py"
    script.write_text(JOB)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", script, tmp_path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    Ledger(tmp_path, tmp_path / "repo").check([0, 1, 2, 3])


def test_merged_steps(tmp_path):
    run(2, ranks.merged, tmp_path)


def test_replicas_that_differ(tmp_path):
    run(2, ranks.drifted, tmp_path)


def test_a_rank_that_fails_once(tmp_path):
    run(2, ranks.one_fails, tmp_path)


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_rank_that_dies_leaves_no_step(tmp_path, where):
    failed = ranks.spawn(2, ranks.one_dies, tmp_path, where)
    assert failed[1] == "killed"
    assert failed[0].startswith(("rank-lost", "rank-failed", "store-io")), failed[0]
    Ledger(tmp_path, tmp_path / "repo").check([0])
