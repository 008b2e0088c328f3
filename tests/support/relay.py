"""A relay on loopback between the ranks of a live session, whose link can be cut: closed, or silent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Relay:
    """Passes bytes on both ways to ``target``, host:port, until it is told otherwise."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._silent = threading.Event()
        self._shut = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.place = ("127.0.0.1", self._server.getsockname()[1])
        self.address = f"127.0.0.1:{self.place[1]}"
        self._start(self._accept)

    def cut(self, how: str) -> None:
        """Closed: every connection ends, and a new one does at once. Silent: nothing passes, and no one is told."""
        (self._silent if how == "silent" else self._shut).set()
        if how == "closed":
            self._end()

    def mend(self) -> None:
        """New connections pass again; those from before the cut are gone."""
        self._end()
        self._silent.clear()
        self._shut.clear()

    def close(self) -> None:
        """For good."""
        self._shut.set()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._end()
        for thread in self._threads:
            thread.join(10)

    def _start(self, work: Callable[..., None], *given: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=given, daemon=True))
        self._threads[-1].start()

    def _end(self) -> None:
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            if self._shut.is_set():
                near.close()
                continue
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            self._open += [near, far]
            for one, other in ((near, far), (far, near)):
                self._start(self._pass, one, other)

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                if not self._silent.is_set():
                    other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
