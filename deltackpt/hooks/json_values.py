"""Values of Python that are no weights, as JSON and back, exactly: numbers, containers, small arrays; never a pickle.

Strings, integers, booleans, None, finite floats, lists and dicts with string keys are JSON as they are. All else is an
object of one key, which begins with ``$`` (spec/NOTES.md, "Training state").
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from deltackpt.errors import CheckpointError, FormatError
from deltackpt.torch_views.words import NAMES

MOST = 1 << 20  # bytes of an array that JSON holds
DEEPEST = 64
NEED = "None, numbers, strings, lists, tuples, dicts, and arrays of at most 1 MiB"
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def dumps(value: object, where: str) -> bytes:
    """The value as a JSON text. Raises CheckpointError ``training-value``, which says where in it."""
    return json.dumps(_plain(value, where, DEEPEST), separators=(",", ":"), allow_nan=False).encode("ascii")


def loads(data: bytes, where: str) -> Any:
    """The value that `dumps` was given. Raises FormatError ``training-json``."""
    try:
        return _value(json.loads(data, object_pairs_hook=_object, parse_constant=_refused))
    except (ValueError, TypeError, KeyError, RecursionError, binascii.Error, RuntimeError) as error:
        have = f"what is no state of a training ({str(error)[:120]})"
        raise FormatError("training-json", where=where, have=have, need="JSON that deltackpt wrote") from error


def _plain(value: Any, where: str, depth: int) -> Any:
    if depth == 0:
        raise _refuse(where, f"values more than {DEEPEST} deep")
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return [_plain(item, f"{where}[{i}]", depth - 1) for i, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [_plain(item, f"{where}[{i}]", depth - 1) for i, item in enumerate(value)]}
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _plain(item, f"{where}[{key!r}]", depth - 1) for key, item in value.items()}
    if kind in _MAPPINGS:
        pairs = [(_plain(k, f"a key of {where}", depth - 1), item) for k, item in value.items()]
        return {_MAPPINGS[kind]: [[k, _plain(item, f"{where}[{k!r}]", depth - 1)] for k, item in pairs]}
    if kind is bytes:
        return {"$bytes": _text(value, where)}
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return {"$tensor": _tensor(value, where)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        array = np.ascontiguousarray(value)
        return {"$array": [array.dtype.str, list(value.shape), _text(array.tobytes(), where)]}
    raise _refuse(where, f"a value of type {kind.__module__}.{kind.__qualname__}")


def _tensor(tensor: torch.Tensor, where: str) -> list[Any]:
    if tensor.layout != torch.strided or tensor.dtype not in NAMES or tensor.is_meta:
        raise _refuse(where, f"a tensor of {tensor.layout}, {tensor.dtype}, on {tensor.device}")
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [NAMES[tensor.dtype], list(tensor.shape), _text(flat, where)]


def _text(data: bytes, where: str) -> str:
    if len(data) > MOST:
        raise _refuse(where, f"an array of {len(data):,} bytes")
    return base64.b64encode(data).decode("ascii")


def _refuse(where: str, have: str) -> CheckpointError:
    hint = "Leave it out, or turn it into such values in a state_dict() of your own."
    return CheckpointError("training-value", where=where, have=have, need=NEED, hint=hint)


_MAPPINGS: Mapping[type, str] = {dict: "$dict", Counter: "$counter", OrderedDict: "$ordered"}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key twice")
    return found


def _refused(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) != 1 or not next(iter(plain)).startswith("$"):
        if any(key.startswith("$") for key in plain):
            raise ValueError("a mark among other keys")
        return {key: _value(item) for key, item in plain.items()}
    mark, held = next(iter(plain.items()))
    return _READERS[mark](held)


def _read_float(held: Any) -> float:
    if held not in ("inf", "-inf", "nan"):
        raise ValueError(f"{held!r} in the place of inf or nan")
    return float(held)


def _read_tensor(held: Any) -> torch.Tensor:
    name, shape, text = held
    words = torch.frombuffer(bytearray(_bytes(text)), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    return words.view(DTYPES[name]).reshape(shape)


def _read_array(held: Any) -> Any:
    name, shape, text = held
    dtype = np.dtype(name)
    if dtype.kind not in "biufc":
        raise ValueError(f"{name!r} in the place of a number's dtype")
    found = np.frombuffer(_bytes(text), dtype).reshape(shape).copy()
    return found if shape else found[()]


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _pairs(held: Any) -> list[tuple[Any, Any]]:
    return [(_value(key), _value(item)) for key, item in held]


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "$float": _read_float,
    "$tuple": lambda held: tuple(_value(item) for item in held),
    "$dict": lambda held: dict(_pairs(held)),
    "$counter": lambda held: Counter(dict(_pairs(held))),
    "$ordered": lambda held: OrderedDict(_pairs(held)),
    "$bytes": _bytes,
    "$tensor": _read_tensor,
    "$array": _read_array,
}
