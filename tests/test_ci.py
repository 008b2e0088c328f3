"""`.ci/run` counts what it runs: a target that fails is a verdict; of the long ones it is told.

Its targets take an hour, so `make` is a script here that records its call and ends as it is told.
"""

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from deltackpt import kernels

ROOT = Path(__file__).parents[1]
COUNTED = ["check", "test", "test-hooks", "test-stores", "demo", "wheels"]
TESTS = ["test", "test-hooks", "test-stores"]
LONG = ["demo-train", "test-vllm", "test-heavy"]
MAKE = """#!/usr/bin/env bash
echo "$1" >> "$CALLS"
[[ $1 == test ]] && echo "12 passed, 1 skipped in 3.45s"
[[ $PYTEST_ADDOPTS == *--last-failed* && " $ALONE " == *" $1 "* ]] && exit 0
for pair in $STATUSES; do [[ ${pair%=*} == "$1" ]] && exit "${pair#*=}"; done
exit 0
"""


def run(tmp_path: Path, alone: str = "", **statuses: int) -> tuple[int, list[str], list[str]]:
    """-> the status of `.ci/run`, what it printed, and the targets that it made, where ``statuses`` are not 0.

    What failed of the target ``alone`` passes when it is run once more.
    """
    make, calls = tmp_path / "make", tmp_path / "calls"
    make.write_text(MAKE)
    make.chmod(0o755)
    of_targets = " ".join(f"{name.replace('_', '-')}={status}" for name, status in statuses.items())
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "STATUSES": of_targets,
        "ALONE": alone,
        "PYTEST_ADDOPTS": "",
    }
    script = ["bash", str(ROOT / ".ci" / "run")]
    done = subprocess.run(script, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout.splitlines(), calls.read_text().split()


def test_all_is_well(tmp_path: Path) -> None:
    status, out, made = run(tmp_path)
    assert (status, made) == (0, [*COUNTED, *LONG])
    assert out[-1] == "12 passed, 1 skipped in 3.45s"


@pytest.mark.parametrize("name", COUNTED)
def test_a_failure_counts_and_the_long_ones_wait(tmp_path: Path, name: str) -> None:
    status, out, made = run(tmp_path, **{name.replace("-", "_"): 2})
    again = [name] if name in TESTS else []
    at = COUNTED.index(name)
    assert (status, made) == (1, [*COUNTED[:at], *again, *COUNTED[at:]])
    assert out[-2:] == ["12 passed, 1 skipped in 3.45s", f"CI: FAILED: {name}"]


@pytest.mark.parametrize("name", TESTS)
def test_what_fails_beside_others_and_passes_alone_is_told(tmp_path: Path, name: str) -> None:
    status, out, made = run(tmp_path, alone=name, **{name.replace("-", "_"): 2})
    at = COUNTED.index(name)
    assert (status, made) == (0, [*COUNTED[:at], name, *COUNTED[at:], *LONG])
    assert f"CI: make {name} had tests that failed and then passed alone: file them, they are named above" in out


@pytest.mark.parametrize("name", COUNTED)
def test_one_of_those_that_hangs_is_a_failure(tmp_path: Path, name: str) -> None:
    assert run(tmp_path, **{name.replace("-", "_"): 124})[0] == 1


@pytest.mark.parametrize("name", LONG)
def test_a_failure_of_a_long_one_is_told(tmp_path: Path, name: str) -> None:
    status, out, made = run(tmp_path, **{name.replace("-", "_"): 2})
    assert (status, made) == (0, [*COUNTED, *LONG])
    assert f"CI: make {name} FAILED, which decides nothing: file it" in out
    assert out[-1] == "12 passed, 1 skipped in 3.45s"


@pytest.mark.parametrize("status", [124, 137])
@pytest.mark.parametrize("name", LONG)
def test_the_clock_is_no_failure_of_a_long_one(tmp_path: Path, name: str, status: int) -> None:
    ended, out, made = run(tmp_path, **{name.replace("-", "_"): status})
    assert (ended, made) == (0, [*COUNTED, *LONG])
    assert f"CI: make {name} was stopped by the clock: no verdict on it" in out


@pytest.mark.skipif("CI" not in os.environ, reason="only CI has to have all that tests skip without")
@pytest.mark.parametrize("module", ["torch", "transformers", "accelerate", "triton"])
def test_what_tests_skip_without_is_installed(module: str) -> None:
    assert find_spec(module) is not None


@pytest.mark.skipif("CI" not in os.environ, reason="only CI has to have a compiler")
def test_the_kernels_are_compiled() -> None:
    assert kernels.status() == "compiled"
