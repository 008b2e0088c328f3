"""A managed cache: a checkpoint directory that follows a repository in O(changes).

A move never touches the current slot: it changes the other one, proves every byte of it, renames it, and switches. A
path never names two steps, so an engine that remembers by path sees a new one. The slot that was current before the
last switch is the one that is patched next: readers of a slot have until then to close its files. Where they have done
so earlier, it can be moved to the current step in advance (`standby`).

Slots are not synced, which would cost more than all the rest of a move. Instead, the first move after the machine was
started again reads all of the current slot and checks it against its step, and trusts nothing else that it finds.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deltackpt.cache.layout import BUILDING, MAKING, RECORDS, CacheLayout, link_of
from deltackpt.errors import CheckpointError, ConflictError, NotFoundError
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository
from deltackpt.restore.journal import Journal
from deltackpt.restore.journal_files import JournalHead
from deltackpt.util import behind
from deltackpt.util.disk import boot_id, draft_of, link_or, replace_file
from deltackpt.util.file_server import remove, remove_any, rename, symlink
from deltackpt.util.lock import lock, lock_file

FORMAT = "deltackpt-cache"
VERSION = 1


class Cache(CacheLayout):
    """The directory of a managed cache; everything here that changes it happens under its lock."""

    def current(self) -> Link | None:
        """The step that `current` points at."""
        try:
            target = os.readlink(self.pointer)
        except OSError:
            return None
        link = link_of(target)
        return link if link and self.slot(link).is_dir() else None

    def slots(self) -> list[Link]:
        """The steps that have a slot."""
        return [link for path in self.root.iterdir() if path.is_dir() and (link := link_of(path.name))]

    def drop_slot(self, slot: Path) -> None:
        """Remove a slot, or anything else of its name: of a symlink only the link."""
        with suppress(OSError):
            if slot.is_dir() and not slot.is_symlink():
                shutil.rmtree(slot, ignore_errors=True)
            else:
                slot.unlink()

    def switch(self, link: Link) -> None:
        """Point `current` at a slot, atomically."""
        fresh = draft_of(self.pointer)
        fresh.unlink(missing_ok=True)
        symlink(fresh, self.slot(link).name)
        rename(fresh, self.pointer)

    @property
    def trusted(self) -> bool:
        """Was it all written or proven since the machine was started?"""
        try:
            return self.boot.read_text() == boot_id() != ""
        except (OSError, ValueError):
            return False

    def trust(self) -> None:
        """Record that all that is there was written or proven since the machine was started."""
        replace_file(self.boot, boot_id().encode(), sync=False)

    def is_signed(self, link: Link) -> bool:
        """Was all that led to this slot read from a store whose signatures were asked for?"""
        try:
            return self.signed.read_text() == self.slot(link).name
        except (OSError, ValueError):
            return False

    def set_signed(self, link: Link | None) -> None:
        """Record that signatures were asked for on the whole way to a step; None: that they were not."""
        if link is None:
            self.signed.unlink(missing_ok=True)
        elif not self.is_signed(link):
            replace_file(self.signed, self.slot(link).name.encode(), sync=False)

    def drop(self, *, keep: Link | None) -> None:
        """Remove every slot but one, and every trace of a move."""
        for link in self.slots():
            if link != keep:
                self.drop_slot(self.slot(link))
        for path in (self.journal, self.next):
            remove_any(path)
        self.drop_records()
        self.drop_nameless()

    def drop_nameless(self) -> None:
        """Remove the slots whose name is no step's."""
        for path in (self.patching, self.ready):
            self.drop_slot(path)

    def adopt_journal(self, before: Journal | None = None) -> None:
        """The journal of a move that is done takes the place of the one before.

        In two calls: some systems write a file that replaces another out first, which takes longer than all else here.
        Between the two `finish_switch` finds it. The files of the one before are removed, and unmapped where that is
        given, by a thread of their own: the system takes them back page by page. What it leaves behind if it is killed
        is of no journal, and goes with the next move.
        """
        with suppress(FileNotFoundError):
            rename(self.journal, self.records(1)[0])
        rename(self.next, self.journal)
        left = self._unnamed_records()

        def remove_all() -> None:
            for path in left:
                _unlink(path)
            if before is not None:
                before.unmap()

        behind.begin(remove_all)

    def drop_records(self) -> None:
        """Remove the files of journals that are gone."""
        for path in self._unnamed_records():
            _unlink(path)

    def _unnamed_records(self) -> list[Path]:
        heads = [head for path in (self.journal, self.next) if (head := JournalHead.read(path)) is not None]
        named = {name for head in heads for name in head.more}
        return [path for path in self.root.glob(RECORDS) if path.name not in named]

    def finish_switch(self) -> None:
        """A move that was killed after its slot was proven and renamed: finish it. Drop what an earlier one left."""
        for path in (self.patching, self.ready):
            if path.is_symlink() or not path.is_dir():  # left by no move that is under way; it would block the next one
                self.drop_slot(path)
        if not self.patching.exists() and (done := Journal.read(self.next)) is not None:
            if self.slot(done.end).is_dir():
                self.switch(done.end)
                self.adopt_journal()
            else:
                remove(self.next)
        self.drop_records()
        for path in self.root.glob(BUILDING):
            shutil.rmtree(path, ignore_errors=True)


def _unlink(path: Path) -> None:
    with suppress(OSError):
        remove_any(path)


def open_current(cache: str | os.PathLike[str]) -> tuple[Path, Link]:
    """The current slot's directory and step. Raises NotFoundError ``cache-empty``, CheckpointError ``cache-unproven``
    after the machine was started again, since a power cut may have torn it."""
    path, link = find_current(cache)
    if not Cache(Path(cache)).trusted:
        raise CheckpointError(
            "cache-unproven",
            where=cache,
            have="a slot that was not proven since this machine was started",
            need="one that is sure to be whole",
            hint="`deltackpt apply REPO CACHE --cache` proves it, or builds it anew.",
        )
    return path, link


def find_current(cache: str | os.PathLike[str]) -> tuple[Path, Link]:
    """The same, proven or not. Raises NotFoundError ``cache-empty``."""
    held = Cache(Path(cache))
    link = held.current()
    if link is None:
        raise NotFoundError(
            "cache-empty",
            where=cache,
            have="no current step",
            need="a managed cache",
            hint="`deltackpt apply REPO CACHE --cache` makes one.",
        )
    return held.slot(link), link


@contextmanager
def locked(repo: Repository, root: Path) -> Iterator[Cache]:
    """The cache's directory, made if there is none, checked to be this repository's, and locked by this process.

    Raises ConflictError ``not-a-cache``, ``cache-locked``, and OSError.
    """
    held = Cache(root)
    if not held.marker.exists():
        there = root.is_symlink() or (root.exists() and not root.is_dir())
        if there or (root.exists() and any(path.name not in MAKING for path in root.iterdir())):
            raise _not_a_cache(root, link_or(root, "something else there"))
        root.mkdir(parents=True, exist_ok=True)
    hint = "Wait for it, or give every process a cache of its own."
    with lock_cache(held, shared=False, need="one at a time", hint=hint):
        if not held.marker.exists():
            about = {"format": FORMAT, "version": VERSION, "repository": repo.id}
            # The one file here that cannot be made again from others.
            replace_file(held.marker, f"{json.dumps(about)}\n".encode(), sync=True)
        _check_marker(held, repo)
        yield held


@contextmanager
def lock_cache(held: Cache, *, shared: bool, need: str, hint: str) -> Iterator[None]:
    """The lock of a cache that is there, alone or shared with other readers. Raises ConflictError ``cache-locked``
    while another process has it, and OSError.
    """
    with lock_file(held.lock) as fd:
        try:
            lock(fd, shared=shared, wait=False)
        except OSError as error:
            have = "another process at work"
            raise ConflictError("cache-locked", where=held.root, have=have, need=need, hint=hint) from error
        yield


def _check_marker(held: Cache, repo: Repository) -> None:
    try:
        value = json.loads(held.marker.read_bytes())
        about = (value["format"], value["version"], value["repository"])
    except (OSError, ValueError, KeyError, TypeError):
        about = ("", 0, "")
    if about != (FORMAT, VERSION, repo.id):
        have = f"the cache of repository {about[2]}" if about[0] == FORMAT else f"another {held.marker.name}"
        raise _not_a_cache(held.root, have)


def _not_a_cache(root: Path, have: str) -> ConflictError:
    return ConflictError(
        "not-a-cache",
        where=root,
        have=have,
        need="a managed cache of this repository, or an empty directory",
        hint="Choose a directory of its own.",
    )
