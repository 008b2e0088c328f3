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


@pytest.mark.parametrize(("first", "step"), [(0, 32), *(pytest.param(i, 8, marks=pytest.mark.heavy) for i in range(8))])
def test_every_mistake_is_seen(first, step):
    """A sample, or all of them."""
    mutants = tool()
    every = list(mutants.mutants())
    assert len(every) >= 600
    assert [name for name in mutants.survivors(every[first::step]) if not mutants.known(name)] == []


def test_there_are_enough_of_records_and_repositories():
    mutants = tool()
    parts = [mutant.part for mutant in mutants.mutants()]
    reading = {part for part, kinds in mutants.READ_BY.items() if part and kinds in (mutants.RECORDS, ("chain",))}
    assert sum(part in reading for part in parts) >= 60


def test_every_line_is_there_once():
    mutants = tool()
    wrong = [old for name, lines in mutants.LINES.items() for old, _ in lines if mutants.SOURCES[name].count(old) != 1]
    assert wrong == []
