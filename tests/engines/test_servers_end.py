"""A test run that is killed takes the servers that it began with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.running import python_path

TESTS = Path(__file__).parents[1]
RUN = """
import subprocess, sys, time
from support.ending import ENDING
server = ["sh", "-c", "sleep 600; true"]  # of two processes
first, second = (subprocess.Popen(server, start_new_session=True) for _ in range(2))
ENDING.began(first)
ENDING.began(second)
second.kill()
second.wait()
ENDING.ended(second)
print(first.pid, flush=True)
time.sleep(600)
"""


def there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_servers_end_with_the_run(how):
    environment = {**os.environ, "PYTHONPATH": python_path(TESTS)}
    with subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        group = int(run.stdout.readline())
        assert there(group)
        run.send_signal(how)
    end = time.monotonic() + 60
    while there(group):
        assert time.monotonic() < end
        time.sleep(0.05)
