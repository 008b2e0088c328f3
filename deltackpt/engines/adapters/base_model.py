"""The base model of an engine, and whether an adapter is one of it.

Its layers are known from the checkpoint that the engine says it runs, where that is a folder of this machine, or from
the repository that it follows; its state from that repository alone. An adapter's step names the state that it was
trained over, if the trainer said so (spec/NOTES.md, "Adapters").
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deltackpt.checkpoint.adapters import BaseModel, Form, check_fits, other_base
from deltackpt.checkpoint.checkpoint import Checkpoint
from deltackpt.errors import ConflictError, DeltackptError, NotFoundError
from deltackpt.format.manifest import Link, Manifest
from deltackpt.format.safetensors_header import head_size, parse_header
from deltackpt.publish.base_model import BASE, BaseRecord
from deltackpt.repository import Repository
from deltackpt.util.disk import open_regular

LONGEST = 200  # characters that an error shows of a name


def forms_of_file(path: Path) -> dict[str, Form]:
    """The tensors of one safetensors file: that which engines load, whatever lies beside it. Raises CheckpointError,
    FormatError."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        first = file.read(8)
        head = first + file.read(head_size(first, size, str(path)) - 8)
    return {t.name: Form(t.dtype, t.shape) for t in parse_header(head, size, str(path)).tensors}


def forms_of(folder: Path) -> dict[str, Form]:
    """The tensors of a checkpoint's folder. Raises CheckpointError, FormatError."""
    with Checkpoint.open(folder) as opened:
        return {name: Form(at.dtype, at.shape) for name, at in opened.tensors.items()}


class BaseModels:
    """What engines run; ``repo`` is the repository whose branch ``ref`` they follow, None where that is not known."""

    def __init__(self, repo: Repository | None, ref: str) -> None:
        self._repo, self._ref = repo, ref
        self._folders: dict[str, BaseModel | None] = {}
        self._layouts: dict[str, BaseModel] = {}
        self._related: dict[tuple[str, str], bool] = {}

    def check(
        self, engine: Callable[[], str], version: str | None, weights: Path, config: Mapping[str, Any], step: Manifest
    ) -> None:
        """Raise ChainError ``adapter-base`` for an adapter of another base than the engine's.

        ``engine`` tells the folder or name of the model that it runs, ``version`` is that of its weights;
        ``weights`` is the adapter's file, of ``step``.
        """
        trained = config.get("base_model_name_or_path")
        known = isinstance(trained, str) and trained.isprintable() and 0 < len(trained) <= LONGEST
        where = f"{weights.parent.name}, of {trained if known else 'an unnamed model'}"
        if self._repo is None:
            if (base := self._of_folder(engine())) is not None:
                check_fits(forms_of_file(weights), base, config, where)
            return
        at = self._step(version)
        newest = at or self._repo.load(self._repo.find("latest", self._ref))
        check_fits(forms_of_file(weights), self._of_layout(self._repo, newest), config, where)
        if (record := BaseRecord.of(step.metadata.get(BASE))) is not None:
            self._check_state(self._repo, record, at, where)

    def _of_folder(self, root: str) -> BaseModel | None:
        """None where it is of the Hub, of another machine, or no safetensors."""
        if root not in self._folders:
            self._folders[root] = None
            try:
                if Path(root).is_absolute() and Path(root).is_dir():
                    self._folders[root] = BaseModel(f"the engine's model, {root}", forms_of(Path(root)))
            except (DeltackptError, OSError):
                pass
        return self._folders[root]

    def _of_layout(self, repo: Repository, step: Manifest) -> BaseModel:
        key = step.layout.sha256
        if key not in self._layouts:
            forms = {name: Form(tensor.dtype, tensor.shape) for name, tensor in repo.layout(step).tensors.items()}
            self._layouts = {key: BaseModel(f"{repo.store.url}, ref {self._ref}, step {step.step}", forms)}
        return self._layouts[key]

    def _step(self, version: str | None) -> Manifest | None:
        """The step that an engine says it is at; None before its first, or of a number that is not there."""
        if self._repo is None or version is None or not (version.isascii() and version.isdigit()):
            return None
        try:
            return self._repo.load(self._repo.find(int(version), self._ref))
        except (NotFoundError, ConflictError):
            return None

    def _check_state(self, repo: Repository, record: BaseRecord, at: Manifest | None, where: str) -> None:
        if at is not None and at.state == record.state:
            return
        have = f"one trained over step {record.step} ({record.id[:12]}) of repository {record.repository[:12]}"
        if record.repository != repo.id:
            raise other_base(where, have, f"one of {repo.store.url}, repository {repo.id[:12]}, which engines follow")
        if at is not None and not self._is_related(repo, record.link, at):
            raise other_base(where, have, f"a step before or after the engine's {at.step} ({at.link.id[:12]})")

    def _is_related(self, repo: Repository, trained: Link, at: Manifest) -> bool:
        """Is one of the two steps before the other? What was collected cannot be told, and is taken for it."""
        key = trained.id, at.link.id
        if key not in self._related:
            try:
                newer, older = (at.link, trained) if at.step >= trained.step else (repo.load(trained).link, at.link)
                chain = repo.walk(newer)
                self._related[key] = chain[-1].parent is not None or older in [m.link for m in chain]
            except NotFoundError:
                self._related[key] = True
        return self._related[key]
