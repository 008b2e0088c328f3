"""slime's first layout, held to files that its own code wrote, and to arithmetic that is not the library's."""

import json
import shutil
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import zstandard
from support.foreign_layouts import WIDTH, receive_slime_v1, slime_v1, slime_v1_checksum
from support.states import make_checkpoint, random_bytes
from test_interop_dtypes import names, row, states_of_all
from test_interop_round_trips import published, states_of_a_run

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import ChainError, FormatError, UsageError
from deltackpt.format.dtypes import DTYPES
from deltackpt.interop import ExportOptions, export_steps, import_steps, reader, writer
from deltackpt.interop.slime_v1_checksum import SUMMED, checksum_of, hash_of
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply

RECORDED = Path(__file__).parent / "recorded_slime"
RUNS = [f"{what}-{encoding}" for what in ("mixed", "bf16") for encoding in ("indices", "deltas", "deltas_zstd")]
STATED = {  # what slime's code said of the files, as it printed it
    "mixed-indices": (18585994313674522762, 128050070137340080),
    "mixed-deltas": (18585994313674522721, 128050070137340000),
    "mixed-deltas_zstd": (18585994313674522721, 128050070137340000),
    "bf16-indices": (126452633287262246, 18574392975647834264),
    "bf16-deltas": (126452633287262211, 18574392975647834215),
    "bf16-deltas_zstd": (126452633287262211, 18574392975647834215),
}


def recorded_state(number):
    data = zstandard.ZstdDecompressor().decompress((RECORDED / f"step_{number}.safetensors.zst").read_bytes())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__")
    found = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        found[name] = (entry["dtype"], tuple(entry["shape"]), data[8 + size + start : 8 + size + end])
    return found


def checked(tmp_path, form, src, states):
    """Import it through the public functions; every byte of both steps is compared."""
    base = make_checkpoint(tmp_path / "base", states[0])
    name, source = reader("auto", src)
    assert name == form
    assert import_steps(name, source, tmp_path / "repo", base=base, threads=1).steps == [0, 1, 2]
    repo = Repository.open(tmp_path / "repo")
    for number, need in enumerate(states):
        apply(repo, tmp_path / str(number), number, threads=1)
        with Checkpoint.open(tmp_path / str(number)) as have:
            assert {n: (t.dtype, t.shape, have.bytes_of(n).tobytes()) for n, t in have.tensors.items()} == need


@pytest.mark.parametrize("run", ["xor-xxh3-128", "overwrite-adler32"])
def test_what_slime_wrote_in_its_second_layout_comes_in(tmp_path, run):
    checked(tmp_path, "slime", RECORDED / run, [recorded_state(number) for number in range(3)])


@pytest.mark.parametrize("run", RUNS)
def test_what_slime_wrote_comes_in(tmp_path, run):
    states = [recorded_state(number) for number in range(3)]
    if run.startswith("bf16"):
        kept = {name for name, value in states[0].items() if value[0] == "BF16"}
        states = [{**states[0], **{n: s[n] for n in kept}} for s in states]
    checked(tmp_path, "slime-v1", RECORDED / "v1" / run, states)


@pytest.mark.parametrize("run", RUNS)
def test_the_checksum_that_slime_stated(tmp_path, run):
    """Of each recorded file, by the arithmetic of the tests; and a flipped bit of it is refused."""
    for number, need in enumerate(STATED[run], 1):
        (path,) = (RECORDED / "v1" / run / f"weight_v{number:06d}").iterdir()
        data = path.read_bytes()
        plain = zstandard.ZstdDecompressor().decompress(data) if run.endswith("zstd") else data
        size = int.from_bytes(plain[:8], "little")
        header = json.loads(plain[8 : 8 + size])
        assert header["__metadata__"]["checksum"] == str(need)
        parts = {}
        for key in ("__positions__", "__values__"):
            start, end = header[key]["data_offsets"]
            parts[key] = plain[8 + size + start : 8 + size + end]
        dtype = header["__values__"]["dtype"]
        assert slime_v1_checksum(parts["__positions__"], parts["__values__"], dtype) == need
    start, _ = header["__values__"]["data_offsets"]
    broken = bytearray(plain)
    broken[8 + size + start] ^= 1
    shutil.copytree(RECORDED / "v1" / run, tmp_path / "run")
    (path,) = (tmp_path / "run" / "weight_v000002").iterdir()
    path.write_bytes(zstandard.ZstdCompressor(level=1).compress(bytes(broken)) if run.endswith("zstd") else broken)
    base = make_checkpoint(tmp_path / "base", recorded_state(0))
    with pytest.raises(FormatError) as raised:
        import_steps(*reader("auto", tmp_path / "run"), tmp_path / "repo", base=base, threads=1)
    assert raised.value.code == "foreign-checksum"


def test_of_two_bf16_values_on_paper() -> None:
    """1.0 is 3FF0000000000000 as a double, -2.0 is C000000000000000; positions 1 and 5 are bytes 01 00 05 00."""
    positions, values = np.array([1, 0, 5, 0], "u1"), np.array([0x3F80, 0xC000], "<u2").view("u1")
    assert hash_of(positions, "U8") == 1 ^ 5
    assert hash_of(values, "BF16") == 0x3FF0000000000000 ^ 0xC000000000000000
    assert checksum_of(positions, values, "BF16") == 4 ^ (0xFFF0000000000000 << 1)  # 65 bits: it is no machine word


def one_by_one(data, dtype):
    """Each element widened alone, by struct and by hand."""
    width = WIDTH[dtype]
    for i in range(0, len(data), width):
        raw = data[i : i + width]
        if dtype == "BF16":
            value = struct.unpack("<f", b"\0\0" + raw)[0]
        elif dtype in ("F16", "F32", "F64"):
            value = struct.unpack({"F16": "<e", "F32": "<f", "F64": "<d"}[dtype], raw)[0]
        else:
            value = int.from_bytes(raw, "little", signed=dtype[0] == "I")
            yield value % (1 << 64)
            continue
        yield struct.unpack("<Q", struct.pack("<d", value))[0]


@pytest.mark.parametrize("dtype", sorted(SUMMED))
def test_of_every_dtype_element_by_element(dtype):
    rng = np.random.default_rng(5)
    raw = np.frombuffer(random_bytes(rng, dtype, (301,)), f"<u{WIDTH[dtype]}")
    if dtype == "BOOL":
        raw = raw & 1
    elif dtype in ("BF16", "F16", "F32", "F64"):  # no NaN: its payload is the processor's
        raw = raw & raw.dtype.type((1 << (8 * WIDTH[dtype] - 2)) - 1)
    data = raw.tobytes()
    need = 0
    for word in one_by_one(data, dtype):
        need ^= word
    assert hash_of(np.frombuffer(data, "u1"), dtype) == need
    assert slime_v1_checksum(b"", data, dtype) == need << 1


def test_in_pieces(monkeypatch):
    data = np.arange(1000, dtype="<u2").view("u1")
    need = hash_of(data, "F16")
    monkeypatch.setattr("deltackpt.interop.slime_v1_checksum.PIECE", 7)
    assert hash_of(data, "F16") == need
    assert hash_of(data[:0], "F16") == 0


@pytest.mark.parametrize("dtype", sorted(SUMMED))
def test_it_is_torchs_own(dtype):
    """Of every bit pattern of 16 bits, and of many of the wider ones, NaN included."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch, "hash_tensor"):
        pytest.skip("a torch without hash_tensor")
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "BOOL": "bool", "U8": "uint8"}
    width = WIDTH[dtype]
    words = np.arange(1 << 16, dtype="<u2") if width == 2 else np.random.default_rng(1).integers(0, 256, 1 << 16, "u1")
    raw = (words & 1 if dtype == "BOOL" else words).view("u1")
    kind = getattr(torch, names.get(dtype, f"int{8 * width}"))
    tensor = torch.from_numpy(raw.copy()).view(kind)
    assert hash_of(raw, dtype) == int(torch.hash_tensor(tensor).item())
    each = torch.hash_tensor(tensor.view(-1, 1), dim=1).view(torch.int64).numpy().view("<u8")
    for i in range(0, len(each), 97):
        assert hash_of(raw[i * width : (i + 1) * width], dtype) == each[i]


@pytest.mark.parametrize("encoding", ["deltas", "indices", "deltas_zstd"])
def test_what_we_write_its_receiver_takes_and_we_read(tmp_path, encoding):
    repo = published(tmp_path, states_of_a_run())
    out = tmp_path / "out"
    done = export_steps(repo, "slime-v1", writer("slime-v1", out, encoding=encoding)[1], out, threads=1)
    assert (done.steps, done.whole) == ([1, 2, 3], [])
    state = states_of_a_run()[0]
    for number, need in enumerate(states_of_a_run()[1:], 1):
        state = receive_slime_v1(out / f"weight_v{number:06d}", state)
        assert state == need
    assert list((out / "weight_v000003").iterdir()) == []  # a step without changes
    base = make_checkpoint(tmp_path / "base", states_of_a_run()[0], shards=2)
    import_steps(*reader("auto", out), tmp_path / "back", base=base, threads=1)
    back = Repository.open(tmp_path / "back")
    assert [(m.step, m.state) for m in back.log()] == [(m.step, m.state) for m in repo.log()]


def test_long_gaps_several_dtypes_and_files(tmp_path, monkeypatch):
    zeros = {"long": ("BF16", (70000,), bytes(140000)), "w": ("F32", (3,), bytes(12)), "v": ("BF16", (3,), bytes(6))}
    new = np.zeros(70000, "<u2")
    new[[0, 69999]] = 0x3F80
    states = [zeros, {**zeros, "long": ("BF16", (70000,), new.tobytes()), "w": ("F32", (3,), b"\0" * 8 + b"\0\0\x80?")}]
    states.append({**states[-1], "v": ("BF16", (3,), b"\x80?" * 3), "long": zeros["long"]})
    monkeypatch.setattr("deltackpt.interop.slime_v1_write.FILE_BYTES", 8)
    repo = published(tmp_path, states)
    out = tmp_path / "out"
    export_steps(repo, "slime-v1", writer("slime-v1", out)[1], out, threads=1)
    state = states[0]
    for number, need in enumerate(states[1:], 1):
        state = receive_slime_v1(out / f"weight_v{number:06d}", state)
        assert state == need
        assert len(list((out / f"weight_v{number:06d}").iterdir())) == 2


def test_what_it_cannot_carry(tmp_path):
    one = {"w": ("BF16", (2,), bytes(4)), "i": ("I32", (1,), bytes(4))}
    for i, other in enumerate(
        [
            {**one, "i": ("I32", (1,), b"\1\0\0\0")},
            {**one, "w": ("BF16", (2,), b"\xc0\x7f\0\0")},  # a NaN: receivers take it for an element that stays
            {**one, "new": ("F32", (1,), b"abcd")},
            {"w": one["w"]},
            {**one, "w": ("F16", (2,), b"abcd")},
        ]
    ):
        repo = published(tmp_path / str(i), [one, other])
        out = tmp_path / str(i) / "out"
        with pytest.raises(ChainError) as raised:
            export_steps(repo, "slime-v1", writer("slime-v1", out)[1], out, threads=1)
        assert raised.value.code == "foreign-carry"
        assert "`slime`" in raised.value.hint
        assert not [p for p in out.rglob("*") if p.is_file()]
    with pytest.raises(UsageError):
        writer("slime-v1", tmp_path, encoding="xor")


def test_the_dtypes_that_the_table_names(tmp_path):
    states, carried = states_of_all(), set()
    with Checkpoint.open(make_checkpoint(tmp_path / "old", states[0])) as old:
        for i, dtype in enumerate(sorted(DTYPES)):
            path = make_checkpoint(tmp_path / dtype, {**states[0], dtype: states[1][dtype]})
            with Checkpoint.open(path) as new, suppress(ChainError):
                writer("slime-v1", tmp_path / "out")[1].delta(i, old, new, 1)
                carried.add(dtype)
    refused = f"{names(DTYPES.keys() - carried)} (`foreign-carry`)"
    assert row("written", "slime-v1") == [names(carried), "–", refused]


def test_gaps_of_numbers_and_early_files(tmp_path):
    states = states_of_a_run()
    src = tmp_path / "src"
    for number in (1, 2):
        slime_v1(
            src, number, states[number - 1], states[number], prev_version=str(number - 1) if number > 1 else "default"
        )
    base = make_checkpoint(tmp_path / "base", states[0])
    import_steps(*reader("auto", src), tmp_path / "repo", base=base, threads=1)
    shutil.rmtree(src / "weight_v000002")
    slime_v1(src, 2, states[1], states[2], prev_version="0")
    with pytest.raises(ChainError) as raised:
        import_steps(*reader("auto", src), tmp_path / "other", base=base, threads=1)
    assert raised.value.code == "foreign-gap"


def test_a_checksum_cut_to_64_bits_is_one_too(tmp_path):
    states = states_of_a_run()
    slime_v1(tmp_path / "src", 1, states[0], states[1], cut=True)
    base = make_checkpoint(tmp_path / "base", states[0])
    import_steps(*reader("auto", tmp_path / "src"), tmp_path / "repo", base=base, threads=1)


def test_numbers_that_have_gaps(tmp_path):
    from deltackpt.publish.write import write

    states = states_of_a_run()
    for i, state in enumerate(states):
        write(make_checkpoint(tmp_path / "in" / str(i), state), tmp_path / "repo", step=10 * i)
    repo = Repository.open(tmp_path / "repo")
    out = tmp_path / "out"
    with pytest.raises(ChainError, match="--renumber"):
        export_steps(repo, "slime-v1", writer("slime-v1", out)[1], out, threads=1)
    export_steps(repo, "slime-v1", writer("slime-v1", out)[1], out, ExportOptions(renumber=True), threads=1)
    assert sorted(p.name for p in out.iterdir()) == [f"weight_v{n:06d}" for n in (1, 2, 3)]
