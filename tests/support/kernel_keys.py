"""What Triton would compile anew for, of each launch that the interpreter runs: the keys of its caches, for a card.

Needs no card, and Triton in the interpreter's mode.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

BACKEND = CUDABackend(GPUTarget("cuda", 90, 32))
Keys = set[tuple[str, str, str]]  # module and name of the kernel, and what it is compiled for


@cache
def _binder(kernel: FunctionType, kept: tuple[tuple[str, Any], ...]) -> Any:
    made = JITFunction(kernel, **{name: list(v) if isinstance(v, tuple) else v for name, v in kept})
    return create_function_from_signature(made.signature, made.params, BACKEND)


def _key(kernel: InterpretedFunction[Any], args: Any, options: dict[str, Any]) -> tuple[str, str, str]:
    wanted = {"do_not_specialize", "do_not_specialize_on_alignment", "version"}
    kept = tuple((n, tuple(v) if isinstance(v, list) else v) for n, v in kernel.kwargs.items() if n in wanted and v)
    _, found, launch = _binder(kernel.fn, kept)(*args, **options)
    return kernel.fn.__module__.rpartition(".")[2], kernel.fn.__name__, f"{found} {sorted(launch.items())}"


@contextmanager
def launched(*, run: bool = True) -> Iterator[Keys]:
    """-> the keys of all kernels that are launched within the block, in any thread; they do nothing without ``run``."""
    found: Keys = set()
    real = InterpretedFunction.run

    def noted(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found.add(_key(self, args, options))
        return real(self, *args, grid=grid, warmup=warmup or not run, **options)

    InterpretedFunction.run = noted
    try:
        yield found
    finally:
        InterpretedFunction.run = real


def kernels(folder: Path) -> set[tuple[str, str]]:
    """(module, name) of all kernels under a folder that are launched there, and not called by others alone."""
    found = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            launch = isinstance(node, ast.Call) and any(k.arg == "num_warps" for k in node.keywords)
            if launch and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name):
                found.add((path.stem, node.func.value.id))
    return found


def jitted(folder: Path) -> set[tuple[str, str]]:
    """(module, name) of all functions there that Triton compiles."""
    found = set()
    for path in folder.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                found.add((path.stem, node.name))
    return found
