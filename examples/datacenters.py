"""Two "datacenters" over S3 on loopback, and a link between them that is cut for a while.

    pip install '.[stores]'
    python examples/datacenters.py [--work DIR]

In the west a trainer publishes to its own bucket. In the east a mirror pulls the steps over the link into the east's
bucket, and a follower there keeps a managed cache at the newest one, as an engine would read it. Then the link is cut,
two more steps are published, and the link comes back: nothing has to be done, and both sides end at the same bytes.
"""

from __future__ import annotations

import argparse
import filecmp
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import deltackpt

DEADLINE = 120.0  # seconds in which what has to come comes, on a busy machine too
WEST, EAST = "s3://west/run", "s3://east/run"


class Link:
    """A wire to one address that can be cut: open connections break, new ones are refused."""

    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self._open: set[socket.socket] = set()
        self._up, self._lock = True, threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        with self._lock:
            self._up = False
            for end in self._open:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        with self._lock:
            self._up = True

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            with self._lock:  # none slips through while the link is being cut
                if not self._up:
                    near.close()
                    continue
                far = socket.create_connection(self._to)
                self._open |= {near, far}
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            with self._lock:
                self._open.discard(end)


def command(*words: object, endpoint: str, log: Path) -> subprocess.Popen[bytes]:
    """`deltackpt`, in a process of its own, that knows one endpoint."""
    line = [sys.executable, "-m", "deltackpt_cli", *map(str, words)]
    with log.open("ab") as out:
        return subprocess.Popen(line, env={**os.environ, "AWS_ENDPOINT_URL": endpoint}, stdout=out, stderr=out)


def publish(work: Path, steps: int, *, begin: int = 0) -> None:
    """What a trainer in the west does."""
    for step in range(begin, begin + steps):
        weights = np.random.default_rng(0).normal(0, 0.02, (256, 256)).astype(np.float32)
        weights += np.float32(2e-6) * step
        folder = work / f"step_{step}"
        folder.mkdir()
        save_file({"layer.weight": weights.astype(np.float16)}, folder / "model.safetensors")
        deltackpt.write(folder, WEST, step=step)


def wait_for(what: str, work: Path, step: int) -> None:
    """Until the east's cache is at a step."""
    wanted, found = work / f"step_{step}/model.safetensors", work / "cache/current/model.safetensors"
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            if filecmp.cmp(wanted, found, shallow=False):
                print(f"{what}: the east is at step {step}", flush=True)
                return
        time.sleep(0.1)
    raise SystemExit(f"{what}: the east did not come to step {step}\n{(work / 'log').read_text()[-3000:]}")


def main() -> None:
    """Publish, cut, publish, mend, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path)
    given = parser.parse_args()
    work = given.work or Path(tempfile.mkdtemp(prefix="datacenters-"))
    work.mkdir(parents=True, exist_ok=True)

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # its line for each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    here = f"http://{host}:{port}"
    os.environ |= {
        "AWS_ENDPOINT_URL": here, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test", "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }  # fmt: skip
    import s3fs

    files = s3fs.S3FileSystem()
    for bucket in ("west", "east"):
        files.mkdir(bucket)
    link = Link(host, port)
    log = work / "log"
    publish(work, 2)
    running = [
        command("mirror", WEST, EAST, "--watch", "--wait", "--poll", "0.2s", endpoint=link.url, log=log),
        command("follow", EAST, work / "cache", "--wait", "--poll", "0.2s", "--json", endpoint=here, log=log),
    ]
    try:
        wait_for("at first", work, 1)
        link.cut()
        publish(work, 2, begin=2)
        assert deltackpt.Repository.open(WEST).find("latest").step == 3
        assert deltackpt.Repository.open(EAST).find("latest").step == 1
        print("the link is cut: the west is at step 3, the east keeps step 1", flush=True)
        link.mend()
        wait_for("after the cut", work, 3)
        for place in (WEST, EAST):
            assert deltackpt.verify(place).ok
        print("both are whole", flush=True)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(DEADLINE)
        server.stop()


if __name__ == "__main__":
    main()
