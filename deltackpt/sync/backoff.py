"""Which errors pass by themselves, and how long to wait for that."""

from __future__ import annotations

import random
from dataclasses import dataclass

from deltackpt.errors import DeltackptError, StoreError

TRANSIENT = frozenset({"store-busy", "store-silent"})
# What damage in transit looks like, or a collection that was faster than a reader. Lasting damage looks the same.
AMBIGUOUS = frozenset(
    {
        *("object-hash", "manifest-hash", "object-short", "object-changed", "object-missing", "object-too-large"),
        *("step-missing", "ref-moved", "chain-broken", "chain-differs", "tensor-differs", "part-elsewhere"),
        *("json-syntax", "json-depth", "json-duplicate-key", "json-number", "json-too-long", "manifest-field"),
        *("manifest-canonical", "manifest-elsewhere", "gc-running"),
    }
)


@dataclass
class Backoff:
    """How long to wait after each failure in a row, in seconds: ``first``, doubled up to ``most`` ([S-FOL-3]).

    Transient errors are waited out without end, ambiguous ones ``attempts`` times in a row.
    """

    first: float = 1.0
    most: float = 60.0
    attempts: int = 5
    failures: int = 0  # in a row

    def delay(self, error: DeltackptError) -> float:
        """Seconds to wait before the next attempt, counted as another failure.

        Raises the error itself where another attempt cannot help.
        """
        transient = isinstance(error, StoreError) and error.code in TRANSIENT
        # [S-FOL-3]: it ends where asking again cannot help.
        if not transient and (error.code not in AMBIGUOUS or self.failures >= self.attempts):
            raise error
        longest: float = min(self.most, self.first * 2 ** min(self.failures, 30))
        self.failures += 1
        return longest * random.uniform(0.5, 1)

    def reset(self) -> bool:
        """An attempt succeeded; -> whether any had failed before it."""
        failed, self.failures = self.failures > 0, 0
        return failed
