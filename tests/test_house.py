"""The house keeps its measures: short files and functions, few parameters, a class name once, few modules."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted([*(ROOT / "deltackpt").rglob("*.py"), *(ROOT / "cli").rglob("*.py")])
LINES = 400  # of a file
BODY = 60  # lines of a function, its signature and docstring included
PARAMETERS = 10
FREE = {"deltackpt/hooks/trainer.py": {"__init__"}}  # the hook's constructor is its list of options


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def functions(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def many_allowed(path, node):
    """Options of a command and arguments of a kernel are parameters."""
    name = name_of(path)
    return name.startswith(("cli/", "deltackpt/gpu/triton/")) or node.name in FREE.get(name, ())


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_measures(path):
    assert len(path.read_text().splitlines()) <= LINES
    for node in functions(path):
        assert node.end_lineno - node.lineno < BODY, f"{node.name} has {node.end_lineno - node.lineno + 1} lines"
        given = node.args
        count = len([*given.posonlyargs, *given.args, *given.kwonlyargs])
        assert count <= PARAMETERS or many_allowed(path, node), f"{node.name} has {count} parameters"


def test_the_door():
    assert len([*(ROOT / "deltackpt").glob("*.py")]) <= 3


def test_a_class_name_is_used_once():
    """Private ones too: who searches for a name finds one thing."""
    names = Counter(
        node.name
        for path in FILES
        if path.is_relative_to(ROOT / "deltackpt")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert not {name: count for name, count in names.items() if count > 1}


def test_no_two_files_of_tests_have_one_name():
    """Pytest imports them by their names alone."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
