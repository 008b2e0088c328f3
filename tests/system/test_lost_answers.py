"""A file server that does what it is asked, loses its answer, and is asked again (NFS): all commands, at every call."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.on_a_file_server import STEPS, checkpoint
from support.running import ROOT, environment

from deltackpt.util import file_server

SOURCE = ROOT / "tests/support/lost_answers.c"
KINDS = ("link", "rename", "sym", "folder", "rmdir", "remove")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None or sys.platform != "linux":
        pytest.skip("no compiler, or no LD_PRELOAD")
    made = tmp_path_factory.mktemp("lost") / "lost.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(made), str(SOURCE), "-ldl"], check=True)
    return made


def run_a_day(library, folder, kinds, seed=""):
    for step in range(STEPS):
        checkpoint(folder / f"saved/{step}", step)
        checkpoint(folder / f"run/checkpoint-{step}", step)
    lost = {"LD_PRELOAD": str(library), "LOST_ANSWERS": " ".join(kinds), "LOST_SEED": seed}
    env = environment(**lost, PYTHONDONTWRITEBYTECODE="1")
    env["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'tests'}"
    line = [sys.executable, "-m", "support.on_a_file_server", str(folder)]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (folder / "wrong").read_text() == "", done.stderr[-2000:]


@pytest.mark.parametrize(("kinds", "seed"), [(KINDS, ""), (KINDS, "1"), (KINDS, "2")], ids=["all", "half", "others"])
def test_a_day_whose_answers_are_lost(tmp_path, library, kinds, seed):
    run_a_day(library, tmp_path, kinds, seed)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", ["", *map(str, range(3, 8))])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_answer(tmp_path, library, kind, seed):
    run_a_day(library, tmp_path, [kind], seed)


def test_what_another_has_is_not_taken_for_ours(tmp_path):
    """Nor is what was lost on the way."""
    ours, theirs, gone = tmp_path / "ours", tmp_path / "theirs", tmp_path / "gone"
    ours.write_bytes(b"ours")
    theirs.write_bytes(b"theirs")
    (tmp_path / "folder/full").mkdir(parents=True)
    (tmp_path / "here").symlink_to("theirs")
    for call, kind in (
        (lambda: file_server.link(ours, theirs), FileExistsError),
        (lambda: file_server.symlink(theirs, "ours"), FileExistsError),
        (lambda: file_server.symlink(tmp_path / "here", "ours"), FileExistsError),
        (lambda: file_server.make_folder(tmp_path / "folder"), FileExistsError),
        (lambda: file_server.make_folder(theirs), FileExistsError),
        (lambda: file_server.rename(gone, theirs), FileNotFoundError),
        (lambda: file_server.rename(ours, gone / "inside"), FileNotFoundError),
        (lambda: file_server.remove(tmp_path / "folder"), OSError),
        (lambda: file_server.remove_tree(theirs), OSError),
    ):
        with pytest.raises(kind):
            call()
    assert (ours.read_bytes(), theirs.read_bytes(), os.readlink(tmp_path / "here")) == (b"ours", b"theirs", "theirs")
    file_server.remove_tree(Path(gone))
