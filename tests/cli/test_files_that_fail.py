"""Files that are cut short, vanish or cannot be mapped, paths that no system takes: an error in words, each time."""

import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.running import checkpoint, command, deltackpt, environment
from support.states import tree

from deltackpt import kernels

# Cuts a file short once it is mapped, as another process may do.
CUT = """
import os
from deltackpt.checkpoint import checkpoint
inner = checkpoint._map_file
def cut(path, stamp):
    found = inner(path, stamp)
    if "{of}" in str(path):
        os.truncate(path, 4096)
    return found
checkpoint._map_file = cut"""
guarded = pytest.mark.skipif(kernels.LIB is None, reason="without the kernels the process ends")


def large(path: Path, step: int) -> Path:
    rng = np.random.default_rng(step)
    return checkpoint(path, step, large=rng.integers(0, 1 << 16, (512, 1024), np.uint16).view(np.float16))


@pytest.fixture
def world(tmp_path: Path) -> Path:
    for step in range(2):
        large(tmp_path / f"step_{step}", step)
    assert deltackpt("write", tmp_path / "step_0", tmp_path / "repo").status == 0
    return tmp_path


def leases(repo: Path) -> list[Path]:
    return list((repo / "leases").glob("*")) if (repo / "leases").exists() else []


@guarded
@pytest.mark.parametrize("of", ["step_0", "step_1"])
def test_a_file_cut_short_while_it_is_written_from(world, of):
    repo, before = world / "repo", tree(world / "repo")
    whole = (world / of / "model.safetensors").read_bytes()
    line = ("write", world / "step_1", repo, "--base", world / "step_0")
    done = deltackpt(*line, "--json", before=CUT.format(of=of))
    assert (done.status, done.json["error"]) == (5, "checkpoint-changed")
    assert str(world / of) in done.err
    assert leases(repo) == []
    assert tree(repo) == before
    (world / of / "model.safetensors").write_bytes(whole)
    assert deltackpt(*line).status == 0
    assert deltackpt("verify", world / "step_1", "--against", repo).status == 0


QUANTIZED = ("--quantize", "fp8-block")


@guarded
@pytest.mark.parametrize("of", ["step_0", "step_1"])
def test_a_file_cut_short_while_it_is_quantised(world, of):
    pytest.importorskip("torch")
    line = ("write", world / "step_1", world / "fp8", "--base", world / "step_0", *QUANTIZED)
    assert deltackpt("write", world / "step_0", world / "fp8", *QUANTIZED).status == 0
    before, home = tree(world / "fp8"), world / "tmp"
    home.mkdir()
    done = deltackpt(*line, "--json", before=CUT.format(of=of), TMPDIR=str(home))
    assert (done.status, done.json["error"]) == (5, "checkpoint-changed"), done.err
    assert str(world / of) in done.err
    assert tree(world / "fp8") == before
    assert list(home.glob("deltackpt-quantize*")) == []


LIMIT = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}))"""


def test_no_room_for_the_quantised_copy(world):
    pytest.importorskip("torch")
    home = world / "tmp"
    home.mkdir()
    done = deltackpt(
        "write", world / "step_1", world / "fp8", *QUANTIZED, "--json", before=LIMIT.format(most=9999), TMPDIR=str(home)
    )
    assert (done.status, done.json["error"]) == (8, "not-writable"), done.err
    assert done.json["have"] == "File too large"
    assert str(home) in done.json["where"]
    assert not (world / "fp8").exists()
    assert list(home.glob("deltackpt-quantize*")) == []


@pytest.mark.parametrize("most", [0, 100, 300])
def test_no_room_for_a_key(tmp_path, most):
    """100 bytes hold the public key, and no private one."""
    done = deltackpt("keygen", tmp_path / "key", "--comment", "c" * 300, "--json", before=LIMIT.format(most=most))
    assert (done.status, done.json["error"]) == (8, "not-writable"), done.err
    assert list(tmp_path.iterdir()) == []
    assert deltackpt("keygen", tmp_path / "key").status == 0


@pytest.mark.parametrize("there", [b"", b"an earlier plan"])
def test_no_room_for_a_plan(world, there):
    """An earlier file of that name stays as it was, and so does what else is in the folder."""
    home, repo = world / "plans", world / "repo"
    home.mkdir()
    (home / ".plan.json").write_bytes(b"of somebody")
    if there:
        (home / "plan.json").write_bytes(there)
    before = tree(home)
    full = LIMIT.format(most=100)
    done = deltackpt("gc", repo, "--plan", home / "plan.json", "--json", before=full)
    assert (done.status, done.json["error"]) == (8, "not-writable"), done.err
    assert tree(home) == before
    (home / "link").symlink_to("plan.json")
    assert deltackpt("gc", repo, "--plan", home / "link").status == 0
    assert (home / "link").is_symlink()
    assert deltackpt("gc", repo, "--execute", home / "plan.json").status == 0
    done = deltackpt("gc", repo, "--plan", "/dev/stdout", "-q")
    assert done.status == 0
    assert done.out.startswith('{"delete":')


@guarded
def test_one_cut_short_while_others_read_it(world):
    again = (world / "step_1/model.safetensors").read_bytes()
    cut = CUT.format(of="step_1")
    for line in (
        ("diff", world / "step_0", world / "step_1"),
        ("verify", world / "step_1", "--against", world / "repo"),
        ("watch", world, world / "other", "--once", "--settle", "0s", "--poll", "0.01s"),
    ):
        done = deltackpt(*line, before=cut)
        (world / "step_1/model.safetensors").write_bytes(again)
        if line[0] == "watch":  # the step before is published, and this one waits
            assert "step 0" in done.out
            assert "step 1" not in done.out
        else:
            assert done.status in (4, 5)
            assert done.status == 5 or "[tensor-differs]" in done.out
            assert "cut short" in done.err + done.out


@guarded
def test_an_anchor_cut_short_while_it_is_applied(world):
    cut = """
import os
from deltackpt.restore import anchor
inner = anchor.map_guarded
def cut(fd, size, path):
    found = inner(fd, size, path)
    os.truncate(path, 4096)
    return found
anchor.map_guarded = cut"""
    done = deltackpt("apply", world / "repo", world / "out", "--json", before=cut)
    assert (done.status, done.json["error"]) == (3, "object-hash")
    assert not (world / "out").exists()
    assert leases(world / "repo") == []


@guarded
@pytest.mark.parametrize("how", ["default", "faulthandler"])
def test_other_faults_end_the_process_as_ever(world, how):
    """A mapping that is not ours."""
    fault = f"""
import mmap, os, sys, atexit
{"import faulthandler; faulthandler.enable()" if how == "faulthandler" else ""}
def fault():
    with open("{world}/own", "w+b") as file:
        file.truncate(8192)
        mapped = mmap.mmap(file.fileno(), 8192)
        file.truncate(0)
        mapped[5000]
from deltackpt_cli import console
console.Output.result = lambda *args: fault()"""
    done = subprocess.run(
        command("write", world / "step_1", world / "repo", before=fault),
        env=environment(),
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGBUS
    assert (b"Fatal Python error: Bus error" in done.stderr) == (how == "faulthandler")


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
static int refused(int fd, int flags) {
    char link[64], path[4096];
    const char *below = getenv("REFUSED");
    if (fd < 0 || flags & MAP_ANONYMOUS || !below) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return !strncmp(path, below, strlen(below));
}
#define MAP(name)                                                                          \
    void *name(void *at, size_t size, int prot, int flags, int fd, off_t offset) {         \
        static void *(*inner)(void *, size_t, int, int, int, off_t);                       \
        if (!inner) inner = dlsym(RTLD_NEXT, #name);                                       \
        if (refused(fd, flags)) return errno = ENODEV, MAP_FAILED;                         \
        return inner(at, size, prot, flags, fd, offset);                                   \
    }
MAP(mmap)
MAP(mmap64)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What stands before the C library and refuses to map files below a folder, as some file systems do."""
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    built = subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", folder / "shim.so", folder / "shim.c", "-ldl"])
    if built.returncode:
        pytest.skip("no C compiler")
    return folder / "shim.so"


def test_a_file_system_that_cannot_map(world, shim, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    how = {"LD_PRELOAD": str(shim), "REFUSED": str(world), "TMPDIR": str(elsewhere)}
    repo = world / "repo"
    done = deltackpt("write", world / "step_1", repo, "--base", world / "step_0", **how)
    assert (done.status, done.err.count("cannot be mapped")) == (0, 1)
    for i in range(2):
        assert deltackpt("apply", repo, world / f"out_{i}", "--step", i, **how).status == 0
        assert tree(world / f"out_{i}") == tree(world / f"step_{i}")
        assert deltackpt("apply", repo, world / "cache", "--cache", "--step", i, **how).status == 0
        assert tree(world / "cache/current") == tree(world / f"step_{i}")
    for line in (("verify", repo), ("verify", world / "step_1", "--against", repo), ("inspect", repo, "--step", 1)):
        assert deltackpt(*line, **how).status == 0
    assert [path.name for path in elsewhere.iterdir() if not path.name.startswith("deltackpt-")] == []


LONG = "/".join(["x" * 200] * 25)


@pytest.mark.parametrize("name", ["n" * 300, LONG], ids=["name", "path"])
def test_names_and_paths_that_are_too_long(world, name):
    one, repo = world / "step_0", world / "repo"
    for line in (
        ("write", world / name, repo),
        ("write", one, world / name),
        ("write", one, repo, "--base", world / name),
        ("write", one, repo, "--cache", world / name),
        ("apply", repo, world / name),
        ("apply", repo, world / name, "--cache"),
        ("apply", world / name, world / "out"),
        ("verify", world / name),
        ("verify", world / name, "--against", repo),
        ("diff", one, world / name),
        ("inspect", world / name),
        ("gc", repo, "--plan", world / name),
        ("gc", repo, "--execute", world / name),
        ("watch", world / name, repo, "--once"),
        ("mirror", repo, world / name),
        ("export", repo, "vllm", world / name),
        ("import", "auto", world / name, repo),
    ):
        done = deltackpt(*line)
        assert done.status in (3, 4, 5, 6, 7, 8), (line[0], done.status, done.err)
        assert "Traceback" not in done.err
        assert "name too long" in done.err or line[0] in ("import", "verify", "inspect"), done.err
    assert leases(repo) == []


def test_plans_of_gc(world):
    repo = world / "repo"
    done = deltackpt("gc", repo, "--plan", world / "none/plan.json", "--json")
    assert (done.status, done.json["error"]) == (8, "not-writable")
    for path, have in (("/dev/zero", "a device"), (world, "a directory"), (world / "none", "No such file")):
        done = deltackpt("gc", repo, "--execute", path, "--json")
        assert (done.status, done.json["error"]) == (6, "plan-missing")
        assert have in done.json["have"]
    os.mkfifo(world / "pipe")
    assert deltackpt("gc", repo, "--execute", world / "pipe").status == 6


@pytest.mark.parametrize("what", ["model.safetensors", "config.json", ""])
def test_files_that_vanish(world, what):
    """Between the moment that the directory is listed and the moment that they are read."""
    gone = f"""
import shutil
from pathlib import Path
from deltackpt.checkpoint import Checkpoint
def check(self):
    path = Path("{world}/step_1/{what}")
    shutil.rmtree(path) if path.is_dir() else path.unlink()
Checkpoint.check_whole = check"""
    before = tree(world / "repo")
    done = deltackpt("write", world / "step_1", world / "repo", "--json", before=gone)
    assert (done.status, done.json["error"]) == (5, "checkpoint-changed")
    assert tree(world / "repo") == before
