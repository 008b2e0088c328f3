"""How changes are encoded for a link of a known rate: who is faster than the coder sends them plainly.

Coded bytes are few and take time to make; plain ones (`index`) are some six times as many, and are made at once. Both
are measured on the steps themselves, at each rank of the trainer for itself: parts are independent of each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deltackpt.codecs import parse_choice
from deltackpt.codecs.registry import CODECS
from deltackpt.publish.step import EncodeOptions

PLAIN = CODECS["index"].name
KEEP = 0.7  # of what was measured before, in what is known


@dataclass(frozen=True)
class Cost:
    """Of a changed element: ``seconds`` to encode it, and ``size`` in bytes."""

    seconds: float
    size: float

    def over(self, rate: float) -> float:
        """Seconds for a changed element, over a link of ``rate`` bytes a second."""
        return self.seconds + self.size / rate


class LinkRate:
    """Chooses for one rank. ``rate``: of the link, bytes a second; None: always as the hook was told."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._costs: dict[str, Cost] = {}

    def choose(self, options: EncodeOptions) -> EncodeOptions:
        """How the next step is encoded. Each way is tried once."""
        if self.rate is None or parse_choice(options.encoding).name == PLAIN:
            return options
        plain = replace(options, encoding=PLAIN)
        coded_cost, plain_cost = self._costs.get(options.encoding), self._costs.get(PLAIN)
        if coded_cost is None:
            return options
        if plain_cost is None or plain_cost.over(self.rate) < coded_cost.over(self.rate):
            return plain
        return options

    def saw(self, options: EncodeOptions, changed: int, seconds: float, size: int) -> None:
        """What a step of so many ``changed`` elements took to encode, and its ``size`` in bytes."""
        if not changed:
            return
        new, old = Cost(seconds / changed, size / changed), self._costs.get(options.encoding)
        if old is not None:
            new = Cost(KEEP * old.seconds + (1 - KEEP) * new.seconds, KEEP * old.size + (1 - KEEP) * new.size)
        self._costs[options.encoding] = new
