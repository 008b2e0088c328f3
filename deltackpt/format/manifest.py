"""The manifest: the immutable record of one step (FORMAT section "Manifest").

Canonical JSON; its id is the sha256 of its bytes. Fields that this version does not know are kept in ``extra``;
features that a reader must know are listed in ``requires``, and an unknown one is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from deltackpt.errors import FormatError
from deltackpt.format.canonical import dumps, loads_canonical
from deltackpt.format.names import ORDINARY, why_unsafe
from deltackpt.format.record import RecordKind, check_canonical

FORMAT = "deltackpt"
VERSION = 1
MAX_MANIFEST = 4 << 20
MAX_STEP = 10**15
FEATURES: frozenset[str] = frozenset()

_KIND = RecordKind(FORMAT, VERSION, "manifest")
_ID = re.compile(r"[0-9a-f]{64}")
REPOSITORY_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class File:
    """An object of the store, by name; ``sha256`` decides what it is."""

    name: str
    size: int
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        """FILE of the spec."""
        return {"name": self.name, "size": self.size, "sha256": self.sha256}


@dataclass(frozen=True)
class Link:
    """A step and the id of its manifest."""

    step: int
    id: str

    @property
    def name(self) -> str:
        """The manifest's object."""
        return f"steps/{self.step:08d}-{self.id}.json"

    def to_dict(self) -> dict[str, Any]:
        """LINK of the spec."""
        return {"step": self.step, "id": self.id}


@dataclass(frozen=True)
class Counts:
    """Tensors added, removed, replaced whole and changed, and storage elements: all of the state, and those changed."""

    added: int = 0
    removed: int = 0
    changed: int = 0
    elements: int = 0
    changed_elements: int = 0

    def to_dict(self) -> dict[str, int]:
        """The field ``counts``."""
        return dict(vars(self))


@dataclass(frozen=True)
class Manifest:
    """Fields in the order of the spec. ``parent`` is None for the first step of a chain; ``base`` is its state digest.

    A step is reached whole, from the ``anchor`` files (one for each shard of the layout, in its order), or from its
    parent, with the ``patch`` files (parts; none where nothing changed). It has one way at least, often both.
    """

    repository: str
    step: int
    parent: Link | None
    base: str | None
    state: str
    anchor: tuple[File, ...] | None
    patch: tuple[File, ...] | None
    layout: File
    digests: File
    counts: Counts
    time: int  # seconds since 1970
    producer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """All fields, unknown ones too."""
        return {
            **self.extra,
            "format": FORMAT,
            "version": VERSION,
            "repository": self.repository,
            "step": self.step,
            "parent": self.parent.to_dict() if self.parent else None,
            "base": self.base,
            "state": self.state,
            "anchor": None if self.anchor is None else [f.to_dict() for f in self.anchor],
            "patch": None if self.patch is None else [f.to_dict() for f in self.patch],
            "layout": self.layout.to_dict(),
            "digests": self.digests.to_dict(),
            "counts": self.counts.to_dict(),
            "time": self.time,
            "producer": self.producer,
            "metadata": dict(self.metadata),
        }

    def encode(self) -> bytes:
        """The object's bytes: canonical JSON."""
        return dumps(self.to_dict())

    @property
    def link(self) -> Link:
        """The step and the sha256 of its bytes."""
        return Link(self.step, hashlib.sha256(self.encode()).hexdigest())

    @property
    def files(self) -> tuple[File, ...]:
        """Every object that the step names."""
        return (*(self.anchor or ()), *(self.patch or ()), self.layout, self.digests)


def decode(data: bytes, where: str) -> Manifest:
    """Parse and check a manifest. Raises FormatError: json-*, manifest-canonical, version-unknown, manifest-field."""
    value, canonical = loads_canonical(data, limit=MAX_MANIFEST, where=where)
    fields = Fields(_KIND.check(value, where), where)
    unknown = set(fields.texts("requires", missing=True)) - FEATURES
    if unknown:  # [F-MAN-11] [F-VER-4]
        raise FormatError(
            "feature-unknown",
            where=where,
            have=f"requires {sorted(unknown)}",
            need="known features",
            hint="A newer deltackpt may know them.",
        )
    check_canonical(canonical, where)
    return _manifest(fields)


def _manifest(f: Fields) -> Manifest:
    manifest = Manifest(
        repository=f.text("repository", REPOSITORY_ID),
        step=f.number("step", MAX_STEP),
        parent=f.link("parent"),
        base=None if f.get("base") is None else f.text("base", _ID),
        state=f.text("state", _ID),
        anchor=f.files("anchor"),
        patch=f.files("patch"),
        layout=f.file(f.get("layout"), "layout"),
        digests=f.file(f.get("digests"), "digests"),
        counts=f.counts(),
        time=f.number("time", 1 << 53),
        producer=f.text("producer"),
        metadata=f.mapping("metadata"),
        extra={} if f.value.keys() == _KNOWN else {k: v for k, v in f.value.items() if k not in _KNOWN},
    )
    if manifest.anchor is None and manifest.patch is None:  # [F-MAN-4]
        f.refuse("anchor", "neither anchor nor patch", "one of them at least")
    if manifest.patch is not None and manifest.parent is None:  # [F-MAN-5]
        f.refuse("patch", "a patch without a parent", "the step that it applies to")
    if (manifest.parent is None) != (manifest.base is None):  # [F-MAN-5]
        f.refuse("base", "a parent without its state, or a state without a parent", "both or none")
    if manifest.parent and manifest.parent.step >= manifest.step:  # [F-MAN-6]
        f.refuse("parent", f"parent step {manifest.parent.step}", f"one before {manifest.step}")
    return manifest


_KNOWN = {
    *("format", "version", "repository", "step", "parent", "base", "state"),
    *("anchor", "patch", "layout", "digests", "counts", "time", "producer", "metadata"),
}


class Fields:
    """Typed access to a JSON object; whatever is missing or of another type is FormatError ``manifest-field``, which
    names the field [F-MAN-3] [F-EDGE-1] [S-LEASE-1].
    """

    def __init__(self, value: dict[str, Any], where: str) -> None:
        self.value = value
        self._where = where

    def refuse(self, name: str, have: str, need: str) -> NoReturn:
        """Raise FormatError ``manifest-field``."""
        raise FormatError("manifest-field", where=f"{self._where}, {name}", have=have, need=need)

    def get(self, name: str) -> Any:
        """The value of a field that must be there."""
        if name not in self.value:
            self.refuse(name, "no such field", "the field")
        return self.value[name]

    def text(self, name: str, pattern: re.Pattern[str] | None = None) -> str:
        """A text; all of it matches ``pattern``."""
        value = self.get(name)
        if not isinstance(value, str) or (pattern and not pattern.fullmatch(value)):
            self.refuse(name, repr(value)[:80], f"text like {pattern.pattern}" if pattern else "text")
        return value

    def texts(self, name: str, *, missing: bool) -> list[str]:
        """A list of texts; with ``missing`` an absent field is an empty one."""
        value = self.value.get(name, []) if missing else self.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.refuse(name, repr(value)[:80], "a list of texts")
        return value

    def number(self, name: str, limit: int) -> int:
        """An integer from 0 to ``limit``."""
        return self._number(self.get(name), name, limit)

    def _number(self, value: Any, name: str, limit: int) -> int:
        if type(value) is not int or not 0 <= value <= limit:
            self.refuse(name, repr(value)[:80], f"an integer from 0 to {limit}")
        return value

    def files(self, name: str) -> tuple[File, ...] | None:
        """A list of files, or null; the size of the record bounds their number."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list):  # [F-MAN-3] [F-EDGE-3]
            self.refuse(name, repr(value)[:80], "a list of files")
        return tuple(self.file(item, name) for item in value)

    def mapping(self, name: str) -> dict[str, Any]:
        """An object of any fields."""
        value = self.get(name)
        if not isinstance(value, dict):
            self.refuse(name, repr(value)[:80], "an object")
        return value

    def link(self, name: str) -> Link | None:
        """A step and its id, or null."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict) or value.keys() != _LINK_KEYS or not isinstance(value["id"], str):
            self.refuse(name, repr(value)[:80], "step and id")
        if not _ID.fullmatch(value["id"]):
            self.refuse(name, repr(value["id"])[:80], "64 hex digits")
        return Link(self._number(value["step"], name, MAX_STEP), value["id"])

    def file(self, value: Any, name: str) -> File:
        """A FILE, given as its value. Raises ``name-escapes`` too."""
        if not isinstance(value, dict) or value.keys() != _FILE_KEYS:
            self.refuse(name, repr(value)[:80], "name, size and sha256")
        path, sha256 = value["name"], value["sha256"]
        if not isinstance(path, str) or not isinstance(sha256, str) or not _ID.fullmatch(sha256):
            self.refuse(name, repr(value)[:80], "a name and a sha256 of 64 hex digits")
        if not (path.startswith(_FOLDERS) and ORDINARY.fullmatch(path)):
            check_object_name(path, f"{self._where}, {name}")
        return File(path, self._number(value["size"], name, 1 << 62), sha256)

    def counts(self) -> Counts:
        """The field ``counts``."""
        value = self.mapping("counts")
        if value.keys() != _COUNTS.keys():
            self.refuse("counts", repr(sorted(value))[:80], ", ".join(_COUNTS))
        for number in value.values():
            self._number(number, "counts", 1 << 62)
        return Counts(**value)


_FILE_KEYS = {"name", "size", "sha256"}
_LINK_KEYS = {"step", "id"}
_COUNTS = Counts().to_dict()
_FOLDERS = ("anchors/", "patches/", "states/", "folds/")


def check_object_name(name: str, where: str) -> None:
    """Refuse an object name in a manifest or layout that leaves the folders where payloads live: ``name-escapes``."""
    if not name.startswith(_FOLDERS) or why_unsafe(name):  # [F-MAN-8] [S-NAME-5]
        raise FormatError("name-escapes", where=where, have=repr(name)[:120], need=f"a name in {', '.join(_FOLDERS)}")
