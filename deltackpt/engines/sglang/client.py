"""An SGLang server, by its own route for weights on disk: every step has a path of its own."""

from __future__ import annotations

from pathlib import Path

from deltackpt.engines.clients.base import Client, ClientOptions, EngineReport
from deltackpt.errors import ChainError, UsageError
from deltackpt.format.manifest import Link

# By ours. SGLang's third mode, in_place, goes on with what was computed with the old weights.
_PAUSES = {"keep": "retract", "abort": "abort"}


class SglangClient(Client):
    """SGLang loads the whole checkpoint, and goes back to its old one by itself where that fails."""

    kind = "sglang"

    def __init__(self, url: str, options: ClientOptions) -> None:
        """Raises UsageError ``engine-form`` for a pause mode that SGLang does not have."""
        super().__init__(url, options)
        if options.pause not in _PAUSES:
            need = " or ".join(_PAUSES)
            raise UsageError("engine-form", where=f"--pause, for {self.name}", have=options.pause, need=need)
        self._path, self._step = Path(), ""
        self._before = Path(), ""

    def version(self) -> str:
        """The weight version that the engine tells its users."""
        return str(self.http.field("/model_info", "weight_version"))

    def stage(self, link: Link, state: str, path: Path) -> EngineReport:
        """Nothing is prepared: the path is remembered, and the one that the engine has."""
        self._path, self._step = path, str(link.step)
        self._before = Path(str(self.http.field("/model_info", "model_path"))), self.version()
        return EngineReport("reload", "SGLang reads whole checkpoints")

    def pause(self) -> None:
        """Stop generation; requests in flight as the options say."""
        self.http.post("/pause_generation", {"mode": _PAUSES[self.options.pause]})

    def apply(self) -> EngineReport:
        """Load the whole checkpoint of the slot."""
        self._load(self._path, self._step)
        return EngineReport("reload", "SGLang reads whole checkpoints")

    def _load(self, path: Path, version: str) -> None:
        body = {"model_path": str(path), "flush_cache": True, "abort_all_requests": False, "weight_version": version}
        answer = self.http.post("/update_weights_from_disk", body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            have = str(answer.get("message") if isinstance(answer, dict) else answer)[:600]
            raise ChainError("engine-refused", where=self.name, have=have, need="success")

    def drop_cache(self) -> None:
        """Flush the radix cache."""
        self.http.post("/flush_cache")

    def finish(self) -> None:
        """The load has set the version: check it."""
        if (found := self.version()) != self._step:
            raise ChainError("engine-refused", where=self.name, have=f"version {found}", need=self._step)

    def undo(self) -> None:
        """Load the old checkpoint, whose slot is still there."""
        self._load(*self._before)

    def resume(self) -> None:
        """Generation goes on."""
        self.http.post("/continue_generation", {})

    def check(self) -> None:
        """SGLang offers nothing to hold against a step."""
