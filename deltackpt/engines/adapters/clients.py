"""The adapters of one engine, by its HTTP routes.

Both kinds list their adapters as models, with the folder that each was loaded from. vLLM's routes are there with
VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora (seen in 0.32), SGLang's with --enable-lora (read in 0.5.23).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

from deltackpt.engines.clients.http import Http
from deltackpt.errors import ChainError, DeltackptError, UsageError

_LORA_INFO = re.compile(r"^vllm:lora_requests_info\{(?P<labels>.*)\}\s+(?P<at>[0-9.e+]+)$", re.MULTILINE)
_BUSY = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')


class AdapterClient(ABC):
    """One engine. Calls raise ChainError ``engine-refused``, StoreError ``engine-silent``."""

    kind = ""
    no_route = "Is it this engine?"

    def __init__(self, url: str, timeout: float) -> None:
        self.http, self.name = Http(url, timeout, no_route=self.no_route), f"{self.kind}={url}"

    def loaded(self) -> dict[str, str]:
        """The folder of each model and adapter that the engine offers, by name."""
        cards = self.http.field("/v1/models", "data")
        if not isinstance(cards, list) or not all(isinstance(card, dict) and "id" in card for card in cards):
            have, need = f"the answer {str(cards)[:200]!r}", "models, each with an id"
            raise ChainError("engine-refused", where=self.http.url + "/v1/models", have=have, need=need)
        return {str(card["id"]): str(card.get("root", "")) for card in cards}

    @abstractmethod
    def load(self, name: str, folder: Path) -> None:
        """Load an adapter from a folder that stays as it is while the adapter is loaded."""

    @abstractmethod
    def unload(self, name: str) -> None:
        """Take an adapter away from new requests."""

    @abstractmethod
    def busy(self) -> frozenset[str]:
        """The adapters that requests in flight use, as far as the engine tells."""

    @abstractmethod
    def base(self) -> str | None:
        """The version of the engine's own weights; None where it does not tell."""


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


KINDS: dict[str, type[AdapterClient]] = {client.kind: client for client in (VllmAdapters, SglangAdapters)}


def adapter_client(spec: str, timeout: float) -> AdapterClient:
    """The client for ``KIND=URL``. Raises UsageError ``engine-form``."""
    kind, _, url = spec.partition("=")
    if kind not in KINDS or not url.startswith(("http://", "https://")):
        need = " or ".join(f"{kind}=http://HOST:PORT" for kind in KINDS)
        raise UsageError("engine-form", where="--engine", have=spec[:200], need=need)
    return KINDS[kind](url.rstrip("/"), timeout)
