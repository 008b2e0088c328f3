"""Processes that end with the one that began them, however that ends: a test run that is killed leaves no server."""

import atexit
import os
import subprocess
import sys
from contextlib import suppress

_WATCH = """
import os, signal, sys
left = set()
for line in sys.stdin:
    what, _, number = line.strip().partition(" ")
    (left.add if what == "began" else left.discard)(int(number))
for number in left:
    try:
        os.killpg(number, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
"""


class Ending:
    """Another process holds the far end of a pipe: that closes when this one ends, and then the groups are killed."""

    def __init__(self):
        self._watcher, self._owner = None, 0

    def _say(self, line):
        if self._watcher is None or self._owner != os.getpid():
            command = [sys.executable, "-c", _WATCH]
            self._watcher = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
            self._owner = os.getpid()
            atexit.register(self._close)
        with suppress(OSError):
            self._watcher.stdin.write(line)
            self._watcher.stdin.flush()

    def _close(self):
        if self._owner == os.getpid():
            self._watcher.stdin.close()
            self._watcher.wait(30)

    def began(self, process):
        """``process`` leads a group of its own; -> it."""
        self._say(f"began {process.pid}\n")
        return process

    def ended(self, process):
        """It ended, and its number may be another's from now on."""
        self._say(f"ended {process.pid}\n")


ENDING = Ending()
