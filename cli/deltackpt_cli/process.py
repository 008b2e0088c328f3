"""A shell command of the user, run to its end or until it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from threading import Event

GRACE = 10.0  # seconds that it has to end after SIGTERM
INTERVAL = 0.05  # seconds after which ``stop`` is looked at


def run(command: str, variables: Mapping[str, str], stop: Event) -> int | None:
    """Run a shell command with some variables set; -> its status, negative for the signal that ended it;
    None if it was cut short.

    Its output goes to stderr, since stdout is our data. It is a process group of its own: when ``stop`` is set it gets
    SIGTERM as a whole, and later SIGKILL.
    """
    with subprocess.Popen(
        command,
        shell=True,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        start_new_session=True,
    ) as child:
        try:
            while not stop.is_set():
                try:
                    return child.wait(INTERVAL)
                except subprocess.TimeoutExpired:
                    continue
            _signal(child, signal.SIGTERM)
            try:
                child.wait(GRACE)
            except subprocess.TimeoutExpired:
                _signal(child, signal.SIGKILL)
            return None
        except BaseException:
            _signal(child, signal.SIGKILL)
            raise


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    if child.poll() is None:
        os.killpg(child.pid, number)
