"""Kernels compiled in the background: some small tensors go the way that a step's will, before there is a step.

Compiling takes 10 s and more in a process that finds none in Triton's cache. What is not compiled when a step needs it
is compiled then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

import torch

from deltackpt.format.dtypes import DTYPES, DType
from deltackpt.gpu import pipeline
from deltackpt.gpu.digest import has_kernels, sums_of_pieces
from deltackpt.torch_views.boxes import Box
from deltackpt.torch_views.delta import Delta
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.snapshot import Snapshot
from deltackpt.torch_views.words import INTS, NAMES

ROUNDS = (3, 16)  # tensors: Triton compiles anew for counts that are a multiple of 16
SHAPE = (256, 512)
log = logging.getLogger(__name__)


class CompileAhead:
    """Compiles what captures changes of weights of ``dtypes`` on a device, in a thread of its own.

    ``seconds``: how long it took, None until it ended; ``error``: what went wrong, which a step would say again.
    """

    def __init__(self, device: torch.device, dtypes: Iterable[DType], *, host: bool = False) -> None:
        """``host``: for a snapshot in host memory."""
        self.seconds: float | None = None
        self.error: str = ""
        self._device, self._host = device, host
        self._dtypes = sorted(set(dtypes), key=lambda dtype: dtype.name)
        self._thread = threading.Thread(target=self._run, name="deltackpt-compile")
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it ended. -> whether it did within ``timeout`` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            for dtype in self._dtypes:
                for count in ROUNDS:
                    if not threading.main_thread().is_alive():  # the process ends, and waits for this thread
                        return
                    self._round(dtype, count)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            log.warning("kernels were not compiled ahead, a step will do it: %s", self.error)
        finally:
            self.seconds = time.monotonic() - began
        if not self.error:
            log.info("kernels for %s are compiled, in %.1f s", ", ".join(d.name for d in self._dtypes), self.seconds)

    def _round(self, dtype: DType, count: int) -> None:
        """Some tensors, of which some elements change."""
        with _aside(self._device):
            names = {safe: made for made, safe in NAMES.items()}
            pieces = []
            for number in range(count):
                words = torch.ones(SHAPE, dtype=INTS[dtype.width], device=self._device)
                pieces.append(Piece(f"w{number}", dtype, Box.all_of(SHAPE), words.view(names[dtype.name])))
            snapshot, found = Snapshot(pieces, host=self._host), list[Delta]()
            for piece in pieces:
                piece.tensor.view(INTS[dtype.width]).view(-1)[::61] += 1
            sums_of_pieces(pieces)
            pipeline.capture(pieces, snapshot, found, "auto")


def _aside(device: torch.device) -> torch.cuda.StreamContext:
    """A stream of its own on a card, so that training goes on beside; else nothing."""
    return torch.cuda.stream(torch.cuda.Stream(device) if device.type == "cuda" else None)


def compile_ahead(pieces: Iterable[Piece], *, host: bool = False) -> list[CompileAhead]:
    """For every device that has kernels, in the background, what the capture of these pieces needs."""
    wanted: dict[torch.device, set[str]] = {}
    for piece in pieces:
        device = piece.tensor.device
        if has_kernels(device) and INTS.get(piece.dtype.width) is not None and piece.dtype.name != "F4":
            wanted.setdefault(device, set()).add(piece.dtype.name)
    return [CompileAhead(device, (DTYPES[name] for name in names), host=host) for device, names in wanted.items()]
