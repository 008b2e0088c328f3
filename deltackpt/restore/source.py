"""The source over a repository, and the way from one step to a later one over any source."""

from __future__ import annotations

import hashlib
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from deltackpt.errors import ChainError
from deltackpt.format.layout import Layout
from deltackpt.format.manifest import File, Link
from deltackpt.format.state_digest import TensorDigest
from deltackpt.patch.index import Span
from deltackpt.patch.part import ReadInto
from deltackpt.patch.source import PartSource, StepRecord, StepSource, to_host
from deltackpt.repository import Repository
from deltackpt.repository.chain import Hop
from deltackpt.repository.objects import object_differs
from deltackpt.store.held_file import open_object
from deltackpt.util.disk import ensure_space, space_errors
from deltackpt.util.guard import map_guarded
from deltackpt.util.parallel import ordered_map, threads_or_default

SMALL = 64 << 10  # bytes: a part up to this size is read, a larger one mapped
KEPT = 4  # parts of which ranges are asked for, where signatures are asked for too
FETCHES = 8  # parts that a remote store is asked for at a time


class RepositorySource:
    """The steps of one branch. Parts are mapped files: those of a local store, or temporary ones of a remote one."""

    def __init__(self, repo: Repository, ref: str = "main") -> None:
        self._repo, self._ref = repo, ref
        self._proven: OrderedDict[File, memoryview] = OrderedDict()  # parts of which ranges were asked for
        self._lock = Lock()

    @property
    def url(self) -> str:
        """Of the store."""
        return self._repo.store.url

    @property
    def parallel(self) -> int:
        """Files of this machine are only mapped and hashed: as many as there are processors for."""
        return min(FETCHES, threads_or_default(None)) if self._repo.store.capabilities.local else FETCHES

    def latest(self) -> Link | None:
        """The step that the branch is at. Raises FormatError for a damaged ref."""
        head = self._repo.ref(self._ref)
        return head.link if head else None

    def step(self, link: Link) -> StepRecord:
        """What the manifest says. Raises what `Repository.load` raises."""
        found = self._repo.load(link)
        return StepRecord(found.repository, link, found.parent, found.base, found.state, found.patch)

    def layout(self, link: Link) -> Layout:
        """The step's layout object, which the manifest names by sha256."""
        return self._repo.layout(self._repo.load(link))

    def digests(self, link: Link) -> Mapping[str, TensorDigest]:
        """The step's digests object, checked against the manifest's state digest."""
        return self._repo.digests(self._repo.load(link))

    def part(self, file: File) -> memoryview:
        """The bytes of a part, mapped and proven by sha256; a remote one is downloaded to a temporary file first.

        Small ones are read: a mapping holds a descriptor, and a chain can have thousands of parts.
        """
        store = self._repo.store
        with ExitStack() as stack:
            local = store.local_path(file.name) if store.capabilities.local else None
            if local is None:
                spool = stack.enter_context(self._downloaded(file))
            else:
                spool = stack.enter_context(open_object(local, f"{store.url}/{file.name}"))
            size = spool.seek(0, 2)
            if size > SMALL:
                view = map_guarded(spool.fileno(), size, local or Path(file.name))[0].view
            else:
                spool.seek(0)
                view = memoryview(spool.read())
            stack.close()  # the mapping has a descriptor of its own
            if local is not None and (size != file.size or hashlib.sha256(view).hexdigest() != file.sha256):
                raise object_differs(f"{store.url}/{file.name}", size, file)
            return view

    def reads(self, file: File) -> ReadInto | None:
        """What copies bytes of a part that `part` gave sooner than from there; None if nothing does."""
        return None

    def in_room(self, file: File) -> bool:
        """Are the bytes that `part` gave in memory that a device copies from?"""
        return False

    def _downloaded(self, file: File) -> BinaryIO:
        folder = Path(tempfile.gettempdir())
        ensure_space(folder, file.size)
        with space_errors(folder), ExitStack() as stack:
            spool: BinaryIO = stack.enter_context(tempfile.TemporaryFile(prefix="deltackpt-"))
            for chunk in self._repo.stream(file):
                spool.write(chunk)
            spool.flush()
            stack.pop_all()
            return spool

    def ranges(self, file: File, spans: Sequence[Span]) -> list[bytes]:
        """A request for each span that is not empty; where signatures are asked for, of a part that is fetched whole
        and proven first: checksums of tiles withstand no forger."""
        if self._repo.trust is not None:  # [S-SIG-14]
            whole = self._whole(file)
            return [bytes(whole[start:end]) for start, end in spans]
        store = self._repo.store
        return [store.get_range(file.name, start, end - start) if start < end else b"" for start, end in spans]

    def _whole(self, file: File) -> memoryview:
        """`part`, the last KEPT of which are kept."""
        with self._lock:
            if (found := self._proven.get(file)) is None:
                found = self._proven[file] = self.part(file)
                if len(self._proven) > KEPT:
                    self._proven.popitem(last=False)
            return found


def as_source(found: Repository | PartSource) -> PartSource:
    """A repository's parts, or a source as it is."""
    return RepositorySource(found) if isinstance(found, Repository) else found


def host_parts(source: PartSource, files: Sequence[File]) -> Iterator[memoryview]:
    """Whole parts in host memory, each proven by its sha256, in this order; as many at a time as the source serves."""
    return ordered_map(lambda file: to_host(source.part(file)), files, source.parallel)


def hops_between(source: StepSource, start: Link, end: Link) -> tuple[Hop, ...]:
    """The patches of every step after ``start`` up to ``end``, oldest first.

    Raises ChainError ``chain-broken`` where ``end`` does not follow ``start`` by patches alone, ``chain-differs`` where
    a step and its parent do not agree, NotFoundError ``object-missing``.
    """
    hops: list[Hop] = []
    record = source.step(end)
    while record.link != start:
        if record.parent is None or record.parts is None or record.parent.step < start.step:
            have = f"a chain that does not lead from step {start.step} by patches"
            raise ChainError("chain-broken", where=f"step {end.step}, {source.url}", have=have, need="one that does")
        parent = source.step(record.parent)
        if (parent.repository, parent.state) != (record.repository, record.base):
            have = f"a parent of state {parent.state[:16]}, repository {parent.repository}"
            need = f"state {(record.base or '')[:16]}, repository {record.repository}"
            raise ChainError("chain-differs", where=f"step {record.link.step}", have=have, need=need)
        hops.append(Hop(record.repository, parent.link, record.link, parent.state, record.parts))
        record = parent
    return tuple(reversed(hops))
