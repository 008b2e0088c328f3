"""The key of an engine that asks for one: from the environment, never from an address or a command line."""

from __future__ import annotations

import os
from typing import Final

from deltackpt.errors import UsageError

VARIABLE: Final = "DELTACKPT_ENGINE_KEY"


def engine_key(*others: str) -> str:
    """What is sent to an engine as a bearer token: of the variable, or of the first of ``others`` that is set; empty
    where none is. Raises UsageError ``engine-form`` for one that no header can hold; it is not shown."""
    for name in (VARIABLE, *others):
        if key := os.environ.get(name, "").strip():
            if not key.isascii() or not key.isprintable() or " " in key:
                have, need = "a key that is not shown", "printable ASCII without spaces"
                raise UsageError("engine-form", where=name, have=have, need=need)
            return key
    return ""
