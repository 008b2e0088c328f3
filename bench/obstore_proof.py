"""What obstore does where spec/decisions/0014-stores-stay-on-fsspec.md says that it fails, and what a request costs.

    PYTHONPATH=.:bench python bench/obstore_proof.py [--turns 300] [--endpoint URL]

Prints one JSON object a finding. The S3 server is moto's, in a process of its own; others are sockets here.
With --endpoint only the requests are measured, against that server: `moto_server` closes each connection.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import obstore
import obstore_trial
from obstore.store import S3Store
from sync import client, s3_server

from deltackpt.store.s3 import S3Driver
from tests.support.faulty_proxy import FaultyProxy

KEYS = {"access_key_id": "bench", "secret_access_key": "bench", "region": "us-east-1"}
BODY = bytes(1 << 10)


def store(url: str, **more: Any) -> S3Store:
    options = {"allow_http": True, "timeout": timedelta(seconds=5)}
    return S3Store("bench", endpoint=url, client_options=options, retry_config={"max_retries": 0}, **KEYS, **more)


def say(finding: str, **found: Any) -> None:
    print(json.dumps({"finding": finding, **found}), flush=True)


def parts_without_a_condition(url: str) -> None:
    """Of a body in parts the last request has no condition, and with a condition there are no parts."""
    with FaultyProxy(url).serve() as proxy:
        heard: list[dict[str, str]] = []
        proxy.hear = lambda headers: heard.append({k.lower(): v for k, v in headers.items()})  # type: ignore[method-assign]
        through = store(proxy.url)
        obstore.put(through, "taken", b"another's", mode="create")

        def blocks() -> Iterator[bytes]:
            for _ in range(3):
                yield bytes(6 << 20)

        for mode in ("create", "overwrite"):
            heard.clear()
            proxy.requests.clear()
            try:
                obstore.put(through, f"{mode}d" if mode == "create" else "taken", blocks(), mode=mode)
                outcome = "succeeded"
            except Exception as error:
                outcome = type(error).__name__
            asked = [method for _, method, _ in proxy.requests]
            sizes = [int(h.get("content-length", 0)) for h in heard]
            conditions = sum("if-none-match" in h for h in heard)
            say(f"18 MiB in blocks, mode={mode}", outcome=outcome, asked=asked, bytes=sizes, conditions=conditions)
        say("an object that was there, after mode=overwrite in parts", size=obstore.head(through, "taken")["size"])


def one_key_that_it_takes_for_none(url: str) -> None:
    fs = client(url)
    fs.call_s3("put_object", Bucket="bench", Key="listed/fine", Body=b"")
    fs.call_s3("put_object", Bucket="bench", Key="listed/./odd", Body=b"")
    try:
        outcome = str([meta["path"] for meta in obstore.list(store(url), "listed").collect()])
    except Exception as error:
        outcome = type(error).__name__
    ours = [head.key for head in S3Driver(fs, "bench").scan("listed/")]
    say("a listing with a key of another's in it, listed/./odd", obstore=outcome, ours=ours)


class Busy(BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(429)
        self.send_header("Retry-After", "3600")
        self.send_header("Content-Length", "0")
        self.end_headers()


def a_pause_that_is_asked_for() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        obstore.get(store(f"http://127.0.0.1:{server.server_port}"), "a")
    except Exception as error:
        say("429 with Retry-After: 3600", kind=type(error).__name__, said="3600" in str(error) + repr(vars(error)))
    server.shutdown()


def the_time(url: str) -> None:
    """What is asked to know it, where another request has just been answered."""
    with FaultyProxy(url).serve() as proxy:
        drivers = {
            "ours": S3Driver(client(proxy.url), "bench"),
            "obstore": obstore_trial.ObstoreDriver(lambda: store(proxy.url, disable_bulk_delete=True)),
        }
        for name, driver in drivers.items():
            driver.create(f"time/{name}", b"", "0123456789abcdef")
            proxy.requests.clear()
            driver.clock("time/")
            say(f"the store's clock, {name}", asked=[method for _, method, _ in proxy.requests])


def an_interrupt() -> None:
    """SIGINT a second into a request to a server that never answers."""
    code = """if True:
        import sys, time, obstore_proof
        from deltackpt.store.s3 import S3Driver
        from deltackpt.store.retry import RetryPolicy
        driver = {ours}
        try:
            driver.fetch("a", 0, 10, None)
        except KeyboardInterrupt:
            pass"""
    for name, ours in (
        ("ours", "S3Driver(obstore_proof.client(sys.argv[1]), 'bench', RetryPolicy(silence=5))"),
        ("obstore", "obstore_proof.obstore_trial.ObstoreDriver(lambda: obstore_proof.store(sys.argv[1]))"),
    ):
        with socket.create_server(("127.0.0.1", 0)) as mute:
            url = f"http://127.0.0.1:{mute.getsockname()[1]}"
            with subprocess.Popen([sys.executable, "-c", code.format(ours=ours), url], stderr=subprocess.DEVNULL) as it:
                connection, _ = mute.accept()
                time.sleep(1)
                it.send_signal(signal.SIGINT)
                began = time.monotonic()
                it.wait()
                say(f"interrupted, {name}", seconds_until_it_ended=round(time.monotonic() - began, 2))
                connection.close()


def a_fork(url: str) -> None:
    """A request in a child of a process that has made one; each makes a store of its own."""
    kinds: dict[str, Callable[[], object]] = {
        "ours": lambda: S3Driver(client(url), "bench").head("fork"),
        "obstore": lambda: obstore.head(store(url), "fork"),
    }
    obstore.put(store(url), "fork", b"")
    for name, request in kinds.items():
        request()
        if (child := os.fork()) == 0:
            signal.alarm(8)
            request()
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        say(f"a request in a fork, {name}", outcome="answered" if status == 0 else f"ended by signal {-status}")


class Sync(S3Driver):
    """For comparison: our driver over botocore's own client, which is synchronous and public."""

    def __init__(self, url: str) -> None:
        from botocore.config import Config
        from botocore.session import Session

        config = Config(connect_timeout=10, read_timeout=30, max_pool_connections=32, retries={"total_max_attempts": 1})
        self._client = Session().create_client("s3", endpoint_url=url, config=config)

    def create(self, key: str, data: bytes, mark: str) -> None:
        self._client.put_object(Bucket="bench", Key=key, Body=data, IfNoneMatch="*", Metadata={"deltackpt-put": mark})

    def fetch(self, key: str, start: int, length: int, tag: str | None) -> Any:
        found = self._client.get_object(Bucket="bench", Key=key, Range=f"bytes={start}-{start + length - 1}")
        return found["Body"].read()


def small_requests(url: str, turns: int) -> None:
    """One of each in turn: seconds until it is done, and of this process's processors, all threads."""
    fs = client(url)
    drivers = {
        "s3fs": S3Driver(fs, "bench"),
        "obstore": obstore_trial.ObstoreDriver(lambda: store(url)),
        "botocore": Sync(url),
    }
    took: dict[str, list[tuple[float, float]]] = {f"{what} {name}": [] for what in ("put", "get") for name in drivers}
    for turn in range(turns + 10):
        for name, driver in drivers.items():
            for what in ("put", "get"):
                key = f"small/{name}/{turn}"
                began, used = time.perf_counter(), time.process_time()
                if what == "put":
                    driver.create(key, BODY, "0123456789abcdef")
                else:
                    driver.fetch(key, 0, len(BODY) + 1, None)
                took[f"{what} {name}"].append((time.perf_counter() - began, time.process_time() - used))
    for what, times in took.items():
        whole, own = (round(1e3 * statistics.median(t[i] for t in times[10:]), 2) for i in (0, 1))
        say(f"{what}, 1 KiB", milliseconds=whole, of_this_process=own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--endpoint")
    args = parser.parse_args()
    if args.endpoint:
        client(args.endpoint).call_s3("create_bucket", Bucket="bench")
        return small_requests(args.endpoint, args.turns)
    with s3_server() as url:
        parts_without_a_condition(url)
        one_key_that_it_takes_for_none(url)
        a_pause_that_is_asked_for()
        the_time(url)
        an_interrupt()
        small_requests(url, args.turns)
        a_fork(url)


if __name__ == "__main__":
    main()
