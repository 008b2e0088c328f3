"""The formats by name, and which of them a directory is of: by what is in it."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, Final, TypeVar

from deltackpt.errors import FormatError, UsageError
from deltackpt.interop import prime, prime_sparse, slime, slime_v1, slime_v1_write, slime_write, trl, trl_write, vllm
from deltackpt.interop.protocol import LayoutReader, LayoutWriter

T = TypeVar("T")

# The more particular first: a version directory of slime's second layout has an index, of the first one has not.
READERS: Final[dict[str, tuple[Callable[[Path], bool], Callable[..., LayoutReader]]]] = {
    "slime": (slime.detect, slime.SlimeReader),
    "slime-v1": (slime_v1.detect, slime_v1.SlimeV1Reader),
    "trl": (trl.detect, trl.TrlReader),
    "prime-rl-sparse": (prime_sparse.detect, prime_sparse.PrimeSparseReader),
    "prime-rl": (prime.detect, prime.PrimeReader),
}
WRITERS: Final[dict[str, Callable[..., LayoutWriter]]] = {
    "slime": slime_write.SlimeWriter,
    "slime-v1": slime_v1_write.SlimeV1Writer,
    "trl": trl_write.TrlWriter,
    "prime-rl": prime.PrimeWriter,
    "vllm": vllm.VllmWriter,
}
FORMATS: Final = tuple(dict.fromkeys([*READERS, *WRITERS]))
ALIASES: Final = {"miles": "slime", "sglang": "slime", "stitch": "slime"}


def reader(name: str, root: Path, **options: Any) -> tuple[str, LayoutReader]:
    """The reader of a directory, and the format's name; ``auto`` finds it.

    Raises UsageError ``foreign-format`` for a name that is not known, FormatError ``foreign-unknown`` for a directory
    of another format.
    """
    name = ALIASES.get(name, name)
    if name != "auto" and name not in READERS:
        need = f"auto, {', '.join([*READERS, *ALIASES])}"
        raise UsageError("foreign-format", where="import", have=repr(name)[:80], need=need)
    marker = {"marker": options["marker"]} if options.get("marker") else {}
    found = [key for key, (detect, _) in READERS.items() if detect(root, **(marker if key == "prime-rl" else {}))]
    if name == "auto" and len(found) == 1:
        name = found[0]
    if name not in found:
        have = f"what looks like {' and '.join(found)}" if found else "nothing of a known format"
        need = "one format" if name == "auto" else name
        hint = (
            f"Name the run's own directory, or its format: {', '.join(READERS)}. spec/INTEROP.md shows their layouts."
        )
        raise FormatError("foreign-unknown", where=root, have=have, need=need, hint=hint)
    return name, _made(READERS[name][1], name, root, options)


def writer(name: str, out: Path, **options: Any) -> tuple[str, LayoutWriter]:
    """The writer of a format into ``out``. Raises UsageError ``foreign-format``."""
    name = ALIASES.get(name, name)
    if name not in WRITERS:
        need = ", ".join([*WRITERS, *ALIASES])
        raise UsageError("foreign-format", where="export", have=repr(name)[:80], need=need)
    return name, _made(WRITERS[name], name, out, options)


def _made(make: Callable[..., T], name: str, root: Path, options: dict[str, Any]) -> T:
    if unknown := options.keys() - signature(make).parameters.keys():
        have = f"an option that {name} does not have ({', '.join(sorted(unknown))})"
        raise UsageError("usage", where=name, have=have, need=f"those of {name}")
    return make(root, **options)
