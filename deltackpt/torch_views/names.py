"""Names of tensors as a checkpoint has them: without what wrappers add, and each once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from deltackpt.errors import CheckpointError, UsageError
from deltackpt.format.tensor_names import RESERVED
from deltackpt.torch_views.wrappers import Strip, strip

Rename = Mapping[str, str] | Callable[[str], "str | None"]


def published_names(names: Iterable[str], rename: Rename | None = None, stripped: Strip = strip) -> dict[str, str]:
    """{name in the model: name in the checkpoint}. What ``rename`` maps to None is left out.

    ``stripped`` takes off what wrappers added. ``rename`` is asked with stripped names; as a mapping it has to know all
    of them. Raises CheckpointError ``names-collide`` and UsageError ``names-unmapped``, with all names concerned.
    """
    found: dict[str, str] = {}
    nowhere: list[str] = []
    for name in names:
        own = stripped(name)
        new: str | None = own
        if callable(rename):
            new = rename(own)
        elif rename is not None:
            new = rename.get(own, "")
        if new is None:
            continue
        if not new or new.startswith(RESERVED):
            nowhere.append(name)
        found[name] = new
    if nowhere:
        need = f"a name for each that is not empty and does not start with {RESERVED!r}"
        hint = "Map them with `rename=`; None leaves a tensor out."
        raise UsageError("names-unmapped", where="the model", have=listed(nowhere), need=need, hint=hint)
    origins: dict[str, list[str]] = {}
    for name, new in found.items():
        origins.setdefault(new, []).append(name)
    if twice := {new: names for new, names in origins.items() if len(names) > 1}:
        have = "; ".join(f"{new!r} from {listed(names)}" for new, names in list(twice.items())[:20])
        hint = "Give each a name of its own with `rename=`, or None to leave it out."
        raise CheckpointError("names-collide", where="the model", have=have, need="each name once", hint=hint)
    return found


def listed(names: Iterable[str], most: int = 50) -> str:
    """Names for an error's text, the first ``most`` of them."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name[:120]) for name in names[:most]) + more
