"""A repository: anchors, patches, manifests and refs in a store, published in the safe order (spec/STORE.md).

`Repository` is the face of its parts: `objects`, `refs`, `manifests`, `states`, `find` and `commit`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import Thread
from typing import TYPE_CHECKING

from deltackpt.errors import NotFoundError
from deltackpt.format.edge import Edge
from deltackpt.format.manifest import File, Link, Manifest
from deltackpt.repository import chain
from deltackpt.repository.chain import Plan
from deltackpt.repository.commit import Commits, PublishLease
from deltackpt.repository.edges import StoredEdges, record_of
from deltackpt.repository.find import StepFinder
from deltackpt.repository.manifests import FAR, Manifests, links_of
from deltackpt.repository.marker import create_marker, read_marker
from deltackpt.repository.objects import Objects
from deltackpt.repository.refs import Ref, Refs
from deltackpt.repository.secure import Security
from deltackpt.repository.states import States
from deltackpt.store import Buffer, Store, open_store

if TYPE_CHECKING:  # these load numpy, which a log does without
    from deltackpt.format.layout import Layout
    from deltackpt.format.state_digest import TensorDigest
    from deltackpt.repository.signer import RecordSigner
    from deltackpt.repository.trust import Trust
    from deltackpt.signing.keys import Signer
    from deltackpt.signing.policy import TrustPolicy


class Repository:
    """Reads and publishes. All that it returns was checked against the hash that names it.

    ``pins``: whether readers take a lease on what they read. One that follows a store where requests are counted does
    without: what it reads is new, and should it be collected nevertheless, it looks for another way.
    ``writer``: the lease under which steps are published, where one is held from step to step (`writer_lease`).
    ``manifests``, ``states``: what is loaded, with what is kept of it in memory. ``trust``: whose signatures it asks
    for, where it does (`secure`); then branches, tags, steps that are asked for and edges are checked by it.
    """

    def __init__(self, store: Store, identity: str) -> None:
        self.id = identity
        self.pins = True
        self.writer: PublishLease | None = None
        self.trust: Trust | None = None
        self._objects = Objects(store)
        self._refs = Refs(self._objects)
        self.manifests = Manifests(self._objects, identity)
        self.states = States(self._objects)
        self._finder = StepFinder(self._objects, self._refs, self.manifests, identity)
        self._commits = Commits(self._objects, self._refs, self.manifests)

    @property
    def store(self) -> Store:
        """The store that all of it is in. It can be replaced by another connection to the same place."""
        return self._objects.store

    @store.setter
    def store(self, store: Store) -> None:
        self._objects.store = store

    @classmethod
    def open(cls, url: str | os.PathLike[str]) -> Repository:
        """Open an existing repository, `secure` as the environment says. Raises NotFoundError ``repository-missing``,
        ``bucket-missing``, FormatError for a broken marker.
        """
        return cls.at(open_store(url)).secure()

    @classmethod
    def at(cls, store: Store) -> Repository:
        """The same, in a store that is open, and whatever the environment says of keys."""
        return cls(store, read_marker(store))

    @classmethod
    def open_or_create(cls, url: str | os.PathLike[str]) -> Repository:
        """Open a repository, or make one where there is nothing at all. Raises ConflictError ``not-a-repository``
        where there are other objects, and what `open` raises for a broken marker.
        """
        return cls.at_or_create(open_store(url)).secure()

    @classmethod
    def at_or_create(cls, store: Store) -> Repository:
        """The same, in a store that is open."""
        try:
            return cls.at(store)
        except NotFoundError:
            return cls(store, create_marker(store))

    # Signatures

    def secure(
        self,
        trust: str | os.PathLike[str] | TrustPolicy | None = None,
        *,
        max_age: float | None = None,
        sign: str | os.PathLike[str] | Signer | None = None,
    ) -> Repository:
        """Believe the store only what is signed by keys that are trusted, and sign what is published -> itself.

        ``trust``, ``max_age`` (seconds) and ``sign`` are those of `trust_policy` and `keys.signer`. None stands for
        what was asked for before, or for the environment (``DELTACKPT_TRUST``, ``DELTACKPT_MAX_AGE``,
        ``DELTACKPT_SIGN_KEY``), and for neither where that says nothing. Raises UsageError ``trust-file``,
        ``sign-key``, ``usage``, ExtraMissingError, ChainError ``repository-replaced``.
        """
        wanted = Security(trust, max_age, sign)
        if wanted.wanted:
            before = self.trust, self._commits.signer
            self.trust, self._commits.signer = wanted.open(self._objects, self.id, self.load, before)
            if self.trust is not None:
                self._refs.check, self._finder.check = self.trust.check_name, self.trust.check_step
        return self

    @property
    def signer(self) -> RecordSigner | None:
        """What signs the steps that are published, None where nothing does."""
        return self._commits.signer

    def check_again(self, ref: str) -> None:
        """A branch that has not moved. Raises ChainError ``signature-stale`` where `trust` says so."""
        if self.trust is not None:
            self.trust.check_again(f"refs/{ref}")

    # Refs

    def ref(self, name: str = "main") -> Ref | None:
        """The branch, or None if nothing was published on it. Raises FormatError, UsageError ``ref-name``."""
        return self._refs.branch(name)

    def head(self, name: str = "main") -> Ref | None:
        """`ref`, where None stands for a branch that begins.

        Raises NotFoundError ``ref-missing`` if there is no ref at all, and yet steps that follow others: it was lost,
        and a writer that began anew would leave them behind.
        """
        return self._finder.head(name)

    def branch(self, name: str = "main") -> Ref | None:
        """`ref`, where None stands for a repository in which nothing was published yet.

        Raises NotFoundError ``ref-missing``, with the refs that there are, and what `confirm_place` raises.
        """
        return self._finder.branch(name)

    def absent(self, name: str = "main") -> NotFoundError:
        """Why a branch that was asked for is not there: ``ref-missing``, or ``branch-empty`` where nothing was
        published at all. Raises what `confirm_place` raises.
        """
        return self._finder.absent(name)

    def lost(self, name: str = "main") -> NotFoundError:
        """`absent` for a branch that was there before, so that ``branch-empty`` is ``ref-missing`` too."""
        return self._finder.lost(name)

    def confirm_place(self) -> None:
        """Ask the store whether this repository is still there: one small request.

        Raises NotFoundError ``repository-missing``, ``bucket-missing``, ChainError ``repository-replaced`` where
        another repository is, and what `open` raises for a broken marker.
        """
        self._finder.confirm_place()

    def tag(self, name: str) -> Ref | None:
        """The tag, or None. Raises FormatError, UsageError ``ref-name``."""
        return self._refs.tag(name)

    def unproven(self, name: str) -> Ref | None:
        """The branch ``refs/NAME`` or tag ``tags/NAME``, with any signature or none, for the caller to judge;
        None if it is not there.

        Raises FormatError, UsageError ``ref-name``.
        """
        return self._refs.unproven(name)

    def refs(self, prefix: str = "refs/") -> Iterator[Ref]:
        """All branches (``refs/``) or tags (``tags/``). Raises FormatError for one that is damaged."""
        return self._refs.all(prefix)

    def ref_names(self, prefix: str = "refs/") -> Iterator[str]:
        """The names of all branches or tags, damaged ones too."""
        return self._refs.names(prefix)

    def parse_ref(self, name: str, raw: bytes) -> Ref:
        """The branch whose object has these bytes. Raises FormatError, UsageError ``ref-name``."""
        return self._refs.parse_branch(name, raw)

    def put_tag(self, name: str, link: Link) -> Ref:
        """Name a step that is there. Raises ConflictError ``tag-exists``, UsageError ``ref-name``."""
        made = self._refs.put_tag(name, link)
        if self.signer is not None:
            self.signer.again(f"tags/{name}", link, None)
        return made

    def delete_tag(self, name: str) -> Ref:
        """Remove a tag; its step stays until gc. Raises NotFoundError ``tag-missing``."""
        return self._refs.delete_tag(name)

    def move_ref(self, name: str, old: Ref | None, new: Link) -> None:
        """Compare-and-swap. Raises ConflictError ``ref-moved``, which says what the ref is at."""
        self._refs.move(name, old, new, self.load)

    # Steps

    def load(self, link: Link) -> Manifest:
        """The manifest of a step, from memory if it was loaded before.

        Raises NotFoundError ``object-missing``, FormatError ``manifest-hash`` and what `manifest.decode` raises,
        ChainError ``manifest-elsewhere``.
        """
        return self.manifests.load(link)

    def confirm(self, link: Link) -> None:
        """Ask the store whether a step is there; one that is not in memory is loaded. Raises what `load` raises."""
        self.manifests.confirm(link)

    def steps(self) -> list[Link]:
        """Every step with a manifest, on any branch, in order of step."""
        return self.manifests.links()

    @staticmethod
    def listed(names: Iterable[str]) -> list[Link]:
        """The steps whose manifests have these names, in order of step; other names are passed over."""
        return links_of(names)

    def log(self, ref: str = "main") -> list[Manifest]:
        """The chain of a branch, newest first, as far as it was not collected."""
        head = self.ref(ref)
        return self.walk(head.link) if head else []

    def walk(self, target: Link) -> list[Manifest]:
        """The chain of a step, newest first, as far as it was not collected; over a network many are read together."""
        return list(chain.walk(target, self.manifests.loading_ahead(target, FAR), self.edges()))

    def edges(self) -> StoredEdges:
        """Folds and later anchors, as they are listed now."""
        if self.trust is not None:
            return StoredEdges(self.store, self.id, self.trust.vouches, self.manifests.packs)
        return StoredEdges(self.store, self.id, packs=self.manifests.packs)

    def resolve(self, target: Link, *, have: Link | None = None) -> Plan:
        """`chain.resolve` over manifests and edges, which are not asked for where one patch is all that is missing."""
        if have is not None and (plan := chain.next_step(target, self.load, have)) is not None:
            return plan
        if have is not None and (prefetch := self.manifests.prefetch(have, target)) is not None:
            prefetch.join()
        load = self.load if have is not None else self.manifests.loading_ahead(target, FAR)
        return chain.resolve(target, load, have=have, edges=self.edges())

    def find(self, spec: str | int | Link = "latest", ref: str = "main") -> Link:
        """A step by number on the branch ``ref``, by ``number-id`` on any, by tag, or ``latest``.

        Beyond what was collected, a number that only one step has is that step. Raises NotFoundError ``step-missing``
        with the nearest steps that are there, ConflictError ``step-ambiguous``, and what `branch` raises. A link is
        what it says, there or not.
        """
        return self._finder.find(spec, ref)

    def find_unproven(self, spec: str | int, ref: str = "main") -> Link:
        """`find`, with any signatures or none of step and branch, for the caller to judge."""
        plain = StepFinder(self._objects, Refs(self._objects), self.manifests, self.id)
        return plain.find(spec, ref)

    def gone(self, step: int) -> NotFoundError:
        """The error for a step that is not there, or no longer; names the nearest ones that are."""
        return self._finder.gone(step)

    # Objects

    def read(self, file: File, limit: int) -> bytes:
        """A whole object of at most ``limit`` bytes; its size and sha256 are those that the file entry says.

        Raises FormatError ``object-hash``, NotFoundError ``object-missing``.
        """
        return self._objects.read(file, limit)

    def stream(self, file: File) -> Iterator[bytes]:
        """An object in pieces, proven at its end: FormatError ``object-hash`` there, or once it has too many bytes."""
        return self._objects.stream(file)

    def prove(self, files: Iterable[File]) -> None:
        """Read objects and hash them. Raises FormatError ``object-hash`` at the first that has other bytes."""
        self._objects.prove(files)

    def put(self, name: str, chunks: Iterable[Buffer]) -> File:
        """Create an object; -> its name, size in bytes and sha256. Raises what `Store.put` raises."""
        return self._objects.put(name, chunks)

    # Layouts and digests

    def layout(self, of: Manifest) -> Layout:
        """The layout of a step. Raises FormatError, NotFoundError ``object-missing``."""
        return self.states.layout(of.layout)

    def layout_of(self, file: File) -> Layout:
        """The layout in an object. Raises FormatError, NotFoundError ``object-missing``."""
        return self.states.layout(file)

    def digests(self, of: Manifest) -> Mapping[str, TensorDigest]:
        """The digests of a step's tensors, by name, checked against its state digest. Raises FormatError,
        NotFoundError ``object-missing``.
        """
        return self.states.digests(of)

    def know(self, of: Manifest, digests: Mapping[str, TensorDigest]) -> None:
        """The digests of a step that this process has just published need not be read."""
        self.states.add(of, digests)

    def prefetch(self, of: Manifest, have: Link | None = None) -> Thread:
        """Begin to read the digests and the layout of a step, and the manifests that lead there from ``have``.

        An error is raised to the caller that asks for the same later.
        """
        if have is not None:
            self.manifests.prefetch(have, of.link)
        return self.states.prefetch(of)

    # Publishing

    def put_edge(self, new: Edge) -> str:
        """Record a fold, or an anchor written later, whose files are durable; -> the name of the record."""
        self.store.put(new.name, [new.encode()])
        if self.signer is not None:
            self.signer.again(None, record_of(new.name), None)
        return new.name

    def publish(self, new: Manifest, ref: str, old: Ref | None, check: Callable[[], None] = lambda: None) -> Link:
        """Commit a step whose objects are durable: the manifest first, then the ref. ``check`` is called in between,
        and raises if the objects may be gone.

        Raises ConflictError ``ref-moved`` if ``ref`` is no longer ``old``; the manifest then stays behind, unreachable,
        until gc. ``ref-forked`` where another writer published the same step on a store without compare-and-swap.
        """
        return self._commits.publish(new, ref, old, check)
