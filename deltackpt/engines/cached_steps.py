"""The bytes of a step that lie on this host, to compare an engine's memory with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deltackpt.checkpoint import Checkpoint
from deltackpt.engines.proof import Read
from deltackpt.engines.shared_cache import reading
from deltackpt.format.manifest import Link
from deltackpt.format.safetensors_header import Tensor
from deltackpt.repository import Repository

Shapes = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Slot:
    """``table``: its tensors by name, in the order of the layout; ``read`` gives the bytes of one."""

    root: Path
    table: Mapping[str, Tensor]
    read: Read


@contextmanager
def slot_of(repo: Repository, cache: Path, link: Link | None) -> Iterator[Slot | None]:
    """The slot of a step in a managed cache, while it stands still. None where it is not there, or not proven."""
    with reading(cache) as held:
        root = held.slot(link) if link is not None else None
        if link is None or root is None or not root.is_dir() or not held.trusted:
            yield None
            return
        with Checkpoint.open(root) as found:
            yield Slot(root, repo.layout(repo.load(link)).tensors, found.bytes_of)


def shapes(repo: Repository, link: Link) -> Shapes:
    """Dtype and shape of every tensor of a step."""
    return {name: (t.dtype, tuple(t.shape)) for name, t in repo.layout(repo.load(link)).tensors.items()}
