"""One engine's HTTP routes: JSON in, JSON out, and errors that say which engine and what it said."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from deltackpt.errors import ChainError, StoreError

MAX_ANSWER = 64 << 20


class Http:
    def __init__(self, url: str, timeout: float = 120.0) -> None:
        self.url, self.timeout = url, timeout

    def get(self, path: str, timeout: float | None = None) -> Any:
        return self._ask(urllib.request.Request(self.url + path), timeout)

    def post(self, path: str, body: Any = None, timeout: float | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        return self._ask(urllib.request.Request(self.url + path, data, headers, method="POST"), timeout)

    def _ask(self, request: urllib.request.Request, timeout: float | None) -> Any:
        """Raises ChainError ``engine-refused`` for an error as the answer, StoreError ``engine-silent`` for none."""
        try:
            with urllib.request.urlopen(request, timeout=timeout or self.timeout) as answer:
                raw = answer.read(MAX_ANSWER)
            return json.loads(raw) if raw else None
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            have = f"status {error.code}: {said[:600]}"
            raise ChainError("engine-refused", where=request.full_url, have=have, need="status 200") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            have = f"no answer ({type(error).__name__}: {str(error)[:200]})"
            hint = "Is it running? It is asked again, and brought to the newest step then."
            raise StoreError("engine-silent", where=request.full_url, have=have, need="an answer", hint=hint) from error
