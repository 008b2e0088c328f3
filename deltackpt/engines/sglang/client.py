"""An SGLang server, by its own route for weights on disk: every step has a path of its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from deltackpt.engines.clients.base import Client, ClientOptions, EngineReport
from deltackpt.engines.sglang.adapters import SglangAdapters
from deltackpt.engines.sglang.weights import Checksums, ServedWeights, checksums_of, is_link
from deltackpt.errors import ChainError, DeltackptError, StoreError, UsageError
from deltackpt.format.manifest import Link

# By our names. SGLang's third mode, in_place, continues with what was computed with the old weights.
_PAUSES = {"keep": "retract", "abort": "abort"}
_UNKNOWN = "Unsupported action"
_WHOLE = "SGLang reads whole checkpoints"
_BUSY = "SGLang 0.5.10 to 0.5.20 drops no cache while requests wait, as they do in a pause: use --pause abort."
_RESTS = 60.0  # seconds at most between two steps that are tried, each a load and a load back, with such an engine
_WEDGED = "Restart the engine; until then it answers from other weights than its version says."


class SglangClient(Client):
    """SGLang loads the whole checkpoint.

    Where that fails it does not go back, whatever its message says: 0.5.4 to 0.5.23 read the new path again. So the old
    one is loaded by us, from the slot that the engine had; where its own path is a link, from what that stood for.
    Its cache is dropped by a call of its own: a load that is asked for both ends 0.5.6 to 0.5.21 if it cannot be.
    """

    kind = "sglang"
    no_route = "Is it SGLang, 0.5.6 or newer?"
    keys = ("SGLANG_API_KEY",)
    adapters = SglangAdapters

    def __init__(self, url: str, options: ClientOptions) -> None:
        """Raises UsageError ``engine-form`` for a pause mode that SGLang does not have, ``engine-cache`` where there is
        no cache."""
        super().__init__(url, options)
        if options.cache is None:
            need, hint = "a cache: SGLang loads whole checkpoints", "Give CACHE."
            raise UsageError("engine-cache", where=self.name, have="no cache", need=need, hint=hint)
        if options.pause not in _PAUSES:
            need = " or ".join(_PAUSES)
            raise UsageError("engine-form", where=f"--pause, for {self.name}", have=options.pause, need=need)
        self._path, self._step = Path(), ""
        self._links: dict[tuple[str, str], Path] = {}  # what the path of a version stood for, where it is a link
        self._before = ServedWeights(Path(), "")
        self._applied = False  # and not final
        self._lost: ChainError | None = None  # why its weights are those of no step
        self._busy = ""  # what it said when its cache was not dropped at the last step
        self._refusals, self._again = 0, 0.0  # how often in a row, and until when it is left alone (monotonic)

    def version(self) -> str:
        """The weight version that the engine reports to its users."""
        return self._served()[1]

    def locate(self) -> None:
        """Remember what the engine's path stands for: the next move of the cache makes `current` another slot."""
        try:
            path, version = self._served()
        except StoreError:
            self._links.clear()  # it may be started anew, from what the link stands for then
            raise
        if (path, version) not in self._links and is_link(path):
            self._links[path, version] = Path(path).resolve()

    def _served(self) -> tuple[str, str]:
        """The path and the version that the engine says it serves."""
        path, version = self.http.fields("/model_info", "model_path", "weight_version")
        return str(path), str(version)

    def stage(self, link: Link, state: str, path: Path | None) -> EngineReport:
        """Nothing is prepared: the path is remembered, and what the engine has."""
        assert path is not None
        if self._busy and time.monotonic() < self._again:
            raise self._not_dropped(self._busy)
        self._path, self._step, self._applied, self._lost = path, str(link.step), False, None
        served, version = self._served()
        if not is_link(served):
            self._before = ServedWeights(Path(served), version)
        else:  # it may stand for the new step by now: only the bits tell what it was
            remembered = self._links.get((served, version))
            slots = Path(served).resolve().parent
            self._before = ServedWeights(remembered, version, self._checksums(), slots)
        return EngineReport("reload", _WHOLE, path="reload", expected="reload")

    def pause(self) -> None:
        """Stop generation; requests in flight as the options say."""
        self.http.post("/pause_generation", {"mode": _PAUSES[self.options.pause]})

    def apply(self) -> EngineReport:
        """Load the whole checkpoint of the slot."""
        self._load(self._path, self._step)
        self._applied = True
        return EngineReport("reload", _WHOLE, path="reload", expected="reload")

    def _load(self, path: Path, version: str) -> None:
        body = {"model_path": str(path), "flush_cache": False, "abort_all_requests": False, "weight_version": version}
        answer = self.http.post("/update_weights_from_disk", body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            have = str(answer.get("message") if isinstance(answer, dict) else answer)[:600]
            raise ChainError("engine-refused", where=self.name, have=have, need="success")

    def drop_cache(self) -> None:
        """Flush the radix cache. An engine that refuses again and again is left alone for longer and longer."""
        try:
            self.http.post("/flush_cache")
        except ChainError as error:
            if self._applied:
                self._busy = error.have
                self._again = time.monotonic() + (min(2.0**self._refusals, _RESTS) if self._refusals else 0.0)
                self._refusals += 1
            raise self._not_dropped(error.have) from error
        if self._applied:
            self._busy, self._refusals = "", 0

    def _not_dropped(self, said: str) -> ChainError:
        return ChainError("engine-refused", where=f"{self.name}: its cache", have=said, need="status 200", hint=_BUSY)

    def finish(self) -> None:
        """The load has set the version: check it."""
        self._applied = False
        if (found := self.version()) != self._step:
            raise ChainError("engine-refused", where=self.name, have=f"version {found}", need=self._step)

    def undo(self) -> None:
        """Load the old checkpoint, whose slot is still there. Raises ChainError ``engine-wedged`` where the engine is
        not known to have its old weights after it."""
        self._applied = False
        refused = ""
        for path in self._before.candidates():
            try:
                self._load(path, self._before.version)
            except ChainError as error:
                refused = error.have
                continue
            if self._before.checksums is None or self._before.checksums == self._checksums():
                return
            refused = f"other weights in {path.name} than the engine had"
        self._lost = ChainError(
            "engine-wedged",
            where=self.name,
            have=f"no slot with its old weights ({refused or 'none is there any more'})",
            need=f"what it served as version {self._before.version}",
            hint=_WEDGED,
        )
        raise self._lost

    def resume(self) -> None:
        """Resume generation."""
        self.http.post("/continue_generation", {})

    def check(self) -> None:
        """Before a step is final: load it once more, and hold every tensor against the first load, by SGLang's own
        checksums. Else: raise what an `undo` found.

        SGLang keeps its weights under other names and in other shapes than a checkpoint, so that no checksum of theirs
        follows from a step alone. Raises ChainError ``engine-refused`` for tensors that differ, or an SGLang without
        such checksums.
        """
        if self._lost is not None:
            raise self._lost
        if not self._applied:
            return
        if (first := self._checksums()) is None:
            have, need = "an SGLang without /weights_checker", "one that has its checksums (0.5.12), or no --check"
            raise ChainError("engine-refused", where=self.name, have=have, need=need)
        self._load(self._path, self._step)
        again = self._checksums() or {}
        if wrong := sorted(name for name in first.keys() | again.keys() if first.get(name) != again.get(name)):
            have, need = f"other bits in {len(wrong)} tensors, such as {wrong[0][:80]}", "the same of two loads"
            raise ChainError("engine-refused", where=self.name, have=have, need=need)

    def _checksums(self) -> Checksums | None:
        """Of every tensor on every rank, by SGLang itself; None for one that has no such route, or only others of its
        actions, as before 0.5.12."""
        try:
            answer: Any = self.http.post("/weights_checker", {"action": "checksum"})
        except DeltackptError as error:
            have = error.have if isinstance(error, ChainError) else ""
            if have.startswith(("status 404", "status 405")) or (have.startswith("status 400") and _UNKNOWN in have):
                return None
            raise
        return checksums_of(answer, self.name)
