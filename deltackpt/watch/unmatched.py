"""What is in a directory where no name fits the pattern, in words, and the pattern that would fit."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deltackpt.watch.snapshot import FIELD, SUFFIX, folders

_NUMBER = re.compile(r"[0-9]{1,15}")
_DEEPEST = 3  # folders below a numbered one where weights are looked for, as in global_step_7/actor/huggingface
_MANY = 64  # folders that are looked at


@dataclass(frozen=True)
class Unmatched:
    """``said`` is all of it in a sentence, ``seen`` what is there, ``fits`` a pattern of checkpoints that are there."""

    said: str
    seen: str
    fits: str


def unmatched(root: Path, pattern: str) -> Unmatched:
    """Look at what is in ``root``, where nothing fits ``pattern``."""
    try:
        names = folders(root)
        loose = any(entry.name.endswith(SUFFIX) for entry in os.scandir(root))
    except OSError:
        return Unmatched(f"{root} cannot be read", "a directory that cannot be read", "")
    shown = [name for name in names if not name.startswith(".")]
    seen = ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
    seen = seen or ("a checkpoint itself, and no directories" if loose else "no directories")
    kinds = Counter(found for name in shown[-_MANY:] for found in _patterns(root, name))
    fits = kinds.most_common(1)[0][0] if kinds else ""
    hint = f"; --pattern '{fits}' would fit" if fits else ""
    return Unmatched(f"nothing is called {pattern} in {root} yet: there is {seen}{hint}", seen, fits)


def _patterns(root: Path, name: str) -> Iterator[str]:
    """Patterns that fit checkpoints in or below a folder whose name has a number."""
    numbers = [*_NUMBER.finditer(name)]
    if not numbers:
        return
    start, end = numbers[-1].span()
    for below in _weights(root / name, _DEEPEST):
        yield f"{name[:start]}{FIELD}{name[end:]}{below}"


def _weights(path: Path, depth: int) -> Iterator[str]:
    """Where weights are, at the path itself ("") or below it ("/hf")."""
    try:
        with os.scandir(path) as entries:
            if any(entry.name.endswith(SUFFIX) for entry in entries):
                yield ""
                return
        below = folders(path) if depth else []
    except OSError:
        return
    for name in below[:_MANY]:
        if not name.startswith("."):
            for deeper in _weights(path / name, depth - 1):
                yield f"/{name}{deeper}"


def listed(left: Sequence[tuple[str, str]]) -> str:
    """Files, with why they stayed: the first few, by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, why in left:
        by_reason.setdefault(why, []).append(name)
    return "; ".join(f"{_first(names)} ({why})" for why, names in by_reason.items())


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
