"""Which weights an SGLang server has, as far as it says: a path, a version, and checksums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from deltackpt.cache.layout import link_of
from deltackpt.errors import ChainError

Checksums: TypeAlias = dict[str, str]  # "rank/tensor": what SGLang's /weights_checker says of it


@dataclass(frozen=True)
class ServedWeights:
    """What an engine has before an update. ``path`` is its slot, None where that is not known; ``checksums`` those of
    its tensors, None where they were not asked for, or are not offered; ``slots`` is the folder of a cache of which one
    slot may hold them.
    """

    path: Path | None
    version: str
    checksums: Checksums | None = None
    slots: Path | None = None

    def candidates(self) -> Iterator[Path]:
        """What may hold these weights, the likeliest first; more than one only where checksums tell them apart."""
        if self.path is not None and (self.path.is_dir() or not self.path.is_absolute()):  # or a name on a hub
            yield self.path
        if self.checksums is None or self.slots is None or not self.slots.is_dir():
            return
        for slot in sorted(self.slots.iterdir(), reverse=True):
            if link_of(slot.name) is not None and slot.is_dir() and slot != self.path:
                yield slot


def is_link(path: str) -> bool:
    """Whether an engine's path is a link on this host, such as `current` of a cache."""
    return Path(path).is_absolute() and Path(path).is_symlink()


def checksums_of(answer: Any, name: str) -> Checksums:
    """What ``/weights_checker`` answered, by rank and tensor. Raises ChainError ``engine-refused`` for another form."""
    try:
        found = {
            f"{at}/{tensor}": str(checksum)
            for at, rank in enumerate(answer["ranks"])
            for tensor, checksum in rank["checksums"].items()
        }
    except (KeyError, TypeError, AttributeError):
        found = {}
    if not found:
        need = "the checksums of its tensors"
        raise ChainError("engine-refused", where=name, have=f"the answer {str(answer)[:200]!r}", need=need)
    return found
