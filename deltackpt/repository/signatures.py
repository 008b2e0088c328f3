"""The signatures of a repository's records, as objects: found by listing, and put (spec/SIGNATURES.md)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import islice

from deltackpt.errors import ConflictError, FormatError, NotFoundError
from deltackpt.format.manifest import Link
from deltackpt.format.signature import MAX_SIGNATURE, SignedStatement, decode_signature
from deltackpt.store import Store

FOLDER = "signatures/"
MOST = 1024  # names of one record's signatures that are looked at, and of each key's, those that are read:
MOST_READ = 64

_NAME = re.compile(r"signatures/\d{8,16}-([0-9a-f]{64})/([0-9a-f]{16})-(\d{16})\.json")


def folder_of(link: Link) -> str:
    """Where the signatures of a manifest or edge are; ``link.id`` is the sha256 of its bytes."""
    return f"{FOLDER}{link.step:08d}-{link.id}/"


def signed_id(name: str) -> str | None:
    """The id of the record that the signature of this name is of; None for other names."""
    found = _NAME.fullmatch(name)
    return found[1] if found else None


def read_signatures(store: Store, link: Link, keys: Collection[str] | None = None) -> Iterator[SignedStatement]:
    """The signatures of a record that can be read, newest first; of ``keys`` alone, if given. Not proven.

    One that is damaged, or of another record, is passed over: a writer that can put it can remove it as well.
    """
    wanted = None if keys is None else {key[:16] for key in keys}
    found = [
        (m[3], m[2], info.name)
        for info in islice(store.list(folder_of(link)), MOST)
        if (m := _NAME.fullmatch(info.name)) and (wanted is None or m[2] in wanted)
    ]
    read: dict[str, int] = {}
    for _, key, name in sorted(found, reverse=True):
        read[key] = read.get(key, 0) + 1
        if read[key] > MOST_READ:
            continue
        try:
            one = decode_signature(store.get(name, MAX_SIGNATURE), f"{store.url}/{name}")
        except (FormatError, NotFoundError):  # [S-SIG-4]
            continue
        if one.statement.link == link and name == signature_name(one):
            yield one


def signature_name(one: SignedStatement) -> str:
    """The object of a signature."""
    return f"{folder_of(one.statement.link)}{one.by.key[:16]}-{one.statement.time:016d}.json"


def put_signature(store: Store, one: SignedStatement) -> str:
    """Put a signature -> its name. One that is there already, with the same bytes, is as good."""
    name, raw = signature_name(one), one.encode()
    try:
        store.put(name, [raw])
    except ConflictError:
        if store.get(name, MAX_SIGNATURE) != raw:
            raise
    return name
