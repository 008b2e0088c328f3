"""Signed repositories for tests: a small one in memory, keys, and readers that remember apart from each other."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deltackpt.format.signature import KeySet, Signature, SignedStatement, Statement
from deltackpt.repository import Repository
from deltackpt.signing.ed25519 import library
from deltackpt.signing.keys import PrivateKey
from deltackpt.signing.policy import TrustPolicy
from deltackpt.store import MemoryStore
from support.chains import World


def key_of(number: int) -> PrivateKey:
    """A key that is the same in every process, where tests name their cases by it: its secret is one byte, 32 times."""
    return PrivateKey(library().Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32))


def keys_of(*keys: PrivateKey, threshold: int = 1, **more: object) -> KeySet:
    """A reader's own key set."""
    return KeySet(None, 0, tuple(sorted(key.public for key in keys)), threshold, **more)  # type: ignore[arg-type]


def armored(by: Signature) -> bytes:
    """The form that `ssh-keygen -Y sign` prints: by hand, from the description of SSHSIG."""

    def string(data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + data

    kind, key, signed = b"ssh-ed25519", bytes.fromhex(by.key), bytes.fromhex(by.signature)
    pair = [string(kind) + string(data) for data in (key, signed)]
    fields = (pair[0], b"deltackpt", b"", b"sha512", pair[1])
    text = base64.b64encode(b"SSHSIG\0\0\0\x01" + b"".join(map(string, fields)))
    lines = [text[at : at + 70] for at in range(0, len(text), 70)]
    return b"\n".join([b"-----BEGIN SSH SIGNATURE-----", *lines, b"-----END SSH SIGNATURE-----", b""])


def write_key(path: Path, key: PrivateKey) -> Path:
    """A private key's file, as `deltackpt keygen` leaves it."""
    path.write_bytes(key.private_text())
    path.chmod(0o600)
    return path


def signed_world(root: Path, url: str | Path, key: PrivateKey) -> World:
    """A world whose writer signs."""
    world = World(root, url)
    world.writer = Repository.open_or_create(url).secure(sign=key)
    return world


def statement(by: PrivateKey, said: Statement, *, key: str | None = None) -> SignedStatement:
    """A statement signed by ``by``, or in its words, under the name of another ``key``."""
    made = by(said.encode())
    return SignedStatement(said, Signature(key or made.key, made.signature))


@contextmanager
def memory(patch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """Within, readers and signers remember in ``folder``."""
    with patch.context() as inner:
        inner.setenv("DELTACKPT_TRUST_DIR", str(folder))
        yield


def reader(store: MemoryStore | Repository, policy: TrustPolicy | KeySet) -> Repository:
    """The repository as one sees it who trusts these keys."""
    repo = Repository.at(store.store if isinstance(store, Repository) else store)
    return repo.secure(policy if isinstance(policy, TrustPolicy) else TrustPolicy(policy))
