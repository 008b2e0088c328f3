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
_WORD = re.compile(r"(step|iter|iteration|checkpoint|ckpt)[^0-9A-Za-z]*$", re.IGNORECASE)  # before a step's number
_PICKLE = ("pytorch_model", "consolidated")  # how weights begin that are no safetensors files; publishing says so
_DEEPEST = 3  # folders below a numbered one where weights are looked for, as in global_step_7/actor/huggingface
_MANY = 64  # folders that are looked at


@dataclass(frozen=True)
class Unmatched:
    """``said`` is all of it in a sentence, ``seen`` what is there, ``fits`` a pattern of checkpoints that are there;
    ``itself`` is true of a directory that is a checkpoint, and has none below it."""

    said: str
    seen: str
    fits: str
    itself: bool = False


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
    fits = _fitting(f"{name}{below}" for name in shown[-_MANY:] for below in _weights(root / name, _DEEPEST))
    hint = f"; --pattern '{fits}' would fit" if fits else ""
    said = f"nothing is called {pattern} in {root} yet: it has {seen}{hint}"
    return Unmatched(said, seen, fits, itself=loose and not shown)


def _fitting(paths: Iterator[str]) -> str:
    """The pattern that fits the most of these paths; of several the one whose number follows a word for a step, and
    then the one whose number is the last of the first folder. Empty where no path has a number."""
    kinds = Counter[str]()
    called: dict[str, bool] = {}
    for path in paths:
        first = path.partition("/")[0]
        numbers = sorted(_NUMBER.finditer(path), key=lambda found: (found.end() > len(first), -found.start()))
        for found in numbers:
            kind = f"{path[: found.start()]}{FIELD}{path[found.end() :]}"
            kinds[kind] += 1
            called[kind] = _WORD.search(path[: found.start()]) is not None
    return max(kinds, key=lambda kind: (kinds[kind], called[kind]), default="")


def _weights(path: Path, depth: int) -> Iterator[str]:
    """Where weights are, at the path itself ("") or below it ("/hf")."""
    try:
        with os.scandir(path) as entries:
            if any(entry.name.endswith(SUFFIX) or entry.name.startswith(_PICKLE) for entry in entries):
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
