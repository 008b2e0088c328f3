"""Where the process begins: light to import, so that an interrupt finds it ready from the first moment on."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # typing itself takes a while, in which there would be a traceback
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

INTERRUPTED = 130

_leaving = INTERRUPTED  # what the process leaves with if it is interrupted outside of the command


def main() -> NoReturn:
    """Run the command line of this process. An interrupt at any time is one word and exit code 130, never a traceback;
    once the command has ended its own result stands."""
    global _leaving
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not so where the caller ignores it
    if ours:
        signal.signal(signal.SIGINT, _leave)
    try:
        from deltackpt_cli import app

        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        app.main()
    except SystemExit as end:
        _leaving = end.code if isinstance(end.code, int) else 0
        raise
    except KeyboardInterrupt:  # before the command itself, or behind it
        _leave(signal.SIGINT, None)
    finally:
        if ours:
            signal.signal(signal.SIGINT, _leave)
    raise AssertionError("main() exits")


def _leave(number: int, frame: FrameType | None) -> None:
    """Leave at once: what would be run on the way out may be half imported, or gone."""
    if _leaving == INTERRUPTED:
        try:  # noqa: SIM105 (contextlib is an import more)
            os.write(2, b"interrupted\n")
        except OSError:
            pass
    os._exit(_leaving)
