"""A look at a run: head, rate, readers by their leases, engines by their metrics, and what does not answer."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest
from deltackpt_cli.live import screen, seconds
from support.running import command, deltackpt, environment

from deltackpt.errors import ChainError, StoreError, UsageError
from deltackpt.format.manifest import Manifest
from deltackpt.report.live import LiveReader, LiveView
from deltackpt.repository import Repository
from deltackpt.repository.leases import lease
from deltackpt.util.metrics import Metrics


def test_head_readers_and_engines(report_repo: Path) -> None:
    repo = Repository.open(report_repo)
    metrics = Metrics()
    metrics.set("deltackpt_step", 4, 'vllm=http://h:1/"')
    metrics.set("deltackpt_lag_seconds", 2.5, 'vllm=http://h:1/"')
    metrics.set("deltackpt_wedged", 1, 'vllm=http://h:1/"')
    metrics.set("deltackpt_step", 6)
    with metrics.on(0) as port, lease(repo, repo.find(6), have=repo.find(2)):
        url = f"http://127.0.0.1:{port}/metrics"
        view = LiveView(Repository.open(report_repo), metrics=[url, "http://127.0.0.1:1/metrics"])
        found = view.look()
        assert (found.step, found.id) == (6, repo.find(6).id)
        assert found.age is not None
        assert found.age >= 0
        held, cache, engine = found.readers
        assert (held.step, held.behind) == (2, 4)
        assert held.name.startswith("lease of ")
        assert engine == LiveReader('vllm=http://h:1/"', 4, 2, 2.5, "wedged")
        assert (cache.name, cache.step, cache.behind) == (url, 6, 0)
        assert len(found.errors) == 1
        assert found.errors[0].startswith("http://127.0.0.1:1/metrics: ")
        assert view.look().readers == found.readers or view.look().step == 6
        shown = "\n".join(screen(found))
        assert all(part in shown for part in ("step 6", "wedged", "error: http://127.0.0.1:1/metrics"))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\ndeltackpt_step +Inf\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\ndeltackpt_step NaN\n",
        b"no HTTP at all\r\n\r\n",
    ],
)
def test_a_page_of_metrics_that_is_none(report_repo: Path, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                peer.settimeout(60)
                peer.recv(65536)
                peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/metrics"
        found = LiveView(Repository.open(report_repo), metrics=[url]).look()
        thread.join()
    assert (found.step, found.readers, len(found.errors)) == (6, (), 1)
    assert found.errors[0].startswith(url)


def test_a_head_whose_manifest_cannot_be_read_now_is_told(report_repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = Repository.open(report_repo)
    view = LiveView(repo)

    def load(link: object) -> Manifest:
        raise StoreError("store-unavailable", where="the store", have="no answer", need="one")

    monkeypatch.setattr(repo, "load", load)
    found = view.look()
    assert (found.step, found.age, len(found.errors)) == (None, None, 1)


def test_a_repository_that_goes_and_one_that_takes_its_place(report_repo: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(report_repo, tmp_path / "repo"))
    view = LiveView(Repository.open(copy))
    assert view.look().step == 6
    copy.rename(tmp_path / "away")
    gone = view.look()
    assert (gone.step, len(gone.errors)) == (None, 1)
    Repository.open_or_create(copy)
    with pytest.raises(ChainError, match="repository-replaced"):
        view.look()
    shutil.rmtree(copy)
    (tmp_path / "away").rename(copy)
    assert (view.look().step, view.look().errors) == (6, ())


def test_usage(report_repo: Path) -> None:
    with pytest.raises(UsageError):
        LiveView(Repository.open(report_repo), metrics=["file:///etc/passwd"])
    assert deltackpt("status", report_repo, "--metrics", "http://h/metrics").status == 2
    assert deltackpt("status", report_repo, "--watch", "--cache", "c").status == 2
    assert [seconds(value) for value in (0.04, 119, 120, 7200, 200_000)] == [
        "0.0 s", "119.0 s", "2.0 min", "2.0 h", "2.3 d"
    ]  # fmt: skip


def test_lines_where_there_is_no_terminal(report_repo: Path) -> None:
    line = command("status", report_repo, "--watch", "--poll", "0.1s")
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"step 6 (")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == (b"", b"", 0)


def test_a_screen_on_a_terminal(report_repo: Path) -> None:
    ours, terminal = pty.openpty()
    line = command("status", report_repo, "--watch", "--poll", "0.1s")
    with subprocess.Popen(line, stdout=terminal, stderr=subprocess.PIPE, env=environment(TERM="xterm")) as process:
        os.close(terminal)
        drawn = b""
        while b"no reader has a lease" not in drawn:
            drawn += os.read(ours, 1 << 16)
        process.send_signal(signal.SIGINT)
        while True:  # what it draws on its way out has to be read
            try:
                if not os.read(ours, 1 << 16):
                    break
            except OSError:  # the other end is closed
                break
        _, err = process.communicate(timeout=60)
    os.close(ours)
    assert (err, process.returncode) == (b"", 0)
    assert b"step 6" in drawn
