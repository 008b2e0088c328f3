"""The adapters of a vLLM server, by its routes with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora (0.32)."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from deltackpt.engines.clients.adapters import AdapterClient
from deltackpt.errors import DeltackptError

_LORA_INFO = re.compile(r"^vllm:lora_requests_info\{(?P<labels>.*)\}\s+(?P<at>[0-9.e+]+)$", re.MULTILINE)
_BUSY = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')


class VllmAdapters(AdapterClient):
    """vLLM."""

    kind = "vllm"
    no_route = "vLLM has this route with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora only."

    def load(self, name: str, folder: Path) -> None:
        """Raises what vLLM says, of a rank above its --max-lora-rank, say."""
        self.http.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload(self, name: str) -> None:
        """Requests in flight keep it; vLLM may read its folder again for them."""
        self.http.post("/v1/unload_lora_adapter", {"lora_name": name})

    def busy(self) -> frozenset[str]:
        """By the newest of the gauges that vLLM sets to the time at which they held."""
        found = [(float(m["at"]), m["labels"]) for m in _LORA_INFO.finditer(str(self.http.get("/metrics") or ""))]
        names = _BUSY.findall(max(found)[1]) if found else []
        return frozenset(name for text in names for name in text.split(",") if name)

    def base(self) -> str | None:
        """Told by servers with VLLM_SERVER_DEV_MODE=1."""
        with suppress(DeltackptError):
            return str(self.http.field("/weight_info", "weight_version"))
        return None
