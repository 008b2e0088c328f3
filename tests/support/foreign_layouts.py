"""The layouts of other systems, made from what is known of them; nothing here is the library's."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash
import zstandard

Value = tuple[str, tuple[int, ...], bytes]
State = dict[str, Value]

WIDTH = {  # bytes of what is compared: of F4 and F6 the bytes that they are packed into
    **dict.fromkeys(("F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "BOOL", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 8),
}
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
TORCH = {
    **{"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64", "BOOL": "bool"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
    **{"U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
    **{"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
}


def safetensors(
    path: Path, rows: list[tuple[str, str, tuple[int, ...], bytes]], metadata: dict[str, str] | None = None
):
    path.parent.mkdir(parents=True, exist_ok=True)
    header: dict = {"__metadata__": metadata} if metadata is not None else {}
    at = 0
    for name, dtype, shape, data in rows:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for *_, data in rows))
    return path


def words(value: Value) -> np.ndarray:
    return np.frombuffer(value[2], f"<u{WIDTH[value[0]]}")


def changed(old: State, new: State):
    """(name, flat positions, new words) of every tensor that differs."""
    for name, value in new.items():
        a, b = words(old[name]), words(value)
        at = np.flatnonzero(a != b)
        if len(at):
            yield name, at, b[at]


def flat(dtype: str, values: np.ndarray) -> tuple[int]:
    """The shape of values as one dimension of a dtype."""
    return (8 * values.nbytes // BITS.get(dtype, 8 * WIDTH[dtype]),)


def gaps(positions: np.ndarray) -> np.ndarray:
    return np.array([p - q - 1 for p, q in zip(positions, [-1, *positions[:-1]], strict=True)], np.int64)


# slime, second layout


def _differ(old: bytes, new: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    a, b = np.frombuffer(old, "u1"), np.frombuffer(new, "u1")
    return np.flatnonzero(a != b), a, b


def _xor(old: bytes, new: bytes) -> bytes:
    _, a, b = _differ(old, new)
    return (a ^ b).tobytes()


def _overwrite(old: bytes, new: bytes) -> bytes:
    at, _, b = _differ(old, new)
    return np.array([len(at), *at], "<u4").tobytes() + b[at].tobytes()


def _xor_sparse(old: bytes, new: bytes) -> bytes:
    at, a, b = _differ(old, new)
    return np.array([len(at), *at], "<u8").tobytes() + (a ^ b)[at].tobytes()


SLIME = {"xor": _xor, "overwrite": _overwrite, "xor_sparse": _xor_sparse}
SUMS: dict[str, Callable[[bytes], str]] = {
    "xxh3-128": lambda data: xxhash.xxh3_128_hexdigest(data),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


def slime(root: Path, number: int, old: State, new: State, *, encoding="xor", checksum="xxh3-128", ranks=2, prefix=""):
    """One version; tensors are dealt to the ranks, and a rank without changes has no file."""
    folder = root / f"weight_v{number:06d}"
    folder.mkdir(parents=True)
    names = [name for name in new if old[name] != new[name]]
    weight_map = {}
    for rank in range(ranks):
        rows, metadata = [], {}
        for name in names[rank::ranks]:
            blob = zstandard.ZstdCompressor(level=1).compress(SLIME[encoding](old[name][2], new[name][2]))
            rows.append((name, "U8", (len(blob),), blob))
            metadata[prefix + name] = SUMS[checksum](new[name][2])
        if rows:
            file = f"model-{rank:05d}-of-{ranks:05d}.safetensors"
            safetensors(folder / file, rows, metadata)
            weight_map |= dict.fromkeys(names[rank::ranks], file)
    index = {
        "metadata": {
            "version": f"{number:06d}",
            "base_version": f"{number - 1:06d}",
            "delta_encoding": encoding,
            "compression_format": "zstd",
            "checksum_format": checksum,
        },
        "weight_map": weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def receive_slime(folder: Path, state: State) -> State:
    """What a receiver does: every file of the folder, every tensor in it, onto its own bytes; then the digest."""
    metadata = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]
    assert {"version", "base_version", "delta_encoding", "compression_format", "checksum_format"} <= metadata.keys()
    new = dict(state)
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        digests = header.pop("__metadata__")
        for name, entry in header.items():
            assert entry["dtype"] == "U8"
            start, end = entry["data_offsets"]
            raw = zstandard.ZstdDecompressor().decompress(data[8 + size + start : 8 + size + end])
            dtype, shape, old = new[name]
            out = bytearray(old)
            if metadata["delta_encoding"] == "xor":
                assert len(raw) == len(old)
                out = bytearray(_xor(old, raw))
            else:
                wide = 4 if metadata["delta_encoding"] == "overwrite" else 8
                count = int.from_bytes(raw[:wide], "little")
                at = np.frombuffer(raw, f"<u{wide}", count, wide)
                for i, p in enumerate(at.tolist()):
                    value = raw[wide + wide * count + i]
                    out[p] = value if wide == 4 else out[p] ^ value
            assert SUMS[metadata["checksum_format"]](bytes(out)) == digests[name]
            new[name] = (dtype, shape, bytes(out))
    return new


# slime, first layout


def widened(data: bytes, dtype: str) -> np.ndarray | None:
    """Each element as 64 bits, as torch.hash_tensor takes it: floats as doubles, integers by their sign. None for
    dtypes that it refuses. By numpy's own dtypes, and of BF16 by its definition: the upper half of an F32."""
    raw = np.frombuffer(data, "u1")
    if dtype == "BF16":
        halves = np.zeros((len(raw) // 2, 4), "u1")
        halves[:, 2:] = raw.reshape(-1, 2)
        return halves.reshape(-1).view("<f4").astype(np.float64).view("<u8")
    if dtype in ("F16", "F32", "F64"):
        return raw.view(f"<f{WIDTH[dtype]}").astype(np.float64).view("<u8")
    if dtype in ("I8", "I16", "I32", "I64"):
        return raw.view(f"<i{WIDTH[dtype]}").astype(np.int64).view("<u8")
    return raw.astype("<u8") if dtype in ("U8", "BOOL") else None


def slime_v1_checksum(positions: bytes, values: bytes, dtype: str) -> int | None:
    """The xor of position bytes, and that of values moved up by a bit: a Python integer, of 65 bits at most."""
    wide = widened(values, dtype)
    if wide is None:
        return None
    sums = [0, 0]
    for i, words_ in enumerate((widened(positions, "U8"), wide)):
        for word in words_.tolist():
            sums[i] ^= word
    return sums[0] ^ (sums[1] << 1)


def receive_slime_v1(folder: Path, state: State) -> State:
    """What a receiver does: the checksum first, then values at positions, of every file."""
    new = {name: [dtype, shape, bytearray(data)] for name, (dtype, shape, data) in state.items()}
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        if data[:4] == b"\x28\xb5\x2f\xfd":
            data = zstandard.ZstdDecompressor().decompress(data)
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        metadata = header.pop("__metadata__")
        assert header.keys() == {"__positions__", "__values__"}
        at, values = (
            data[8 + size + start : 8 + size + end]
            for start, end in (header[key]["data_offsets"] for key in ("__positions__", "__values__"))
        )
        dtype = header["__values__"]["dtype"]
        assert header["__positions__"]["dtype"] == "U8"
        assert int(metadata["checksum"]) == slime_v1_checksum(at, values, dtype)
        for p in json.loads(metadata["params"]):
            assert (new[p["name"]][0], list(new[p["name"]][1])) == (dtype, p["shape"])
            assert p["dtype"] == TORCH[dtype]
            raw = np.frombuffer(at[p["pos_start"] : p["pos_end"]], f"<u{p['pos_width']}").astype(np.int64)
            positions = raw if metadata["encoding"] == "indices" else np.cumsum(raw + 1) - 1
            wide = WIDTH[dtype]
            assert len(positions) == p["val_end"] - p["val_start"]
            for k, position in enumerate(positions.tolist()):
                value = values[wide * (p["val_start"] + k) : wide * (p["val_start"] + k + 1)]
                new[p["name"]][2][wide * position : wide * (position + 1)] = value
    return {name: (dtype, shape, bytes(data)) for name, (dtype, shape, data) in new.items()}


def slime_v1(
    root: Path, number: int, old: State, new: State, *, encoding="deltas", rank=0, flush=0, promote=False, cut=False,
    **more: str,
):  # fmt: skip
    positions, values, params = b"", [], []
    wide = "<f4" if promote else None
    count = 0
    for name, at, found in changed(old, new):
        dtype, shape, _ = new[name]
        if encoding == "indices":
            raw, width = at.astype("<i4").tobytes(), 4
        else:
            width = 4 if gaps(at).max() > 65535 else 2
            raw = gaps(at).astype(f"<u{width}").tobytes()
        params.append(
            {
                "name": name,
                "dtype": f"torch.{TORCH[dtype]}" if dtype in TORCH else dtype,
                "shape": list(shape),
                "pos_start": len(positions),
                "pos_end": len(positions) + len(raw),
                "pos_width": width,
                "val_start": count,
                "val_end": count + len(found),
            }
        )
        positions += raw
        count += len(found)
        if wide and dtype == "BF16":
            found = found.astype("<u4") << 16
        values.append(found)
    data = b"".join(v.tobytes() for v in values)
    dtype = "F32" if promote else next((new[p["name"]][0] for p in params), "BF16")
    shape = flat(dtype, np.frombuffer(data, "u1"))
    rows = [("__positions__", "U8", (len(positions),), positions), ("__values__", dtype, shape, data)]

    checksum = slime_v1_checksum(positions, data, dtype)
    if cut:
        checksum %= 1 << 64
    metadata = {
        "encoding": encoding,
        "params": json.dumps(params),
        "current_version": str(number),
        **({} if checksum is None else {"checksum": str(checksum)}),
        **more,
    }
    path = root / f"weight_v{number:06d}" / f"rank{rank:04d}_flush{flush:06d}.safetensors"
    safetensors(path, rows, metadata)
    if encoding == "deltas_zstd":
        path.write_bytes(zstandard.ZstdCompressor(level=1).compress(path.read_bytes()))
    return path


# TRL


def trl(root: Path, number: int, old: State, new: State, *, form="gap_delta", **more: str):
    metadata = {"format": "sparse_weight_patch", "version": "1", "model_version": str(number), **more}
    rows = []
    for name, at, values in changed(old, new):
        if form == "first":
            rows += [(f"{name}.indices", "I32", (len(at),), at.astype("<i4").tobytes())]
            rows += [(f"{name}.values", new[name][0], flat(new[name][0], values), values.tobytes())]
            continue
        if form == "raw":
            kind, raw = "I32", at.astype("<i4")
        elif form == "nvcomp_cascaded":
            kind, raw = "U8", np.zeros(40, "u1")
        else:
            big = gaps(at).max() > 65535
            kind, raw = ("U32", gaps(at).astype("<u4")) if big else ("U16", gaps(at).astype("<u2"))
        rows += [(f"{name}.idx", kind, (len(raw),), raw.tobytes())]
        rows += [(f"{name}.val", new[name][0], flat(new[name][0], values), values.tobytes())]
    if form == "first":
        metadata["changed_params"] = json.dumps([name for name, *_ in changed(old, new)])
    else:
        metadata["encoding"] = form
    return safetensors(root / "deltas" / f"step_{number:06d}.safetensors", rows, metadata)


def trl_anchor(root: Path, number: int, state: State, folder="anchors", **more: str):
    rows = [(name, *value) for name, value in state.items()]
    return safetensors(root / folder / f"step_{number:06d}.safetensors", rows, {"model_version": str(number), **more})


def trl_checksum(state: State) -> str:
    return hashlib.sha256(b"".join(state[name][2] for name in sorted(state))).hexdigest()


# prime-rl's drafts


def prime_files(root: Path, number: int, old: State, new: State):
    folder, tensors, rows = root / "broadcasts" / f"step_{number}", [], []
    for name, at, values in changed(old, new):
        rows.append((f"{name}.indices", "I64", (len(at),), at.astype("<i8").tobytes()))
        rows.append((f"{name}.values", new[name][0], flat(new[name][0], values), values.tobytes()))
        entry = {"name": name, "indices_key": f"{name}.indices", "values_key": f"{name}.values"}
        entry |= {"shape": list(new[name][1]), "dtype": TORCH.get(new[name][0], new[name][0])}
        tensors.append(entry | {"numel": len(words(new[name])), "num_changed": len(at)})
    file = "delta-00001-of-00001.safetensors"
    safetensors(folder / file, rows)
    manifest: dict = {
        "format": "prime_rl_sparse_filesystem_v1",
        "type": "delta",
        "step": number,
        "base_step": number - 1,
    }
    (folder / "sparse_manifest.json").write_text(
        json.dumps(manifest | {"patch_files": [{"file": file, "tensors": tensors}]})
    )
    return folder


def prime_update(root: Path, number: int, old: State, new: State, *, compressed=False):
    folder, tensors, rows = root / f"step_{number}", [], []
    for i, (name, at, values) in enumerate(changed(old, new)):
        rows.append((f"tensor_{i}.indices", "I32", (len(at),), at.astype("<i4").tobytes()))
        rows.append((f"tensor_{i}.values", new[name][0], flat(new[name][0], values), values.tobytes()))
        tensors.append({"name": name, "shape": list(new[name][1]), "checksum": 1})
    path = safetensors(folder / "sparse_update_patch.safetensors", rows)
    if compressed:
        path.write_bytes(zstandard.ZstdCompressor().compress(path.read_bytes()))
    manifest = {"format": "prime-rl-sparse-update", "version": 1, "step": number, "base_step": number - 1}
    manifest |= {"compressed": compressed, "tensors": tensors}
    (folder / "sparse_update_manifest.json").write_text(json.dumps(manifest))
    return folder


def prime_ranks(root: Path, number: int, old: State, new: State, *, ranks=2):
    folder, found, hashes = root / f"step_{number}", list(changed(old, new)), {}
    for r in range(ranks):
        rows, tensors = [], []
        for i, (name, at, values) in enumerate(found[r::ranks]):
            rows.append((f"t{i}_indices", "I64", (len(at),), at.astype("<i8").tobytes()))
            rows.append((f"t{i}_values", new[name][0], flat(new[name][0], values), values.tobytes()))
            tensors.append({"name": name, "shape": list(new[name][1])})
        path = safetensors(folder / f"rank_{r}.safetensors", rows)
        (folder / f"rank_{r}.json").write_text(json.dumps({"tensors": tensors}))
        hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest = {"format": "prime-rl-sparse-hf-v1", "base_step": number - 1, "target_step": number, "ranks": ranks}
    (folder / "sparse_manifest.json").write_text(json.dumps(manifest | {"sha256": hashes}))
    return folder
