"""The signatures and key sets of a repository, carried to its copy: after the records that they are of, before refs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from deltackpt.errors import ConflictError, FormatError, NotFoundError
from deltackpt.format.manifest import Link
from deltackpt.format.signature import MAX_KEY_SET, MAX_SIGNATURE, decode_keys, decode_signature
from deltackpt.repository.signatures import FOLDER, folder_of, signature_name
from deltackpt.store import Store


class SignatureCopy:
    """From one store to another; remembers what it copied. None is proven here: a reader proves those that it uses, and
    one that is damaged is left out.
    """

    def __init__(self, source: Store, target: Store) -> None:
        self._source, self._target = source, target
        self._done: set[str] = set()
        self._sets = 0  # key sets that are there
        self._begun = False

    def copy(self, there: Collection[str], news: Iterable[str]) -> int:
        """Copy what is of the records ``there`` at the target, by name; after the first time, of the ``news`` among
        them alone. -> objects copied.
        """
        count = self._copy_sets()
        found = self._names(news) if self._begun else (info.name for info in self._source.list(FOLDER))
        for name in found:
            if name not in self._done and any(record in there for record in _records_of(name)):
                count += self._copy(name)
        self._begun = True
        return count

    def _names(self, records: Iterable[str]) -> Iterator[str]:
        for record in records:
            link = Link(int(record.partition("/")[2].partition("-")[0]), record[-69:-5])
            yield from (info.name for info in self._source.list(folder_of(link)))

    def _copy(self, name: str) -> int:
        where = f"{self._source.url}/{name}"
        try:
            raw = self._source.get(name, MAX_SIGNATURE)
            if signature_name(decode_signature(raw, where)) != name:
                return 0
        except (FormatError, NotFoundError):
            return 0
        put = _put(self._target, name, raw)
        self._done.add(name)
        return put

    def _copy_sets(self) -> int:
        """Key sets, in order: each is of use only after the one before."""
        count = 0
        while True:
            name = f"keys/{self._sets + 1:08d}.json"
            try:
                raw = self._source.get(name, MAX_KEY_SET)
                decode_keys(raw, f"{self._source.url}/{name}")
            except (NotFoundError, FormatError):
                return count
            count += _put(self._target, name, raw)
            self._sets += 1


def _records_of(name: str) -> tuple[str, str]:
    """The manifest or the edge that a signature may be of."""
    folder = name.split("/")[1] if name.count("/") == 2 else ""
    return f"steps/{folder}.json", f"edges/{folder}.json"


def _put(store: Store, name: str, raw: bytes) -> int:
    try:
        store.put(name, [raw])
    except ConflictError as error:
        if error.code != "object-exists":
            raise
        return 0
    return 1
