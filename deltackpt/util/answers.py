"""Answers of HTTP servers, read whole, and not for longer than was agreed."""

from __future__ import annotations

import http.client
import socket
import time
import urllib.request
from contextlib import suppress
from threading import Timer
from typing import Any

_TOGETHER = 1 << 20  # bytes of a read


def read_whole(answer: Any, most: int, seconds: float) -> bytes:
    """At most ``most`` bytes of what `urllib.request` has opened.

    A socket's own timeout is for each of its packets: a server that sends one now and then would be waited for
    without an end. Raises TimeoutError after ``seconds``, OSError, http.client.HTTPException for a body that is cut
    short.
    """
    end, found, size = time.monotonic() + seconds, [], 0
    while size < most and (data := answer.read1(min(most - size, _TOGETHER))):
        found.append(data)
        size += len(data)
        if time.monotonic() > end:
            raise TimeoutError(f"timed out after {seconds:g} s, with {size:,} bytes of an answer")
    whole = b"".join(found)
    if size < most and answer.length:
        raise http.client.IncompleteRead(whole, answer.length)
    return whole


class _Punctual:
    """A connection whose answer's status and headers are there in its timeout, however they come."""

    timeout: Any
    sock: Any

    def getresponse(self) -> Any:
        """Raises TimeoutError, and what the standard library does."""
        if not isinstance(self.timeout, int | float):
            return super().getresponse()  # type: ignore[misc]
        late = []

        def end() -> None:
            late.append(True)
            with suppress(OSError, AttributeError):  # closed meanwhile
                self.sock.shutdown(socket.SHUT_RDWR)

        timer = Timer(self.timeout, end)
        timer.daemon = True
        timer.start()
        try:
            answer = super().getresponse()  # type: ignore[misc]
        except (OSError, http.client.HTTPException) as error:
            if late:
                raise self._late() from error
            raise
        finally:
            timer.cancel()
        if late:  # what was cut off can look like an end
            answer.close()
            raise self._late()
        return answer

    def _late(self) -> TimeoutError:
        return TimeoutError(f"timed out after {self.timeout:g} s, before the answer's headers ended")


class _Http(_Punctual, http.client.HTTPConnection):
    pass


class _Https(_Punctual, http.client.HTTPSConnection):
    pass


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_Http, req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_Https, req, context=self._context)  # type: ignore[attr-defined]


def in_time() -> tuple[urllib.request.BaseHandler, ...]:
    """Handlers for `urllib.request.build_opener`: a request's timeout is then that of the whole head of its answer too,
    and not of each packet alone."""
    return _HttpHandler(), _HttpsHandler()
