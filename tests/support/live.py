"""Live sessions in tests: a small model, a trainer that changes it, engines in threads and in processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from deltackpt.live import LiveReceiver, join

TOKEN = "a secret of these tests"
DEADLINE = 120.0  # seconds after which a test gives up


def make_model(seed: int = 0, zeros: bool = False) -> torch.nn.Module:
    """Boxes of several sizes, a norm, a tied head, and a buffer of integers."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential()
    model.embed = torch.nn.Embedding(120, 64)
    model.up = torch.nn.Linear(64, 200)
    model.down = torch.nn.Linear(200, 64)
    model.norm = torch.nn.LayerNorm(64)
    model.head = torch.nn.Linear(64, 120, bias=False)
    model.head.weight = model.embed.weight
    model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    model = model.bfloat16()
    if zeros:
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.zero_()
    return model


def nudge(model: torch.nn.Module, step: int, share: float = 0.05) -> None:
    """One training step's change."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator) * 1e-2
            mask = torch.rand(p.shape, generator=generator) < share
            p.add_((noise * mask).to(p.dtype))
        model.seen += 1


def raw(model: torch.nn.Module) -> dict[str, bytes]:
    """Every tensor down to its bytes."""
    return {
        name: t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, t in model.state_dict().items()
    }


def until(what: Callable[[], Any], seconds: float = DEADLINE) -> Any:
    """Wait for something to be true."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "in vain"
        time.sleep(0.01)
    return found


class Engine:
    """A receiver in a thread of its own."""

    def __init__(self, model: torch.nn.Module, address: str, **options: Any) -> None:
        self.model, self.address, self.options = model, address, options
        self.receiver: LiveReceiver | None = None
        self.done: int | None = None
        self.steps: list[Any] = []
        self.errors: list[BaseException] = []
        self.events: list[Any] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            options = {"token": TOKEN, "timeout": 20.0, "report": self.events.append, **self.options}
            self.receiver = join(self.model, self.address, **options)
            self.done = self.receiver.step
            while not self._stop.is_set():
                try:
                    if (step := self.receiver.receive(0.05)) is not None:
                        self.steps.append(step)
                except Exception as error:
                    self.errors.append(error)
                self.done = self.receiver.step
        except BaseException as error:
            self.errors.append(error)

    def at(self, step: int) -> bool:
        """Is it at a step?"""
        return self.done == step

    def reach(self, step: int) -> None:
        """Wait until it is at a step."""
        until(lambda: self.at(step) or (self.errors and self.receiver is None))
        assert self.at(step), self.errors

    def close(self) -> None:
        self._stop.set()
        self._thread.join(DEADLINE)
        if self.receiver is not None:
            with suppress(Exception):
                self.receiver.close()
