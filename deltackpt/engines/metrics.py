"""What the follower of a host counts of its engines: the names of `deltackpt.util.metrics`, which lists all."""

from __future__ import annotations

from deltackpt.util.metrics import KINDS as _KINDS
from deltackpt.util.metrics import Metrics

__all__ = ["_KINDS", "Metrics"]
