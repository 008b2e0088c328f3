"""The checkpoint of a step for ranks that have to load all of it, and share no cache: once on each host."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from deltackpt.engines.cached_steps import Steps
from deltackpt.engines.engine import Engine, attempt, raise_on_all
from deltackpt.format.manifest import Link

BOOT = Path("/proc/sys/kernel/random/boot_id")
Host = tuple[str, str, int, int, int]


@contextmanager
def one_folder(engine: Engine, steps: Steps, link: Link) -> Iterator[Path]:
    """As `Steps.folder`, whose folder is made by the first rank of each host: the others wait for it, and it is there
    until all of them are done. Collective, and what is done within the block may not raise on some ranks alone.

    Raises on every rank what making one of them raised."""
    found: list[Host] = []
    raise_on_all(engine, attempt(lambda: found.append(host())))
    hosts = engine.agree((found[0], engine.rank))
    maker = next(rank for where, rank in hosts if where == found[0])
    made: list[Path] = []
    with ExitStack() as stack:
        makes = maker == engine.rank
        error = attempt(lambda: made.append(stack.enter_context(steps.folder(link)))) if makes else None
        raise_on_all(engine, error)
        paths = dict(engine.agree((engine.rank, str(made[0]) if made else "")))
        if not makes:
            stack.enter_context(steps.held(link, paths[maker]))
        yield Path(paths[maker])
        engine.agree("loaded")


def host() -> Host:
    """Equal for processes that see the same folder of temporary files under the same name, and may read each other's.
    Raises OSError."""
    folder = tempfile.gettempdir()
    seen = Path(folder).stat()
    kernel = BOOT.read_text() if BOOT.exists() else socket.gethostname()
    return kernel, folder, seen.st_dev, seen.st_ino, os.getuid()
