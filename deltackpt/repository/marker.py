"""The marker, which makes a place a repository and holds its id (STORE section "Marker")."""

from __future__ import annotations

import secrets

from deltackpt.errors import ConflictError, DeltackptError, FormatError, NotFoundError
from deltackpt.format.canonical import dumps, loads_strict
from deltackpt.format.manifest import FORMAT, REPOSITORY_ID, VERSION
from deltackpt.format.record import RecordKind
from deltackpt.store import Store
from deltackpt.store.base import NO_OBJECT

MARKER = "deltackpt.json"
MAX_SMALL = 64 << 10  # bytes of a marker, a ref or a tag

_KIND = RecordKind(FORMAT, VERSION, "repository", "marker-field")


def read_marker(store: Store) -> str:
    """The id of the repository in ``store``. Raises NotFoundError ``repository-missing``, ``bucket-missing``;
    FormatError ``marker-field``, ``version-unknown``, json-* for a broken marker.
    """
    try:
        raw = store.get(MARKER, MAX_SMALL)
    except NotFoundError as error:  # [S-MARK-5]
        if error.code == "bucket-missing":  # a writer cannot make a repository there
            raise
        _check_bucket(store)
        raise NotFoundError(
            "repository-missing",
            where=store.url,
            have="no deltackpt.json" if error.have == NO_OBJECT else error.have,
            need="a repository",
            hint="`deltackpt write CHECKPOINT_DIR REPO` makes one where there is nothing. If it was lost, "
            "`deltackpt mirror MIRROR REPO --repair` puts it back.",
        ) from error
    value = _KIND.check(loads_strict(raw, limit=MAX_SMALL, where=f"{store.url}/{MARKER}"), store.url)  # [S-MARK-5]
    if not REPOSITORY_ID.fullmatch(str(value.get("repository"))):  # [S-MARK-5]
        have, need = "no id, or another kind of id", "a repository of 32 hex digits"
        raise FormatError("marker-field", where=store.url, have=have, need=need)
    if value.keys() != {"format", "repository", "version"} or dumps(value) != raw:  # [S-MARK-1]
        have, need = "more, or in another form", "canonical JSON of three fields"
        raise FormatError("marker-field", where=store.url, have=have, need=need)
    identity: str = value["repository"]
    return identity


def _check_bucket(store: Store) -> None:
    """Raises NotFoundError ``bucket-missing`` where only a listing tells a missing bucket from an empty one."""
    try:
        next(iter(store.list("refs/")), None)
    except DeltackptError as error:  # a reader may have no leave to list
        if error.code == "bucket-missing":
            raise


def create_marker(store: Store) -> str:
    """Make a repository in an empty place; -> its id, or that of a writer that was faster.

    Raises ConflictError ``not-a-repository`` where there are other objects.
    """
    if next(iter(store.list("")), None) is not None:  # [S-MARK-3]
        raise ConflictError(
            "not-a-repository",
            where=store.url,
            have="other files",
            need="a repository, or an empty place for one",
            hint="Choose a folder or prefix of its own.",
        )
    identity = secrets.token_hex(16)
    marker = {"format": FORMAT, "version": VERSION, "repository": identity}
    try:
        store.put(MARKER, [dumps(marker)])
    except ConflictError:  # another writer made it in between [S-MARK-4]
        return read_marker(store)
    return identity
