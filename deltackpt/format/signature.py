"""Signatures and key sets as records (spec/SIGNATURES.md): canonical JSON, and the bytes that ed25519 signs."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from deltackpt.errors import FormatError
from deltackpt.format.canonical import dumps, loads_strict
from deltackpt.format.manifest import MAX_STEP, REPOSITORY_ID, Fields, Link
from deltackpt.format.record import RecordKind, check_canonical

NAMESPACE = b"deltackpt"
VERSION = 1
MAX_SIGNATURE = 4096  # bytes of a signature's object
MAX_KEYS = 32  # keys of a set, and signatures of one
MAX_KEY_SET = 64 << 10
MAX_TIME = 1 << 53  # microseconds, up to the year 2255

_HASH = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(r"[0-9a-f]{128}")
_NAMED = re.compile(r"(refs|tags)/[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_STATEMENT = RecordKind("deltackpt-statement", VERSION, "statement", "signature-field")
_KEY_SET = RecordKind("deltackpt-keys", VERSION, "key set", "signature-field")


def to_sign(message: bytes) -> bytes:
    """What ed25519 signs for a message: the blob of OpenSSH's SSHSIG, namespace ``deltackpt``, sha512."""
    parts = (NAMESPACE, b"", b"sha512", hashlib.sha512(message).digest())
    return b"SSHSIG" + b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def fingerprint(key: str) -> str:
    """How OpenSSH shows a public key of 64 hex digits: ``SHA256:…``."""
    import base64

    blob = b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + bytes.fromhex(key)
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


@dataclass(frozen=True)
class Statement:
    """What a signer says: that record ``link`` belongs to ``repository`` and, where ``ref`` is not None, that this
    branch (``refs/NAME``) or tag (``tags/NAME``) is at it.

    ``previous`` is the step that the branch was at before; ``time`` is in microseconds since 1970, and later than that
    of any statement about the same name that its signer knew.
    """

    repository: str
    ref: str | None
    link: Link
    previous: Link | None
    time: int

    def encode(self) -> bytes:
        """The message that is signed: canonical JSON."""
        return dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The fields of the spec."""
        return {
            "format": _STATEMENT.format,
            "version": VERSION,
            "repository": self.repository,
            "ref": self.ref,
            **self.link.to_dict(),
            "previous": self.previous.to_dict() if self.previous else None,
            "time": self.time,
        }


@dataclass(frozen=True)
class Signature:
    """An ed25519 public key and what it made of a message, in hex."""

    key: str
    signature: str

    def to_dict(self) -> dict[str, str]:
        """SIGNATURE of the spec."""
        return {"key": self.key, "signature": self.signature}


@dataclass(frozen=True)
class SignedStatement:
    """One object below ``signatures/``: a statement and one signature of it, not yet proven."""

    statement: Statement
    by: Signature

    def encode(self) -> bytes:
        """The object's bytes."""
        return dumps({"statement": self.statement.to_dict(), **self.by.to_dict()})


@dataclass(frozen=True)
class KeySet:
    """Who may sign a repository: any ``threshold`` of ``keys``, until ``expires`` (seconds since 1970, or None).

    Sets count from 1; number 0 is what a reader was given. ``repository`` is None there for one of any repository.
    """

    repository: str | None
    number: int
    keys: tuple[str, ...]
    threshold: int = 1
    expires: int | None = None

    def encode(self) -> bytes:
        """The message that is signed: canonical JSON."""
        return dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The fields of the spec."""
        fields = {name: value for name, value in vars(self).items() if name != "keys"}
        return {"format": _KEY_SET.format, "version": VERSION, **fields, "keys": list(self.keys)}

    @property
    def name(self) -> str:
        """The set's object."""
        return f"keys/{self.number:08d}.json"


@dataclass(frozen=True)
class SignedKeySet:
    """A key set and its signatures, not yet proven."""

    keys: KeySet
    by: tuple[Signature, ...]

    def encode(self) -> bytes:
        """The object's bytes."""
        return dumps({"keys": self.keys.to_dict(), "signatures": [one.to_dict() for one in self.by]})


class _Fields(Fields):
    """Typed access, of which the code is ``signature-field`` [S-SIG-1] [S-SIG-17]."""

    def refuse(self, name: str, have: str, need: str) -> NoReturn:
        raise FormatError("signature-field", where=f"{self._where}, {name}", have=have, need=need)


def decode_signature(data: bytes, where: str) -> SignedStatement:
    """Parse a signature's object. Raises FormatError ``signature-field``, ``version-unknown``, ``manifest-canonical``
    and json-*.
    """
    value = _object(data, MAX_SIGNATURE, {"statement", "key", "signature"}, where)
    f = _fields(_STATEMENT, value["statement"], where)
    if f.value.keys() != _KNOWN:
        f.refuse("statement", ", ".join(sorted(f.value))[:120], ", ".join(sorted(_KNOWN)))
    ref = None if f.get("ref") is None else f.text("ref", _NAMED)
    link = Link(f.number("step", MAX_STEP), f.text("id", _HASH))
    statement = Statement(
        f.text("repository", REPOSITORY_ID), ref, link, f.link("previous"), f.number("time", MAX_TIME)
    )
    return SignedStatement(statement, _signature(value, where))


def decode_keys(data: bytes, where: str) -> SignedKeySet:
    """Parse a key set's object. Raises what `decode_signature` raises."""
    value = _object(data, MAX_KEY_SET, {"keys", "signatures"}, where)
    by = value["signatures"]
    if not isinstance(by, list) or len(by) > MAX_KEYS:
        raise _refused(where, "signatures", f"at most {MAX_KEYS} signatures")
    found = tuple(_signature(one, where) for one in by)
    return SignedKeySet(key_set(value["keys"], where), found)


def key_set(value: Any, where: str) -> KeySet:
    """A key set, given as its JSON value. Raises FormatError ``signature-field``, ``version-unknown``."""
    f = _fields(_KEY_SET, value, where)
    if f.value.keys() != _KEYS_KNOWN:
        f.refuse("keys", ", ".join(sorted(f.value))[:120], ", ".join(sorted(_KEYS_KNOWN)))
    repository = None if f.get("repository") is None else f.text("repository", REPOSITORY_ID)
    keys = tuple(f.texts("keys", missing=False))
    if not all(map(_HASH.fullmatch, keys)) or list(keys) != sorted({*keys}) or not 0 < len(keys) <= MAX_KEYS:
        f.refuse("keys", repr(keys)[:80], f"1 to {MAX_KEYS} keys of 64 hex digits, sorted, each once")
    threshold = f.number("threshold", len(keys))
    if threshold == 0:
        f.refuse("threshold", "0", "1 at least")
    expires = None if f.get("expires") is None else f.number("expires", MAX_TIME)
    return KeySet(repository, f.number("number", MAX_STEP), keys, threshold, expires)


_KNOWN = {"format", "version", "repository", "ref", "step", "id", "previous", "time"}
_KEYS_KNOWN = {"format", "version", "repository", "number", "keys", "threshold", "expires"}


def _object(data: bytes, limit: int, names: set[str], where: str) -> dict[str, Any]:
    value = loads_strict(data, limit=limit, where=where)
    if not isinstance(value, dict) or value.keys() != names:  # [S-SIG-1] [S-SIG-17]
        raise _refused(where, "another kind of JSON", ", ".join(sorted(names)))
    check_canonical(dumps(value) == data, where)
    return value


def _fields(kind: RecordKind, value: Any, where: str) -> _Fields:
    return _Fields(kind.check(value, where), where)


def _signature(value: Any, where: str) -> Signature:
    if not isinstance(value, dict):
        raise _refused(where, repr(value)[:80], "a key and a signature")
    f = _Fields(value, where)
    return Signature(f.text("key", _HASH), f.text("signature", _SIGNATURE))


def _refused(where: str, have: str, need: str) -> FormatError:
    return FormatError("signature-field", where=where, have=have, need=need)
