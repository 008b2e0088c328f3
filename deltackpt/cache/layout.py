"""The names of everything in the directory of a managed cache; whatever reads or writes there asks this module.

    cache.json              whose cache it is
    current -> 00000012-…   the step to load, switched atomically
    00000012-…/             a slot: a whole, proven checkpoint; its name is the manifest's
    00000011-…/             the other slot, which the next move patches
    journal                 what leads from the other slot to the current one, and records-…, if it names some
    ready/                  the standby, if wanted: the other slot, already moved to the current step
    patching/, journal.next the move under way
    boot                    the boot of the machine in which all of it was written or proven
    lock                    held by the process that moves it
    trusted.txt             the current step, where it and all that led to it was proven by signatures
    told.json               the step from which the callback of a follower returned
    receivers/              reports of engines to a caller on this host, and the locks of such callers

A file that is replaced has its name behind a dot until it is whole; a slot that is built is `.NAME.tmp-…`.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from deltackpt.format.manifest import Link
from deltackpt.restore.journal_files import BESIDE
from deltackpt.util.disk import draft_of

_MARKER = "cache.json"
_LOCK = "lock"
_RECEIVERS = "receivers"

# What another process that makes this cache, or an engine that waits for it, has put there so far.
MAKING = frozenset({_LOCK, draft_of(Path(_MARKER)).name, _MARKER, _RECEIVERS})

BUILDING = ".*.tmp-*"  # slots that a killed move was building
RECORDS = f"{BESIDE}*"  # files of journals, each of that which names it
SIDE_DRAFT = ".side"  # in a slot: a side file that is not whole


class CacheLayout:
    """The paths of a cache at ``root``, whether or not anything is there."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = root = Path(root)
        self.marker = root / _MARKER
        self.pointer = root / "current"
        self.journal = root / "journal"
        self.next = root / "journal.next"
        self.ready = root / "ready"
        self.patching = root / "patching"
        self.boot = root / "boot"
        self.lock = root / _LOCK
        self.signed = root / "trusted.txt"
        self.acknowledged = root / "told.json"
        self.receivers = root / _RECEIVERS

    def records(self, count: int) -> list[Path]:
        """So many new files of a journal."""
        token = secrets.token_hex(8)
        return [self.root / f"{BESIDE}{token}.{i}" for i in range(count)]

    def slot(self, link: Link) -> Path:
        """The folder of a step's checkpoint."""
        return self.root / f"{link.step:08d}-{link.id}"

    def report(self, token: str, rank: int) -> Path:
        """The report of an engine's rank to the caller that gave ``token``."""
        return self.receivers / f"{token}.{rank}.json"

    def updater(self, token: str) -> Path:
        """The lock of a process that updates engines."""
        return self.receivers / f"updater-{token}.lock"

    def updaters(self) -> list[Path]:
        """The locks of all such processes, alive or not."""
        return sorted(self.receivers.glob("updater-*.lock"))

    def reports(self, token: str) -> list[Path]:
        """The reports of all ranks under a token that are there."""
        return sorted(self.receivers.glob(f"{token}.*.json"))


def link_of(name: str) -> Link | None:
    """The step of the slot with this folder name; None for other names."""
    step, _, identity = name.partition("-")
    return Link(int(step), identity) if step.isascii() and step.isdigit() and len(identity) == 64 else None
