"""What Triton's kernels are launched with, noted while the interpreter runs them, and compiled for a card without one.

    python -m support.kernel_signatures FILE        compile what was noted; prints each kernel and what is wrong with it

The interpreter takes much that the compiler refuses. Not to be run where TRITON_INTERPRET is set.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton.language as tl

POINTERS = {
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
CARD = ("cuda", 90, 32)  # an H200: backend, architecture, lanes of a warp
# Several warps load what one of them replaces: between the loads and the stores all have to wait for each other.
IN_PLACE = {"_pick", "_rank"}


@contextmanager
def noted() -> Iterator[set[str]]:
    """-> a line of JSON for each kernel and kind of arguments that is launched from here on."""
    from triton.runtime.interpreter import InterpretedFunction

    lines: set[str] = set()
    real = InterpretedFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        parameters = inspect.signature(self.fn).parameters
        own = {key: options[key] for key in options if key in parameters}
        found = inspect.signature(self.fn).bind(*args, **own).arguments
        kinds = {name: _kind(value, "constexpr" in str(parameters[name].annotation)) for name, value in found.items()}
        launch = {key: options[key] for key in options if key not in parameters}
        lines.add(json.dumps([self.fn.__module__, self.fn.__name__, kinds, launch], sort_keys=True))
        return real(self, *args, grid=grid, warmup=warmup, **options)

    InterpretedFunction.run = run
    try:
        yield lines
    finally:
        InterpretedFunction.run = real


def _kind(value: Any, constant: bool) -> Any:
    if isinstance(value, tl.dtype):
        return ["dtype", value.name]
    if constant or isinstance(value, bool):
        return ["constant", value]
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def compile_one(line: str) -> str:
    """-> the kernel's name. Raises whatever the compiler raises, AssertionError for one of IN_PLACE without barrier."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name, kinds, options = json.loads(line)
    kernel = getattr(importlib.import_module(module), name)
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    for place, argument in enumerate(kernel.arg_names):
        kind = kinds[argument]
        signature[argument] = kind if isinstance(kind, str) else "constexpr"
        if not isinstance(kind, str):
            constants[(place,)] = getattr(tl, kind[1]) if kind[0] == "dtype" else kind[1]
    made = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget(*CARD), options=options)
    assert made.asm["cubin"]
    if name in IN_PLACE:
        assert waits_before_stores(made.asm["ptx"]), "a store that a late warp's load may see"
        return f"{name}, which waits"
    return str(name)


def waits_before_stores(ptx: str) -> bool:
    """Is there a barrier of all warps between every store to global memory and the last load from there before it, on
    whatever way it is come to?"""
    waiting, stores = False, 0
    for line in ptx.splitlines():
        if " ld.global" in line or line.startswith("$"):  # a label: some may have come from elsewhere
            waiting = False
        elif "bar.sync" in line or "barrier.sync" in line:
            waiting = True
        elif " st.global" in line:
            stores += 1
            if not waiting:
                return False
    return stores > 0


def stores_after_barriers(source: str, name: str) -> bool:
    """The same by the kernel's source, as the compiler may wait for reasons of its own: is there a `tl.debug_barrier`
    before all stores of a block of the function ``name``, and no load after it?"""
    (function,) = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == name
    )
    stores = 0
    for node in ast.walk(function):
        waiting = False
        for line in getattr(node, "body", []):
            if isinstance(line, ast.Expr):
                called = ast.unparse(line.value)
                waiting = waiting or called.startswith("tl.debug_barrier(")
                if called.startswith(("tl.store(", "tl.atomic")):
                    stores += 1
                    if not waiting:
                        return False
            if "tl.load(" in ast.unparse(line):
                waiting = False
    return stores > 0


def main() -> int:
    wrong = 0
    for line in Path(sys.argv[1]).read_text().splitlines():
        try:
            print("ok", compile_one(line), flush=True)
        except Exception as error:
            wrong += 1
            print("WRONG", line, error, flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
