import gc
import json
import os
import pickle
import socket
import struct
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from deltackpt.checkpoint import Checkpoint, Located
from deltackpt.checkpoint import files as checkpoint_files
from deltackpt.errors import (
    CheckpointError,
    DeltackptError,
    FormatError,
    NoSpaceError,
    StoreError,
    UsageError,
)
from deltackpt.format.names import is_path
from deltackpt.format.safetensors_header import Tensor, build_header
from deltackpt.util import disk

INDEX = "model.safetensors.index.json"


def arrays(*names):
    return {name: np.arange(5, dtype="<f4") + len(name) for name in names}


def sharded(root, shards, weight_map=None, index=INDEX):
    for name, tensors in shards.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays(*tensors), root / name)
    if weight_map is None:
        weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (root / index).write_text(json.dumps({"metadata": {"total_size": 1.5}, "weight_map": weight_map}))


def refused(root):
    with pytest.raises(DeltackptError) as error:
        Checkpoint.open(root)
    return error.value


# What is read


def test_a_single_file(tmp_path):
    saved = arrays("b", "a", "\u00e9", "\U0001f600", "\uffff")
    save_file(saved, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.root == tmp_path
        assert [shard.path for shard in checkpoint.shards] == ["model.safetensors"]
        assert checkpoint.shards[0].size == (tmp_path / "model.safetensors").stat().st_size
        assert checkpoint.side == ("config.json",)
        assert checkpoint.left_out == ()
        assert list(checkpoint.tensors) == sorted(saved, key=str.encode)
        raw = (tmp_path / "model.safetensors").read_bytes()
        for name, array in saved.items():
            found = checkpoint.tensors[name]
            assert (found.dtype, found.shape, found.shard) == ("F32", (5,), "model.safetensors")
            assert raw[found.start : found.end] == array.tobytes()
            view = checkpoint.bytes_of(name)
            assert (view.dtype, view.ndim, view.flags.writeable) == (np.uint8, 1, False)
            assert view.tobytes() == array.tobytes()


def test_every_bit_pattern_and_the_empty_shapes(tmp_path):
    words = np.arange(1 << 16).astype("<u2")
    layout = [
        Tensor("nothing", "BF16", (0, 7), 0, 0),
        Tensor("words", "BF16", (256, 256), 0, 1 << 17),
        Tensor("flags", "BOOL", (3,), 1 << 17, (1 << 17) + 3),
        Tensor("scalar", "I64", (), (1 << 17) + 3, (1 << 17) + 11),
        Tensor("nibbles", "F4", (2, 4), (1 << 17) + 11, (1 << 17) + 15),
    ]
    data = words.tobytes() + b"\x00\x02\xff" + b"12345678" + b"abcd"
    (tmp_path / "model.safetensors").write_bytes(build_header(layout, {}) + data)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.bytes_of("words").tobytes() == words.tobytes()
    assert checkpoint.bytes_of("flags").tolist() == [0, 2, 255]
    assert checkpoint.bytes_of("nibbles").tobytes() == b"abcd"
    assert checkpoint.bytes_of("nothing").shape == (0,)
    for name in checkpoint.tensors:
        checkpoint.release(name)


def test_an_index_wins_and_strays_are_reported(tmp_path):
    sharded(tmp_path, {"model-2.safetensors": ["c"], "model-1.safetensors": ["b", "a"], "sub/x.safetensors": ["d"]})
    save_file(arrays("old"), tmp_path / "model.safetensors")
    save_file(arrays("old"), tmp_path / "model-3.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert [shard.path for shard in checkpoint.shards] == [
        "model-1.safetensors",
        "model-2.safetensors",
        "sub/x.safetensors",
    ]
    assert list(checkpoint.tensors) == ["a", "b", "c", "d"]
    assert checkpoint.side == (INDEX,)
    reason = "not part of this checkpoint"
    assert checkpoint.left_out == (("model-3.safetensors", reason), ("model.safetensors", reason))
    assert checkpoint.bytes_of("d").tobytes() == arrays("d")["d"].tobytes()


@pytest.mark.parametrize(
    "index", ["diffusion_pytorch_model.safetensors.index.json", "adapter_model.safetensors.index.json"]
)
def test_an_index_by_any_name(tmp_path, index):
    sharded(tmp_path, {"1.safetensors": ["a"]}, index=index)
    assert list(Checkpoint.open(tmp_path).tensors) == ["a"]


@pytest.mark.parametrize(
    ("present", "chosen"),
    [
        (["model", "adapter_model", "diffusion_pytorch_model", "x"], "model"),
        (["adapter_model", "diffusion_pytorch_model", "x"], "adapter_model"),
        (["diffusion_pytorch_model", "x"], "diffusion_pytorch_model"),
        (["x"], "x"),
    ],
)
def test_the_choice_of_a_single_file(tmp_path, present, chosen):
    for name in present:
        save_file(arrays(name), tmp_path / f"{name}.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert list(checkpoint.tensors) == [chosen]
    assert [name for name, _ in checkpoint.left_out] == sorted(
        f"{name}.safetensors" for name in present if name != chosen
    )


def test_a_hub_cache_snapshot(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    (snapshot / "tokenizer").mkdir(parents=True)
    save_file(arrays("a"), blobs / "1")
    (blobs / "2").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1")
    (snapshot / "config.json").symlink_to("../../blobs/2")
    (snapshot / "tokenizer" / "vocab.json").symlink_to("../../../blobs/2")
    checkpoint = Checkpoint.open(snapshot)
    assert checkpoint.bytes_of("a").tobytes() == arrays("a")["a"].tobytes()
    assert checkpoint.side == ("config.json", "tokenizer/vocab.json")
    assert checkpoint.left_out == ()


def test_side_files_and_what_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "MAX_SIDE", 1 << 20)
    save_file(arrays("a"), tmp_path / "model.safetensors")
    for name in (
        "b.txt",
        "a/z.txt",
        "a.txt",
        "\u00e9.json",
        ".gitattributes",
        ".git/config",
        "a/.cache/x",
        "a/m.safetensors",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    (tmp_path / "a" / ".cache" / "x").write_bytes(b"1")
    (tmp_path / "exact.dat").write_bytes(bytes(1 << 20))
    (tmp_path / "large.dat").write_bytes(bytes((1 << 20) + 1))
    (tmp_path / "optimizer.pt").write_bytes(b"1")
    (tmp_path / "back\\slash").write_bytes(b"1")
    (tmp_path / os.fsdecode(b"\xff.txt")).write_bytes(b"1")
    (tmp_path / "loop").symlink_to(".")
    (tmp_path / "gone").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.side == (".gitattributes", "a.txt", "a/z.txt", "b.txt", "exact.dat", "\u00e9.json")
    assert checkpoint.left_out == (
        (".git/", "dot-directory"),
        ("?.txt", "its name is no plain path on every system"),
        ("a/.cache/", "dot-directory"),
        ("a/m.safetensors", "not part of this checkpoint"),
        ("back\\slash", "its name is no plain path on every system"),
        ("gone", "not readable: No such file or directory"),
        ("large.dat", "larger than 1 MiB"),
        ("loop", "a link to a directory"),
        ("optimizer.pt", "a pickle"),
        ("pipe", "not a regular file"),
    )


def test_values_are_frozen(tmp_path):
    save_file(arrays("a"), tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(str(tmp_path))
    assert isinstance(checkpoint.tensors["a"], Located)
    for value in (checkpoint.tensors["a"], checkpoint.shards[0], checkpoint.shards[0].header):
        with pytest.raises(AttributeError):
            value.name = "b"
    with pytest.raises(ValueError, match="read-only"):
        checkpoint.bytes_of("a")[0] = 1
    with pytest.raises(KeyError):
        checkpoint.bytes_of("b")


# What is refused: the choice of files


def test_checkpoint_missing(tmp_path):
    (tmp_path / "file").write_text("x")
    assert refused(tmp_path / "none").code == "checkpoint-missing"
    assert refused(tmp_path / "file").code == "checkpoint-missing"


def test_checkpoint_empty(tmp_path):
    assert refused(tmp_path).code == "checkpoint-empty"
    (tmp_path / "config.json").write_text("{}")
    error = refused(tmp_path)
    assert (error.code, error.exit_code, error.have) == ("checkpoint-empty", 5, "config.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "x.pt", "x.pth", "x.ckpt"])
def test_checkpoint_pickle(tmp_path, name):
    (tmp_path / name).write_bytes(b"anything")
    error = refused(tmp_path)
    assert error.code == "checkpoint-pickle"
    assert name in error.have
    assert "save_file" in error.hint


def test_checkpoint_ambiguous(tmp_path):
    save_file(arrays("a"), tmp_path / "model-1.safetensors")
    save_file(arrays("a"), tmp_path / "model-2.safetensors")
    error = refused(tmp_path)
    assert error.code == "checkpoint-ambiguous"
    assert INDEX in error.hint
    sharded(tmp_path, {"model-1.safetensors": ["a"]})
    assert list(Checkpoint.open(tmp_path).tensors) == ["a"]
    sharded(tmp_path, {"model-2.safetensors": ["a"]}, index="other.safetensors.index.json")
    assert refused(tmp_path).code == "checkpoint-ambiguous"


# What is refused: the index

ESCAPES = [
    "",
    ".",
    "..",
    "../x.safetensors",
    "a/../../x.safetensors",
    "a/../x.safetensors",
    "./x.safetensors",
    "a//x.safetensors",
    "a/",
    "/etc/x.safetensors",
    "C:/x.safetensors",
    "C:x.safetensors",
    "a\\x.safetensors",
    "..\\x.safetensors",
    "x\0.safetensors",
    "x\n.safetensors",
    "x" * 1025,
]


@pytest.mark.parametrize("name", ESCAPES, ids=range(len(ESCAPES)))
def test_name_escapes(tmp_path, name):
    sharded(tmp_path, {"1.safetensors": ["a"]}, {"a": name})
    assert refused(tmp_path).code == "shard-escapes"
    assert not is_path(name)


def test_plain_names():
    assert all(map(is_path, ["x", "a/b.safetensors", "...", "a..b", "..a", ".x", "\u00e9", "a b", "con"]))


@pytest.mark.parametrize(
    "value", [[], {}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": None}]
)
def test_index_field(tmp_path, value):
    (tmp_path / INDEX).write_text(json.dumps(value))
    assert refused(tmp_path).code == "index-field"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{", "json-syntax"), ('{"weight_map":{"a":"x","a":"y"}}', "json-duplicate-key"), ("[" * 100_000, "json-depth")],
    ids=range(3),
)
def test_an_index_that_is_not_strict_json(tmp_path, text, expected):
    (tmp_path / INDEX).write_text(text)
    error = refused(tmp_path)
    assert isinstance(error, FormatError)
    assert (error.code, error.where) == (expected, str(tmp_path / INDEX))


def test_an_index_that_cannot_be_read(tmp_path):
    (tmp_path / INDEX).symlink_to("nowhere")
    assert refused(tmp_path).code == "not-readable"
    (tmp_path / INDEX).unlink()
    (tmp_path / INDEX).mkdir()
    assert (refused(tmp_path).code, refused(tmp_path).have) == ("not-a-file", "a directory")


def test_shard_missing(tmp_path):
    sharded(tmp_path, {"1.safetensors": ["a"], "2.safetensors": ["b"]})
    (tmp_path / "2.safetensors").unlink()
    error = refused(tmp_path)
    assert (error.code, error.where) == ("shard-missing", str(tmp_path / "2.safetensors"))
    (tmp_path / "2.safetensors").symlink_to("nowhere")
    assert (refused(tmp_path).code, refused(tmp_path).have) == ("shard-missing", "a link to nothing")


def test_tensor_missing(tmp_path):
    shards = {"1.safetensors": ["a"], "2.safetensors": ["b"]}
    sharded(tmp_path, shards, {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"})
    assert refused(tmp_path).code == "tensor-missing"
    sharded(tmp_path, shards, {"a": "2.safetensors", "b": "1.safetensors"})
    error = refused(tmp_path)
    assert (error.code, error.have) == ("tensor-missing", "tensor 'a' in 1.safetensors")


def test_tensor_duplicate(tmp_path):
    sharded(tmp_path, {"1.safetensors": ["a", "b"], "2.safetensors": ["b"]})
    error = refused(tmp_path)
    assert (error.code, error.have) == ("tensor-duplicate", "tensor 'b' in 1.safetensors and 2.safetensors")


def test_tensor_unlisted(tmp_path):
    sharded(tmp_path, {"1.safetensors": ["a", "b"]}, {"a": "1.safetensors"})
    error = refused(tmp_path)
    assert (error.code, error.where) == ("tensor-unlisted", str(tmp_path / "1.safetensors"))


# What is refused: the files


def zip_bytes(tmp_path):
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    return (tmp_path / "zip").read_bytes()


GOOD = save(arrays("a"))
NOT_SAFETENSORS = {
    "an empty file": b"",
    "an HTML page": b"<!DOCTYPE html>\n<html>",
    "an HTML page ": b"  <html lang=en>",
    "an XML document": b'<?xml version="1.0"?><Error>',
    "a git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "a pickle": pickle.dumps({"a": 1}, protocol=4),
    "a pickle ": pickle.dumps({"a": 1}, protocol=2),
    "a zip archive": zip_bytes,
    "gzip data": b"\x1f\x8b\x08" + bytes(40),
    "zstd data": b"\x28\xb5\x2f\xfd" + bytes(40),
    "a GGUF file": b"GGUF" + bytes(40),
    "a numpy file": b"\x93NUMPY" + bytes(40),
    "an HDF5 file": b"\x89HDF\r\n\x1a\n" + bytes(40),
    "a JSON document": b'{"weight_map": {}}',
    "a JSON document ": b"\xef\xbb\xbf [1]",
    "a file that begins with zeros": bytes(4096),
    "text": b"404: Entry not found\n",
    "a truncated safetensors file": GOOD[:7],
    "a truncated safetensors file ": GOOD[:8],
    "a truncated safetensors file  ": GOOD[:20],
    "a safetensors file cut short or added to": GOOD[:-1],
    "a safetensors file cut short or added to ": GOOD + b"x",
}


@pytest.mark.parametrize("what", NOT_SAFETENSORS)
def test_not_safetensors(tmp_path, what):
    data = NOT_SAFETENSORS[what]
    (tmp_path / "model.safetensors").write_bytes(data(tmp_path) if callable(data) else data)
    error = refused(tmp_path)
    assert isinstance(error, CheckpointError)
    assert error.code == "not-safetensors"
    assert error.have.startswith(what.strip())
    assert error.hint


def test_a_directory_is_not_safetensors(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    assert (refused(tmp_path).code, refused(tmp_path).have) == ("not-safetensors", "a directory")


def test_a_defect_inside_keeps_its_code(tmp_path):
    for text, expected in ((b'{"a":1}', "header-field"), (b'{"":1}  ', "name-refused"), (b"\xff" * 9, "json-syntax")):
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
        error = refused(tmp_path)
        assert (type(error), error.code) == (FormatError, expected)
        assert str(tmp_path / "model.safetensors") in error.where


def test_a_header_whose_length_looks_like_a_pickle(tmp_path):
    text = b"{}".ljust(0x0280)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert Checkpoint.open(tmp_path).tensors == {}
    text = b"{]".ljust(0x0280)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert refused(tmp_path).code == "json-syntax"


def test_not_a_file(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    done = []
    thread = threading.Thread(target=lambda: done.append(refused(tmp_path)), daemon=True)
    thread.start()
    thread.join(10)
    assert [(error.code, error.have) for error in done] == [("not-a-file", "a FIFO")]
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("/dev/null")
    assert (refused(tmp_path).code, refused(tmp_path).have) == ("not-a-file", "a device")
    (tmp_path / "model.safetensors").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(tmp_path)  # the address has room for 108 bytes
        try:
            server.bind("model.safetensors")
        finally:
            os.chdir(here)
        assert (refused(tmp_path).code, refused(tmp_path).have) == ("not-a-file", "a socket")


def test_not_readable(tmp_path):
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    assert refused(tmp_path).code == "not-readable"


# The life of an open checkpoint


@pytest.mark.parametrize("change", ["append", "touch", "replace", "remove"])
def test_checkpoint_changed(tmp_path, change):
    path = tmp_path / "model.safetensors"
    save_file(arrays("a"), path)
    before, mapped = Checkpoint.open(tmp_path), Checkpoint.open(tmp_path)
    view = mapped.bytes_of("a")
    for checkpoint in (before, mapped):
        checkpoint.verify_unchanged()
    info = path.stat()
    if change == "append":
        with path.open("ab") as file:
            file.write(b"x")
    elif change == "touch":
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns + 1))
    else:
        path.rename(tmp_path / "old.safetensors")
        if change == "replace":
            save_file(arrays("a"), path)
            os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    for call in (before.verify_unchanged, mapped.verify_unchanged, lambda: before.bytes_of("a")):
        with pytest.raises(CheckpointError) as error:
            call()
        assert error.value.code == "checkpoint-changed"
    assert view.tobytes() == arrays("a")["a"].tobytes()


def test_close(tmp_path):
    save_file(arrays("a"), tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        view = checkpoint.bytes_of("a")
    checkpoint.close()
    checkpoint.release("a")
    assert view.tobytes() == arrays("a")["a"].tobytes()
    with pytest.raises(UsageError) as error:
        checkpoint.bytes_of("a")
    assert error.value.code == "checkpoint-closed"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_no_descriptor_stays_open(tmp_path):
    sharded(tmp_path, {f"{i}.safetensors": [f"t{i}"] for i in range(5)})

    def count():
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()  # what earlier tests left
    before = count()
    checkpoint = Checkpoint.open(tmp_path)
    assert count() == before
    for name in checkpoint.tensors:
        checkpoint.bytes_of(name)
    assert count() <= before + 5  # a mapping holds one
    checkpoint.close()
    assert count() == before


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_release_keeps_resident_memory_small(tmp_path):
    size = 8 << 20
    layout = [Tensor(f"t{i}", "U8", (size,), i * size, (i + 1) * size) for i in range(8)]
    data = b"".join(bytes([i]) * size for i in range(8))
    (tmp_path / "model.safetensors").write_bytes(build_header(layout, {}) + data)

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    checkpoint = Checkpoint.open(tmp_path)
    before = resident()
    views = {name: checkpoint.bytes_of(name) for name in checkpoint.tensors}
    for name, view in views.items():
        assert view.max() == int(name[1:])
        checkpoint.release(name)
        assert resident() < before + 2 * size
    assert all(view[0] == view[-1] == int(name[1:]) for name, view in views.items())


def test_tensors_are_read_by_many_threads(tmp_path):
    sharded(tmp_path, {f"{i}.safetensors": [f"t{i}"] for i in range(4)})
    checkpoint = Checkpoint.open(tmp_path)
    wrong = []

    def work():
        for _ in range(50):
            for name in checkpoint.tensors:
                if checkpoint.bytes_of(name).tobytes() != arrays(name)[name].tobytes():
                    wrong.append(name)
                checkpoint.release(name)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# The disk


def test_ensure_space(tmp_path):
    disk.ensure_space(tmp_path, 1)
    disk.ensure_space(tmp_path / "not" / "there", 1)
    with pytest.raises(NoSpaceError) as error:
        disk.ensure_space(tmp_path / "not" / "there", 1 << 62)
    assert (error.value.code, error.value.exit_code) == ("no-space", 9)
    assert f"{1 << 62:,} bytes" in error.value.need


def test_other_errors_are_not_about_space(tmp_path):
    with pytest.raises(StoreError) as error, disk.space_errors(tmp_path):
        (tmp_path / "none").read_bytes()
    assert error.value.code == "not-writable"


def test_fsync_dir(tmp_path):
    disk.fsync_dir(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        disk.fsync_dir(tmp_path / "file")
