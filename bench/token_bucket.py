"""One limiter under a carrier and under what it is compared with: a token bucket in the process that sends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any


class Bucket:
    """Lets so many bytes a second pass, whoever sends them."""

    def __init__(self) -> None:
        self.rate, self.ready = 0.0, 0.0

    def take(self, size: int) -> None:
        """Wait until so many bytes more have passed."""
        if self.rate:
            self.ready = max(time.monotonic(), self.ready) + size / self.rate
            time.sleep(max(0.0, self.ready - time.monotonic()))

    def under_carrier(self) -> None:
        """All that this process sends in a session: over pairs, and over connections."""
        from deltackpt.carriers.pairs import Pair
        from deltackpt.carriers.wire import Wire

        filled, sent = Pair._filled, Wire.send_bytes

        def pieces(pair: Any, *given: Any) -> Iterator[Any]:
            for slot, size in filled(pair, *given):
                self.take(size)
                yield slot, size

        def chunks(wire: Any, data: Any, deadline: Any) -> None:
            def through() -> Iterator[Any]:
                for chunk in data:
                    self.take(len(chunk))
                    yield chunk

            sent(wire, through(), deadline)

        Pair._filled, Wire.send_bytes = pieces, chunks  # type: ignore[method-assign]
