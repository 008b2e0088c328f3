"""A repository: anchors, patches, manifests and refs in a store, published in the safe order (spec/STORE.md)."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock, Thread, local
from typing import TYPE_CHECKING, Any

from deltackpt.errors import ChainError, ConflictError, DeltackptError, FormatError, NotFoundError, UsageError
from deltackpt.format import manifest
from deltackpt.format.canonical import dumps, loads_strict
from deltackpt.format.edge import Edge
from deltackpt.format.manifest import FORMAT, MAX_MANIFEST, REPOSITORY_ID, VERSION, File, Link, Manifest
from deltackpt.repository import chain
from deltackpt.repository.chain import Plan
from deltackpt.repository.edges import StoredEdges
from deltackpt.store import Buffer, Store, open_store
from deltackpt.store.base import DAMAGED

if TYPE_CHECKING:  # these load numpy, which a log does without
    from deltackpt.format.layout import Layout
    from deltackpt.format.state_digest import TensorDigest

MARKER = "deltackpt.json"
MAX_SMALL = 64 << 10
CACHED = 4096  # manifests kept in memory
STATES = 4  # layouts, and steps' digests, kept in memory
FAR = 8  # steps from which on manifests are loaded together
READERS = 8

_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_STEP = re.compile(r"steps/(\d{8,16})-([0-9a-f]{64})\.json")
_EXACT = re.compile(r"(\d{1,16})-([0-9a-f]{6,64})")


@dataclass(frozen=True)
class Ref:
    """A name that points at a step: a branch under ``refs/`` that moves, or a tag under ``tags/`` that stays."""

    name: str
    link: Link
    raw: bytes

    @classmethod
    def to(cls, name: str, link: Link) -> Ref:
        """The ref that points at ``link``."""
        return cls(name, link, dumps(link.to_dict()))


class Repository:
    """Reads and publishes. All that it returns was checked against the hash that names it.

    ``pins``: whether readers take a lease on what they read. One that follows a store where requests are counted does
    without: what it reads is new, and should it be collected nevertheless, it looks for another way.
    ``writer``: the lease under which steps are published, where it is kept from one to the next (`writer_lease`).
    """

    def __init__(self, store: Store, identity: str) -> None:
        self.store = store
        self.id = identity
        self.pins = True
        self.writer: Any = None
        self.load = lru_cache(maxsize=CACHED)(self._load)
        self.layout_of = lru_cache(maxsize=STATES)(self._layout_of)
        self._states: OrderedDict[tuple[File, File, str], dict[str, TensorDigest]] = OrderedDict()
        self._coming: tuple[tuple[Link, Link], Thread] | None = None
        self._here = local()  # what this thread loaded last
        self._reading = Lock()  # one reads layout and digests, and whoever wants the same waits for that
        self._begun = Lock()

    @classmethod
    def open(cls, url: str | os.PathLike[str]) -> Repository:
        """Open an existing repository. Raises NotFoundError ``repository-missing``, FormatError for a broken marker."""
        return cls.at(open_store(url))

    @classmethod
    def at(cls, store: Store) -> Repository:
        """The same, in a store that is open."""
        try:
            raw = store.get(MARKER, MAX_SMALL)
        except NotFoundError as error:
            raise NotFoundError(
                "repository-missing",
                where=store.url,
                have="no deltackpt.json",
                need="a repository",
                hint="`deltackpt write CHECKPOINT_DIR REPO` makes one where there is nothing. If it was lost, "
                "`deltackpt mirror MIRROR REPO --repair` puts it back.",
            ) from error
        value = loads_strict(raw, limit=MAX_SMALL, where=f"{store.url}/{MARKER}")
        if (
            not isinstance(value, dict)
            or value.get("format") != FORMAT
            or not REPOSITORY_ID.fullmatch(str(value.get("repository")))
        ):
            raise FormatError(
                "marker-field", where=store.url, have="another deltackpt.json", need="format and repository"
            )
        if type(value.get("version")) is not int or value["version"] != VERSION:
            have = f"version {value.get('version')!r}"
            raise FormatError("version-unknown", where=store.url, have=have, need=f"repository version {VERSION}")
        if value.keys() != {"format", "repository", "version"} or dumps(value) != raw:
            have, need = "more, or in another form", "canonical JSON of three fields"
            raise FormatError("marker-field", where=store.url, have=have, need=need)
        return cls(store, value["repository"])

    @classmethod
    def open_or_create(cls, url: str | os.PathLike[str]) -> Repository:
        """Open a repository, or make one where there is nothing at all."""
        return cls.at_or_create(open_store(url))

    @classmethod
    def at_or_create(cls, store: Store) -> Repository:
        """The same, in a store that is open."""
        try:
            return cls.at(store)
        except NotFoundError:
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
                return cls.at(store)
            return cls(store, identity)

    # Refs

    def ref(self, name: str = "main") -> Ref | None:
        """The branch, or None if nothing was published on it."""
        return self._read_ref(f"refs/{_checked(name)}.json", name)

    def head(self, name: str = "main") -> Ref | None:
        """`ref`, where None stands for a branch that begins.

        Raises NotFoundError ``ref-missing`` if there is no ref at all, and yet steps that follow others: it was lost,
        and who began anew would leave them behind.
        """
        if (found := self.ref(name)) is not None or next(self.ref_names(), None) is not None:
            return found
        for link in reversed(self.steps()):  # a first publish that was killed leaves steps without parents
            if self.load(link).parent is None:
                continue
            newest = f"{link.step}-{link.id[:12]}"
            raise NotFoundError(
                "ref-missing",
                where=f"{self.store.url}, ref {name}",
                have=f"no ref at all, and steps up to {link.step}",
                need="the ref that led to them",
                hint=f"It was lost, or removed. `deltackpt mirror MIRROR REPO` sets it as a mirror has it. "
                f"`--step {newest}` reads that step; "
                f"`deltackpt write CHECKPOINT_DIR REPO --resume-from {newest}` goes on from it, with a new ref.",
            )
        return None

    def tag(self, name: str) -> Ref | None:
        return self._read_ref(f"tags/{_checked(name)}.json", name)

    def refs(self, prefix: str = "refs/") -> Iterator[Ref]:
        """All branches (``refs/``) or tags (``tags/``). Raises FormatError for one that is damaged."""
        for name in self.ref_names(prefix):
            if ref := self._read_ref(f"{prefix}{name}.json", name):
                yield ref

    def ref_names(self, prefix: str = "refs/") -> Iterator[str]:
        """Their names, whatever is in them."""
        for info in self.store.list(prefix):
            name = info.name[len(prefix) :].removesuffix(".json")
            if _REF.fullmatch(name) and info.name.endswith(".json"):
                yield name

    def _read_ref(self, object_name: str, name: str) -> Ref | None:
        try:
            raw = self.store.get(object_name, MAX_SMALL)
        except NotFoundError:
            return None
        return self._parse_ref(object_name, name, raw)

    def parse_ref(self, name: str, raw: bytes) -> Ref:
        """The branch whose object has these bytes. Raises FormatError."""
        return self._parse_ref(f"refs/{_checked(name)}.json", name, raw)

    def _parse_ref(self, object_name: str, name: str, raw: bytes) -> Ref:
        try:
            return self._decode_ref(object_name, name, raw)
        except FormatError as error:
            if not error.hint:
                error.hint = (
                    "Which step it named, only another copy can tell: remove the object, then `deltackpt mirror MIRROR "
                    "REPO` sets it as a mirror has it."
                )
            raise

    def _decode_ref(self, object_name: str, name: str, raw: bytes) -> Ref:
        value = loads_strict(raw, limit=MAX_SMALL, where=f"{self.store.url}/{object_name}")
        fields = manifest.Fields({"link": value}, f"{self.store.url}/{object_name}")
        link = fields.link("link")
        if link is None:
            fields.refuse("link", "null", "step and id")
        if dumps(value) != raw:
            where = f"{self.store.url}/{object_name}"
            raise FormatError("manifest-canonical", where=where, have="JSON in another form", need="canonical JSON")
        return Ref(name, link, raw)

    def put_tag(self, name: str, link: Link) -> Ref:
        """Name a step that is there. Raises ConflictError ``tag-exists``, UsageError ``ref-name``."""
        if name == "latest" or (name.isascii() and name.isdigit()) or _EXACT.fullmatch(name):
            need = "a name that no step could be meant by"
            raise UsageError("ref-name", where="tag", have=repr(name), need=need)
        made = Ref.to(name, link)
        try:
            self.store.put(f"tags/{_checked(name)}.json", [made.raw])
        except ConflictError as error:
            now = self.tag(name)
            have = f"tag {name} at step {now.link.step}, {now.link.id[:12]}" if now else f"tag {name}"
            hint = "A tag never moves. Choose another name, or delete it first."
            raise ConflictError("tag-exists", where=self.store.url, have=have, need="a new name", hint=hint) from error
        return made

    def delete_tag(self, name: str) -> Ref:
        """Remove a tag; its step stays until gc. Raises NotFoundError ``tag-missing``."""
        if (found := self.tag(name)) is None:
            known = ", ".join(sorted(tag.name for tag in self.refs("tags/"))[:8])
            hint = f"The tags are {known}." if known else "There is no tag."
            need = f"tag {name!r}"
            raise NotFoundError("tag-missing", where=self.store.url, have="no such tag", need=need, hint=hint)
        self.store.delete(f"tags/{name}.json")
        return found

    def move_ref(self, name: str, old: Ref | None, new: Link) -> None:
        """Compare-and-swap. Raises ConflictError ``ref-moved``, which says who holds the ref."""
        try:
            self.store.swap(f"refs/{_checked(name)}.json", old.raw if old else None, Ref.to(name, new).raw)
        except ConflictError as error:
            now = self.ref(name)
            if now is not None and now.link == new:  # the swap was answered by an error, and took effect all the same
                return
            raise ConflictError(
                "ref-moved",
                where=f"{self.store.url}, ref {name}",
                have=f"step {now.link.step}, {now.link.id[:12]}{self._writer(now.link)}" if now else "no step",
                need=f"step {old.link.step}, {old.link.id[:12]}" if old else "no step yet",
                hint="Another writer published meanwhile; nothing was lost. Look at `deltackpt log`, then write again.",
            ) from error

    def _writer(self, link: Link) -> str:
        """Who published a step, as far as that can be said."""
        try:
            found = self.load(link)
        except (FormatError, ChainError, NotFoundError):
            return ""
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.time))
        return f", published by {found.producer[:80]} at {when}"

    # Steps

    def confirm(self, link: Link) -> None:
        """Ask the store whether a step is there; one that was never loaded is loaded by that.

        Raises NotFoundError ``object-missing``.
        """
        self._here.loaded = None
        self.load(link)
        if self._here.loaded != link:  # it came from memory
            self.store.stat(link.name)

    def _learn(self, published: Manifest) -> None:
        """What this process has just published need not be loaded."""
        self._here.published = published
        self.load(published.link)
        self._here.published = None

    def _load(self, link: Link) -> Manifest:
        known: Manifest | None = getattr(self._here, "published", None)
        if known is not None and known.link == link:
            return known
        where = f"{self.store.url}/{link.name}"
        raw = self.store.get(link.name, MAX_MANIFEST)
        self._here.loaded = link
        if hashlib.sha256(raw).hexdigest() != link.id:
            raise FormatError("manifest-hash", where=where, have="other bytes", need=f"sha256 {link.id}")
        found = manifest.decode(raw, where)
        if (found.step, found.repository) != (link.step, self.id):
            have = f"step {found.step} of repository {found.repository}"
            raise ChainError("manifest-elsewhere", where=where, have=have, need=f"step {link.step} of {self.id}")
        return found

    def steps(self) -> list[Link]:
        """Every step with a manifest, on any branch, in order of step."""
        return self.listed(info.name for info in self.store.list("steps/"))

    @staticmethod
    def listed(names: Iterable[str]) -> list[Link]:
        """The steps whose manifests have these names, in order of step; other names are passed over."""
        found = (_STEP.fullmatch(name) for name in names)
        return sorted((Link(int(m[1]), m[2]) for m in found if m), key=lambda link: (link.step, link.id))

    def log(self, ref: str = "main") -> list[Manifest]:
        """The chain of a branch, newest first, as far as it was not collected."""
        head = self.ref(ref)
        return list(chain.walk(head.link, self.load, self.edges())) if head else []

    def edges(self) -> StoredEdges:
        """Folds and later anchors, as they are listed now."""
        return StoredEdges(self.store, self.id)

    def resolve(self, target: Link, *, have: Link | None = None) -> Plan:
        """`chain.resolve` over manifests and edges, which are not asked for where one patch is all that is missing."""
        if have is not None and (plan := chain.next_step(target, self.load, have)) is not None:
            return plan
        if have is not None and (coming := self.bring_chain(have, target)) is not None:
            coming.join()
        return chain.resolve(target, self.load, have=have, edges=self.edges())

    def bring_chain(self, have: Link, target: Link) -> Thread | None:
        """Begin to read many manifests at once, where each takes a request and they would be followed one by one.

        Errors are those of whoever asks for them. Who begins the same again gets what was begun.
        """
        store = self.store.capabilities
        if target.step - have.step <= FAR or store.local or store.pause:
            return None
        with self._begun:
            if self._coming is None or self._coming[0] != (have, target):
                thread = Thread(target=self._load_between, args=(have, target), name="deltackpt-chain", daemon=True)
                self._coming = (have, target), thread
                thread.start()
            return self._coming[1]

    def _load_between(self, have: Link, target: Link) -> None:
        from deltackpt.util.parallel import ordered_map

        def attempt(link: Link) -> None:
            with suppress(DeltackptError):  # whoever needs it says what is wrong with it
                self.load(link)

        with suppress(DeltackptError):
            links = [link for link in self.steps() if have.step < link.step <= target.step]
            list(ordered_map(attempt, links[-CACHED:], READERS))

    def find(self, spec: str | int | Link = "latest", ref: str = "main") -> Link:
        """A step by number on the branch ``ref``, by ``number-id`` on any, by tag, or ``latest``.

        Beyond what was collected, a number that only one step has is that step. Raises NotFoundError ``step-missing``
        with the nearest steps that are there, ConflictError ``step-ambiguous``. A link is what it says, there or not.
        """
        if isinstance(spec, Link):
            return spec
        if spec == "latest":
            if (newest := self.head(ref)) is None:
                raise self._no_step("step latest", [])
            return newest.link
        if isinstance(spec, str) and not (spec.isascii() and spec.isdigit()):
            if (exact := _EXACT.fullmatch(spec)) is not None:
                return self._only(
                    spec, [link for link in self._numbered(int(exact[1])) if link.id.startswith(exact[2])]
                )
            if (tag := self.tag(spec)) is not None:
                return tag.link
            raise self._no_step(f"tag {spec!r}", [])
        number, head = int(spec), self.head(ref)
        after = None
        link = head.link if head else None
        while link is not None and link.step >= number:
            if link.step == number:
                return link
            after = link
            try:
                link = self.load(link).parent
            except NotFoundError:
                if after == (head.link if head else None):
                    raise
                return self._only(number, self._numbered(number))
        near = [found.step for found in (after, link) if found is not None]
        raise self._no_step(f"step {number}", near)

    def _numbered(self, step: int) -> list[Link]:
        """Every step of a number, on any branch."""
        found = (_STEP.fullmatch(info.name) for info in self.store.list(f"steps/{step:08d}-"))
        return [Link(int(m[1]), m[2]) for m in found if m]

    def _only(self, spec: str | int, found: list[Link]) -> Link:
        if len(found) == 1:
            return found[0]
        if found:
            ids = ", ".join(f"{link.step}-{link.id[:12]}" for link in found[:4])
            have = f"{len(found)} steps that could be meant"
            raise ConflictError(
                "step-ambiguous", where=self.store.url, have=have, need="one", hint=f"Name one of {ids}."
            )
        raise self.gone(int(str(spec).partition("-")[0]))

    def gone(self, step: int) -> NotFoundError:
        """The error for a step that is not there, or no longer; names the nearest ones that are."""
        steps = [link.step for link in self.steps()]
        near = [max((s for s in steps if s < step), default=None), min((s for s in steps if s > step), default=None)]
        return self._no_step(f"step {step}", [s for s in near if s is not None])

    def _no_step(self, what: str, near: list[int]) -> NotFoundError:
        hint = "`deltackpt log` lists what is there."
        if near:
            hint = f"The nearest step{'s are' if len(near) > 1 else ' is'} {' and '.join(map(str, near))}."
        return NotFoundError("step-missing", where=self.store.url, have="no such step", need=what, hint=hint)

    # Objects

    def read(self, file: File, limit: int) -> bytes:
        """A whole object; its size and sha256 are those that the file entry says."""
        raw = self.store.get(file.name, limit)
        if len(raw) != file.size or hashlib.sha256(raw).hexdigest() != file.sha256:
            raise object_differs(f"{self.store.url}/{file.name}", len(raw), file)
        return raw

    def stream(self, file: File) -> Iterator[bytes]:
        """An object in pieces, proven at its end: FormatError ``object-hash`` there, or once it has too many bytes."""
        found, size = hashlib.sha256(), 0
        for chunk in self.store.read(file.name):
            found.update(chunk)
            size += len(chunk)
            if size > file.size:
                break
            yield chunk
        if size != file.size or found.hexdigest() != file.sha256:
            raise object_differs(f"{self.store.url}/{file.name}", size, file)

    def prove(self, files: Iterable[File]) -> None:
        """Read objects and hash them. Raises FormatError ``object-hash`` at the first that is another."""
        for file in files:
            for _ in self.stream(file):
                pass

    def layout(self, of: Manifest) -> Layout:
        with self._reading:
            return self.layout_of(of.layout)

    def bring_states(self, of: Manifest, have: Link | None = None) -> Thread:
        """Begin to read the digests of a step, and the layout, and what leads there from ``have``.

        Errors are those of whoever asks for it.
        """
        if have is not None:
            self.bring_chain(have, of.link)

        def bring() -> None:
            with suppress(BaseException):
                self.digests(of)

        thread = Thread(target=bring, name="deltackpt-states", daemon=True)
        thread.start()
        return thread

    def _layout_of(self, file: File) -> Layout:
        from deltackpt.format import layout

        return layout.decode(self.read(file, layout.MAX_LAYOUT), f"{self.store.url}/{file.name}")

    def digests(self, of: Manifest) -> dict[str, TensorDigest]:
        with self._reading:
            if (found := self._states.get(_state_key(of))) is None:
                from deltackpt.format import digests

                raw, where = self.read(of.digests, digests.MAX_DIGESTS), f"{self.store.url}/{of.digests.name}"
                found = digests.decode(raw, self.layout_of(of.layout), of.state, where)
            self._keep(of, found)
            return dict(found)

    def know(self, of: Manifest, digests: dict[str, TensorDigest]) -> None:
        """The digests of a step that this process has just published."""
        with self._reading:
            self._keep(of, dict(digests))

    def _keep(self, of: Manifest, digests: dict[str, TensorDigest]) -> None:
        self._states.pop(_state_key(of), None)
        self._states[_state_key(of)] = digests
        if len(self._states) > STATES:
            self._states.popitem(last=False)

    def put(self, name: str, chunks: Iterable[Buffer]) -> File:
        written = self.store.put(name, chunks)
        return File(written.name, written.size, written.sha256)

    def put_edge(self, new: Edge) -> str:
        """Record a fold, or an anchor written later, whose files are durable; -> the name of the record."""
        self.store.put(new.name, [new.encode()])
        return new.name

    def publish(self, new: Manifest, ref: str, old: Ref | None, check: Callable[[], None] = lambda: None) -> Link:
        """Commit a step whose objects are durable: the manifest first, then the ref. ``check`` is called in between,
        and raises if the objects may be gone.

        Raises ConflictError ``ref-moved`` if ``ref`` is no longer ``old``; the manifest then stays behind, unreachable,
        until gc.
        """
        link = new.link
        alone = self.store.capabilities.swap
        before = set() if alone else {*self._numbered(link.step)}
        self.store.put(link.name, [new.encode()])
        check()
        self.move_ref(ref, old, link)
        self._learn(new)
        if not alone and (others := {*self._numbered(link.step)} - before - {link}):
            raise self._forked(ref, link, others)
        return link

    def _forked(self, ref: str, ours: Link, others: set[Link]) -> ConflictError:
        """Another writer published the same step meanwhile, on a store that could not keep the two apart."""
        now, ids = self.ref(ref), ", ".join(sorted(link.id[:12] for link in others))
        return ConflictError(
            "ref-forked",
            where=f"{self.store.url}, ref {ref}",
            have=f"two writers at step {ours.step}: {ours.id[:12]} is ours, {ids} another's",
            need="one writer a ref, since this store has no compare-and-swap",
            hint=f"Both steps are whole, and the ref is at {now.link.id[:12] if now else 'none'}. Stop one writer; the "
            "other goes on from the ref.",
        )


def _state_key(of: Manifest) -> tuple[File, File, str]:
    return of.digests, of.layout, of.state


def object_differs(where: str, size: int, file: File) -> FormatError:
    return FormatError(
        "object-hash",
        where=where,
        have=f"other bytes ({size:,})",
        need=f"{file.size:,} bytes of sha256 {file.sha256[:16]}…",
        hint=DAMAGED,
    )


def new_folder(kind: str, step: int) -> str:
    """A name never used before: ``anchors/<step>-<nonce>`` and the like."""
    return f"{kind}/{step:08d}-{secrets.token_hex(6)}"


def _checked(name: str) -> str:
    if not _REF.fullmatch(name):
        raise UsageError("ref-name", where="name", have=repr(name)[:120], need="letters, digits, '.', '_' and '-'")
    return name
