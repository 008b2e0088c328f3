"""The checksums that other systems put beside a tensor, over all its bytes."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import xxhash

from deltackpt.errors import ChainError, UsageError
from deltackpt.interop.files import field_error
from deltackpt.interop.protocol import Bytes, Check
from deltackpt.util.extras import install_line


def _blake3(data: Bytes) -> str:
    try:
        from blake3 import blake3
    except ImportError as error:
        raise UsageError(
            "extra-missing",
            where="blake3",
            have="no module blake3",
            need="the library of these checksums",
            hint=install_line("interop"),
        ) from error
    return str(blake3(data.data).hexdigest())


CHECKSUMS: dict[str, Callable[[Bytes], str]] = {
    "xxh3-128": lambda data: xxhash.xxh3_128_hexdigest(data.data),
    "blake3": _blake3,
    "adler32": lambda data: f"{zlib.adler32(data.data):08x}",
}


def checksum(name: object, where: object) -> Callable[[Bytes], str]:
    """The function of a name: uint8 [n] -> text. Raises FormatError ``foreign-field`` for a name that is not known."""
    if not isinstance(name, str) or name not in CHECKSUMS:
        raise field_error(where, f"the checksum {name!r}", f"one of {', '.join(CHECKSUMS)}")
    return CHECKSUMS[name]


def proves(function: Callable[[Bytes], str], need: str, where: str) -> Check:
    """A check that raises ChainError ``foreign-digest`` unless the new bytes have this digest."""

    def check(data: Bytes) -> None:
        if (have := function(data)) != need:
            raise ChainError(
                "foreign-digest",
                where=where,
                have=f"bytes of {have}",
                need=need[:80],
                hint="The base is not the state that the step was made for, or the step is damaged.",
            )

    return check
