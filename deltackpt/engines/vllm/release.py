"""Which releases of vLLM this plugin knows, and what each of them offers. Nothing of vLLM is imported.

What is said here was read from the wheels: tests/support/vllm_releases.py is the tool, and a test holds the plugin
against its table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from deltackpt.errors import UsageError

KEY = "VLLM_API_KEY"  # the variable that a vLLM server reads its key from
FIRST, LAST = (0, 20), (0, 33)
EXTENSION = "deltackpt.engines.vllm.worker.DeltaWorker"


@dataclass(frozen=True, order=True)
class Release:
    """A release of vLLM, by the two numbers that its interfaces change with."""

    major: int
    minor: int

    @property
    def has_backends(self) -> bool:
        """Whether a weight-transfer backend is given the model, and both ends of an update. Before 0.25 vLLM takes a
        model apart before a backend is asked for its weights, and 0.20 and 0.21 have no room for other backends: there
        the worker extension does all of it."""
        return self >= Release(0, 25)

    @property
    def has_versions(self) -> bool:
        """Whether it keeps a version of its weights; else the ranks' receivers do."""
        return self >= Release(0, 27)

    def __str__(self) -> str:
        return f"vLLM {self.major}.{self.minor}"


def release_of(version: str, where: str) -> Release:
    """The release with a ``version``, such as 0.32.0+cpu. Raises UsageError ``engine-version`` for one that the plugin
    was not held against, ``where`` being who asks."""
    numbers = re.match(r"v?(\d{1,4})\.(\d{1,4})(?!\d)", version)
    found = Release(int(numbers[1]), int(numbers[2])) if numbers else None
    if found is None or not Release(*FIRST) <= found <= Release(*LAST):
        need = f"{Release(*FIRST)} to {LAST[0]}.{LAST[1]}"
        hint = "Install one of these. A newer deltackpt may know more of them."
        raise UsageError("engine-version", where=where, have=f"vLLM {version[:40]}", need=need, hint=hint)
    return found


def check_backend(version: str, where: str) -> None:
    """Raises UsageError ``engine-version`` where a weight-transfer backend cannot be used."""
    if not release_of(version, where).has_backends:
        hint = f"Start it with --worker-extension-cls {EXTENSION} and without --weight-transfer-config."
        need = "vLLM 0.25 or newer for a weight-transfer backend"
        raise UsageError("engine-version", where=where, have=f"vLLM {version[:40]}", need=need, hint=hint)
