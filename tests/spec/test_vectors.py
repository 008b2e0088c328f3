"""Every vector through every path of the library and through spec/decode.py: one verdict, and one code."""

import ast
import json
import shutil
import subprocess
import sys
from functools import partial

import pytest
from support.states import Form, encode
from support.tile_by_tile import PARTS
from support.vectors import (
    FIXTURES,
    INDEX,
    base_of,
    by_second,
    code_of,
    data_of,
    decoded_apart,
    folder_of,
    in_place,
    name_of,
    of_kind,
    proofs,
    read_checkpoint,
    read_checkpoint_by_second,
    read_record,
    read_record_by_second,
    restore,
    second,
    streamed,
    sums_of,
    tree,
)

from deltackpt import kernels
from deltackpt.codecs import Change, Entry
from deltackpt.codecs.table import read_table, write_table
from deltackpt.codecs.types import words
from deltackpt.format.dtypes import DTYPES, storage_shape
from deltackpt.patch.part import TABLE, PartReader, PartWriter
from deltackpt.repository import Repository
from deltackpt.verification import verify_part, verify_repository

pytestmark = pytest.mark.usefixtures("engine")

# What a reader takes, though a writer has to say it shorter.
LONGER = {f"valid/v2_{name}.safetensors" for name in ("form_stated_again", "names_that_share_less_than_they_could")}

# What only the old elements tell; verify of a lone part cannot.
NEEDS_OLD = {
    *(
        "base-shape",
        "boxes-overlap",
        "boxes-too-many",
        "count-differs",
        "indices-order",
        "plane-length",
        "frame-size",
        "frame-broken",
    ),
    *("tile-short", "tile-length", "unary-count", "gap-outside", "position-outside", "padding", "step-outside"),
    *("list-wrong", "count-outside"),
}


def test_there_are_enough():
    assert len(of_kind("part", "manifest", "layout", "digests", "edge", valid=True)) >= 40
    assert sum("error" in v for v in INDEX) >= 80
    sizes = [p.stat().st_size for p in FIXTURES.rglob("*") if p.is_file() and p.suffix != ".pyc"]
    assert sum(sizes) < 4 << 20


@pytest.mark.parametrize("vector", of_kind("part"), ids=name_of)
def test_parts(vector):
    """Whole, by ranges, tile by tile, in place, entry by entry, by the second decoder, and verified without a base."""
    data, base, code = data_of(vector), base_of(vector), vector.get("error")
    for reader in (*(partial(streamed, read=read) for read in PARTS.values()), in_place, by_second):
        found = {}
        assert code_of(lambda: found.update(reader(data, base))) == code, reader  # noqa: B023
        if code is None:
            assert proofs(found).items() >= vector["result"].items()
            assert sums_of(found).items() >= vector.get("sums", {}).items()
    for read in PARTS.values():
        apart = code_of(lambda: decoded_apart(data, base, read))  # noqa: B023
        assert apart == (None if code in ("base-shape", "boxes-overlap", "boxes-too-many") else code)
    codes = {finding.code for finding in verify_part(FIXTURES / vector["path"]).findings}
    assert codes == {code} or (codes == set() and (code is None or code in NEEDS_OLD))


@pytest.mark.parametrize("vector", of_kind("part", valid=True), ids=name_of)
def test_round_trip(vector):
    """The table, read and written, is the same bytes; so is the whole part where a writer has no choice."""
    base, part = base_of(vector), PartReader(memoryview(data_of(vector)), "vector")
    table = bytes(part._bytes(TABLE))
    again = write_table(read_table(table, "vector", part.version), part.version)
    assert again == table or (vector["path"] in LONGER and len(again) < len(table))
    if "written" not in vector:
        return
    form = Form(part.version)
    result, writer = streamed(data_of(vector), base), PartWriter(part.origin, part.version)
    for name, encoding in vector["written"].items():
        if (value := result[name]) is None:
            writer.add(Entry.removal(name, part.version))
            continue
        dtype, shape = DTYPES[value[0]], value[1]
        target = words(value[2], dtype.width)
        old = words(base[name][2], dtype.width) if name in base else None
        changed = (old != target).nonzero()[0] if old is not None else target[:0].astype("i8")
        stored = storage_shape(dtype, shape)
        before = target[:0] if old is None else old[changed]
        change = Change(dtype, stored, changed, before, target[changed] if old is not None else before, old, target)
        if old is None:
            used, encoded = "full", form.codecs["full"].encode(change, shape, boxed=False)
        else:
            used, encoded = encode(change, shape, encoding, form=form)
        assert used == encoding
        writer.add(Entry(name, used, dtype, shape, shape, (0,) * len(shape), encoded.detail, part.version), encoded)
    assert b"".join(map(bytes, writer.chunks())) == data_of(vector)


@pytest.mark.parametrize("vector", of_kind("manifest", "layout", "digests", "edge", "pack"), ids=name_of)
def test_records(vector):
    if "repeat" in vector and kernels.LIB is None:
        pytest.skip("long, and no kernel has a part in it: once is enough")
    data = data_of(vector)
    assert code_of(lambda: read_record(vector, data)) == vector.get("error")
    assert code_of(lambda: read_record_by_second(vector, data)) == vector.get("error")
    if "error" not in vector and vector["kind"] in ("manifest", "edge"):
        assert read_record(vector, data).encode() == data


@pytest.mark.parametrize("vector", of_kind("checkpoint"), ids=name_of)
def test_checkpoints(vector, tmp_path):
    folder = folder_of(vector, tmp_path / "checkpoint")
    for read in (read_checkpoint, read_checkpoint_by_second):
        found = {}
        assert code_of(lambda: found.update(read(folder))) == vector.get("error")  # noqa: B023
        assert proofs(found) == vector.get("result", {})


@pytest.mark.parametrize("vector", of_kind("chain"), ids=name_of)
def test_chains(vector, tmp_path):
    """Restored by both readers, and verified."""
    source, repository = (folder_of(vector, tmp_path / name) for name in ("source", "repository"))
    code = vector.get("error")
    for out, call in ((tmp_path / "a", restore), (tmp_path / "b", second().restore)):
        where = repository if call is restore else source  # a lease is left to the copy
        got = code_of(lambda: call(where, vector.get("tag", vector["step"]), out))  # noqa: B023
        assert got == code or (got is None and vector.get("optional")), call
        assert (tree(out) if out.exists() else {}) == ({} if got else vector.get("files", {}))
    assert {p.name for p in tmp_path.iterdir()} <= {"source", "repository", "a", "b"}
    codes: set[str] = set()
    failed = code_of(lambda: codes.update(f.code for f in verify_repository(Repository.open(repository)).findings))
    if code is None or "verify" in vector:
        assert (failed, codes) == (None, set(vector.get("verify", ())))
    else:
        assert code in codes | {failed}


GOLDEN = {name: FIXTURES / "stores" / name for name in ("golden-v1", "golden-v2")}
EXPECTED = {name: json.loads((path / "expected.json").read_text()) for name, path in GOLDEN.items()}


@pytest.mark.parametrize(("name", "step"), [(name, step) for name, found in EXPECTED.items() for step in sorted(found)])
def test_golden_repository(name, step, tmp_path):
    """Of parts of each version, and readable for ever: golden-v1 was written by version 0.1.0."""
    shutil.copytree(GOLDEN[name] / "repository", tmp_path / "repository")
    restore(tmp_path / "repository", int(step), tmp_path / "out")
    assert tree(tmp_path / "out") == EXPECTED[name][step]
    second().restore(GOLDEN[name] / "repository", int(step), tmp_path / "second")
    assert tree(tmp_path / "second") == EXPECTED[name][step]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_repository_is_whole(name, tmp_path):
    shutil.copytree(GOLDEN[name] / "repository", tmp_path / "repository")
    versions = {PartReader(memoryview(p.read_bytes()), p.name).version for p in tmp_path.rglob("part-*")}
    assert versions == {int(name[-1])}
    repo = Repository.open(tmp_path / "repository")
    assert verify_repository(repo).ok
    assert repo.find("golden") == repo.find(2)
    assert {edge.start is None for found in repo.edges().values() for edge in found} == {True, False}


def test_vectors_are_as_made(tmp_path):
    """fixtures/make.py gives the very bytes that are committed."""
    subprocess.run([sys.executable, FIXTURES / "make.py", tmp_path], check=True, capture_output=True)
    for name in ("valid", "invalid", "chains"):
        assert tree(tmp_path / name) == tree(FIXTURES / name)
    assert (tmp_path / "index.json").read_bytes() == (FIXTURES / "index.json").read_bytes()


def test_the_maker_knows_nothing_of_the_library():
    for path in FIXTURES.glob("*.py"):
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]
        names = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
        assert path.name == "golden.py" or not any(name.startswith("deltackpt") for name in names)
