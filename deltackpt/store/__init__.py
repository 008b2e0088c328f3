"""Bytes by name, behind one small contract; the only place that touches a disk or a network."""

from __future__ import annotations

import os
from collections.abc import Callable
from urllib.parse import unquote_to_bytes

from deltackpt.errors import UsageError
from deltackpt.store.base import (
    Buffer,
    Capabilities,
    ObjectInfo,
    Store,
    Written,
    check_name,
)
from deltackpt.store.local import LocalStore
from deltackpt.store.memory import MemoryStore, named

__all__ = [
    "SCHEMES",
    "Buffer",
    "Capabilities",
    "LocalStore",
    "MemoryStore",
    "ObjectInfo",
    "Store",
    "Written",
    "check_name",
    "open_store",
]


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store at a URL or path; nothing is created or contacted until the first operation.

    A plain path or ``file://`` is a folder, ``memory://NAME`` this process's store of that name.
    Raises UsageError ``store-scheme`` for any other.
    """
    text = os.fspath(url)
    scheme, separator, rest = text.partition("://")
    if text and not separator:
        return LocalStore(text)
    opener = SCHEMES.get(scheme.lower())
    if opener is None:
        raise _no_store(text)
    return opener(rest)


def _open_file(rest: str) -> Store:
    path = os.fsdecode(unquote_to_bytes(rest.removeprefix("localhost")))
    if not path.startswith("/"):
        raise _no_store(f"file://{rest}")
    return LocalStore(path)


def _no_store(url: str) -> UsageError:
    return UsageError(
        "store-scheme",
        where="store URL",
        have=repr(url),
        need="a path, or a URL of " + ", ".join(f"{scheme}://" for scheme in SCHEMES),
        hint="a local folder is given as a plain path, or as file:///absolute/path",
    )


SCHEMES: dict[str, Callable[[str], Store]] = {
    "file": _open_file,
    "memory": named,
}
