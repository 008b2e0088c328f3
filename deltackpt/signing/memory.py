"""What a reader and a signer remember of a repository, so that nothing older passes for new.

Two small JSON files for each repository, in ``DELTACKPT_TRUST_DIR``, or ``deltackpt/trust`` below the user's
``XDG_STATE_HOME``; processes of one user share it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltackpt.errors import ChainError, FormatError, UsageError
from deltackpt.format.canonical import dumps, loads_strict
from deltackpt.format.manifest import Fields, Link
from deltackpt.format.signature import MAX_TIME, KeySet, key_set
from deltackpt.util.disk import replace_file
from deltackpt.util.lock import lock_file, locked

FOLDER = "DELTACKPT_TRUST_DIR"
_MOST = 16 << 20  # bytes of a repository's file
logger = logging.getLogger("deltackpt")


@dataclass(frozen=True)
class Seen:
    """The step that a branch or tag was at, and the time of the statement that said so, in microseconds."""

    link: Link
    time: int

    def to_dict(self) -> dict[str, Any]:
        """For the file."""
        return {**self.link.to_dict(), "time": self.time}


class TrustMemory:
    """Of one repository. ``keys``: the newest key set that follows from a reader's own; ``seen``: of each name, the
    newest statement that was accepted, or with ``signed`` the newest that was made here.

    Where the folder cannot be written to, the process remembers alone, and a warning says so. A damaged file is no
    empty one: UsageError ``trust-memory``. Key sets are synced; a power cut may lose the last statements, as syncing
    each would take longer than all else of a step.
    """

    def __init__(self, repository: str, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = Path(folder) if folder is not None else default_folder()
        self._names = self._folder / f"{repository}.json"
        self._keys = self._folder / f"{repository}.keys.json"
        self._own: dict[Path, dict[str, Any]] = {}  # where nothing can be written

    def keys(self, root: KeySet | None) -> KeySet | None:
        """The newest set that was reached from ``root``; None if none was, or from another root."""
        return self._set(self._read(self._keys), root)

    def _set(self, value: Mapping[str, Any], root: KeySet | None) -> KeySet | None:
        if not value or value.get("root") != _root(root):
            return None
        try:
            return key_set(value.get("set"), str(self._keys))
        except FormatError as error:
            raise _damaged(self._keys) from error

    def learn_keys(self, root: KeySet | None, keys: KeySet) -> None:
        """Remember a set, unless a later one of the same root is."""

        def change(value: dict[str, Any]) -> None:
            held = self._set(value, root)
            if held is None or held.number <= keys.number:
                value.update(root=_root(root), set=keys.to_dict())

        self._change(self._keys, change, sync=True)

    def seen(self, name: str, *, signed: bool = False) -> Seen | None:
        """The newest statement about a name, None if there was none."""
        found = self._read(self._names).get(_field(name, signed))
        return None if found is None else self._seen(found)

    def learn(self, name: str, new: Seen, *, signed: bool = False) -> None:
        """Remember a statement, unless a later one is."""

        def change(value: dict[str, Any]) -> None:
            known = value.get(_field(name, signed))
            if known is None or self._seen(known).time < new.time:
                value[_field(name, signed)] = new.to_dict()

        self._change(self._names, change, sync=False)

    def forget(self, name: str) -> None:
        """What was signed under a name."""
        self._change(self._names, lambda value: value.pop(_field(name, True), None), sync=True)

    def _seen(self, value: Any) -> Seen:
        try:
            f = Fields({**value, "link": {"step": value["step"], "id": value["id"]}}, str(self._names))
            link = f.link("link")
            assert link is not None
            return Seen(link, f.number("time", MAX_TIME))
        except (FormatError, KeyError, TypeError) as error:
            raise _damaged(self._names) from error

    def _read(self, path: Path) -> dict[str, Any]:
        if path in self._own:
            return self._own[path]
        try:
            raw = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise _damaged(path, error.strerror or "an error") from error
        if not raw:  # all that a power cut left of a new file
            return {}
        try:
            value = loads_strict(raw, limit=_MOST, where=str(path))
        except FormatError as error:
            raise _damaged(path) from error
        if not isinstance(value, dict):
            raise _damaged(path)
        return value

    def _change(self, path: Path, change: Callable[[dict[str, Any]], object], *, sync: bool) -> None:
        value = dict(self._read(path))
        before = dumps(value)
        change(value)
        if dumps(value) == before:
            return
        if path in self._own:
            self._own[path] = value
            return
        try:
            make_private(self._folder)
            with lock_file(self._folder / ".lock") as fd, locked(fd):
                value = dict(self._read(path))  # another process may have been here
                change(value)
                replace_file(path, dumps(value), sync=sync)
        except OSError as error:
            logger.warning("%s: %s: what was seen is not remembered", self._folder, error.strerror or error)
            self._own[path] = value


def _field(name: str, signed: bool) -> str:
    return f"{'signed' if signed else 'seen'} {name}"


def _damaged(path: Path, have: str = "something else") -> UsageError:
    hint = "If it was damaged, remove it: the next reading is then a first one."
    return UsageError("trust-memory", where=path, have=have, need="what was seen", hint=hint)


def check_place(url: str, repository: str, folder: str | os.PathLike[str] | None = None) -> None:
    """Remember which repository is at a URL. Raises ChainError ``repository-replaced`` where another one was."""
    base = Path(folder) if folder is not None else default_folder()
    path = base / f"place-{hashlib.sha256(url.encode()).hexdigest()[:32]}"
    try:
        known = path.read_text()
    except OSError:
        known = ""
    if known and known != repository:  # [S-SIG-13]
        raise ChainError(
            "repository-replaced",
            where=url,
            have=f"repository {repository}",
            need=f"repository {known[:32]}, which was trusted there before",
            hint=f"Nothing of it was read. If it is meant, remove {path}.",
        )
    if not known:
        try:
            make_private(base)
            with lock_file(base / ".lock") as fd, locked(fd):
                replace_file(path, repository.encode(), sync=True)
        except OSError as error:
            logger.warning("%s: %s: which repository is there is not remembered", base, error.strerror or error)


def make_private(folder: Path) -> None:
    """Make a folder that only its owner writes to, unless it is there. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def default_folder() -> Path:
    """Where memories are."""
    if given := os.environ.get(FOLDER):
        return Path(given)
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "deltackpt" / "trust"


def _root(root: KeySet | None) -> str:
    """Tells key sets that a reader was given apart: with another one it begins anew."""
    return "first-use" if root is None else hashlib.sha256(root.encode()).hexdigest()
