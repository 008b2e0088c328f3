"""Kernels that the host launches, hundreds of times a step.

Triton finds out at every launch what its arguments are like, which compiled kernel is for such ones, and what of its
settings has changed: some 50 us. Here a launch whose arguments are like those of an earlier one goes straight to what
was compiled for that one, as Triton's tutorials do with a kernel that is compiled beforehand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

# From here on a compiled kernel takes its constants too, in the order of its signature.
DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)
_NARROW, _SIGNED = 1 << 31, 1 << 63
_INTERPRETER = threading.Lock()


def host_kernel(**options: Any) -> Callable[[Any], Any]:
    """Decorates a kernel that the host launches; ``options`` are those of `triton.jit`. It is launched as Triton's:
    positional arguments first, its constants and what Triton takes by name."""

    def made(function: Any) -> Any:
        kernel = triton.jit(**options)(function)
        if not isinstance(kernel, JITFunction):
            return _in_turns(kernel)
        return HostKernel(kernel) if DIRECT else kernel

    return made


def _in_turns(interpreted: Any) -> Any:
    """A kernel that Triton interprets, as tests have it: where a program is lies in one place for the whole process, so
    that of several threads one launches at a time."""

    def run(*args: Any, **named: Any) -> Any:
        with _INTERPRETER:
            return type(interpreted).run(interpreted, *args, **named)

    interpreted.run = run
    return interpreted


class HostKernel:
    """A kernel, and what was compiled of it for arguments of each kind. All else is asked of the kernel."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        # What was compiled takes an address for a tensor: else it asks the tensor for it, and CUDA whether it is one.
        plain = [*map(plain_of, args)]
        key = (torch.cuda.current_device(), *map(kind_of, args, plain), *named.items())
        found = self._compiled.get(key)
        if found is None:
            compiled = self.kernel[grid](*args, **named)
            constants = tuple(named[name] for name in self.kernel.arg_names[len(args) :])
            self._compiled[key] = compiled, constants
            return
        compiled, constants = found
        axes = (*grid, 1, 1)
        compiled[axes](*plain, *constants)


def plain_of(argument: Any) -> Any:
    """The address of a tensor; all else as it is."""
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def kind_of(argument: Any, plain: Any) -> Any:
    """Equal for arguments for which Triton compiles one kernel: it looks at the dtype of a tensor and whether its
    address is a multiple of 16, and of an integer at how wide it is, whether it is 1, and a multiple of 16. ``plain``:
    what `plain_of` makes of it."""
    if argument is not plain:
        return argument.dtype, plain % 16 == 0
    if type(argument) is int:
        return argument == 1, argument % 16 == 0, -_NARROW <= argument < _NARROW, argument < _SIGNED
    return type(argument), argument
