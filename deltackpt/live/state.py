"""What is live: the step that the engines of a session have, and the sums that prove the next one."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from deltackpt.format import state_digest
from deltackpt.format.dtypes import DTYPES, nbytes
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.state_digest import Sums
from deltackpt.hooks.live import LiveTrainer


class LiveState:
    """Known to the trainer's first rank; moved at the instant at which a step is decided. Any thread may ask."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """``tensors``: names, dtypes and shapes of the state, which stay."""
        self.tensors = tensors
        self.step: int | None = None
        self.state: str | None = None
        self.sums: Mapping[str, Sums] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, trainer: LiveTrainer) -> LiveState:
        """At the step that the weights were when the hook was made, if they were one."""
        tensors = {}
        for name in sorted(trainer.state.tensors, key=str.encode):
            known = trainer.state.tensors[name]
            tensors[name] = Tensor(name, known.dtype, known.shape, 0, nbytes(DTYPES[known.dtype], known.shape))
        made = cls(tensors)
        if trainer.base is not None:
            made.move(trainer.base.link.step, trainer.base.state, trainer.base.sums)
        return made

    def move(self, step: int, state: str, sums: Mapping[str, Sums]) -> None:
        """To another step. ``sums`` are of every tensor."""
        with self._lock:
            self.step, self.state, self.sums = step, state, dict(sums)

    @property
    def now(self) -> tuple[int | None, str | None, Mapping[str, Sums]]:
        """Step, state digest and sums, of one instant."""
        with self._lock:
            return self.step, self.state, self.sums

    def digest(self, sums: Mapping[str, Sums]) -> str:
        """The state digest, hex, of the same tensors with these sums."""
        return state_digest.state((t.name, t.dtype, tuple(t.shape), sums[t.name]) for t in self.tensors.values())
