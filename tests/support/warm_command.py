"""Starts of the command as forks of a process that has imported it: the same process of its own, with its streams,
environment, folder and status, for a tenth of the processor time, most of which is imports.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

# What counts when modules are imported, or sooner: with another value than the server's a start has to be a real one.
AT_START = re.compile("PYTHON|LD_|LC_|LANG|TZ|OMP_|OPENBLAS_|MALLOC|DELTACKPT_KERNELS|TMPDIR|COVERAGE")
LONGEST = 128 << 10  # bytes of a request: more than a command line of these tests has

# Forks, and goes on in the child as a fresh `python -c` would. What it imports is what any command does; each command's
# own modules are imported by it, so that one that is missing is missed.
SERVER = """
import json, os, random, socket, sys, warnings

def serve(link):
    while True:
        asked, fds, _, _ = socket.recv_fds(link, {longest}, 2)
        if not asked:
            os._exit(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forks beside threads: numpy's are asleep
            child = os.fork()
        if not child:
            link.close()
            for number, fd in enumerate(fds, 1):
                os.dup2(fd, number)
                os.close(fd)
            words, environment, folder = json.loads(asked)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv[1:] = words
            random.seed()
            return
        for fd in fds:
            os.close(fd)
        link.send(str(child).encode())
        link.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())

import numpy
from deltackpt_cli.app import main
import deltackpt.cache, deltackpt.publish.write, deltackpt.repository, deltackpt.restore.materialize
serve(socket.socket(fileno=int(sys.argv.pop())))
del serve
main()
"""


class WarmCommand:
    """The process that forks. One start at a time; it ends with this one."""

    def __init__(self, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line = [sys.executable, "-c", SERVER.replace("{longest}", str(LONGEST)), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(line, env=environment, pass_fds=[theirs.fileno()])
        self._link, self._environment = ours, environment
        self._lock = threading.Lock()

    def run(
        self, words: list[str], environment: dict[str, str], timeout: float
    ) -> subprocess.CompletedProcess[bytes] | None:
        """What `subprocess.run` returns and raises; None where it has to be a start of its own."""
        mine = self._environment
        differing = {k for k in mine.keys() | environment.keys() if mine.get(k) != environment.get(k)}
        try:
            asked = json.dumps([words, environment, str(Path.cwd())]).encode()
        except FileNotFoundError:  # a folder that was removed
            return None
        if any(map(AT_START.match, differing)) or len(asked) > LONGEST or not self._lock.acquire(blocking=False):
            return None
        try:
            return self._run(words, asked, time.monotonic() + timeout)
        finally:
            self._lock.release()

    def _run(self, words: list[str], asked: bytes, deadline: float) -> subprocess.CompletedProcess[bytes] | None:
        pipes = [os.pipe(), os.pipe()]
        try:
            try:
                socket.send_fds(self._link, [asked], [write for _, write in pipes])
            finally:
                for _, write in pipes:
                    os.close(write)
            child = self._link.recv(64)
            if not child:  # the server has ended: a start of its own says why
                return None
            try:
                out, err = _read_all([read for read, _ in pipes], deadline)
            except TimeoutError:
                os.kill(int(child), signal.SIGKILL)
                self._link.recv(64)
                raise subprocess.TimeoutExpired(words, 0) from None
        except (BrokenPipeError, ConnectionResetError):
            return None
        finally:
            for read, _ in pipes:
                os.close(read)
        return subprocess.CompletedProcess(words, int(self._link.recv(64)), out, err)

    def close(self) -> None:
        """Ends the process."""
        self._link.close()
        self._process.wait()


def _read_all(fds: list[int], deadline: float) -> list[bytes]:
    found: dict[int, list[bytes]] = {fd: [] for fd in fds}
    with selectors.DefaultSelector() as waiting:
        for fd in fds:
            waiting.register(fd, selectors.EVENT_READ)
        while waiting.get_map():
            ready = waiting.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                if data := os.read(key.fd, 1 << 16):
                    found[key.fd].append(data)
                else:
                    waiting.unregister(key.fd)
    return [b"".join(found[fd]) for fd in fds]


_started: list[WarmCommand] = []


def run_warm(
    words: list[str], environment: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[bytes] | None:
    """The command with these words, of this environment; None where it has to be a start of its own."""
    if any("\x00" in word for word in words):
        return None
    if not _started:
        _started.append(WarmCommand(environment))
        atexit.register(_started[0].close)
    return _started[0].run(words, environment, timeout)
