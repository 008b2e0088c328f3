"""The adapters of an SGLang server, by its routes with --enable-lora (read in 0.5.23)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from deltackpt.engines.clients.adapters import AdapterClient
from deltackpt.errors import DeltackptError


class SglangAdapters(AdapterClient):
    """SGLang."""

    kind = "sglang"
    no_route = "Is it SGLang, with --enable-lora?"

    def load(self, name: str, folder: Path) -> None:
        """Raises what SGLang says."""
        self.http.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload(self, name: str) -> None:
        """SGLang answers once the requests in flight that use it have ended."""
        self.http.post("/unload_lora_adapter", {"lora_name": name})

    def busy(self) -> frozenset[str]:
        """None: `unload` waits by itself."""
        return frozenset()

    def base(self) -> str | None:
        """The weight version."""
        with suppress(DeltackptError):
            return str(self.http.field("/get_model_info", "weight_version"))
        return None
