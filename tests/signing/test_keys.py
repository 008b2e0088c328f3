"""Private keys: where they come from, what OpenSSH says to what they make, and that nothing of them is shown."""

from __future__ import annotations

import base64
import logging
import pickle
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.signed import armored, write_key

from deltackpt.errors import UsageError
from deltackpt.format.signature import Signature, fingerprint
from deltackpt.signing import ed25519, openssh
from deltackpt.signing.keys import PrivateKey, signer

KEY = PrivateKey.generate()
SECRET = KEY.private_text().decode()
needs_openssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")


def ssh(*words: object, data: bytes = b"") -> bytes:
    done = subprocess.run(["ssh-keygen", *map(str, words)], input=data, capture_output=True, timeout=120, check=True)
    return done.stdout


@needs_openssh
def test_openssh_agrees(tmp_path: Path) -> None:
    """A key of ours is one of OpenSSH's, what we sign it verifies, and what it signs we verify."""
    path, message = write_key(tmp_path / "key", KEY), b"anything\0"
    assert ssh("-y", "-f", path).decode().split()[:2] == openssh.public_line(KEY.public).split()
    (tmp_path / "key.pub").write_text(openssh.public_line(KEY.public))
    assert fingerprint(KEY.public).encode() in ssh("-l", "-f", tmp_path / "key.pub")
    (tmp_path / "allowed").write_text(f"me {openssh.public_line(KEY.public)}\n")
    (tmp_path / "sig").write_bytes(armored(KEY(message)))
    how = ("-Y", "verify", "-n", "deltackpt", "-I", "me", "-f", tmp_path / "allowed", "-s", tmp_path / "sig")
    assert b"Good" in ssh(*how, data=message)
    with pytest.raises(subprocess.CalledProcessError):
        ssh(*how, data=b"something else")
    made = openssh.parse_signature(ssh("-Y", "sign", "-n", "deltackpt", "-f", path, data=message))
    assert made == KEY(message)  # ed25519 leaves nothing to chance
    assert ed25519.verify(made, message)


@needs_openssh
def test_keys_of_openssh(tmp_path: Path) -> None:
    ssh("-q", "-t", "ed25519", "-N", "", "-C", "", "-f", tmp_path / "key")
    made = signer(tmp_path / "key")
    assert isinstance(made, PrivateKey)
    assert made.public == openssh.public_key((tmp_path / "key.pub").read_text())
    command = signer(f"command:ssh-keygen -Y sign -n deltackpt -f {shlex.quote(str(tmp_path / 'key'))}")
    assert command is not None
    assert command(b"message") == made(b"message")
    other = signer(f"command:ssh-keygen -Y sign -n git -f {shlex.quote(str(tmp_path / 'key'))}")
    assert other is not None
    with pytest.raises(UsageError, match="namespace"):
        other(b"message")


@needs_openssh
@pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
def test_other_keys_are_refused(tmp_path: Path, kind: str) -> None:
    ssh("-q", "-t", kind, "-N", "secret words" if kind == "ed25519" else "", "-f", tmp_path / "key")
    with pytest.raises(UsageError, match="sign-key"):
        signer(tmp_path / "key")


def test_where_a_key_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert signer(None) is None
    path = write_key(tmp_path / "key", KEY)
    for value in (str(path), SECRET):
        monkeypatch.setenv("DELTACKPT_SIGN_KEY", value)
        found = signer(None)
        assert isinstance(found, PrivateKey)
        assert found.public == KEY.public
    assert signer(KEY) is KEY
    for wrong in (tmp_path, tmp_path / "no", "command:"):
        with pytest.raises(UsageError, match="sign-key"):
            signer(wrong)


def test_a_file_that_others_can_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_key(tmp_path / "key", KEY)
    with caplog.at_level(logging.WARNING):
        signer(path)
        assert not caplog.text
        path.chmod(0o644)
        signer(path)
    assert "chmod 600" in caplog.text


def commanded(body: str) -> str:
    return f"command:{shlex.quote(sys.executable)} -c {shlex.quote(body)}"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise SystemExit(3)", "exit status 3"),
        ("pass", "no armored"),
        ("print('-----BEGIN SSH SIGNATURE-----\\nAAAA\\n-----END SSH SIGNATURE-----')", "version of SSHSIG"),
        ("import os; assert 'DELTACKPT_SIGN_KEY' not in os.environ; raise SystemExit(4)", "exit status 4"),
    ],
)
def test_commands_that_do_not_sign(body: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACKPT_SIGN_KEY", SECRET)
    command = signer(commanded(body))
    assert command is not None
    with pytest.raises(UsageError, match=why):
        command(b"message")


def test_a_command_that_signs_something_else(tmp_path: Path) -> None:
    (tmp_path / "sig").write_bytes(armored(KEY(b"other")))
    command = signer(commanded(f"print(open({str(tmp_path / 'sig')!r}).read())"))
    assert command is not None
    with pytest.raises(UsageError, match="something else"):
        command(b"message")
    (tmp_path / "sig").write_bytes(armored(KEY(b"message")))
    assert command(b"message") == KEY(b"message")
    no_command = signer("command:/no/such/program --with arguments")
    assert no_command is not None
    with pytest.raises(UsageError, match="No such file"):
        no_command(b"message")


def test_nothing_secret_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "".join(SECRET.split("-----")[2].split())
    at = base64.b64decode(body).index(KEY._key.private_bytes_raw())
    secret = body[at * 4 // 3 + 2 : (at + 32) * 4 // 3 - 2]  # what stands for the seed, and for nothing else
    shown = [repr(KEY), str(KEY), repr(vars(KEY)), repr(KEY(b"x"))]
    with pytest.raises(TypeError):
        pickle.dumps(KEY)
    damaged = SECRET[:120] + "!" + SECRET[121:]
    for wrong in (SECRET, damaged):
        with pytest.raises(UsageError) as caught:
            signer(wrong)
        shown += [str(caught.value), repr(caught.value.to_dict())]
    monkeypatch.setenv("DELTACKPT_SIGN_KEY", damaged)
    with pytest.raises(UsageError) as caught:
        signer(None)
    shown += [str(caught.value), repr(caught.value), repr(caught.value.__cause__)]
    for text in shown:
        squeezed = "".join(text.replace("\\n", "").split())
        assert not any(secret[at : at + 12] in squeezed for at in range(len(secret) - 11))
        assert KEY._key.private_bytes_raw().hex()[:16] not in squeezed


def test_what_is_no_signature() -> None:
    good = KEY(b"message")
    assert ed25519.verify(good, b"message")
    assert not ed25519.verify(good, b"massage")
    assert not ed25519.verify(Signature(good.key, "0" * 128), b"message")
    assert not ed25519.verify(Signature("f" * 64, good.signature), b"message")
    for text in (b"", b"-----BEGIN SSH SIGNATURE-----", armored(good)[:-40], b"x" + armored(good)):
        with pytest.raises(ValueError, match=r"no|cut|another"):
            openssh.parse_signature(text)
    assert openssh.parse_signature(armored(good)) == good
