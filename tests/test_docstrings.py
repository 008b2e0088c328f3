"""Every public class, function, method and property says what it does; one on arrays says of what shape or dtype."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "deltackpt").rglob("*.py"))

ARRAY = re.compile(r"NDArray|\b(Array|Bytes|Words|Elements|Ints)\b")
SHAPE_OR_DTYPE = re.compile(r"\[\w[\w, -]*\]|int\d+|dtype|shape|\bbytes\b|\bwords\b|1-D")


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


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_what_is_public_has_a_docstring(path):
    assert ast.get_docstring(ast.parse(path.read_text())) or not path.read_text()
    assert without_docstring(path) == []


def of_arrays(node):
    if not isinstance(node, ast.FunctionDef):
        return False
    given = node.args
    notes = [arg.annotation for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return any(note and ARRAY.search(ast.unparse(note)) for note in (*notes, node.returns))


def silent_on_arrays(path):
    found = [(name, node) for name, node in public(ast.parse(path.read_text()).body) if of_arrays(node)]
    return [name for name, node in found if not SHAPE_OR_DTYPE.search(ast.get_docstring(node) or "")]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_what_takes_or_returns_arrays_says_shape_or_dtype(path):
    assert silent_on_arrays(path) == []
