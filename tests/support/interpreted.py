"""Kernels in Triton's interpreter, on a host without a card."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any


def interpret() -> None:
    """To be called before Triton is imported, which reads then whether it interprets."""
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") is not None:
        _look_once_a_launch()


def _look_once_a_launch() -> None:
    """The interpreter looks through all of its language again at every call of a function that a kernel calls: a third
    of its time, and nothing changes by it. Where a release of Triton has it otherwise, it is left as it is."""
    import triton.language as tl
    from triton.runtime import interpreter

    look = getattr(interpreter, "_patch_lang", None)
    if look is None or hasattr(look, "once_a_launch"):
        return
    seen: set[int] = set()

    def patch_lang(kernel: Any) -> Any:
        modules = {id(value) for value in kernel.__globals__.values() if value is tl or value is tl.core}
        if modules and modules <= seen:
            return None  # for a function: it is the launch that needs the scope, to end it
        scope = look(kernel)
        if hasattr(scope, "restore"):
            seen.update(modules)
            restore = scope.restore

            def ended() -> None:
                restore()
                seen.clear()

            scope.restore = ended
        return scope

    patch_lang.once_a_launch = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_lang
