"""A checkpoint of more files than this process may open at a time: `write` and `diff` map them without descriptors."""

import resource
from contextlib import contextmanager
from pathlib import Path

from support.running import deltackpt
from support.states import make_checkpoint, tree

from deltackpt import apply, diff, write
from deltackpt.publish.write import AnchorPolicy

SHARDS = 100


@contextmanager
def descriptors(most):
    """So many in all, of a process that had only the usual three open."""
    most += len([*Path("/dev/fd").iterdir()]) - 3
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_hundred_shards_with_few_descriptors(tmp_path):
    steps = [{f"t{i:03d}": ("BF16", (16, 16), bytes([i, step]) * 256) for i in range(SHARDS)} for step in (0, 1, 2, 3)]
    folders = [make_checkpoint(tmp_path / str(i), state, shards=SHARDS) for i, state in enumerate(steps)]
    repo, never = tmp_path / "repo", AnchorPolicy(ratio=float("inf"))
    with descriptors(64):
        write(folders[0], repo, threads=2)
        write(folders[1], repo, base=folders[0], threads=2, anchor=never)
        write(folders[2], repo, threads=2, anchor=never)
        write(folders[3], repo, cache=tmp_path / "cache", threads=2, anchor=never)
        assert sum(t.changed for t in diff(folders[0], folders[1], threads=2).tensors) == SHARDS * 256
    apply(repo, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(folders[3])


FEW = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"


def test_every_command_with_few_descriptors(tmp_path):
    """A process that was started under `ulimit -n 64`."""
    steps = [{f"t{i:03d}": ("BF16", (8, 8), bytes([i, step]) * 64) for i in range(SHARDS)} for step in (0, 1, 2)]
    a, b, c = (make_checkpoint(tmp_path / str(i), state, shards=SHARDS) for i, state in enumerate(steps))
    repo, cache, never = tmp_path / "repo", tmp_path / "cache", ("--anchor-when-ratio", "inf")
    for call in (
        ("write", a, repo),
        ("write", b, repo, "--base", a, *never),
        ("apply", repo, cache, "--cache"),
        ("write", c, repo, *never),
        ("apply", repo, cache, "--cache"),
        ("apply", repo, tmp_path / "out"),
        ("diff", a, b),
        ("verify", repo),
    ):
        done = deltackpt(*call, before=FEW)
        assert (done.status, done.err.count("error")) == (0, 0), (call, done.err)
    assert tree(tmp_path / "out") == tree(c)
    assert tree(cache / "current") == tree(c)
