"""What the adapters of every kind of engine are served by, over HTTP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deltackpt.engines.clients.http import Http
from deltackpt.engines.clients.keys import engine_key
from deltackpt.errors import ChainError


class AdapterClient(ABC):
    """One engine. Calls raise ChainError ``engine-refused``, StoreError ``engine-silent``."""

    kind = ""
    no_route = "Is it this engine?"

    def __init__(self, url: str, timeout: float, keys: Sequence[str] = ()) -> None:
        """``timeout`` in seconds; ``keys`` are the variables that may hold the key that the engine asks for."""
        self.http = Http(url, timeout, no_route=self.no_route, key=engine_key(*keys))
        self.name = f"{self.kind}={url}"

    def loaded(self) -> dict[str, str]:
        """The folder of each model and adapter that the engine offers, by name."""
        return {str(card["id"]): str(card.get("root", "")) for card in self._cards()}

    def model(self) -> str:
        """The folder or name of the model that the engine runs, empty where it does not tell."""
        return next((str(card.get("root", "")) for card in self._cards() if not card.get("parent")), "")

    def _cards(self) -> list[dict[str, Any]]:
        cards = self.http.field("/v1/models", "data")
        if not isinstance(cards, list) or not all(isinstance(card, dict) and "id" in card for card in cards):
            have, need = f"the answer {str(cards)[:200]!r}", "models, each with an id"
            raise ChainError("engine-refused", where=self.http.url + "/v1/models", have=have, need=need)
        return cards

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
