"""prime-rl's broadcasts: `broadcasts/step_7/` is a whole checkpoint with an empty marker that is written last."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import State
from deltackpt.errors import FormatError
from deltackpt.interop.files import copy_checkpoint, numbered, placed
from deltackpt.interop.protocol import Step, Touched
from deltackpt.util.disk import fsync_dir
from deltackpt.util.file_server import make_folder, symlink

DIRECTORY: Final = re.compile(r"step_([0-9]{1,12})")
FOLDER: Final = "broadcasts"
MARKER: Final = "STABLE"
MARKERS: Final = (MARKER, ".sender_ready", ".receiver_ready", "FINISHED")
SPARSE: Final = ("sparse_manifest.json", "sparse_update_manifest.json")


def directories(root: Path) -> dict[int, Path]:
    """The steps of a run's directory, or of its folder of broadcasts."""
    return numbered(root / FOLDER, DIRECTORY) or numbered(root, DIRECTORY)


def detect(root: Path, marker: str | None = None) -> bool:
    """Does a directory hold broadcasts of whole checkpoints? ``marker``: its name, if it is not a known one."""
    markers = (marker,) if marker else MARKERS
    found = directories(root).values()
    return any((p / m).exists() for p in found for m in markers) and not any(
        (p / s).exists() for p in found for s in SPARSE
    )


class PrimeReader:
    """``marker``: the file that says that a step is whole; any that is known if None."""

    def __init__(self, root: Path, *, marker: str | None = None) -> None:
        self._root, self._markers = root, (marker,) if marker else MARKERS

    def steps(self) -> list[Step]:
        """A whole step for every directory. Raises FormatError ``foreign-missing`` where a marker is missing."""
        found = []
        for number, path in directories(self._root).items():
            if not any((path / marker).exists() for marker in self._markers):
                need = f"{' or '.join(self._markers)}, which is written last"
                raise FormatError("foreign-missing", where=path, have="no marker", need=need)
            found.append(Step(number, None, path, "whole; unverifiable: no digest"))
        return found

    def whole(self, step: Step, into: Path, base: Checkpoint | None) -> Path:
        """The directory without its markers: shards as links, side files as copies."""
        make_folder(into)
        for path in sorted(step.path.rglob("*")):
            name = path.relative_to(step.path)
            if path.is_dir():
                make_folder(into / name)
            elif path.name in (*MARKERS, *self._markers):
                continue
            elif path.suffix == ".safetensors" or path.is_symlink():
                symlink(into / name, path.absolute())
            else:
                shutil.copyfile(path, into / name)
        return into

    def prove(self, step: Step, new: State) -> None:
        """Nothing: the layout has no digests."""

    def read(self, step: Step, base: Checkpoint) -> Iterator[Touched]:
        """Never called: every step is whole."""
        raise AssertionError("every step is whole")


class PrimeWriter:
    """Dense steps, as today's evaluators and workers take them; old ones are not removed."""

    consecutive = False
    anchored = True

    def __init__(self, root: Path, *, marker: str = MARKER) -> None:
        self._root, self._marker = root, marker

    def whole(self, number: int, new: Checkpoint) -> None:
        """A copy of the checkpoint, then the marker, both durable."""
        path = self._root / FOLDER / f"step_{number}"
        with placed(path) as draft:
            copy_checkpoint(new, draft)
        (path / self._marker).touch()
        fsync_dir(path)

    def delta(self, number: int, old: Checkpoint, new: Checkpoint, threads: int) -> str | None:
        """A whole step: the layout has no others."""
        self.whole(number, new)
        return "every step is"
