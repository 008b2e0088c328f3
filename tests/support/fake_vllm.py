"""A vLLM of any release, as far as a plugin sees it: modules and classes made of the table of its signatures.

`installed` puts them in the place of the real ones while a test runs; `FakeServer` is its HTTP server, with the routes
that the release has and no others, over a real rank of the plugin.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import json
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qs, urlsplit

from support import fake_vllm_trainer

OURS = "deltackpt.engines.vllm"


def _method(name: str, signature: str, abstract: bool) -> Any:
    space: dict[str, Any] = {}
    exec(f"def {name}{signature}: raise NotImplementedError", space)
    return abc.abstractmethod(space[name]) if abstract else space[name]


def class_of(name: str, facts: dict[str, Any], *bases: Any, **more: Any) -> Any:
    """A class with these signatures, abstract where they are; ``more`` does what the tests need done."""
    methods = {n: _method(n, s, n in facts["abstract"]) for n, s in facts["methods"].items()}
    fields = {n: None for n, given in facts["fields"].items() if given and n not in methods}
    content = {**fields, **methods, **more}
    return types.new_class(name, bases, {"metaclass": abc.ABCMeta}, lambda space: space.update(content))


def _engine(facts: dict[str, Any]) -> Any:
    names = [word.strip() for word in facts["methods"]["__init__"].strip("()").split(",")][1:]

    def init(self: Any, *args: Any) -> None:
        assert len(args) == len(names), names
        vars(self).update(zip(names, args, strict=True))

    def update(self: Any, info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(info))

    init_info, change = TypeVar("init_info"), TypeVar("change")
    does = {
        "__init__": init,
        "update_weights": update,
        "parse_init_info": lambda self, info: self.init_info_cls(**info),
        "parse_update_info": lambda self, info: self.update_info_cls(**info),
    }
    return class_of("WeightTransferEngine", {**facts, "fields": {}}, Generic[init_info, change], **does)


def _info(name: str, facts: dict[str, Any]) -> Any:
    fields = [(n, Any, dataclasses.field(default=None)) for n in facts["fields"] if n != "_"]
    return dataclasses.make_dataclass(name, fields, kw_only=True)


class LayerInfo:
    """No layer is taken apart by the models of these tests."""

    def can_load(self) -> bool:
        return False


class WholeFiles:
    """vLLM's own loader, of safetensors in a folder."""

    def __init__(self, config: Any) -> None: ...

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[Any]:
        from safetensors.torch import load_file

        for path in sorted(Path(model_config.model).glob("*.safetensors")):
            yield from load_file(path).items()


def _modules(version: str, facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    group = SimpleNamespace(rank_in_group=0, world_size=1, cpu_group=None)
    base = {
        "WeightTransferEngine": _engine(facts["engine"]),
        "WeightTransferInitInfo": _info("WeightTransferInitInfo", facts["init_info"]),
        "WeightTransferUpdateInfo": _info("WeightTransferUpdateInfo", facts["update_info"]),
    }
    more, trainers = fake_vllm_trainer.modules(facts, class_of)
    base |= more
    registry: dict[str, Any] = {}
    factory = SimpleNamespace(_registry=registry, register_engine=lambda *a: registry.update({a[0]: a[1:]}))
    loaders: dict[str, Any] = {}
    config = {"VllmConfig": object, "set_current_vllm_config": lambda c: nullcontext(), "LoadConfig": dict}
    layerwise = {
        "initialize_layerwise_reload": lambda model: None,
        "finalize_layerwise_reload": lambda model, config: None,
        "get_layerwise_info": lambda module: LayerInfo(),
        "_copy_and_restore_kernel_tensors": lambda layer, info: None,
    }

    def register(name: str) -> Callable[[Any], Any]:
        return lambda cls: loaders.setdefault(name, cls)

    class Worker:
        def sleep(self, level: int = 1) -> None: ...
        def wake_up(self, tags: Any = None) -> None: ...

    return {
        "vllm": {"__version__": version},
        "vllm._custom_ops": {},
        "vllm.config": {**config, "ModelConfig": object},
        "vllm.config.load": {"LoadConfig": dict},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_world_group": lambda: group},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.base": base,
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": factory, **trainers},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.linear": {"LinearBase": type("LinearBase", (), {})},
        "vllm.model_executor.layers.quantization": {},
        "vllm.model_executor.layers.quantization.base_config": {
            "QuantizeMethodBase": type("QuantizeMethodBase", (), {}),
        },
        "vllm.model_executor.model_loader": {
            "_LOAD_FORMAT_TO_MODEL_LOADER": loaders,
            "register_model_loader": register,
        },
        "vllm.model_executor.model_loader.base_loader": {
            "BaseModelLoader": class_of("BaseModelLoader", facts["loader"], __init__=lambda self, config: None),
        },
        "vllm.model_executor.model_loader.default_loader": {"DefaultModelLoader": WholeFiles},
        "vllm.model_executor.model_loader.reload": {},
        "vllm.model_executor.model_loader.reload.layerwise": layerwise,
        "vllm.model_executor.model_loader.reload.meta": {},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
        "vllm.v1": {},
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu_worker": {"Worker": Worker},
    }


@contextmanager
def installed(version: str, facts: dict[str, Any]) -> Iterator[None]:
    """This release in the place of vLLM, and the plugin imported anew over it."""
    kept = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "vllm" or n.startswith(OURS)}
    parent = importlib.import_module("deltackpt.engines")
    before = vars(parent).get("vllm")
    for name in kept:
        del sys.modules[name]
    try:
        for name, content in _modules(version, facts).items():
            module = ModuleType(name)
            module.__path__ = []
            vars(module).update(content)
            sys.modules[name] = module
            above, _, last = name.rpartition(".")
            if above:
                setattr(sys.modules[above], last, module)
        yield
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "vllm" or n.startswith(OURS)]:
            del sys.modules[name]
        sys.modules.update(kept)
        if before is not None:
            parent.vllm = before  # type: ignore[attr-defined]


class FakeServer:
    """``rank`` is a `DeltaTransfer` or a worker with `DeltaWorker` in it; ``calls`` are the routes that were asked, in
    order. ``asleep``, ``key`` and ``refuses`` (routes that answer 500, once) are for a test to set."""

    def __init__(self, version: str, facts: dict[str, Any], rank: Any) -> None:
        self.version, self.rank, self.routes = version, rank, facts["routes"]
        self.named = "weight_version" in (facts["llm"].get("finish_weight_update") or "")
        self.calls: list[str] = []
        self.weight_version, self.paused, self.asleep, self.key = "default", False, False, ""
        self.refuses: set[str] = set()
        self.stays = 0  # how often a prefix cache is said to stay
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.respond("GET")

            def do_POST(self) -> None:
                self.respond("POST")

            def respond(self, method: str) -> None:
                raw = self.rfile.read(int(self.headers.get("content-length") or 0))
                status, body = fake.answer(method, self.path, raw, self.headers.get("authorization"))
                data = b"" if body is None else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, method: str, path: str, raw: bytes, authorization: str | None) -> tuple[int, Any]:
        parts = urlsplit(path)
        self.calls.append(path)
        if self.key and authorization != f"Bearer {self.key}":
            return 401, {"error": "Unauthorized"}
        if f"{method} {parts.path}" not in self.routes:
            return 404, {"detail": "Not Found"}
        if parts.path in self.refuses:
            self.refuses.discard(parts.path)
            return 500, {"error": "no"}
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        assert query.keys() <= {*self.routes[f"{method} {parts.path}"]}, path
        try:
            if parts.path == "/version":
                return 200, {"version": self.version}
            return 200, getattr(self, parts.path[1:])(json.loads(raw or b"{}"), query)
        except Exception as error:
            return 500, {"error": {"message": str(error)}}

    # The routes, by their names

    def pause(self, body: Any, query: Any) -> Any:
        self.paused = True
        return {"status": "paused"}

    def resume(self, body: Any, query: Any) -> Any:
        self.paused = False
        return {"status": "resumed"}

    def is_paused(self, body: Any, query: Any) -> Any:
        return {"is_paused": self.paused}

    def is_sleeping(self, body: Any, query: Any) -> Any:
        return {"is_sleeping": self.asleep or self.paused}

    def get_world_size(self, body: Any, query: Any) -> Any:
        return {"world_size": 1}

    def weight_info(self, body: Any, query: Any) -> Any:
        return {"weight_version": self.weight_version}

    def init_weight_transfer_engine(self, body: Any, query: Any) -> Any:
        self.rank.init_transfer_engine(self.rank.parse_init_info(body["init_info"]))
        return {"message": "Weight transfer initialized"}

    def start_weight_update(self, body: Any, query: Any) -> Any:
        self.rank.start_weight_update()
        return {"message": "Weight update started"}

    def update_weights(self, body: Any, query: Any) -> Any:
        self.rank.update_weights(body["update_info"])
        return {"message": "Weights updated"}

    def finish_weight_update(self, body: Any, query: Any) -> Any:
        assert not body or self.named, body
        self.rank.finish_weight_update()
        self.weight_version = body.get("weight_version", self.weight_version)
        return {"message": "Weight update finished"}

    def collective_rpc(self, body: Any, query: Any) -> Any:
        return {"results": [str(getattr(self.rank, body["method"])(**body.get("kwargs", {})))]}

    def reset_prefix_cache(self, body: Any, query: Any) -> Any:
        self.stays -= 1
        return {"success": self.stays < 0}

    def reset_encoder_cache(self, body: Any, query: Any) -> Any:
        return None

    def reset_mm_cache(self, body: Any, query: Any) -> Any:
        return None
