"""A folder that this user may not read: a permission, in our words and with its exit code, for every command."""

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
