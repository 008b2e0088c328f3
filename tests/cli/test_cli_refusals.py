"""What is refused before anything is made, in our words: folders that may not be read, branches of odd names."""

import pytest
from support.running import NO_OVERRIDE, checkpoint, deltackpt

from deltackpt.errors import CheckpointError, StoreError

READS = {
    "watch": ("DIR", "repo", "--once"),
    "write": ("DIR", "repo"),
    "diff": ("DIR", "good"),
    "import": ("slime", "DIR", "repo"),
    "verify": ("DIR",),
    "log": ("DIR",),
    "apply": ("DIR", "out"),
    "mirror": ("DIR", "out"),
    "inspect": ("DIR/part",),
}


@pytest.mark.parametrize("ref", ["a b", "../x", ""])
def test_a_branch_that_cannot_be_called_so_leaves_no_repository(tmp_path, ref):
    checkpoint(tmp_path / "run/step_0", 0)
    for line in (("write", tmp_path / "run/step_0"), ("watch", tmp_path / "run")):
        more = ("--once", "--settle", "0s") if line[0] == "watch" else ()
        done = deltackpt(*line, tmp_path / "repo", "--ref", ref, *more)
        assert (done.status, "letters, digits" in done.err) == (2, True)
        assert not (tmp_path / "repo").exists()


@pytest.mark.parametrize("name", READS)
def test_what_may_not_be_read(tmp_path, name):
    closed = tmp_path / "closed"
    closed.mkdir()
    checkpoint(tmp_path / "good", 0)
    closed.chmod(0)
    places = {"DIR": closed, "DIR/part": closed / "part"}
    line = [places.get(w, tmp_path / w if w in ("repo", "out", "good") else w) for w in READS[name]]
    try:
        done = deltackpt(name, *line, before=NO_OVERRIDE)
    finally:
        closed.chmod(0o700)
    assert done.status in (CheckpointError.exit_code, StoreError.exit_code), done.err
    assert "found Permission denied" in done.err
    assert str(closed) in done.err
    assert "--help" not in done.err
    if name in ("watch", "write", "diff"):
        assert (done.status, "a directory that this user can read" in done.err) == (CheckpointError.exit_code, True)
