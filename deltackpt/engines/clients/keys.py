"""The key of an engine that asks for one: from the environment, never from an address or a command line."""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "DELTACKPT_ENGINE_KEY"


def engine_key(*others: str) -> str:
    """What is sent to an engine as a bearer token: of the variable, or of the first of ``others`` that is set; empty
    where none is."""
    found = (os.environ.get(name, "").strip() for name in (VARIABLE, *others))
    return next((key for key in found if key), "")
