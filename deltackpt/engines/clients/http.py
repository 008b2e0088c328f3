"""One engine's HTTP routes: JSON in, JSON or a text out, and errors that say which engine and what it said."""

from __future__ import annotations

import http.client
import ipaddress
import json
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from typing import Any

from deltackpt.errors import ChainError, StoreError
from deltackpt.util.answers import in_time, read_whole

MAX_ANSWER = 64 << 20
_NO_KEY = "It asks for a key: set DELTACKPT_ENGINE_KEY, or the variable that the engine itself reads."


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """An engine answers itself: a key is for no other place, and a POST that is redirected becomes a GET."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Http:
    """The routes of one engine. ``timeout`` in seconds; ``no_route`` is the hint for a route that it does not have;
    ``key`` is sent as a bearer token with every request, if it is not empty.

    A proxy of the environment (``http_proxy``, ``no_proxy``) is used for other hosts alone: what runs on this one is
    not behind it.
    """

    def __init__(
        self, url: str, timeout: float = 120.0, *, no_route: str = "Is it this engine?", key: str = ""
    ) -> None:  # fmt: skip
        self.url, self.timeout, self._no_route = url, timeout, no_route
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        proxies: dict[str, str] | None = {} if on_loopback(url) else None
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies), _NoRedirect, *in_time())

    def get(self, path: str, timeout: float | None = None) -> Any:
        """The answer: JSON as Python has it, else a text, None for an empty one."""
        return self._ask(urllib.request.Request(self.url + path, headers=self._headers), timeout)

    def post(self, path: str, body: Any = None, timeout: float | None = None) -> Any:
        """The same, of a request with a JSON body."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", **self._headers}
        return self._ask(urllib.request.Request(self.url + path, data, headers, method="POST"), timeout)

    def field(self, path: str, name: str, timeout: float = 10) -> Any:
        """One field of a JSON object. Raises ChainError ``engine-refused`` where the answer is anything else."""
        return self.fields(path, name, timeout=timeout)[0]

    def fields(self, path: str, *names: str, timeout: float = 10) -> list[Any]:
        """Fields of a JSON object, in the order of ``names``. Raises what `field` raises."""
        answer = self.get(path, timeout)
        if not isinstance(answer, dict) or not answer.keys() >= {*names}:
            have, need = f"the answer {str(answer)[:200]!r}", f"an object with {' and '.join(map(repr, names))}"
            raise ChainError("engine-refused", where=self.url + path, have=have, need=need, hint="Is it this engine?")
        return [answer[name] for name in names]

    def _ask(self, request: urllib.request.Request, timeout: float | None) -> Any:
        """Raises ChainError ``engine-refused`` for an error as the answer, StoreError ``engine-silent`` for none."""
        seconds = timeout or self.timeout
        try:
            with self._opener.open(request, timeout=seconds) as answer:
                raw = read_whole(answer, MAX_ANSWER, seconds)
            return _parsed(raw)
        except urllib.error.HTTPError as error:
            said = ""
            with error, suppress(OSError, http.client.HTTPException):  # the status says enough
                said = read_whole(error, 2000, seconds).decode(errors="replace")
            have = f"status {error.code}: {said[:600]}"
            hint = self._no_route if error.code == 404 else _NO_KEY if error.code in (401, 403) else ""
            raise ChainError(
                "engine-refused", where=request.full_url, have=have, need="status 200", hint=hint
            ) from error
        except (OSError, http.client.HTTPException) as error:
            have = f"no answer ({type(error).__name__}: {str(error)[:200]})"
            hint = "Is it running? It is asked again, and then updated to the newest step."
            raise StoreError("engine-silent", where=request.full_url, have=have, need="an answer", hint=hint) from error


def on_loopback(url: str) -> bool:
    """Whether a URL names this host by its loopback interface."""
    host = (urllib.parse.urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _parsed(raw: bytes) -> Any:
    if not raw:
        return None
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return raw.decode(errors="replace")
