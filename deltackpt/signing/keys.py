"""Who signs: a private key in OpenSSH's form, from a file or the environment, or a command that keeps it."""

from __future__ import annotations

import logging
import os
import shlex
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltackpt.errors import UsageError
from deltackpt.format.signature import Signature, to_sign
from deltackpt.signing import ed25519, openssh
from deltackpt.util.places import expanded

SIGN_KEY = "DELTACKPT_SIGN_KEY"
COMMAND = "command:"
TIMEOUT = 120.0  # seconds that a command may take, which may ask a person
_HEAD = "-----BEGIN OPENSSH PRIVATE KEY-----"
_MOST = 64 << 10  # bytes of a private key's file, or of a command's answer

Signer = Callable[[bytes], Signature]
logger = logging.getLogger("deltackpt")


class PrivateKey:
    """An ed25519 key in memory. ``public``: 64 hex digits. Shown, it tells no more than that."""

    def __init__(self, key: Any) -> None:
        self._key = key
        self.public: str = key.public_key().public_bytes_raw().hex()

    def __call__(self, message: bytes) -> Signature:
        """Sign a message."""
        return Signature(self.public, self._key.sign(to_sign(message)).hex())

    def __repr__(self) -> str:
        return f"PrivateKey({openssh.public_line(self.public)})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a private key is not pickled")

    @classmethod
    def generate(cls) -> PrivateKey:
        """A new key."""
        return cls(ed25519.library().Ed25519PrivateKey.generate())

    @classmethod
    def parse(cls, text: bytes, where: object) -> PrivateKey:
        """The key in OpenSSH's private form. Raises UsageError ``sign-key``, which shows nothing of it."""
        module = ed25519.library()
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key

        try:
            key = load_ssh_private_key(text, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            locked = "passphrase" in str(error).lower() or "password" in str(error).lower()
            have = "a key with a passphrase" if locked else "something else"
            hint = (
                "ssh-agent can hold it: --sign 'command:ssh-keygen -Y sign -n deltackpt -f KEY.pub'." if locked else ""
            )
            raise _unusable(where, have, "an OpenSSH private key without a passphrase", hint) from None
        if not isinstance(key, module.Ed25519PrivateKey):
            raise _unusable(where, "a key of another kind", "an ed25519 key", "`deltackpt keygen` makes one.")
        return cls(key)

    def private_text(self) -> bytes:
        """OpenSSH's private form, for a file that its owner alone reads."""
        ed25519.library()
        from cryptography.hazmat.primitives import serialization as form

        return bytes(self._key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()))


class SigningCommand:
    """A command that gets the message on stdin and prints OpenSSH's armored signature, as `ssh-keygen -Y sign` does."""

    def __init__(self, line: str) -> None:
        self._words = shlex.split(line)
        if not self._words:
            raise _unusable("the command that signs", "nothing", "a command")
        self._where = f"the command that signs, {Path(self._words[0]).name}"

    def __call__(self, message: bytes) -> Signature:
        """Sign a message. Raises UsageError ``sign-key``; what the command says on stderr is passed through."""
        quiet = {name: value for name, value in os.environ.items() if name != SIGN_KEY}
        try:
            done = subprocess.run(
                self._words, input=message, stdout=subprocess.PIPE, env=quiet, timeout=TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            raise _unusable(self._where, f"no answer for {TIMEOUT:.0f} s", "a signature") from None
        except OSError as error:
            raise _unusable(self._where, error.strerror or "an error", "a command that runs") from None
        if done.returncode != 0:
            raise _unusable(self._where, f"exit status {done.returncode}", "status 0 and a signature on stdout")
        try:
            found = openssh.parse_signature(done.stdout[:_MOST])
        except ValueError as error:
            raise _unusable(self._where, f"{error}", "an armored ed25519 signature on stdout") from None
        if not ed25519.verify(found, message):
            raise _unusable(self._where, "a signature of something else", "one of the bytes on its stdin")
        return found


def signer(key: str | os.PathLike[str] | Signer | None) -> Signer | None:
    """Who signs: a path, ``command:…``, or a signer as it is; None: what ``DELTACKPT_SIGN_KEY`` says, if anything.

    The variable may also hold the private key itself. Raises UsageError ``sign-key``, ExtraMissingError.
    """
    if key is None:
        text = os.environ.get(SIGN_KEY, "").strip()
        if not text:
            return None
        if text.startswith(_HEAD):
            return PrivateKey.parse(f"{text}\n".encode(), SIGN_KEY)
        return signer(text)
    if callable(key):
        return key
    given = os.fspath(key)
    if "PRIVATE KEY" in given:
        have, need = "the key itself", "the path of its file, or `command:…`"
        hint = f"What a command line holds, every user of the host can list. {SIGN_KEY} may hold the key."
        raise _unusable("the key to sign with", have, need, hint)
    if given.startswith(COMMAND):
        return SigningCommand(given[len(COMMAND) :])
    return _from_file(expanded(given))


def _from_file(path: Path) -> PrivateKey:
    try:
        with path.open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                logger.warning("%s can be read by others than its owner: chmod 600 %s", path, path)
            text = file.read(_MOST)
    except OSError as error:
        hint = "`deltackpt keygen KEY` makes one." if isinstance(error, FileNotFoundError) else ""
        raise _unusable(path, error.strerror or "an error", "an OpenSSH private key", hint) from None
    return PrivateKey.parse(text, path)


def _unusable(where: object, have: str, need: str, hint: str = "") -> UsageError:
    return UsageError("sign-key", where=where, have=have, need=need, hint=hint)
