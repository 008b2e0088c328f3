"""Imports point down (DESIGN section 3): a module imports only what stands above it in this list."""

import ast
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "deltackpt"
ORDER = [
    "errors",
    "kernels",
    "util",
    "format",
    "codecs",
    "store",
    "signing",
    "checkpoint",
    "patch",
    "repository",
    "restore",
    "shares",
    "cache",
    "publish",
    "compaction",
    "collector",
    "verification",
    "sync",
    "watch",
    "interop",
    "report",
    "torch_views",
    "quantize",
    "gpu",
    "carriers",
    "hooks",
    "engines",
    "live",
    "api",
]
# Rooms, and modules, without files, network or clock.
PURE = ["errors", "format", "codecs", "repository.chain", "repository.paths", "collector.retention"]
OUTSIDE = {"os", "io", "pathlib", "mmap", "tempfile", "shutil", "socket", "subprocess", "time", "fsspec", "requests"}
EDGES = [
    "torch_views",
    "quantize",
    "gpu",
    "carriers",
    "hooks",
    "engines",
    "live",
]  # where torch is; all else is the core


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}
CORE = [name for name in MODULES if name.partition(".")[0] not in (*EDGES, "__init__")]


def imports(name: str) -> set[str]:
    """Full names of what a module imports, inside of functions too; of our own: without the package."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner.removeprefix("deltackpt.") in MODULES else node.module or "")
    return {module.removeprefix("deltackpt.") for module in found}


def test_every_module_has_its_place():
    assert {name.partition(".")[0] for name in MODULES} <= {*ORDER, "__init__"}


def test_the_page_on_the_house_lists_every_place_in_its_order():
    page = (ROOT.parent / "docs" / "extend" / "house.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)(?:/|\.py)`", row)]
    assert [name for name in listed if name in ORDER] == ORDER


@pytest.mark.parametrize("name", [name for name in MODULES if name != "__init__"])
def test_imports_point_down(name):
    unit = name.partition(".")[0]
    for module in imports(name) & MODULES.keys():
        other = module.partition(".")[0]
        assert other == unit or ORDER.index(other) < ORDER.index(unit), f"{name} imports {module}"


def test_no_cycles():
    """Of all modules, also by imports inside of functions and of types alone."""
    TopologicalSorter({name: imports(name) & MODULES.keys() - {name} for name in MODULES}).prepare()


@pytest.mark.parametrize("name", CORE)
def test_the_core_needs_no_torch(name):
    found = {module.partition(".")[0] for module in imports(name)}
    assert not found & {"torch", "transformers", "vllm", "sglang"}
    if name in PURE or name.partition(".")[0] in PURE:
        assert not found & OUTSIDE
        assert found <= {*sys.stdlib_module_names, *ORDER, "deltackpt", "numpy", "xxhash", "zstandard"}
