"""The commit of a step: its manifest, then the ref (STORE section "Publishing")."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from deltackpt.errors import ConflictError
from deltackpt.format.manifest import Link, Manifest
from deltackpt.repository.manifests import Manifests
from deltackpt.repository.objects import Objects
from deltackpt.repository.refs import Ref, Refs
from deltackpt.repository.signatures import put_signature

if TYPE_CHECKING:
    from deltackpt.repository.signer import RecordSigner


class PublishLease(Protocol):
    """A lease under which a writer publishes step after step; `writer_lease.WriterLease` is the one there is."""

    def step_if_free(self, parent: Link | None) -> AbstractContextManager[bool]:
        """While a step that follows ``parent`` is made, unless another one is in progress; yields whether it is."""

    def check(self) -> None:
        """Raise ConflictError ``lease-lapsed`` if what was put for the step in progress may be gone."""

    def published(self, link: Link) -> None:
        """The step in progress is what the next one follows."""


class Commits:
    """Publishes steps whose objects are durable."""

    def __init__(self, objects: Objects, refs: Refs, manifests: Manifests) -> None:
        self._objects, self._refs, self._manifests = objects, refs, manifests
        self.signer: RecordSigner | None = None

    def publish(self, new: Manifest, ref: str, old: Ref | None, check: Callable[[], None]) -> Link:
        """Put the manifest and its signature, call ``check``, move the ref, see `Repository.publish`."""
        link, store = new.link, self._objects.store
        alone = store.capabilities.swap
        before = set() if alone else {*self._manifests.numbered(link.step)}
        signed = None if self.signer is None else self.signer.head(ref, link, old.link if old else None)
        store.put(link.name, [new.encode()])
        if signed is not None:
            put_signature(store, signed)  # [S-SIG-2]
        check()
        self._refs.move(ref, old, link, self._manifests.load)
        if self.signer is not None and signed is not None:
            self.signer.moved(signed)
        self._manifests.cache.add(link, new)
        if not alone and (others := {*self._manifests.numbered(link.step)} - before - {link}):
            raise self._forked(ref, link, others)
        return link

    def _forked(self, ref: str, ours: Link, others: set[Link]) -> ConflictError:
        """Another writer published the same step meanwhile, on a store that could not keep the two apart."""
        now, ids = self._refs.branch(ref), ", ".join(sorted(link.id[:12] for link in others))
        return ConflictError(
            "ref-forked",
            where=f"{self._objects.store.url}, ref {ref}",
            have=f"two writers at step {ours.step}: {ours.id[:12]} is ours, {ids} another's",
            need="one writer a ref, since this store has no compare-and-swap",
            hint=f"Both steps are whole, and the ref is at {now.link.id[:12] if now else 'none'}. Stop one writer; the "
            "other goes on from the ref.",
        )
