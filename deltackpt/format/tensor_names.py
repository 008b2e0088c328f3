"""Names of tensors: what may be one (FORMAT section "Parts")."""

from __future__ import annotations

import re
from typing import Final

from deltackpt.errors import FormatError

MAX_NAME: Final = 1_024  # bytes of UTF-8
METADATA: Final = "__metadata__"
RESERVED: Final = "deltackpt:"  # starts the names that no checkpoint tensor has
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def check_name(name: str, where: str) -> None:
    """Refuse a tensor name that is empty, longer than MAX_NAME bytes, or has control characters: ``name-refused``."""
    if not name or len(name.encode("utf-8")) > MAX_NAME or has_control(name):  # [F-PART-4]
        need = f"1 to {MAX_NAME} bytes of UTF-8, no control characters"
        raise FormatError("name-refused", where=where, have=f"{len(name)} characters", need=need)


def has_control(text: str) -> bool:
    """Is there a control character, U+0000 to U+001F or U+007F to U+009F, in it?"""
    return not text.isprintable() and _CONTROL.search(text) is not None
