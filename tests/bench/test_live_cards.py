"""bench/live_cards.py, which is written for cards, runs here in small: no figures, but every way through it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
there = all(find_spec(name) for name in ("torch", "triton"))  # importing it here would fix its mode for other tests
pytestmark = [pytest.mark.heavy, pytest.mark.skipif(not there, reason="torch and triton")]  # kernels are interpreted


def bench(*given):
    """Run it, and give its output; fails where it says that something is wrong."""
    line = [sys.executable, str(ROOT / "bench" / "live_cards.py"), "--device", "cpu", "--size", "tiny", *given]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "bench")])}
    found = subprocess.run(line, capture_output=True, text=True, timeout=580, env=env, check=False)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-2000:]
    assert "WRONG" not in found.stdout
    return found.stdout


def test_a_pair_free_and_limited():
    out = bench("--turns", "0", "--cases", "pair", "limited", "--first-load")
    assert '"way": "plain, no limit"' in out
    assert '"way": "coder, 25 Gb/s"' in out
    assert '"way": "coder, 1 Gb/s"' in out


def test_ranks_of_a_hook_and_engines_that_are_killed():
    out = bench("--turns", "0", "--trainers", "2", "--engines", "2", "--cases", "hook", "kill-engine")
    assert '"ranks": 1' in out
    assert '"ranks": 2' in out
    for phase in ("announce", "move", "prove", "agree", "write"):
        assert f'"killed_in": "{phase}"' in out


def test_shares_of_slices_on_cards():
    """Two trainers' rows to two ranks of one engine; each is live, by every rank."""
    out = bench("--trainers", "2", "--engines", "2", "--cases", "shares", "vllm")
    for rank in (2, 3):
        assert f'"rank": {rank}, "step": 3' in out
    assert '"cannot": "vLLM' in out


def test_a_trainer_that_is_killed_in_each_phase():
    out = bench("--cases", "kill-trainer")
    for phase in ("announce", "move", "agree", "write", "live"):
        assert f'"trainer_killed_in": "{phase}"' in out


@pytest.mark.parametrize("given", [["--trainers", "0"], ["--engines", "0"]])
def test_what_cannot_run_is_told_at_once(given):
    with pytest.raises(AssertionError):
        bench(*given)
