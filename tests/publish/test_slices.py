"""A distributed checkpoint of torch, each of whose files holds what one rank had of the tensors."""

import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.checkpoint.hf_storage")

from safetensors.torch import load_file  # noqa: E402

from deltackpt import engines  # noqa: E402
from deltackpt.errors import CheckpointError  # noqa: E402
from deltackpt.publish.write import write  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

JOB = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
state = {name: distribute_tensor(torch.randn(8, 4), mesh, [Shard(axis)]) for name, axis in (("a", 0), ("b", 1))}
writer = dcp.HuggingFaceStorageWriter(
    sys.argv[1], fqn_to_index_mapping={"a": 1, "b": 1}, save_distributed=True, enable_consolidation=len(sys.argv) > 2
)
dcp.save(state, storage_writer=writer)
dist.barrier()
dist.destroy_process_group()
"""


def save(tmp_path, name, *more):
    script = tmp_path / "job.py"
    script.write_text(JOB)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, script, tmp_path / name, *more],
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return tmp_path / name


def refused(folder, repo):
    with pytest.raises(CheckpointError, match="checkpoint-slices") as raised:
        write(folder, repo)
    assert "Consolidate" in raised.value.hint
    assert not repo.exists()


@pytest.mark.heavy
def test_slices_are_not_taken_for_tensors(tmp_path):
    folder = save(tmp_path, "slices")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 2
    refused(folder, tmp_path / "repo")
    for name in (files[0].name, "model.safetensors"):  # one of them alone, whatever it is called
        (tmp_path / name).mkdir()
        shutil.copy(files[0], tmp_path / name / name)
        refused(tmp_path / name, tmp_path / "repo")


@pytest.mark.heavy
def test_what_was_consolidated_is_published(tmp_path):
    folder = save(tmp_path, "saved", "consolidate")
    write(folder, tmp_path / "repo", step=0)
    found = engines.load(Repository.open(tmp_path / "repo"))
    assert {name: tuple(t.shape) for name, t in found.items()} == {"a": (8, 4), "b": (8, 4)}
    [path] = folder.glob("*.safetensors")
    assert all(torch.equal(t, found[name]) for name, t in load_file(path).items())
