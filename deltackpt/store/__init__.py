"""Bytes by name, behind one small contract; the only place that touches a disk or a network."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
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
from deltackpt.util.places import check_url, shown

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

    A plain path or ``file://`` is a folder, ``memory://NAME`` this process's store of that name; ``s3://``, ``gs://``
    and ``az://`` take BUCKET/PREFIX, ``hf://buckets/`` and, through the Hub's S3 gateway, ``hf+s3://buckets/`` take
    NAMESPACE/NAME/PREFIX, any other what fsspec makes of it.
    Raises UsageError ``store-scheme``, ``store-url``, ``store-url-secret``, ``extra-missing``.
    """
    text = os.fspath(url)
    scheme, separator, rest = text.partition("://")
    if text and not separator:
        check_url(text)
        return LocalStore(text)
    opener = SCHEMES.get(scheme.lower())
    if opener is None:
        return _open_other(scheme.lower(), rest)
    return opener(rest)


def _open_file(rest: str) -> Store:
    path = os.fsdecode(unquote_to_bytes(rest.removeprefix("localhost")))
    if not path.startswith("/"):
        raise _no_store(f"file://{rest}")
    return LocalStore(path)


def _open_object_store(scheme: str, rest: str) -> Store:
    from deltackpt.store.fsspec_store import open_fsspec

    return open_fsspec(f"{scheme}://{rest}")


def _open_hub(rest: str) -> Store:
    from deltackpt.store.hub import open_bucket

    return open_bucket(rest)


def _open_gateway(rest: str) -> Store:
    from deltackpt.store.hf_s3 import open_gateway

    return open_gateway(rest)


def _open_other(scheme: str, rest: str) -> Store:
    from fsspec import available_protocols

    if scheme not in available_protocols():
        raise _no_store(f"{scheme}://{rest}")
    return _open_object_store(scheme, rest)


def _no_store(url: str) -> UsageError:
    return UsageError(
        "store-scheme",
        where="store URL",
        have=repr(shown(url))[:200],
        need="a path, or a URL of " + ", ".join(f"{scheme}://" for scheme in SCHEMES),
        hint="write a local folder as a plain path, or as file:///absolute/path",
    )


SCHEMES: dict[str, Callable[[str], Store]] = {
    "file": _open_file,
    "memory": named,
    "s3": partial(_open_object_store, "s3"),
    "gs": partial(_open_object_store, "gs"),
    "az": partial(_open_object_store, "az"),
    "hf": _open_hub,
    "hf+s3": _open_gateway,
}
