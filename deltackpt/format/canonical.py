"""JSON, strictly: one way to write a value, and nothing read that two parsers could take differently."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from math import isfinite
from typing import Any, Final, NoReturn

import numpy as np

from deltackpt import kernels
from deltackpt.errors import FormatError

MAX_DEPTH: Final = 16  # nested objects and arrays, unless the caller says otherwise
MAX_MARKS: Final = 1 << 21  # commas and opening brackets, which bound the values, unless the caller says otherwise
INT_LIMIT: Final = 1 << 63  # integers are in [-2^63, 2^63)

_STEP: Final = {ord("{"): 1, ord("["): 1, ord("}"): -1, ord("]"): -1}
_ALL_DIGITS_0: Final = bytes.maketrans(b"123456789", b"0" * 9)
_DIGITS_19: Final = b"0" * 19
_MINUS_0: Final = tuple(before + b"-0" for before in (b":", b",", b"[", b" ", b"\n", b"\r", b"\t"))
_FEW: Final = 1000  # that are looked at one by one
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b'{}[]"'))
_NOT_MARKS: Final = bytes(set(range(256)) - set(b'{[,"'))
_PIECE: Final = 1 << 16  # bytes looked at together


def loads_strict(
    data: bytes,
    *,
    limit: int,
    where: str,
    depth: int = MAX_DEPTH,
    marks: int = MAX_MARKS,
    allow_floats: bool = False,
) -> Any:
    """Parse one JSON value from UTF-8 ``data``.

    Raises FormatError: ``json-too-long`` above ``limit`` bytes or ``marks`` commas and opening brackets outside of
    strings (values take far more memory than text), ``json-depth`` above ``depth`` levels,
    ``json-duplicate-key``, ``json-number`` for NaN, Infinity, -0, integers outside [-2^63, 2^63) and, unless
    ``allow_floats`` (for files of other tools), any fraction or exponent; ``json-syntax`` for all else, lone surrogates
    included.
    """

    plain, surrogates = _looked_at(data, limit, depth, marks, where)
    parts = _StrictValues(where, allow_floats)
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=parts.mapping,
            parse_int=None if plain else parts.integer,  # below 19 digits no integer can be refused: no call for each
            parse_float=parts.fraction,
            parse_constant=parts.constant,
        )
        if surrogates:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except ValueError as error:  # JSONDecodeError and UnicodeError are ValueErrors
        raise FormatError("json-syntax", where=where, have=f"not JSON ({error})", need="one JSON value") from error
    return value


def _looked_at(data: bytes, limit: int, depth: int, marks: int, where: str) -> tuple[bool, bool]:
    """What `check_bounds` raises; and can no integer be refused, is there an escape, the one source of surrogates?"""
    if kernels.LIB is not None and len(data) <= limit:
        text = np.frombuffer(data, np.uint8)
        if (found := int(kernels.LIB.dk_json_scan(kernels.address(text), len(text), marks, depth))) >= 0:
            return not found & 1, bool(found & 2)
    check_bounds(data, limit, depth, marks, where)
    return _DIGITS_19 not in data.translate(_ALL_DIGITS_0) and not _has_minus_0(data), b"\\u" in data


def _has_minus_0(data: bytes) -> bool:
    """May there be a number that is -0, outside of a string? Names hold "-0" too, most of them after a letter."""
    if data.startswith(b"-0"):
        return True
    if data.count(b"-0") > _FEW:
        return any(text in data for text in _MINUS_0)
    at = data.find(b"-0")
    while at >= 0:
        if data[at - 1 : at + 2] in _MINUS_0:
            return True
        at = data.find(b"-0", at + 2)
    return False


def check_bounds(data: bytes, limit: int, depth: int, marks: int, where: str) -> None:
    """Before a parser runs: it recurses, and deep input would end in a stack overflow.

    Raises FormatError ``json-too-long``, ``json-depth``.
    """
    if len(data) > limit:  # [F-MAN-1] [F-EDGE-1] [F-LAY-5] [F-PART-1]
        have, need = f"{len(data):,} bytes", f"at most {limit:,} bytes"
        raise FormatError("json-too-long", where=where, have=have, need=need)
    if has_more_marks(data, marks):  # [F-JSON-1] [F-PART-1]
        have, need = f"more than {marks:,} commas and brackets", f"at most {marks:,}"
        raise FormatError("json-too-long", where=where, have=have, need=need)
    if _deeper(data, depth):  # [F-JSON-1]
        raise FormatError("json-depth", where=where, have=f"more than {depth} levels", need=f"at most {depth} levels")


class _StrictValues:
    """What the parser calls for values that two parsers could take differently."""

    def __init__(self, where: str, allow_floats: bool) -> None:
        self._where, self._allow_floats = where, allow_floats

    def integer(self, text: str) -> int:
        if len(text) > 20 or text == "-0" or not -INT_LIMIT <= (value := int(text)) < INT_LIMIT:  # [F-JSON-2]
            self._refuse_number(text, "an integer of 64 bits")
        return value

    def fraction(self, text: str) -> float:
        if not self._allow_floats or not isfinite(value := float(text)):  # [F-JSON-2]
            self._refuse_number(text, "a finite number" if self._allow_floats else "an integer")
        return value

    def constant(self, text: str) -> NoReturn:
        self._refuse_number(text, "an integer")

    def mapping(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):  # [F-JSON-2]
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            have, need = f"the key {twice[:80]!r} twice", "each key once"
            raise FormatError("json-duplicate-key", where=self._where, have=have, need=need)
        return result

    def _refuse_number(self, text: str, need: str) -> NoReturn:
        raise FormatError("json-number", where=self._where, have=text[:24], need=need)


def loads_canonical(data: bytes, *, limit: int, where: str) -> tuple[Any, bool]:
    """`loads_strict`, and whether ``data`` is the canonical JSON of the value.

    Text that is written again to the same bytes has no key twice, no -0 and no escaped surrogate, so that what is
    canonical, as nearly all is, takes one pass of each of the C parser and the C writer.
    """
    bounded = len(data) <= limit and not has_more_marks(data, MAX_MARKS) and not _deeper(data, MAX_DEPTH)
    if bounded and _DIGITS_19 not in data.translate(_ALL_DIGITS_0):
        with suppress(ValueError):  # loads_strict says what is wrong
            value = _PLAIN.decode(data.decode("utf-8"))
            if _ENCODER.encode(value).encode("utf-8") == data:
                return value, True
    value = loads_strict(data, limit=limit, where=where)
    return value, _ENCODER.encode(value).encode("utf-8") == data


def _deeper(data: bytes, depth: int) -> bool:
    """Do objects and arrays nest deeper than ``depth``? Not where no more than that many begin."""
    return data.count(b"{") + data.count(b"[") > depth and nesting(data) > depth


def nesting(data: bytes) -> int:
    """The deepest level of objects and arrays that a parser can reach in ``data``, which need not be valid JSON.

    Counts brackets outside strings. Where a bracket is miscounted (after a stray quote, backslash or closing bracket) a
    parser has stopped already.
    """
    level = deepest = 0
    for piece in _outside(data, _NOT_BRACKETS):
        levels = list(accumulate(map(_STEP.__getitem__, piece), initial=level))
        level, deepest = levels[-1], max(deepest, max(levels))
    return deepest


def has_more_marks(data: bytes, limit: int) -> bool:
    """Are there more than ``limit`` commas, ``[`` and ``{`` outside of strings? There are fewer values than that."""
    if sum(map(data.count, (b",", b"[", b"{"))) <= limit:
        return False
    return sum(map(len, _outside(data, _NOT_MARKS))) > limit


def _outside(data: bytes, drop: bytes) -> Iterator[bytes]:
    r"""What stands outside of strings in ``data``, less the bytes to ``drop``, which quotes are not among.

    Piece by piece: a list of all strings takes many times the memory of the text.
    """
    if b"\\" in data:  # first `\\`, which escapes nothing, then the quotes that are escaped
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    data = data.translate(None, drop)
    inside = 0
    for at in range(0, len(data), _PIECE):
        pieces = data[at : at + _PIECE].split(b'"')
        yield b"".join(pieces[inside::2])
        inside ^= (len(pieces) - 1) & 1


def dumps(value: Any) -> bytes:
    """The canonical JSON of ``value``: UTF-8, keys sorted by code point, no spaces, only needed escapes.

    Takes dict (str keys), list, tuple, str, int, bool and None; `loads_strict` gives an equal value back. Raises
    FormatError ``json-number`` for floats and large integers, ``json-depth`` above MAX_DEPTH levels, ``json-syntax``
    for other types and for lone surrogates.
    """
    _check(value, MAX_DEPTH)
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    try:
        return text.encode("utf-8")
    except UnicodeError:
        _refuse("json-syntax", "a lone surrogate", "valid Unicode")


def _no_number(text: str) -> NoReturn:
    raise ValueError(text)


# No floats, no NaN: `parse_float` and `parse_constant` are called for nothing else.
_PLAIN: Final = json.JSONDecoder(parse_float=_no_number, parse_constant=_no_number)
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"), check_circular=False)


def _check(value: Any, depth: int) -> None:
    """Refuse what JSON, or another parser of it, would not return unchanged."""
    if isinstance(value, dict | list | tuple):
        if depth == 0:
            _refuse("json-depth", f"more than {MAX_DEPTH} levels", f"at most {MAX_DEPTH} levels")
        if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
            _refuse("json-syntax", "a key that is no text", "text keys")
        for item in value.values() if isinstance(value, dict) else value:
            _check(item, depth - 1)
    elif isinstance(value, float) or (isinstance(value, int) and not -INT_LIMIT <= value < INT_LIMIT):
        _refuse("json-number", f"a larger or broken number ({type(value).__name__})", "integers of 64 bits")
    elif value is not None and not isinstance(value, str | int):
        _refuse("json-syntax", f"a {type(value).__name__}", "objects, arrays, text, integers, booleans or null")


def _refuse(code: str, have: str, need: str) -> NoReturn:
    raise FormatError(code, where="JSON to be written", have=have, need=need)
