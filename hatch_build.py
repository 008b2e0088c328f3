"""At installation: compile the kernels if there is a C compiler. Without one all works, several times slower."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SCRIPT = Path(__file__).parent / "deltackpt" / "kernels" / "build.py"


class KernelsHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        spec = importlib.util.spec_from_file_location("build_kernels", SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        problem = script.build()
        if problem is not None:
            self.app.display_warning(f"deltackpt goes without its compiled kernels: {problem}")
            script.LIBRARY.unlink(missing_ok=True)
            return
        # The library is called through ctypes, so the wheel depends on the platform and on no version of Python.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append("deltackpt/kernels/kernels.so")
