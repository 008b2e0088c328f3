"""An SGLang server, by its own route for weights on disk: every step has a path of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deltackpt.engines.clients.base import Client, Ready
from deltackpt.errors import ChainError, UsageError
from deltackpt.format.manifest import Link

_PAUSES = {"keep": "retract", "wait": "in_place", "abort": "abort"}


class SglangClient(Client):
    """SGLang loads the whole checkpoint, and goes back to its old one by itself where that fails."""

    kind = "sglang"
    _path = Path()
    _before = ""
    _step = ""

    def version(self) -> str:
        return str(self.http.get("/model_info", 10).get("weight_version"))

    def stage(self, link: Link, state: str, path: Path) -> Ready:
        self._path, self._step = path, str(link.step)
        self._before = str(self.http.get("/model_info", 10).get("model_path", ""))
        return Ready("reload", "SGLang reads whole checkpoints")

    def pause(self) -> None:
        if self.host.pause not in _PAUSES:
            need = " or ".join(_PAUSES)
            raise UsageError("engine-form", where="--pause", have=self.host.pause, need=need)
        self.http.post("/pause_generation", {"mode": _PAUSES[self.host.pause]})

    def apply(self) -> Ready:
        self._load(self._path, self._step)
        return Ready("reload", "SGLang reads whole checkpoints")

    def _load(self, path: Path, version: str | None) -> None:
        body: dict[str, Any] = {"model_path": str(path), "flush_cache": True, "abort_all_requests": False}
        if version is not None:
            body["weight_version"] = version
        answer = self.http.post("/update_weights_from_disk", body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            have = str(answer.get("message") if isinstance(answer, dict) else answer)[:600]
            raise ChainError("engine-refused", where=self.name, have=have, need="success")

    def drop_cache(self) -> None:
        self.http.post("/flush_cache")

    def finish(self) -> None:
        if (found := self.version()) != self._step:
            raise ChainError("engine-refused", where=self.name, have=f"version {found}", need=self._step)

    def undo(self) -> None:
        self._load(Path(self._before), None)

    def resume(self) -> None:
        self.http.post("/continue_generation", {})

    def check(self) -> None:
        """SGLang offers nothing to hold against a step."""
