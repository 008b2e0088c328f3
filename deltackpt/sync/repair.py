"""Damaged objects of a copy, replaced from another copy: plan -> show -> execute (STORE [S-MIR-7]).

Every object that the target's records name is hashed, and so is every record. What is missing, or holds other bytes, is
copied from the source if that has it, whichever of the two is newer. No step and no ref is copied.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltackpt.repository import Repository
from deltackpt.repository.leases import lease
from deltackpt.store import open_store
from deltackpt.sync.scan import Damage, DamageScan
from deltackpt.sync.selection import put_order
from deltackpt.sync.transfer import JOBS, Transfer, default_spool
from deltackpt.util.progress import SILENT, Progress
from deltackpt.verify.findings import Finding, exit_code


@dataclass(frozen=True)
class RepairPlan:
    """``repairs``: what the source has, proven, in the order in which it is put. ``left``: what else is wrong, as the
    errors that a reader would meet. ``checked`` counts the objects that were read; ``bytes`` are those of
    ``repairs``."""

    source: str
    target: str
    id: str
    checked: int
    repairs: tuple[Damage, ...]
    left: tuple[Finding, ...]

    @property
    def bytes(self) -> int:
        """Bytes of what is replaced."""
        return sum(damage.file.size for damage in self.repairs)

    @property
    def exit_code(self) -> int:
        """That of `verify` for what is left."""
        return exit_code(self.left)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**asdict(self), "bytes": self.bytes}


@dataclass(frozen=True)
class RepairResult:
    """What was done: ``repaired`` objects by name, and their ``bytes``; ``left`` is the plan's."""

    source: str
    target: str
    checked: int
    repaired: tuple[str, ...]
    bytes: int
    left: tuple[Finding, ...]
    seconds: float

    @property
    def exit_code(self) -> int:
        """That of `verify` for what is left."""
        return exit_code(self.left)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def repair(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    limit: float | None = None,
    jobs: int = JOBS,
    spool: Path | None = None,
    progress: Progress = SILENT,
) -> RepairResult:
    """Replace what is damaged or missing in the copy at ``target`` from the repository at ``source``; paths or URLs.

    ``limit``, ``jobs`` and ``spool`` are those of `mirror`. Raises what `Repair.plan` and `Repair.execute` raise.
    """
    origin = Repository.open(source)
    transfer = Transfer(origin.store, open_store(target), limit, jobs, spool or default_spool(), progress)
    return Repair(origin, transfer).run()


class Repair:
    """Repairs the target of ``transfer`` from ``source``. Two that run at a time may put an object twice, which loses
    nothing."""

    def __init__(self, source: Repository, transfer: Transfer) -> None:
        self._source, self._store = source, transfer.target
        self._transfer = transfer

    def plan(self) -> RepairPlan:
        """Decide what is replaced; nothing is changed. Reads all of the target.

        Raises ConflictError ``mirror-elsewhere`` for another repository, and what `Repository.at` raises where nothing
        tells whose it is.
        """
        found = DamageScan(self._source, self._transfer)
        found.run()
        return RepairPlan(
            source=self._source.store.url,
            target=self._store.url,
            id=self._source.id,
            checked=found.checked,
            repairs=(
                *found.marker,
                *found.objects,
                *sorted(found.records, key=lambda damage: put_order(damage.file.name)),
            ),
            left=tuple(dict.fromkeys(map(Finding.of, found.left))),
        )

    def run(self) -> RepairResult:
        """Plan and execute, with leases: no gc removes meanwhile what is replaced, or read for it."""
        with lease(self._source, None), lease(Repository(self._store, self._source.id), None):
            return self.execute(self.plan())

    def execute(self, plan: RepairPlan) -> RepairResult:
        """Do what the plan says, except for objects whose bytes are right by now. Killed at any instant, one object is
        missing at worst that was damaged before, and the next plan has it.

        Raises FormatError ``object-hash``, NotFoundError ``object-missing`` where the source lost its object, and what
        the stores raise.
        """
        began = time.monotonic()
        self._transfer.progress.start("repair", plan.bytes)
        repaired = []
        for file in (damage.file for damage in plan.repairs):
            if (error := self._transfer.find_damage(file)) is not None:  # [S-MIR-7]: read again just before
                self._transfer.replace(file, error)
                repaired.append(file)
        return RepairResult(
            source=plan.source,
            target=plan.target,
            checked=plan.checked,
            repaired=tuple(file.name for file in repaired),
            bytes=sum(file.size for file in repaired),
            left=plan.left,
            seconds=round(time.monotonic() - began, 3),
        )
