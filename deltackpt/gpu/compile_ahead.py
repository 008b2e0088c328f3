"""Kernels compiled in the background: some small tensors go the way that a step's will, before there is a step.

Compiling takes 10 s and more in a process that finds none in Triton's cache. What is not compiled when a step needs it
is compiled then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from deltackpt.format.dtypes import DTYPES, DType
from deltackpt.gpu.compile_rounds import capture_round, receive_round
from deltackpt.gpu.digest import has_kernels
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.words import INTS

log = logging.getLogger(__name__)
_RECEIVING: dict[torch.device, list[CompileAhead]] = {}
_LOCK = threading.Lock()


class CompileAhead:
    """Compiles what steps of some ``dtypes`` need on a device, in a thread of its own.

    ``seconds``: how long it took, None until it ended; ``error``: what went wrong, which a step would say again.
    """

    def __init__(
        self, device: torch.device, dtypes: Iterable[DType], one: Callable[[torch.device, DType], None], what: str
    ) -> None:
        """``one`` goes the way of a step of a dtype. ``what``: the word for that in the log."""
        self.seconds: float | None = None
        self.error: str = ""
        self.dtypes = sorted(set(dtypes), key=lambda dtype: dtype.name)
        self._device, self._one, self._what = device, one, what
        self._thread = threading.Thread(target=self._run, name="deltackpt-compile")
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it ended. -> whether it did within ``timeout`` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            for dtype in self.dtypes:
                if not threading.main_thread().is_alive():  # the process ends, and waits for this thread
                    return
                with _aside(self._device):
                    self._one(self._device, dtype)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            log.warning("kernels were not compiled ahead, a step will do it: %s", self.error)
        finally:
            self.seconds = time.monotonic() - began
        if not self.error:
            names = ", ".join(dtype.name for dtype in self.dtypes)
            log.info("kernels for %s are compiled%s, in %.1f s", names, self._what, self.seconds)


def _aside(device: torch.device) -> torch.cuda.StreamContext:
    """A stream of its own on a card, so that work goes on beside; else nothing."""
    return torch.cuda.stream(torch.cuda.Stream(device) if device.type == "cuda" else None)


def compile_ahead(pieces: Iterable[Piece], *, host: bool = False) -> list[CompileAhead]:
    """For every device that has kernels, in the background, what the capture of these pieces needs. ``host``: against
    a snapshot in host memory."""
    found = _by_device((piece.tensor.device, piece.dtype) for piece in pieces)
    one = partial(capture_round, host=host)
    return [CompileAhead(device, dtypes, one, "") for device, dtypes in found.items()]


def compile_receiving(weights: Iterable[tuple[torch.device, DType]]) -> Sequence[CompileAhead]:
    """For every device that has kernels, in the background, what it takes to receive steps of such weights: to decode,
    prove, write and undo them. Once in a process for each dtype. -> what compiles now, or did."""
    with _LOCK:
        for device, dtypes in _by_device(weights).items():
            begun = _RECEIVING.setdefault(device, [])
            new = dtypes - {dtype for one in begun for dtype in one.dtypes}
            if new:
                begun.append(CompileAhead(device, new, receive_round, " for receiving"))
        return [one for begun in _RECEIVING.values() for one in begun]


def join_receiving(device: torch.device) -> None:
    """Wait for what `compile_receiving` began for a device, rather than compile the same beside it."""
    with _LOCK:
        begun = list(_RECEIVING.get(device, ()))
    for one in begun:
        one.wait()


def _by_device(weights: Iterable[tuple[torch.device, DType]]) -> dict[torch.device, set[DType]]:
    wanted: dict[torch.device, set[str]] = {}
    for device, dtype in weights:
        if has_kernels(device) and INTS.get(dtype.width) is not None and dtype.name != "F4":
            wanted.setdefault(device, set()).add(dtype.name)
    return {device: {DTYPES[name] for name in names} for device, names in wanted.items()}
