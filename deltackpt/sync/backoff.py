"""Which errors pass by themselves, and how long to wait for that."""

from __future__ import annotations

import random
from dataclasses import dataclass

from deltackpt.errors import DeltackptError, StoreError

PASSING = frozenset({"store-busy", "store-silent"})
# What damage on the way looks like, or a collection that was faster than a reader. Lasting ones look the same.
DOUBTFUL = frozenset(
    {
        *("object-hash", "manifest-hash", "object-short", "object-changed", "object-missing", "object-too-large"),
        *("step-missing", "ref-moved", "chain-broken", "chain-differs", "tensor-differs", "part-elsewhere"),
        *("json-syntax", "json-depth", "json-duplicate-key", "json-number", "json-too-long", "manifest-field"),
        *("manifest-canonical", "manifest-elsewhere", "gc-running"),
    }
)


@dataclass
class Backoff:
    """How long to wait after each failure in a row, in seconds: ``first``, doubled up to ``most``.

    Errors that pass are waited out without end, doubtful ones ``doubts`` times in a row.
    """

    first: float = 1.0
    most: float = 60.0
    doubts: int = 5
    failures: int = 0  # in a row

    def wait(self, error: DeltackptError) -> float:
        """Seconds to wait before another attempt. Raises the error if no attempt will mend it."""
        passing = isinstance(error, StoreError) and error.code in PASSING
        if not passing and (error.code not in DOUBTFUL or self.failures >= self.doubts):
            raise error
        pause: float = min(self.most, self.first * 2 ** min(self.failures, 30))
        self.failures += 1
        return pause * random.uniform(0.5, 1)

    def over(self) -> bool:
        """Something worked; -> whether anything had failed before it."""
        failed, self.failures = self.failures > 0, 0
        return failed
