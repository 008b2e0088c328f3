"""A store that says of an object that it is larger than anything: memory follows what is read, not what is said."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from typing import Any

import pytest

from deltackpt.errors import DeltackptError
from deltackpt.store.base import Capabilities
from deltackpt.store.driver import BasicDriver, Fetched
from deltackpt.store.remote import RemoteStore

SAID = 1 << 62


class Boasts(BasicDriver):
    capabilities = Capabilities(create_only=True, swap=True, clock=True, ranged=True, local=False)
    makes_buckets = False
    downloads = None

    def fetch(self, key: str, start: int, length: int, tag: str | None) -> Fetched:
        return Fetched(bytes(min(length, 1 << 20)), SAID, "a tag")


@pytest.fixture
def store() -> RemoteStore:
    driver: Any = Boasts()
    return RemoteStore(driver, "test://boasts")


def test_its_first_bytes_come(store: RemoteStore) -> None:
    with closing(store.read("an/object", 1 << 10)) as chunks:  # type: ignore[type-var]
        assert [*islice(chunks, 3)] == [bytes(1 << 10)] * 3


def test_what_is_past_even_that_end_is_refused(store: RemoteStore) -> None:
    with pytest.raises(DeltackptError) as caught:
        store.get_range("an/object", 0, 2 * SAID)
    assert caught.value.code == "object-short"
