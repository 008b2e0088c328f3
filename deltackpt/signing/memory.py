"""What a reader and a signer remember of a repository, so that nothing older passes for new.

One small JSON file for each repository, in ``DELTACKPT_TRUST_DIR``, or ``deltackpt/trust`` below the user's
``XDG_STATE_HOME``; processes of one user share it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
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
    empty one: UsageError ``trust-memory``.
    """

    def __init__(self, repository: str, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = Path(folder) if folder is not None else default_folder()
        self._path = self._folder / f"{repository}.json"
        self._own: dict[str, Any] | None = None  # where nothing can be written

    def keys(self, root: KeySet | None) -> KeySet | None:
        """The newest set that was reached from ``root``; None if none was, or from another root."""
        found = self._read()["keys"]
        if found is None or found.get("root") != _root(root):
            return None
        try:
            return key_set(found.get("set"), str(self._path))
        except FormatError as error:
            raise self._damaged() from error

    def learn_keys(self, root: KeySet | None, keys: KeySet) -> None:
        """Remember a set, unless a later one of the same root is."""

        def change(value: dict[str, Any]) -> None:
            old = value["keys"]
            if old is None or old.get("root") != _root(root) or old["set"]["number"] <= keys.number:
                value["keys"] = {"root": _root(root), "set": keys.to_dict()}

        self._change(change)

    def seen(self, name: str, *, signed: bool = False) -> Seen | None:
        """The newest statement about a name, None if there was none."""
        found = self._read()["signed" if signed else "seen"].get(name)
        return None if found is None else self._seen(found)

    def learn(self, name: str, new: Seen, *, signed: bool = False) -> None:
        """Remember a statement, unless a later one is."""

        def change(value: dict[str, Any]) -> None:
            known = value["signed" if signed else "seen"]
            if name not in known or self._seen(known[name]).time < new.time:
                known[name] = new.to_dict()

        self._change(change)

    def forget(self, name: str) -> None:
        """What was signed under a name."""
        self._change(lambda value: value["signed"].pop(name, None))

    def _seen(self, value: Any) -> Seen:
        try:
            f = Fields({**value, "link": {"step": value["step"], "id": value["id"]}}, str(self._path))
            link = f.link("link")
            assert link is not None
            return Seen(link, f.number("time", MAX_TIME))
        except (FormatError, KeyError, TypeError) as error:
            raise self._damaged() from error

    def _read(self) -> dict[str, Any]:
        if self._own is not None:
            return self._own
        try:
            raw = self._path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return {"keys": None, "seen": {}, "signed": {}}
        except OSError as error:
            raise self._damaged(error.strerror or "an error") from error
        try:
            value = loads_strict(raw, limit=_MOST, where=str(self._path))
        except FormatError as error:
            raise self._damaged() from error
        if not isinstance(value, dict) or value.keys() != {"keys", "seen", "signed"}:
            raise self._damaged()
        if not isinstance(value["seen"], dict) or not isinstance(value["signed"], dict):
            raise self._damaged()
        if value["keys"] is not None and not isinstance(value["keys"], dict):
            raise self._damaged()
        return value

    def _change(self, change: Callable[[dict[str, Any]], object]) -> None:
        value = self._read()
        before = dumps(value)
        change(value)
        if dumps(value) == before or self._own is not None:
            return
        try:
            make_private(self._folder)
            with lock_file(self._folder / ".lock") as fd, locked(fd):
                value = self._read()  # another process may have been here
                change(value)
                replace_file(self._path, dumps(value), sync=True)
        except OSError as error:
            logger.warning("%s: %s: what was seen is not remembered", self._folder, error.strerror or error)
            self._own = value

    def _damaged(self, have: str = "something else") -> UsageError:
        hint = "If it was damaged, remove it: the next reading is then a first one."
        return UsageError("trust-memory", where=self._path, have=have, need="what was seen", hint=hint)


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
