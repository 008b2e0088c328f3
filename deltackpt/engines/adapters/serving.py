"""Every new step of an adapter into running engines, under a name of its own.

A step is restored, proven, into a folder of its own and loaded as ``NAME@STEP``. Requests name the step that they want;
older steps stay for those that are in flight, and go when no request uses them.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

from deltackpt.engines.adapters.base_model import BaseModels
from deltackpt.engines.clients import AdapterClient, adapter_client
from deltackpt.engines.fleet import Emit, stamped
from deltackpt.engines.rounds import rounds
from deltackpt.errors import CheckpointError, DeltackptError, UsageError
from deltackpt.format.canonical import loads_strict
from deltackpt.format.manifest import Link
from deltackpt.publish.base_model import BASE, BaseRecord
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply
from deltackpt.sync.backoff import GRACE
from deltackpt.util.disk import space_errors
from deltackpt.util.metrics import Metrics
from deltackpt.util.places import check_local

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG = 1 << 20  # bytes of an adapter's configuration
REPEAT = 60.0  # seconds after which a failure that lasts is told again
_UNKNOWN = re.compile("does not exist|not found|cannot be found", re.IGNORECASE)  # said of an adapter that is gone
PATIENCE = 1.0  # seconds that a round waits for adapters to go: an engine may let them go after minutes


@dataclass(frozen=True)
class Adapter:
    """An adapter of the engines: what they call it, and the branch that publishes it."""

    name: str
    ref: str = "main"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            need = "letters, digits, dots, - and _"
            raise UsageError("usage", where="--adapter", have=repr(self.name)[:200], need=need)


@dataclass(frozen=True)
class AdapterOptions:
    """How adapters are served.

    ``keep``     steps of an adapter that an engine offers, the newest among them; of those before, only such as
                 requests use
    ``timeout``  seconds that an engine may take for one answer
    ``threads``  None for all processors
    ``grace``    seconds for which the repository may be missing
    ``base``     the repository of the weights that engines follow, None where they follow none: adapters of others are
                 refused
    ``base_ref`` its branch

    Raises UsageError ``usage`` for a ``keep`` below 1, and for a ``base_ref`` of no ``base``.
    """

    keep: int = 2
    timeout: float = 120.0
    threads: int | None = None
    grace: float = GRACE
    base: Repository | None = None
    base_ref: str = "main"

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise UsageError("usage", where="--keep", have=self.keep, need="1 or more")
        if self.base is None and self.base_ref != "main":
            raise UsageError("usage", where="--base-ref", have=self.base_ref, need="a --base-model that it is of")


@dataclass
class _Engine:
    client: AdapterClient
    bases: dict[str, str | None] = field(default_factory=dict)  # by adapter: the engine's weights when it was loaded
    trained: dict[str, int | None] = field(default_factory=dict)  # by adapter: the step of the base it was trained over
    told: dict[str, tuple[str, float]] = field(default_factory=dict)  # by adapter: the last failure, and when
    going: dict[str, _Going] = field(default_factory=dict)  # by name, what is being unloaded
    owed: dict[str, int] = field(default_factory=dict)  # the steps of those whose unload failed: half of it may be done


class _Going(Thread):
    """An adapter that leaves an engine, however long that takes."""

    def __init__(self, client: AdapterClient, name: str, step: int) -> None:
        super().__init__(name=f"unload {name}", daemon=True)
        self._client, self.adapter, self.step = client, name, step
        self.error: DeltackptError | None = None
        self.start()

    def run(self) -> None:
        """Once."""
        try:
            self._client.unload(self.adapter)
        except DeltackptError as error:
            self.error = error


class AdapterServing:
    """Keeps ``engines``, each a ``KIND=URL``, at the newest step of each adapter; ``folder`` holds their files.

    ``emit`` is called with events, each with its ``time``: `loaded`, `unloaded`, `failed`, `base-moved`, `outage`,
    `back`.
    """

    def __init__(
        self,
        repo: Repository,
        folder: str | os.PathLike[str],
        engines: Sequence[str],
        adapters: Sequence[Adapter],
        emit: Emit,
        options: AdapterOptions = AdapterOptions(),
    ) -> None:
        check_local(folder, "FOLDER")
        names = [adapter.name for adapter in adapters]
        if not names or len({*names}) < len(names):
            raise UsageError("usage", where="--adapter", have=", ".join(names) or "none", need="names, each once")
        self._repo, self._adapters, self._options, self._emit = repo, list(adapters), options, stamped(emit)
        self._folder = Path(folder).absolute()  # engines run elsewhere: a relative path would mean another place
        self._bases = BaseModels(options.base, options.base_ref)
        self._engines = [_Engine(adapter_client(engine, options.timeout)) for engine in engines]

    def run(self, stop: Event, poll: float) -> None:
        """Until ``stop``, a round every ``poll`` seconds. Raises an error of the repository that does not pass by
        itself, and that it is gone, once that lasted for the grace time."""
        grace, emit = self._options.grace, self._emit
        rounds(self.update, lambda: None, stop=stop, poll=poll, grace=grace, emit=emit, metrics=Metrics())

    def update(self) -> bool:
        """Every engine to the newest step of every adapter. -> whether all are there.

        Raises CheckpointError ``adapter-missing`` for a step that is none, and what reading the repository raises.
        """
        there, newest, loaded = True, {}, []
        for adapter in self._adapters:
            if (head := self._repo.head(adapter.ref)) is None:
                raise self._repo.absent(adapter.ref)
            newest[adapter] = folder = self._restored(adapter, head.link)
            for engine in self._engines:
                if self._try(engine, adapter, partial(self._load, engine, adapter, head.link, folder)):
                    loaded.append((engine, adapter))
                else:
                    there = False
        for engine, adapter in loaded:  # after all of them: an unload may keep an engine from loading
            there &= self._try(engine, adapter, partial(self._unload, engine, adapter, newest[adapter]))
        for adapter, folder in newest.items():
            self._clear(adapter, folder)
        return there

    def _try(self, engine: _Engine, adapter: Adapter, work: Callable[[], None]) -> bool:
        try:
            work()
        except DeltackptError as error:
            self._failed(engine, adapter, error)
            return False
        return True

    def _restored(self, adapter: Adapter, link: Link) -> Path:
        """The folder of a step, proven when it was written."""
        folder = self._folder / f"{adapter.name}@{link.step}-{link.id}"
        if not folder.exists():
            with space_errors(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
            apply(self._repo, folder, f"{link.step}-{link.id}", ref=adapter.ref, threads=self._options.threads)
        missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
        if missing:
            hint = "TrainerHook(peft='adapter') publishes one."
            where = f"{self._repo.store.url}, ref {adapter.ref}, step {link.step}"
            need = f"an adapter of PEFT: {CONFIG} and {WEIGHTS}"
            raise CheckpointError("adapter-missing", where=where, have=f"no {missing[0]}", need=need, hint=hint)
        return folder

    def _load(self, engine: _Engine, adapter: Adapter, link: Link, folder: Path) -> None:
        loaded, base = engine.client.loaded(), engine.client.base()
        if str(folder) in loaded.values():
            self._tell_base(engine, adapter, base)
            return
        name = f"{adapter.name}@{link.step}"
        if name in loaded:  # the branch went back, and has another step of that number now
            name = f"{name}-{link.id[:8]}"
        read = loads_strict((folder / CONFIG).read_bytes(), limit=MAX_CONFIG, where=CONFIG, allow_floats=True)
        config = read if isinstance(read, dict) else {}
        step = self._repo.load(link)
        self._bases.check(engine.client.model, base, folder / WEIGHTS, config, step)
        began = time.monotonic()
        engine.client.load(name, folder)
        engine.bases[adapter.name] = base
        seconds = round(time.monotonic() - began, 3)
        record = BaseRecord.of(step.metadata.get(BASE))
        engine.trained[adapter.name] = trained = record.step if record else None
        told = {"name": name, "step": link.step, "id": link.id, "rank": config.get("r"), "base": base}
        self._event("loaded", engine, adapter, **told, trained_over=trained, seconds=seconds)

    def _tell_base(self, engine: _Engine, adapter: Adapter, base: str | None) -> None:
        before = engine.bases.setdefault(adapter.name, base)
        if base != before and base is not None:
            engine.bases[adapter.name] = base
            trained = engine.trained.get(adapter.name)
            self._event("base-moved", engine, adapter, before=before, base=base, trained_over=trained)

    def _unload(self, engine: _Engine, adapter: Adapter, newest: Path) -> None:
        """Older steps, but for those that are kept, and those that requests use."""
        ours = re.compile(re.escape(f"{self._folder}{os.sep}{adapter.name}@") + r"(\d+)-[0-9a-f]+")
        older = []
        for name, root in engine.client.loaded().items():
            if (found := ours.fullmatch(root)) is not None and root != str(newest):
                older.append((int(found[1]), name))
        idle = sorted(older)[: max(0, len(older) + 1 - self._options.keep)]
        busy = engine.client.busy() if idle else frozenset()
        owed = [(step, name) for name, step in engine.owed.items() if name.startswith(f"{adapter.name}@")]
        for step, name in (*idle, *owed):
            if name not in busy and name not in engine.going:
                engine.owed.pop(name, None)
                engine.going[name] = _Going(engine.client, name, step)
        end = time.monotonic() + PATIENCE
        for name in [name for name in engine.going if name.startswith(f"{adapter.name}@")]:
            engine.going[name].join(max(0.0, end - time.monotonic()))
            if not engine.going[name].is_alive():
                gone = engine.going.pop(name)
                if gone.error is not None:
                    if not _UNKNOWN.search(gone.error.have):
                        engine.owed[name] = gone.step
                    raise gone.error
                self._event("unloaded", engine, adapter, name=name, step=gone.step)

    def _clear(self, adapter: Adapter, newest: Path) -> None:
        """Remove the folders that no engine has loaded or uses. Where one does not answer, all stay."""
        folders = [path for path in self._folder.glob(f"{adapter.name}@*-*") if path != newest]
        if not folders:
            return
        used: set[str] = set()
        for engine in self._engines:
            try:
                loaded = engine.client.loaded()
                used.update(loaded.values())
                if any(name.startswith(f"{adapter.name}@") for name in engine.client.busy() - loaded.keys()):
                    return  # vLLM may read the folder again of one that was unloaded, for a request in flight
            except DeltackptError:
                return
        for path in folders:
            if str(path) not in used:
                shutil.rmtree(path, ignore_errors=True)

    def _failed(self, engine: _Engine, adapter: Adapter, error: DeltackptError) -> None:
        text, at = engine.told.get(adapter.name, ("", 0.0))
        if str(error) != text or time.monotonic() - at >= REPEAT:
            engine.told[adapter.name] = str(error), time.monotonic()
            self._event("failed", engine, adapter, **error.to_dict())

    def _event(self, event: str, engine: _Engine, adapter: Adapter, **fields: Any) -> None:
        self._emit(event, {"adapter": adapter.name, "engine": engine.client.name, **fields})
