"""Attacks by size: what a few bytes announce is compared with limits, and with the room there is, before it is made."""

from __future__ import annotations

import itertools
import json
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.vectors import FIXTURES, code_of, second

from deltackpt.cache import apply_to_cache
from deltackpt.format import digests, edge, layout, manifest
from deltackpt.format.layout import Layout, Shard, Side
from deltackpt.format.manifest import File, Manifest
from deltackpt.format.safetensors_header import Tensor, build_header, parse_header
from deltackpt.format.state_digest import TensorDigest
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply
from deltackpt.restore.source import RepositorySource
from deltackpt.store import MemoryStore
from deltackpt.verification import verify_repository

VAST = 1 << 60
MB = 1 << 20


def peak_of(call: Callable[[], Any]) -> int:
    """Bytes that a call allocates at its worst."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    return Repository.open(shutil.copytree(FIXTURES / "chains/three_patches", tmp_path / "repository"))


# 17: JSON


MARKS = 1 << 21
TEXTS = {
    "empty arrays": b'{"x":[' + b",".join([b"[]"] * (MARKS // 2 + 1)) + b"]}",
    "zeros": b'{"x":[' + b",".join([b"0"] * (MARKS + 1)) + b"]}",
    "tensors": b"{%s}"
    % b",".join(b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(MARKS // 7 + 1)),
}


@pytest.mark.parametrize("text", TEXTS)
def test_17_a_header_of_many_values(text):
    head = len(TEXTS[text]).to_bytes(8, "little") + TEXTS[text]
    limit = 3 * len(head)
    codes = []
    assert peak_of(lambda: codes.append(code_of(lambda: parse_header(head, None, "here")))) < limit
    assert codes == ["json-too-long"]


@pytest.mark.parametrize("module", [manifest, edge, layout])
def test_17_a_record_of_many_values(module):
    data = b"[" + b"[]," * (MARKS // 2) + b"0]"
    codes = []
    assert peak_of(lambda: codes.append(code_of(lambda: module.decode(data, "here")))) < 16 * MB
    assert codes == ["json-too-long"]


@pytest.mark.parametrize(
    "data", [b'"' * (8 * MB), b'["' + b'\\"' * (4 * MB) + b'"]', b"{" * (8 * MB), b'"",' * (2 * MB)]
)
def test_17_text_that_is_no_json(data):
    """Counting takes no more memory than the text, whatever it is."""
    head = len(data).to_bytes(8, "little") + data
    assert peak_of(lambda: code_of(lambda: parse_header(head, None, "here"))) < 8 * len(data)
    assert peak_of(lambda: code_of(lambda: layout.decode(data, "here"))) < 8 * len(data)


def test_17_a_layout_of_many_folders():
    """Paths of hundreds of segments are compared with their neighbors, not each with each."""
    paths = ["/".join(["d"] * 450) + f"/{i}" for i in range(3000)]
    side = [{"path": p, "file": File(f"anchors/1/{i}", 0, "0" * 64).to_dict()} for i, p in enumerate(paths)]
    data = json.dumps({"format": "deltackpt-layout", "version": 1, "shards": [], "side": side}).encode()
    assert peak_of(lambda: layout.decode(data, "here")) < 12 * len(data)
    inside = [*side, side[0] | {"path": f"{paths[7]}/x"}]
    data = json.dumps({"format": "deltackpt-layout", "version": 1, "shards": [], "side": inside}).encode()
    assert code_of(lambda: layout.decode(data, "here")) == "layout-field"


# 19: a layout


def published(repo: Repository, change: Callable[[Layout], Layout], named: tuple[str, ...] = ()) -> Manifest:
    """A step after the last with another layout, whose proofs are as good as such proofs can be."""
    m = repo.load(repo.find())
    new = change(repo.layout(m))
    proofs = dict(repo.digests(m)) | {name: TensorDigest((0, 0), bytes(16)) for name in named}
    folder = "states/00000099-aaaaaaaaaaaa"
    step = replace(
        m,
        step=m.step + 1,
        parent=m.link,
        base=m.state,
        anchor=None,
        patch=(),
        state=digests.state_of(new, proofs),
        layout=repo.put(f"{folder}/layout.json", [new.encode()]),
        digests=repo.put(f"{folder}/digests.safetensors", [digests.encode(new, proofs)]),
    )
    repo.publish(step, "main", repo.ref())
    return step


def vast_tensor(found: Layout) -> Layout:
    head = build_header([Tensor("vast", "U8", (VAST,), 0, VAST)], {})
    return replace(found, shards=(*found.shards, Shard("vast.safetensors", parse_header(head, None, "here"))))


def vast_side_file(found: Layout) -> Layout:
    return replace(found, side=(*found.side, Side("vast.json", File("anchors/1/vast.json", VAST, "0" * 64))))


@pytest.mark.parametrize(("change", "named"), [(vast_tensor, ("vast",)), (vast_side_file, ())])
def test_19_a_layout_of_vast_files(repo, tmp_path, change, named):
    published(repo, change, named)
    (tmp_path / "place").mkdir()
    for call in (apply, apply_to_cache):
        assert peak_of(lambda: code_of(lambda: call(repo, tmp_path / "place/out", threads=1))) < 4 * MB  # noqa: B023
        assert code_of(lambda: call(repo, tmp_path / "place/out", threads=1)) == "no-space"  # noqa: B023
        assert not list(tmp_path.rglob("vast*"))
        shutil.rmtree(tmp_path / "place/out", ignore_errors=True)
    assert code_of(lambda: second().restore(tmp_path / "repository", repo.find().step, tmp_path / "place/out")) in (
        "tensor-shape",
        "object-missing",
    )


# 20 and 21: objects


class Endless:
    """A store whose objects never end; it counts what is taken, and says nothing of it in `stat`."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.given = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def local_path(self, name: str) -> None:
        return None

    def read(self, name: str, chunk: int = MB) -> Iterator[bytes]:
        yield from self.inner.read(name, chunk)
        for _ in itertools.count():
            self.given += chunk
            assert self.given < 100 * MB
            yield bytes(chunk)


def test_20_objects_without_end(repo, tmp_path):
    """Parts, side files, and whatever `verify` hashes."""
    m = repo.load(repo.find())
    endless = Repository(Endless(repo.store), repo.id)

    def download(file: File) -> None:
        with RepositorySource(endless).part(file):
            raise AssertionError

    for file in m.patch:
        assert code_of(lambda: download(file)) == "object-hash"  # noqa: B023
    assert code_of(lambda: apply(endless, tmp_path / "out", threads=1)) == "object-hash"
    assert not (tmp_path / "out").exists()
    assert {f.code for f in verify_repository(endless, threads=1).findings} >= {"object-hash"}


def test_20_a_side_file_without_end(tmp_path):
    source = shutil.copytree(FIXTURES / "chains/one_anchor", tmp_path / "repository")
    repo = Repository.open(source)
    assert repo.layout(repo.load(repo.find())).side
    endless = Repository(Endless(repo.store), repo.id)
    assert code_of(lambda: apply(endless, tmp_path / "out", threads=1)) == "object-hash"
    assert not (tmp_path / "out").exists()


def test_21_a_part_of_a_vast_size():
    store = Endless(MemoryStore())
    store.put("patches/1/part", [b"x"])

    def download() -> None:
        with RepositorySource(Repository(store, "ab" * 16)).part(File("patches/1/part", VAST, "0" * 64)):
            raise AssertionError

    assert code_of(download) == "no-space"
    assert store.given == 0
