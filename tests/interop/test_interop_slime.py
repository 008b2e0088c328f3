"""slime's two layouts: what they hold comes in, what is inconsistent does not, what we write their receivers take."""

import json
import shutil

import numpy as np
import pytest
import zstandard
from support.foreign_layouts import receive_slime, safetensors, slime, slime_v1
from support.states import make_checkpoint

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import FormatError
from deltackpt.interop import ExportOptions, export_steps, reader, writer
from deltackpt.interop.slime import INDEX
from deltackpt.repository import Repository

ENCODINGS = ["xor", "overwrite", "xor_sparse"]


def versions(world, **options):
    for i, (old, new) in enumerate(zip(world.states, world.states[1:], strict=False)):
        slime(world.src, i + 1, old, new, **options)


@pytest.mark.parametrize("checksum", ["xxh3-128", "adler32"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_run_comes_in(world, encoding, checksum):
    versions(world, encoding=encoding, checksum=checksum, prefix="mx.adler32:" if checksum == "adler32" else "")
    done = world.import_steps()
    assert (done.format, done.steps) == ("slime", [0, 1, 2, 3, 4])
    assert done.proofs[f"{checksum} of every changed tensor; unverifiable: no run, no base digest"] == 4
    world.check()
    assert world.import_steps(base=None).passed == 4


def test_blake3_is_an_extra(world):
    versions(world)
    index = world.src / "weight_v000001" / INDEX
    index.write_text(index.read_text().replace("xxh3-128", "blake3"))
    try:
        import blake3  # noqa: F401
    except ImportError:
        assert "pip install 'blake3>=0.4'" in world.refused("extra-missing").hint
        return
    world.refused("foreign-digest")
    for path in world.src.iterdir():
        shutil.rmtree(path)
    shutil.rmtree(world.repo)
    versions(world)
    world.import_steps()
    out = world.root / "out-slime"
    export_steps(Repository.open(world.repo), "slime", writer("slime", out, checksum="blake3")[1], out, threads=1)
    shutil.rmtree(world.repo)
    world.src = out
    assert (
        world.import_steps(base=None).proofs["blake3 of every changed tensor; unverifiable: no run, no base digest"]
        == 4
    )


def test_a_whole_version_resets_the_chain(world):
    make_checkpoint(world.src / "weight_v000003", world.states[0], shards=2, side={"config.json": b"{}"})
    for i, (old, new) in enumerate(zip(world.states, world.states[1:], strict=False)):
        slime(world.src, i + 4, old, new)
    assert world.import_steps(base=None).steps == [3, 4, 5, 6, 7]
    world.check(first=3)


def test_an_empty_step(world):
    versions(world)
    slime(world.src, 5, world.states[-1], world.states[-1])
    world.states.append(world.states[-1])
    assert world.import_steps().steps[-1] == 5
    world.check()


def test_a_run_is_gone_on_with(world):
    versions(world)
    for number in (3, 4):
        shutil.move(world.src / f"weight_v{number:06d}", world.root)
    assert world.import_steps().steps == [0, 1, 2]
    for number in (4, 3):
        shutil.move(world.root / f"weight_v{number:06d}", world.src)
        if number == 4:
            world.refused("foreign-gap", base=None)
    assert world.import_steps(base=None).steps == [3, 4]
    world.check()


def test_refused(world):
    """One defect each; the version before it is published."""
    versions(world)
    good = world.root / "good"
    shutil.copytree(world.src, good)
    two = world.src / "weight_v000002"

    def edit_index(**changes):
        value = json.loads((two / INDEX).read_text())
        for key, item in changes.items():
            value[key] = {**value[key], **item} if key == "metadata" else item(value[key])
        (two / INDEX).write_text(json.dumps(value))

    def drop_encoding():
        value = json.loads((two / INDEX).read_text())
        del value["metadata"]["delta_encoding"]
        (two / INDEX).write_text(json.dumps(value))

    def drop_name(weight_map):
        return dict(list(weight_map.items())[1:])

    defects = {
        "foreign-gap": [
            lambda: shutil.rmtree(two),
            lambda: edit_index(metadata={"base_version": "000000"}),
            lambda: edit_index(metadata={"version": "000003"}),
            lambda: two.rename(world.src / "weight_v000009"),
        ],
        "foreign-missing": [
            lambda: next(two.glob("*.safetensors")).unlink(),
            lambda: (two / INDEX).unlink(),
        ],
        "foreign-names": [
            lambda: safetensors(two / "more.safetensors", []),
            lambda: edit_index(weight_map=drop_name),
            lambda: edit_index(weight_map=lambda m: {**m, "x": next(iter(m.values()))}),
        ],
        "foreign-twice": [lambda: edit_index(weight_map=lambda m: {**m, "a.weight": sorted(m.values())[-1]})],
        "foreign-field": [
            lambda: edit_index(metadata={"compression_format": "gzip"}),
            lambda: edit_index(metadata={"delta_encoding": "more"}),
            drop_encoding,
            lambda: edit_index(metadata={"checksum_format": "md5"}),
            lambda: edit_index(weight_map=lambda m: dict.fromkeys(m, "../x.safetensors")),
            lambda: edit_index(weight_map=lambda m: []),
            lambda: (two / INDEX).write_text("[]"),
        ],
    }
    for code, all_of_it in defects.items():
        for defect in all_of_it:
            shutil.rmtree(world.src)
            shutil.copytree(good, world.src)
            shutil.rmtree(world.repo, ignore_errors=True)
            defect()
            world.refused(code, name="slime")


def test_blobs_over_a_wrong_base(world):
    versions(world)
    other = make_checkpoint(world.root / "other", world.states[1], shards=2)
    for encoding in ENCODINGS[::2]:
        error = world.refused("foreign-digest", base=other)
        assert "not the state that the step was made for" in error.hint
        shutil.rmtree(world.src)
        shutil.rmtree(world.repo)
        versions(world, encoding=encoding)
    small = make_checkpoint(world.root / "small", {"a.weight": world.states[0]["a.weight"]})
    shutil.rmtree(world.repo, ignore_errors=True)
    world.refused("foreign-tensor", base=small)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_hostile_blobs(world, encoding):
    """Sizes that lie, frames that are cut, doubled or vast, positions that leave or repeat: typed, and bounded."""
    size = len(world.states[0]["norm"][2])
    pack = zstandard.ZstdCompressor(level=1).compress
    wide = 4 if encoding == "overwrite" else 8

    def sparse(positions, values, count=None):
        head = np.array([len(positions) if count is None else count, *positions], f"<u{wide}")
        return pack(head.tobytes() + bytes(values))

    vast = b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + b"\x03\x00\x00"
    blobs = [
        (b"", "frame-broken"),
        (b"\x80\x04K\x01.", "frame-broken"),
        (pack(bytes(size))[:-1], "frame-broken"),
        (pack(bytes(size)) + b"x", "frame-broken"),
        (pack(bytes(size)) * 2, "frame-broken"),
        (vast, "frame-size"),
        (pack(bytes(1 << 24)), "frame-size"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(size)), "frame-size"),
    ]
    if encoding == "xor":
        blobs += [(pack(bytes(size + 1)), "frame-size"), (pack(bytes(size - 1)), "frame-size")]
    else:
        blobs += [
            (sparse([size], [1]), "foreign-position"),
            (sparse([3, 3], [1, 2]), "foreign-position"),
            (sparse([1], [1, 2]), "foreign-length"),
            (sparse([1], [1], count=1 << 31), "foreign-length"),
            (pack(b"\1"), "foreign-length"),
        ]
    folder = slime(world.src, 1, world.states[0], world.states[1], encoding=encoding)
    index = json.loads((folder / INDEX).read_text())
    for blob, code in blobs:
        for path in folder.glob("*.safetensors"):
            path.unlink()
        safetensors(
            folder / "model-00000-of-00001.safetensors", [("norm", "U8", (len(blob),), blob)], {"norm": "0" * 32}
        )
        index["weight_map"] = {"norm": "model-00000-of-00001.safetensors"}
        (folder / INDEX).write_text(json.dumps(index))
        world.not_taken(code)


def test_overwrite_is_not_read_where_its_positions_wrap(monkeypatch, world):
    slime(world.src, 1, world.states[0], world.states[1], encoding="overwrite")
    monkeypatch.setattr("deltackpt.interop.slime.WRAP", 1 << 10)
    world.refused("foreign-wrapped")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_receiver_takes_what_we_write(world, encoding):
    versions(world)
    world.import_steps()
    repo, out = Repository.open(world.repo), world.root / "out-slime"
    name, target = writer("miles", out, encoding=encoding, checksum="adler32")
    done = export_steps(repo, name, target, out, threads=1)
    assert (done.steps, done.whole) == ([0, 1, 2, 3, 4], [(0, "it is the first")])
    with Checkpoint.open(out / "weight_v000000") as first:
        state = {n: (t.dtype, t.shape, first.bytes_of(n).tobytes()) for n, t in first.tensors.items()}
    for i, need in enumerate(world.states[1:], 1):
        folder = out / f"weight_v{i:06d}"
        assert set(json.loads((folder / INDEX).read_text())) == {"metadata", "weight_map"}
        state = receive_slime(folder, state)
        assert state == need
    again = export_steps(
        repo,
        name,
        writer("slime", world.root / "late")[1],
        world.root / "late",
        ExportOptions(start=2, deltas_only=True),
    )
    assert (again.steps, sorted(p.name for p in (world.root / "late").iterdir())) == (
        [3, 4],
        ["weight_v000003", "weight_v000004"],
    )


def test_many_files_where_one_would_be_large(world, monkeypatch):
    monkeypatch.setattr("deltackpt.interop.slime_write.FILE_BYTES", 200)
    versions(world)
    world.import_steps()
    out = world.root / "out-slime"
    export_steps(Repository.open(world.repo), "slime", writer("slime", out)[1], out, threads=1)
    files = sorted(p.name for p in (out / "weight_v000001").glob("*.safetensors"))
    assert len(files) > 1
    assert files[0] == f"model-00000-of-{len(files):05d}.safetensors"
    assert receive_slime(out / "weight_v000001", world.states[0]) == world.states[1]
    assert not [p for p in out.rglob("*") if ".tmp" in p.name or p.suffix == ".part"]


@pytest.mark.parametrize("promote", [False, True])
@pytest.mark.parametrize("encoding", ["indices", "deltas", "deltas_zstd"])
def test_the_first_layout_comes_in(world, encoding, promote):
    for i, (old, new) in enumerate(zip(world.states, world.states[1:], strict=False)):
        names = sorted(new)
        for rank in range(2):
            mine = {n: new[n] if n in names[rank::2] else old[n] for n in names}
            slime_v1(world.src, i + 1, old, mine, encoding=encoding, rank=rank, promote=promote)
    done = world.import_steps()
    assert (done.format, done.steps) == ("slime-v1", [0, 1, 2, 3, 4])
    world.check()


def test_the_first_layout_refused(world):
    path = slime_v1(world.src, 1, world.states[0], world.states[1])
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    world.refused("foreign-checksum")
    size = int.from_bytes(data[:8], "little")
    for old, new, code in [
        (b'"pos_width\\": 2', b'"pos_width\\": 8', "foreign-field"),
        (b'\\"val_end\\": ', b'\\"val_end\\":9', "foreign-length"),
        (b"torch.bfloat16", b"torch.floaty16", "foreign-field"),
        (b'\\"shape\\": [67', b'\\"shape\\": [68', "foreign-shape"),
        (b'"current_version": "1"', b'"current_version": "2"', "foreign-gap"),
        (b'"encoding": "deltas"', b'"encoding": "xeltas"', "foreign-field"),
    ]:
        assert old in data[:size], old
        path.write_bytes(data[:8] + data[8 : 8 + size].replace(old, new, 1) + data[8 + size :])
        shutil.rmtree(world.repo, ignore_errors=True)
        world.refused(code)
    path.write_bytes(data)
    path.rename(path.with_name("rank0000_flush000001.safetensors"))
    world.refused("foreign-missing")


def test_what_is_there_is_told_by_its_content(world, tmp_path):
    versions(world)
    world.refused("foreign-unknown", name="slime-v1")
    world.refused("foreign-unknown", name="trl")
    world.refused("foreign-format", name="nothing")
    with pytest.raises(FormatError, match="nothing of a known format"):
        reader("auto", tmp_path / "none")
