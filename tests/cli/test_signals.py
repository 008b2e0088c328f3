"""Signals that end a command: at any moment, once or twice."""

import subprocess
import sys

import pytest
from support.running import environment


@pytest.mark.parametrize("held", ["stop._cond", "nullcontext()"])
def test_a_signal_in_the_middle_of_a_wait_ends_it(held):
    """`Event.wait` holds the lock of the event when it begins and ends: a handler that took it stood still for ever."""
    text = f"""
import os, signal
from contextlib import nullcontext
from deltackpt_cli.signals import stopped_by_signals
with stopped_by_signals() as stop:
    with {held}:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.wait(30)
    print("told", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("went on")
print("ended")
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, timeout=60, env=environment(), check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"told\nended\n", b"")
