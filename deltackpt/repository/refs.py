"""Refs and tags: the names by which steps are found (STORE section "Refs and tags")."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deltackpt.errors import ChainError, ConflictError, FormatError, NotFoundError, UsageError
from deltackpt.format.canonical import dumps, loads_strict
from deltackpt.format.manifest import Fields, Link, Manifest
from deltackpt.format.record import check_canonical
from deltackpt.repository.marker import MAX_SMALL
from deltackpt.repository.objects import Objects

EXACT = re.compile(r"(\d{1,16})-([0-9a-f]{6,64})")  # a step by number and the first digits of its id

_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LOST = (
    "Which step it named, only another copy can tell: remove the object, then `deltackpt mirror MIRROR REPO` sets it "
    "as a mirror has it."
)


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


class Refs:
    """The branches and tags of a repository, asked for anew each time."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        # Raises where a branch or tag, ``refs/NAME`` or ``tags/NAME``, is at a step that no trusted key vouches for.
        self.check: Callable[[str, Link], None] = lambda name, link: None

    def branch(self, name: str) -> Ref | None:
        """The branch, or None if nothing was published on it. Raises FormatError, UsageError ``ref-name``."""
        return self._read(f"refs/{check_ref_name(name)}.json", name)

    def tag(self, name: str) -> Ref | None:
        """The tag, or None. Raises FormatError, UsageError ``ref-name``."""
        return self._read(f"tags/{check_ref_name(name)}.json", name)

    def all(self, prefix: str) -> Iterator[Ref]:
        """All branches (``refs/``) or tags (``tags/``). Raises FormatError for one that is damaged."""
        for name in self.names(prefix):
            if ref := self._read(f"{prefix}{name}.json", name):
                yield ref

    def names(self, prefix: str) -> Iterator[str]:
        """The names of all branches or tags, damaged ones too."""
        for info in self._objects.store.list(prefix):
            name = info.name[len(prefix) :].removesuffix(".json")
            if _REF.fullmatch(name) and info.name.endswith(".json"):
                yield name

    def unproven(self, name: str) -> Ref | None:
        """The branch ``refs/NAME`` or tag ``tags/NAME``, without `check`. Raises what `branch` raises."""
        own = check_ref_name(name.partition("/")[2])
        return self._read(f"{name}.json", own, check=False)

    def parse_branch(self, name: str, raw: bytes) -> Ref:
        """The branch whose object has these bytes. Raises FormatError, UsageError ``ref-name``."""
        found = self._parse(f"refs/{check_ref_name(name)}.json", name, raw)
        self.check(f"refs/{name}", found.link)
        return found

    def _read(self, object_name: str, name: str, *, check: bool = True) -> Ref | None:
        try:
            raw = self._objects.store.get(object_name, MAX_SMALL)
        except NotFoundError:
            return None
        found = self._parse(object_name, name, raw)
        if check:
            self.check(object_name.removesuffix(".json"), found.link)
        return found

    def _parse(self, object_name: str, name: str, raw: bytes) -> Ref:
        where = f"{self._objects.store.url}/{object_name}"
        try:
            return Ref(name, _link(raw, where), raw)
        except FormatError as error:
            error.hint = error.hint or _LOST
            raise

    def put_tag(self, name: str, link: Link) -> Ref:
        """Name a step that is there. Raises ConflictError ``tag-exists``, UsageError ``ref-name``."""
        if name == "latest" or (name.isascii() and name.isdigit()) or EXACT.fullmatch(name):  # [S-REF-7]
            need = "a name that no step could be meant by"
            raise UsageError("ref-name", where="tag", have=repr(name), need=need)
        made = Ref.to(name, link)
        try:
            self._objects.store.put(f"tags/{check_ref_name(name)}.json", [made.raw])
        except ConflictError as error:  # [S-REF-6]
            now = self.tag(name)
            have = f"tag {name} at step {now.link.step}, {now.link.id[:12]}" if now else f"tag {name}"
            hint = "A tag never moves. Choose another name, or delete it first."
            url = self._objects.store.url
            raise ConflictError("tag-exists", where=url, have=have, need="a new name", hint=hint) from error
        return made

    def delete_tag(self, name: str) -> Ref:
        """Remove a tag; its step stays until gc. Raises NotFoundError ``tag-missing``."""
        if (found := self.tag(name)) is None:
            known = ", ".join(sorted(tag.name for tag in self.all("tags/"))[:8])
            hint = f"The tags are {known}." if known else "There is no tag."
            need = f"tag {name!r}"
            raise NotFoundError("tag-missing", where=self._objects.store.url, have="no such tag", need=need, hint=hint)
        self._objects.store.delete(f"tags/{name}.json")
        return found

    def move(self, name: str, old: Ref | None, new: Link, load: Callable[[Link], Manifest]) -> None:
        """Compare-and-swap of a branch. Raises ConflictError ``ref-moved``, which says what it is at and, where
        ``load`` finds it, by whom that step was published.
        """
        store = self._objects.store
        try:
            store.swap(f"refs/{check_ref_name(name)}.json", old.raw if old else None, Ref.to(name, new).raw)
        except ConflictError as error:  # [S-REF-2] [S-REF-3]
            now = self._read(f"refs/{name}.json", name, check=False)
            if now is not None and now.link == new:  # the swap was answered by an error, and took effect all the same
                return
            raise ConflictError(
                "ref-moved",
                where=f"{store.url}, ref {name}",
                have=f"step {now.link.step}, {now.link.id[:12]}{_writer(now.link, load)}" if now else "no step",
                need=f"step {old.link.step}, {old.link.id[:12]}" if old else "no step yet",
                hint="Another writer published meanwhile; nothing was lost. Look at `deltackpt log`, then write again.",
            ) from error


def _link(raw: bytes, where: str) -> Link:
    value = loads_strict(raw, limit=MAX_SMALL, where=where)
    fields = Fields({"link": value}, where)
    link = fields.link("link")  # [S-REF-1]
    if link is None:
        fields.refuse("link", "null", "step and id")
    check_canonical(dumps(value) == raw, where)
    return link


def _writer(link: Link, load: Callable[[Link], Manifest]) -> str:
    """Who published a step, as far as its manifest says."""
    try:
        found = load(link)
    except (FormatError, ChainError, NotFoundError):
        return ""
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.time))
    return f", published by {found.producer[:80]} at {when}"


def is_ref_name(name: str) -> bool:
    """Can a ref or tag be called so?"""
    return _REF.fullmatch(name) is not None  # [S-NAME-7]


def check_ref_name(name: str) -> str:
    """``name``, if a ref or tag can be called so. Raises UsageError ``ref-name``."""
    if not is_ref_name(name):
        raise UsageError(
            "ref-name", where="name of a ref or tag", have=repr(name)[:120], need="letters, digits, '.', '_' and '-'"
        )
    return name
