"""A repository: anchors, patches, manifests and refs in a store, published in the safe order (spec/STORE.md)."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from deltackpt import chain
from deltackpt.digest import TensorDigest
from deltackpt.errors import ChainError, ConflictError, FormatError, NotFoundError, UsageError
from deltackpt.format import digests, layout, manifest
from deltackpt.format.canonical import dumps, loads_strict
from deltackpt.format.layout import Layout
from deltackpt.format.manifest import FORMAT, MAX_MANIFEST, VERSION, File, Link, Manifest
from deltackpt.store import Buffer, Store, open_store

MARKER = "deltackpt.json"
MAX_SMALL = 64 << 10
CACHED = 4096  # manifests kept in memory

_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_STEP = re.compile(r"steps/(\d{8,16})-([0-9a-f]{64})\.json")


@dataclass(frozen=True)
class Ref:
    """A name that points at a step: a branch under ``refs/`` that moves, or a tag under ``tags/`` that stays."""

    name: str
    link: Link
    raw: bytes


class Repository:
    """Reads and publishes. All that it returns was checked against the hash that names it."""

    def __init__(self, store: Store, identity: str) -> None:
        self.store = store
        self.id = identity
        self.load = lru_cache(maxsize=CACHED)(self._load)

    @classmethod
    def open(cls, url: str | os.PathLike[str]) -> Repository:
        """Open an existing repository. Raises NotFoundError ``repository-missing``, FormatError for a broken marker."""
        store = open_store(url)
        try:
            raw = store.get(MARKER, MAX_SMALL)
        except NotFoundError as error:
            raise NotFoundError(
                "repository-missing",
                where=store.url,
                have="no deltackpt.json",
                need="a repository",
                hint="`deltackpt write CHECKPOINT_DIR REPO` makes one.",
            ) from error
        value = loads_strict(raw, limit=MAX_SMALL, where=f"{store.url}/{MARKER}")
        if not isinstance(value, dict) or value.get("format") != FORMAT or not isinstance(value.get("repository"), str):
            raise FormatError("marker-field", where=store.url, have="another deltackpt.json", need="format and repository")
        if value.get("version") != VERSION:
            have = f"version {value.get('version')!r}"
            raise FormatError("version-unknown", where=store.url, have=have, need=f"repository version {VERSION}")
        return cls(store, value["repository"])

    @classmethod
    def open_or_create(cls, url: str | os.PathLike[str]) -> Repository:
        """Open a repository, or make one where there is nothing at all."""
        try:
            return cls.open(url)
        except NotFoundError:
            store = open_store(url)
            if next(iter(store.list("")), None) is not None:
                raise ConflictError(
                    "not-a-repository",
                    where=store.url,
                    have="other files",
                    need="a repository, or an empty place for one",
                    hint="Choose a folder or prefix of its own.",
                ) from None
            identity = secrets.token_hex(16)
            marker = {"format": FORMAT, "version": VERSION, "repository": identity}
            try:
                store.put(MARKER, [dumps(marker)])
            except ConflictError:  # somebody else made it in between
                return cls.open(url)
            return cls(store, identity)

    # Refs

    def ref(self, name: str = "main") -> Ref | None:
        """The branch, or None if nothing was published on it."""
        return self._read_ref(f"refs/{_checked(name)}.json", name)

    def tag(self, name: str) -> Ref | None:
        return self._read_ref(f"tags/{_checked(name)}.json", name)

    def refs(self, prefix: str = "refs/") -> Iterator[Ref]:
        """All branches (``refs/``) or tags (``tags/``)."""
        for info in self.store.list(prefix):
            name = info.name[len(prefix) :].removesuffix(".json")
            if _REF.fullmatch(name) and (ref := self._read_ref(info.name, name)):
                yield ref

    def _read_ref(self, object_name: str, name: str) -> Ref | None:
        try:
            raw = self.store.get(object_name, MAX_SMALL)
        except NotFoundError:
            return None
        value = loads_strict(raw, limit=MAX_SMALL, where=f"{self.store.url}/{object_name}")
        fields = manifest.Fields({"link": value}, f"{self.store.url}/{object_name}")
        link = fields.link("link")
        if link is None:
            fields.refuse("link", "null", "step and id")
        return Ref(name, link, raw)

    def move_ref(self, name: str, old: Ref | None, new: Link) -> None:
        """Compare-and-swap. Raises ConflictError ``ref-moved``."""
        try:
            self.store.swap(f"refs/{_checked(name)}.json", old.raw if old else None, dumps(new.to_dict()))
        except ConflictError as error:
            now = self.ref(name)
            raise ConflictError(
                "ref-moved",
                where=f"{self.store.url}, ref {name}",
                have=f"step {now.link.step}, {now.link.id[:12]}" if now else "no step",
                need=f"step {old.link.step}, {old.link.id[:12]}" if old else "no step yet",
                hint="Another writer published meanwhile; nothing was lost. Look at `deltackpt log`, then write again.",
            ) from error

    # Steps

    def _load(self, link: Link) -> Manifest:
        where = f"{self.store.url}/{link.name}"
        raw = self.store.get(link.name, MAX_MANIFEST)
        if hashlib.sha256(raw).hexdigest() != link.id:
            raise FormatError("manifest-hash", where=where, have="other bytes", need=f"sha256 {link.id}")
        found = manifest.decode(raw, where)
        if (found.step, found.repository) != (link.step, self.id):
            have = f"step {found.step} of repository {found.repository}"
            raise ChainError("manifest-elsewhere", where=where, have=have, need=f"step {link.step} of {self.id}")
        return found

    def steps(self) -> list[Link]:
        """Every step with a manifest, on any branch, in order of step."""
        found = (_STEP.fullmatch(info.name) for info in self.store.list("steps/"))
        return sorted((Link(int(m[1]), m[2]) for m in found if m), key=lambda link: (link.step, link.id))

    def log(self, ref: str = "main") -> list[Manifest]:
        """The chain of a branch, newest first."""
        head = self.ref(ref)
        return chain.walk(head.link, self.load) if head else []

    def find(self, spec: str | int = "latest", ref: str = "main") -> Link:
        """A step by number on the branch ``ref``, by tag, or ``latest``. Raises NotFoundError ``step-missing``."""
        head = self.ref(ref)
        if spec == "latest":
            if head is None:
                raise self._no_step("latest", [])
            return head.link
        if isinstance(spec, str) and not spec.isdigit():
            tag = self.tag(spec)
            if tag is None:
                raise self._no_step(f"tag {spec!r}", [])
            return tag.link
        number = int(spec)
        steps: list[int] = []
        link = head.link if head else None
        while link is not None and link.step >= number:
            if link.step == number:
                return link
            steps.append(link.step)
            link = self.load(link).parent
        raise self._no_step(str(number), [*steps[-1:], *([link.step] if link else [])])

    def _no_step(self, what: str, near: list[int]) -> NotFoundError:
        hint = f"The nearest steps are {' and '.join(map(str, near))}." if near else "`deltackpt log` lists what is there."
        return NotFoundError("step-missing", where=self.store.url, have="no such step", need=f"step {what}", hint=hint)

    # Objects

    def read(self, file: File, limit: int) -> bytes:
        """A whole object; its size and sha256 are those that the file entry says."""
        raw = self.store.get(file.name, limit)
        if len(raw) != file.size or hashlib.sha256(raw).hexdigest() != file.sha256:
            raise object_differs(f"{self.store.url}/{file.name}", len(raw), file)
        return raw

    def layout(self, of: Manifest) -> Layout:
        return self._layout(of.layout)

    @lru_cache(maxsize=4)  # noqa: B019
    def _layout(self, file: File) -> Layout:
        return layout.decode(self.read(file, layout.MAX_LAYOUT), f"{self.store.url}/{file.name}")

    def digests(self, of: Manifest) -> dict[str, TensorDigest]:
        raw = self.read(of.digests, digests.MAX_DIGESTS)
        return digests.decode(raw, self.layout(of), of.state, f"{self.store.url}/{of.digests.name}")

    def put(self, name: str, chunks: Iterable[Buffer]) -> File:
        written = self.store.put(name, chunks)
        return File(written.name, written.size, written.sha256)

    def publish(self, new: Manifest, ref: str, old: Ref | None) -> Link:
        """Commit a step whose objects are durable: the manifest first, then the ref.

        Raises ConflictError ``ref-moved`` if ``ref`` is no longer ``old``; the manifest then stays behind, unreachable,
        until gc.
        """
        link = new.link
        self.store.put(link.name, [new.encode()])
        self.move_ref(ref, old, link)
        return link


def object_differs(where: str, size: int, file: File) -> FormatError:
    return FormatError(
        "object-hash",
        where=where,
        have=f"other bytes ({size:,})",
        need=f"{file.size:,} bytes of sha256 {file.sha256[:16]}…",
        hint="The object was changed or damaged in the store. `deltackpt verify` shows what can still be restored.",
    )


def new_folder(kind: str, step: int) -> str:
    """A name never used before: ``anchors/<step>-<nonce>`` and the like."""
    return f"{kind}/{step:08d}-{secrets.token_hex(6)}"


def _checked(name: str) -> str:
    if not _REF.fullmatch(name):
        raise UsageError("ref-name", where="ref", have=repr(name)[:120], need="letters, digits, '.', '_' and '-'")
    return name


