"""ed25519, by the library `cryptography`, which is imported when a key is used and not before."""

from __future__ import annotations

from typing import Any

from deltackpt.errors import ExtraMissingError
from deltackpt.format.signature import Signature, to_sign
from deltackpt.util.extras import install_line


def library() -> Any:
    """The module with the keys. Raises ExtraMissingError ``extra-missing`` with the line that installs it."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ExtraMissingError("cryptography", "signatures", install_line("sign")) from error
    return ed25519


def verify(by: Signature, message: bytes) -> bool:
    """Did the key sign the message? Raises ExtraMissingError."""
    ed25519 = library()
    from cryptography.exceptions import InvalidSignature

    try:
        key = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(by.key))
        key.verify(bytes.fromhex(by.signature), to_sign(message))
    except (InvalidSignature, ValueError):  # [S-SIG-3]
        return False
    return True
