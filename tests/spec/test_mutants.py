"""fixtures/mutants.py: a mistake in the second decoder fails a vector, or is known and cannot."""

import importlib.util
import sys

import pytest
from support.vectors import FIXTURES


def tool():
    spec = importlib.util.spec_from_file_location("mutants", FIXTURES / "mutants.py")
    sys.modules["mutants"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.heavy)])
def test_every_mistake_is_seen(step):
    """A sample, or all of them."""
    mutants = tool()
    every = list(mutants.mutants())
    assert len(every) >= 60
    assert [name for name in mutants.survivors(every[::step]) if not mutants.known(name)] == []


def test_every_line_is_there_once():
    mutants = tool()
    text = mutants.SOURCE.read_text()
    assert [old for old, _ in mutants.LINES if text.count(old) != 1] == []
