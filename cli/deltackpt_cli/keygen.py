"""`deltackpt keygen`."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from deltackpt.errors import ConflictError, DeltackptError, StoreError, UsageError
from deltackpt.util.disk import space_errors
from deltackpt_cli import format as text
from deltackpt_cli.console import Output

File = Annotated[
    Path, typer.Argument(metavar="KEY", show_default=False, help="The file of the private key, a new one.")
]
Comment = Annotated[str, typer.Option(metavar="TEXT", show_default=False, help="What the public key's line ends with.")]


@dataclass(frozen=True)
class MadeKey:
    """What was made; nothing of it is secret."""

    private: str
    public: str
    key: str
    fingerprint: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def keygen(output: Output, key: File, comment: Comment = "") -> None:
    """Make a key pair to sign steps with.

    KEY holds the private key, for its owner alone, and KEY.pub the line that readers trust. Both are in OpenSSH's form:
    `ssh-keygen -t ed25519` makes the same.
    """
    from deltackpt.format.signature import fingerprint
    from deltackpt.signing.keys import PrivateKey
    from deltackpt.signing.openssh import public_line

    if not key.name:
        raise UsageError("usage", where="KEY", have=repr(str(key)), need="the name of a new file")
    made, public = PrivateKey.generate(), key.with_name(f"{key.name}.pub")
    line = public_line(made.public, " ".join(comment.encode(errors="replace").decode().split()))
    _create(key, made.private_text(), 0o600)
    try:
        _create(public, f"{line}\n".encode(), 0o644)
    except DeltackptError:
        key.unlink(missing_ok=True)  # a key that nobody was told of
        raise
    result = MadeKey(str(key), str(public), line, fingerprint(made.public))
    output.result(
        result, lambda: text.fields([("public key", line), ("in", str(public)), ("shown as", result.fingerprint)])
    )


def _create(path: Path, data: bytes, mode: int) -> None:
    """A new file, never one that is there, nor a part of one."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        hint = "A key that was replaced signs nothing any more: choose another name."
        raise ConflictError("output-exists", where=path, have="a file", need="none", hint=hint) from None
    except OSError as error:
        need = "a place that can be written"
        raise StoreError("not-writable", where=path, have=error.strerror or error, need=need) from error
    try:
        with space_errors(path):
            _write(fd, data)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _write(fd: int, data: bytes) -> None:
    """All of it, durable; closes the file, and shows nothing of it where that fails."""
    try:
        while data:
            data = data[os.write(fd, data) :]
        os.fsync(fd)
    finally:
        os.close(fd)
