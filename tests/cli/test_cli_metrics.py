"""`--metrics-port` of the commands that run on: what they count is what they did."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.running import World, command, deltackpt, environment

from deltackpt import __version__

LONG = 120.0  # seconds: a machine with other load


@contextmanager
def running(*args: object) -> Iterator[str]:
    """The URL of the metrics of a command, which has to end with 0 when it is told to."""
    line = command(*args, "--metrics-port", 0)
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment()) as process:
        try:
            assert process.stderr is not None
            said = process.stderr.readline().decode()
            found = re.fullmatch(r"metrics: (http://127\.0\.0\.1:\d+/metrics)\n", said)
            assert found is not None, said
            drain = threading.Thread(target=process.stderr.read, daemon=True)
            drain.start()
            yield found[1]
            process.send_signal(signal.SIGTERM)
            assert process.wait(LONG) == 0
            drain.join(LONG)
        finally:
            process.kill()


def until(url: str, **want: float) -> dict[str, float]:
    """The metrics, once they have these values."""
    end = time.monotonic() + LONG
    while True:
        with urllib.request.urlopen(url, timeout=LONG) as answer:
            lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
        found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
        if all(found.get(f"deltackpt_{name}") == value for name, value in want.items()):
            return found
        assert time.monotonic() < end, found
        time.sleep(0.05)


def test_follow(world: World, tmp_path: Path) -> None:
    repo = world.copy(tmp_path)
    fails = "test $DELTACKPT_STEP != 3"
    with running("follow", repo, tmp_path / "cache", "--poll", "0.05s", "--exec", fails) as url:
        first = until(url, step=2, steps_total=1)
        assert first["deltackpt_bytes_total"] > 0
        assert first["deltackpt_lag_seconds"] >= 0
        assert first[f'deltackpt_info{{role="follow",version="{__version__}"}}'] == 1
        assert deltackpt("write", world.steps[3], repo).status == 0
        found = until(url, step=3, steps_total=2, failures_total=1)
        assert found["deltackpt_behind_seconds"] < LONG
        repo.rename(tmp_path / "away")
        end = time.monotonic() + LONG
        while until(url)["deltackpt_retries_total"] == 0:
            assert time.monotonic() < end
            time.sleep(0.05)
        (tmp_path / "away").rename(repo)


def test_mirror(world: World, tmp_path: Path) -> None:
    with running("mirror", world.repo, tmp_path / "copy", "--watch", "--poll", "0.05s") as url:
        found = until(url, step=2, steps_total=3)
        assert found["deltackpt_bytes_total"] > 0
    assert deltackpt("mirror", world.repo, tmp_path / "other", "--metrics-port", 0).status == 2


def test_watch(world: World, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    for i in range(2):
        shutil.copytree(world.steps[i], saved / f"step_{i}")
    with running("watch", saved, tmp_path / "repo", "--settle", "0.1s", "--poll", "0.05s") as url:
        found = until(url, step=1, steps_total=2, changed_elements_total=43)
        assert found["deltackpt_failures_total"] == 0


def bring(source: Path, repo: Path) -> None:
    """What a copy has more, the branch last."""
    for path in sorted(source.rglob("*"), key=lambda path: path.parent.name == "refs"):
        here = repo / path.relative_to(source)
        if path.is_file() and (path.parent.name == "refs" or not here.exists()):
            here.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, here.with_name(".new"))
            here.with_name(".new").rename(here)


def test_a_follower_that_stands_still_is_behind(world: World, tmp_path: Path) -> None:
    repo, other = world.copy(tmp_path), tmp_path / "other"
    shutil.copytree(repo, other)
    with running("follow", repo, tmp_path / "cache", "--poll", "0.05s") as url:
        until(url, step=2)
        known = {*(other / "patches").rglob("*.safetensors")}
        assert deltackpt("write", world.steps[3], other, "--base", world.steps[2]).status == 0
        for path in {*(other / "patches").rglob("*.safetensors")} - known:
            path.chmod(0o644)
            path.write_bytes(bytes(path.stat().st_size))
        bring(other, repo)
        end, first = time.monotonic() + LONG, 0.0
        while (found := until(url))["deltackpt_failures_total"] < 1:
            first = max(first, found["deltackpt_behind_seconds"])
            assert time.monotonic() < end
            time.sleep(0.05)
        before = until(url)["deltackpt_failures_total"]
        while (found := until(url))["deltackpt_failures_total"] == before:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert found["deltackpt_step"] == 2
        assert found["deltackpt_behind_seconds"] > first


def test_watch_waits_and_says_so(world: World, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    shutil.copytree(world.steps[0], saved / "step_0")
    options = ("--settle", "0.1s", "--poll", "0.05s", "--done-marker", "DONE")
    with running("watch", saved, tmp_path / "repo", *options) as url:
        end = time.monotonic() + LONG
        while until(url).get("deltackpt_behind_seconds", 0) < 1:  # no marker comes
            assert time.monotonic() < end
            time.sleep(0.05)
        (saved / "step_0/DONE").touch()
        until(url, step=0, steps_total=1)
        while until(url)["deltackpt_behind_seconds"] >= 1:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_another_interface(world: World, tmp_path: Path) -> None:
    line = command("follow", world.repo, tmp_path / "cache", "--metrics-port", "[::1]:0")
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment()) as process:
        try:
            assert process.stderr is not None
            said = process.stderr.readline().decode()
            if "port-taken" in said or "Cannot assign" in said:
                pytest.skip("no IPv6 here")
            found = re.fullmatch(r"metrics: (http://\[::1\]:\d+/metrics)\n", said)
            assert found is not None, said
            assert "deltackpt_info" in urllib.request.urlopen(found[1], timeout=LONG).read().decode()
        finally:
            process.kill()


def test_a_port_that_cannot_be_had(world: World, tmp_path: Path) -> None:
    with running("follow", world.copy(tmp_path), tmp_path / "cache") as url:
        port = url.split(":")[2].split("/")[0]
        done = deltackpt("follow", world.repo, tmp_path / "other", "--metrics-port", port)
        assert (done.status, done.out) == (8, "")
        assert "[" not in done.err.splitlines()[0]
        assert not (tmp_path / "other").exists()
    for wrong in ("70000", "-1", "http"):
        assert deltackpt("follow", world.repo, tmp_path / "other", "--metrics-port", wrong).status == 2


def test_the_hook(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from deltackpt.hooks import TrainerHook

    model = torch.nn.Linear(8, 8)
    with TrainerHook(model, tmp_path / "repo", metrics_port=0) as hook:
        url = f"http://127.0.0.1:{hook.exporter.port}/metrics"
        hook.step(0)
        with torch.no_grad():
            model.weight += 1
        hook.step(1)
        hook.flush()
        found = until(url, step=1, steps_total=2, queue_steps=0, behind_seconds=0, failures_total=0)
        assert found["deltackpt_changed_elements_total"] >= 64
        assert found["deltackpt_stall_seconds_total"] > 0
        assert found[f'deltackpt_info{{role="hook",version="{__version__}"}}'] == 1
        with TrainerHook(torch.nn.Linear(2, 2), tmp_path / "other", metrics_port=hook.exporter.port) as second:
            assert second.exporter.port is None  # in use: training goes on
            second.step(0)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=5)
