"""Paths of a checkpoint's files, and names of objects: one rule for both, on every system (FORMAT section "Names")."""

from __future__ import annotations

import re

from deltackpt.errors import FormatError

MAX_OBJECT_NAME = 1024  # bytes
MAX_PATH = 960  # bytes: leaves space for the folder before it in an object's name
MAX_SEGMENT = 255  # bytes between two slashes: what file systems hold

# What nearly all names are like: with at most 8 segments of 100 characters they break no rule, and one match says so.
ORDINARY = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,99}/){0,7}[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\\\\:]")
# ASCII: what counts as the same letter elsewhere is up to a version of Unicode, and no matter of this rule.
_RESERVED = re.compile(r"\.{0,2}|\.lock|\.tmp-.*", re.IGNORECASE | re.ASCII | re.DOTALL)


def why_unsafe(name: str, limit: int = MAX_OBJECT_NAME) -> str:
    """What a name of at most ``limit`` bytes breaks [F-NAME-1] with, in words; "" if it obeys."""
    if ORDINARY.fullmatch(name):
        return ""
    if not name:
        return "an empty name"
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "a lone surrogate"
    if size > limit:
        return f"a name of {size} bytes"
    if _UNSAFE.search(name):
        return "a control character, backslash or colon"
    for segment in name.split("/"):
        if _RESERVED.fullmatch(segment):
            return f"the segment {segment!r}"
        if len(segment.encode()) > MAX_SEGMENT:
            return f"a segment of {len(segment.encode())} bytes"
    return ""


def is_path(path: str) -> bool:
    """Is this a relative path that stays in its folder, on every system, and that every store can name?"""
    return not why_unsafe(path, MAX_PATH)


def check_path(path: str, where: str) -> None:
    """Refuse a path of a checkpoint's file that leaves the checkpoint's folder: ``name-escapes``."""
    if not is_path(path):  # [F-LAY-2] [F-NAME-1]
        raise FormatError("name-escapes", where=where, have=repr(path)[:120], need="a plain path inside the checkpoint")
