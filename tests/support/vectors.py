"""The conformance vectors, and every reader that they are run through; each gives the code it refuses with, or None."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import DeltackptError
from deltackpt.format import digests, edge, layout, manifest, pack, state_digest
from deltackpt.format.dtypes import DTYPES
from deltackpt.patch.apply import decode_step, replace_whole, write_step
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply
from deltackpt.restore.patch_reader import PatchReader
from support.tile_by_tile import PARTS

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
INDEX: list[dict[str, Any]] = json.loads((FIXTURES / "index.json").read_text())
Found = dict[str, tuple[str, tuple[int, ...], bytes] | None]


def of_kind(*kinds: str, valid: bool | None = None) -> list[dict[str, Any]]:
    return [v for v in INDEX if v["kind"] in kinds and valid in (None, "error" not in v)]


def name_of(vector: dict[str, Any]) -> str:
    return str(vector["path"])


def data_of(vector: dict[str, Any]) -> bytes:
    data = (FIXTURES / vector["path"]).read_bytes()
    return expanded(data, vector["repeat"][""]) if "repeat" in vector else data


def expanded(data: bytes, piece: list[int]) -> bytes:
    """A file whose piece stands there many times; ``######`` in it is the number of the copy."""
    start, end, times = piece
    unit = data[start:end]
    if b"######" not in unit:
        return data[:start] + unit * times + data[end:]
    return data[:start] + b"".join(unit.replace(b"######", b"%06d" % i) for i in range(times)) + data[end:]


def folder_of(vector: dict[str, Any], to: Path) -> Path:
    """A copy of a repository or checkpoint, with what no git holds: links, and files that are long."""
    shutil.copytree(FIXTURES / vector["path"], to)
    for name, piece in vector.get("repeat", {}).items():
        (to / name).write_bytes(expanded((to / name).read_bytes(), piece))
    for name, target in vector.get("links", {}).items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).symlink_to(target)
    return to


@cache
def second() -> ModuleType:
    """spec/decode.py, which is no package."""
    spec = importlib.util.spec_from_file_location("decode_for_vectors", ROOT / "spec/decode.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_of(call: Callable[[], Any]) -> str | None:
    """The code that a call is refused with. Any exception but the two readers' own is a bug, and passes."""
    try:
        call()
    except (DeltackptError, second().Refused) as error:
        return str(error.code)
    return None


def base_of(vector: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The tensors that a part applies to; ``hex`` is repeated until the tensor is full."""
    found = {}
    for name, t in vector.get("base", {}).items():
        unit, shape = bytes.fromhex(t["hex"]), tuple(t["shape"])
        size = int(np.prod(shape, dtype=object)) * DTYPES[t["dtype"]].bits // 8 if shape else len(unit)
        found[name] = t["dtype"], shape, unit * (size // max(1, len(unit)))
    return found


def proofs(found: Found) -> dict[str, Any]:
    """A state as the index has it."""
    return {
        name: value and {"dtype": value[0], "shape": list(value[1]), "sha256": hashlib.sha256(value[2]).hexdigest()}
        for name, value in found.items()
    }


def sums_of(found: Found) -> dict[str, list[str]]:
    """Both sums of every tensor, in hex."""
    made = {n: state_digest.of_tensor(np.frombuffer(v[2], np.uint8), DTYPES[v[0]]).sums for n, v in found.items() if v}
    return {name: [f"{d:016x}" for d in pair] for name, pair in made.items()}


def _written(current: Any, known: tuple[str, tuple[int, ...]], found: Any) -> bool:
    """`write_step` by way of positions."""
    if (decoded := decode_step(current, known, found)) is None:
        return False
    decoded.write_to(current.view(decoded.values.dtype))
    return True


def in_place(data: bytes, base: Found) -> Found:
    """As `streamed`, with no positions kept."""
    return streamed(data, base, step=write_step)


def streamed(
    data: bytes, base: Found, read: Callable[[bytes], Any] = PARTS["streamed"], step: Callable[..., bool] = _written
) -> Found:
    """Every tensor of a part applied to its base."""
    patch = PatchReader([read(data)])
    result = dict(base)
    for name in patch.names:
        found, old = patch.tensor(name), base.get(name)
        known = (old[0], old[1]) if old else None
        current = np.frombuffer(old[2], np.uint8).copy() if old else None
        if current is None or not step(current, known, found):
            current, known = replace_whole(found)
        result[name] = (*known, current.tobytes()) if known else None
    return result


def decoded_apart(data: bytes, base: Found, read: Callable[[bytes], Any] = PARTS["streamed"]) -> None:
    """Each entry by itself, in no order."""
    part = read(data)
    for entry in reversed(part.entries):
        old = base.get(entry.name)
        if entry.replaces or entry.removes or (old and (entry.dtype.name, entry.whole) == old[:2]):
            words = np.frombuffer(old[2], f"<u{entry.dtype.width}") if old and not entry.removes else None
            if words is not None and old and old[:2] == (entry.dtype.name, entry.whole):
                words = entry.box_of(words)
            part.decode(entry, words)


def by_second(data: bytes, base: Found) -> Found:
    """The same through spec/decode.py."""
    reader = second()
    state = {}
    for name, (dtype, shape, raw) in base.items():
        kind = reader.DTYPES[dtype]
        state[name] = reader.Tensor(kind, list(shape), np.frombuffer(raw, f"<u{kind.width}"))
    new = reader.apply_patch(state, [reader.parse_part(data)])
    found: Found = {n: (t.dtype.name, tuple(t.shape), t.elements.tobytes()) for n, t in new.items()}
    return found | dict.fromkeys(base.keys() - new.keys())


def read_record(vector: dict[str, Any], data: bytes) -> Any:
    kind = vector["kind"]
    if kind == "digests":
        files = layout.decode((FIXTURES / vector["layout"]).read_bytes(), "layout")
        return digests.decode(data, files, vector["state"], "vector")
    return {"manifest": manifest, "layout": layout, "edge": edge, "pack": pack}[kind].decode(data, "vector")


def read_record_by_second(vector: dict[str, Any], data: bytes) -> Any:
    reader, kind = second(), vector["kind"]
    if kind == "digests":
        files = reader.parse_layout((FIXTURES / vector["layout"]).read_bytes())
        return reader.parse_digests(data, files, vector["state"])
    return getattr(reader, f"parse_{kind}")(data)


def read_checkpoint(path: Path) -> Found:
    with Checkpoint.open(path) as checkpoint:
        return {n: (t.dtype, t.shape, checkpoint.bytes_of(n).tobytes()) for n, t in checkpoint.tensors.items()}


def read_checkpoint_by_second(path: Path) -> Found:
    found = second().read_checkpoint(path)
    return {n: (t.dtype.name, tuple(t.shape), t.elements.tobytes()) for n, t in found.items()}


def tree(path: Path) -> dict[str, str]:
    """Every file below a folder, and its sha256."""
    files = (p for p in path.rglob("*") if p.is_file())
    return {p.relative_to(path).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def restore(repository: Path, step: int | str, out: Path) -> None:
    apply(Repository.open(repository), out, step, threads=1)


def refused(call, *args):
    """The code that a call is refused with, or None. Any other exception is a bug of the second decoder."""
    try:
        call(*args)
    except second().Refused as refusal:
        return refusal.code
    return None
