"""The adapters of an SGLang server, by its routes with --enable-lora (read in 0.5.23)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from deltackpt.engines.clients.adapters import AdapterClient
from deltackpt.errors import ChainError, DeltackptError


class SglangAdapters(AdapterClient):
    """SGLang."""

    kind = "sglang"
    no_route = "Is it SGLang, with --enable-lora?"

    def load(self, name: str, folder: Path) -> None:
        """Raises what SGLang says. A name whose unload failed half-way it refuses until that was asked for again."""
        body = {"lora_name": name, "lora_path": str(folder)}
        try:
            self.http.post("/load_lora_adapter", body)
        except ChainError as error:
            if "incomplete unload" not in error.have:
                raise
            self.unload(name)
            self.http.post("/load_lora_adapter", body)

    def unload(self, name: str) -> None:
        """SGLang answers once the requests in flight that use it have ended, and loads no other adapter until then."""
        self.http.post("/unload_lora_adapter", {"lora_name": name})

    def busy(self) -> frozenset[str]:
        """None: `unload` waits by itself."""
        return frozenset()

    def base(self) -> str | None:
        """The weight version, by either of the route's names: the second is that of older releases."""
        return self._told("weight_version")

    def model(self) -> str:
        """Of its own route: `/v1/models` has the served name in its place."""
        return self._told("model_path") or ""

    def _told(self, field: str) -> str | None:
        for route in ("/model_info", "/get_model_info"):
            with suppress(DeltackptError):
                return str(self.http.field(route, field))
        return None
