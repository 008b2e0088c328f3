"""Sign and size of the ULP steps of a step: its patch is decoded against its parent's weights."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from deltackpt.codecs.packed.steps import bit_length, to_steps
from deltackpt.codecs.types import Decoded, Elements
from deltackpt.format.dtypes import DTYPES, DType, uint
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository
from deltackpt.repository.leases import lease
from deltackpt.restore.patch_reader import PatchReader
from deltackpt.restore.replay import Replay

CLASSES = ("1", "2", "3-4", "5-8", "9-16", "17-32", "more")  # distance in ULP


@dataclass(frozen=True)
class UlpSteps:
    """One step: how many floats moved up and down, by distance, in the order of CLASSES. Changes of what is no float,
    and of tensors that are new or replaced, are in neither."""

    step: int
    up: tuple[int, ...]
    down: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def ulp_steps(repo: Repository, link: Link) -> UlpSteps | None:
    """None for a step without a patch, or without its parent. Memory is that of one tensor; both steps are leased.

    Raises what `Repository.resolve` raises, FormatError, ChainError.
    """
    manifest = repo.load(link)
    if manifest.patch is None or manifest.parent is None:
        return None
    counts = np.zeros((2, len(CLASSES)), np.int64)
    with ExitStack() as stack:
        for pinned in (link, manifest.parent):
            stack.enter_context(lease(repo, pinned))
        patch = stack.enter_context(PatchReader.open(repo, manifest))
        old = stack.enter_context(Replay.open(repo, repo.resolve(manifest.parent)))
        for name in sorted(patch.names & old.tensors.keys()):
            found, known = patch.tensor(name), old.tensors[name]
            dtype = DTYPES[known.dtype]
            if (
                found is None
                or not dtype.sign_magnitude
                or (found.dtype.name, found.shape) != (dtype.name, known.shape)
            ):
                continue
            words = old.bytes_of(name).view(uint(dtype.width))
            counts += count_steps(words, found.decode(words), dtype)
            old.release(name)
    up, down = (tuple(row) for row in counts.tolist())
    return UlpSteps(link.step, up, down)


def count_steps(old: Elements, decoded: Decoded, dtype: DType) -> np.ndarray[Any, Any]:
    """Upward and downward steps by class of distance: int64 [2, classes], of old words [n] and what replaces some."""
    if decoded.positions is None:
        at = np.flatnonzero(decoded.values != old)
        before, after = old[at], decoded.values[at]
    else:
        before, after = old[decoded.positions], decoded.values
    differ = before != after
    down, size = to_steps(before[differ], after[differ], dtype)
    classes = np.minimum(bit_length(size), len(CLASSES) - 1)
    return np.stack([np.bincount(classes[down == side], minlength=len(CLASSES)) for side in (False, True)])
