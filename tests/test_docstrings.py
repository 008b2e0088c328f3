"""Every public class, function, method and property says what it does."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "deltackpt").rglob("*.py"))
# Where some are missing. The list only gets shorter.
NOT_YET = ("patch/",)


def name_of(path):
    return path.relative_to(ROOT / "deltackpt").as_posix()


def is_more_of_one(node):
    """Overloads, setters and deleters belong to a function that has the docstring."""
    names = {ast.unparse(mark).rpartition(".")[2] for mark in node.decorator_list}
    return bool(names & {"overload", "setter", "deleter"})


def public(body, prefix=""):
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from public(ast.iter_child_nodes(node), prefix)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("_") or is_more_of_one(node):
                continue
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{prefix}{node.name}.")


def without_docstring(path):
    return [name for name, node in public(ast.parse(path.read_text()).body) if not ast.get_docstring(node)]


@pytest.mark.parametrize("path", [p for p in FILES if not name_of(p).startswith(NOT_YET)], ids=name_of)
def test_what_is_public_has_a_docstring(path):
    assert ast.get_docstring(ast.parse(path.read_text())) or not path.read_text()
    assert without_docstring(path) == []


@pytest.mark.parametrize("room", NOT_YET)
def test_the_list_names_rooms_where_some_are_missing(room):
    assert any(without_docstring(path) for path in FILES if name_of(path).startswith(room))
