"""OpenSSH's texts: a public key's line, and the armored signature that `ssh-keygen -Y sign` prints."""

from __future__ import annotations

import base64
import binascii

from deltackpt.format.signature import NAMESPACE, Signature

TYPE = b"ssh-ed25519"
_BEGIN, _END = b"-----BEGIN SSH SIGNATURE-----", b"-----END SSH SIGNATURE-----"


def public_line(key: str, comment: str = "") -> str:
    """A public key of 64 hex digits as OpenSSH writes it: type, base64 and comment."""
    blob = _string(TYPE) + _string(bytes.fromhex(key))
    return " ".join(filter(None, (TYPE.decode(), base64.b64encode(blob).decode(), comment)))


def public_key(line: str) -> str:
    """The public key of a line, 64 hex digits. Raises ValueError for anything but an ed25519 key."""
    words = line.split()
    if len(words) < 2 or words[0] != TYPE.decode():
        raise ValueError("no line that begins with ssh-ed25519")
    kind, rest = _take(base64.b64decode(words[1], validate=True))
    key, rest = _take(rest)
    if kind != TYPE or len(key) != 32 or rest:
        raise ValueError("no ed25519 key")
    return key.hex()


def parse_signature(text: bytes) -> Signature:
    """The key and the signature in the armored form. Raises ValueError where it is another namespace, hash or key."""
    head, _, rest = text.strip().partition(_BEGIN)
    body, end, tail = rest.partition(_END)
    if head or not end or tail.strip():
        raise ValueError("no armored SSH signature")
    try:
        data = base64.b64decode(b"".join(body.split()), validate=True)
    except binascii.Error as error:
        raise ValueError("no base64") from error
    if data[:10] != b"SSHSIG\0\0\0\x01":
        raise ValueError("another version of SSHSIG")
    fields = []
    data = data[10:]
    while data:
        field, data = _take(data)
        fields.append(field)
    if len(fields) != 5 or fields[1:4] != [NAMESPACE, b"", b"sha512"]:
        raise ValueError("another namespace or hash: it has to be `ssh-keygen -Y sign -n deltackpt`")
    key_type, rest = _take(fields[0])
    key, more = _take(rest)
    signature_type, rest = _take(fields[4])
    signature, left = _take(rest)
    if (key_type, signature_type) != (TYPE, TYPE) or len(key) != 32 or len(signature) != 64 or more or left:
        raise ValueError("no ed25519 signature")
    return Signature(key.hex(), signature.hex())


def _string(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def _take(data: bytes) -> tuple[bytes, bytes]:
    """A string of SSH's wire form, and what follows it."""
    size = int.from_bytes(data[:4], "big")
    if len(data) < 4 or len(data) < 4 + size:
        raise ValueError("cut short")
    return data[4 : 4 + size], data[4 + size :]
