"""Engines that load adapters, with nothing behind their routes, and a trainer that publishes steps of one."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import safetensors.numpy as st

from deltackpt.engines.adapters import Adapter, AdapterOptions, AdapterServing
from deltackpt.publish.write import write
from deltackpt.repository import Repository


def gauge(running, at):
    """vLLM's, which is set to the time at which it held."""
    labels = f'max_lora="2",running_lora_adapters="{",".join(running)}",waiting_lora_adapters=""'
    return f"vllm:lora_requests_info{{{labels}}} {at}"


class FakeEngine:
    """``busy``: adapters that requests use. As vLLM, it goes on with one that is unloaded. ``ended``: set where no
    request uses one that is unloaded; SGLang waits for that, and loads nothing meanwhile. ``broken``: what SGLang has
    unregistered, and could not take out of its ranks."""

    def __init__(self, kind):
        self.kind, self.loaded, self.busy, self.calls, self.version = kind, {}, set(), [], "default"
        self.root = "org/base"  # of the Hub
        self.max_rank, self.seen, self.broken, self.fails = 8, {}, set(), 0
        self.ended, self.lock = threading.Event(), threading.Lock()
        self.ended.set()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path == "/v1/models":
                    cards = [{"id": name, "root": root} for name, root in fake.loaded.items()]
                    self.answer({"data": [{"id": "base", "root": fake.root}, *cards]})
                elif self.path == "/metrics":
                    gauges = [gauge(sorted(fake.busy), "1.8e+09"), gauge(["gone@1"], "1.7e+09")]
                    self.answer("\n".join(["# HELP x", *gauges, ""]))
                elif self.path in ("/weight_info", "/model_info"):
                    self.answer({"weight_version": fake.version, "model_path": fake.root})
                else:
                    self.answer({"error": "not found"}, 404)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                prefix = "/v1" if fake.kind == "vllm" else ""
                name = body["lora_name"]
                fake.calls.append((self.path, name))
                if fake.kind == "sglang":
                    with fake.lock:
                        return self.change(prefix, name, body)
                return self.change(prefix, name, body)

            def change(self, prefix, name, body):
                if self.path == f"{prefix}/load_lora_adapter":
                    config = json.loads(Path(body["lora_path"], "adapter_config.json").read_bytes())
                    if name in fake.loaded:
                        self.answer({"error": {"message": "has already been loaded"}}, 400)
                    elif name in fake.broken:
                        said = (
                            f"LoRA adapter '{name}' has an incomplete unload. Retry the unload before loading it again."
                        )
                        self.answer({"success": False, "error_message": said}, 400)
                    elif config["r"] > fake.max_rank:
                        self.answer({"error": {"message": f"LoRA rank {config['r']} is greater"}}, 400)
                    else:
                        fake.loaded[name] = body["lora_path"]
                        fake.seen[name] = st.load_file(body["lora_path"] + "/adapter_model.safetensors")["a"].tobytes()
                        self.answer({"success": True})
                elif self.path == f"{prefix}/unload_lora_adapter" and name in {*fake.loaded, *fake.broken}:
                    fake.loaded.pop(name, None)
                    if fake.fails:
                        fake.fails -= 1
                        fake.broken.add(name)
                        return self.answer({"success": False, "error_message": "a rank is gone"}, 400)
                    fake.broken.discard(name)
                    if fake.kind == "sglang":
                        assert fake.ended.wait(60)
                    self.answer({"success": True})
                else:
                    self.answer({"error": "not found"}, 404)

            def answer(self, body, status=200):
                raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_): ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = False  # it is closed when all have been answered
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.spec = f"{kind}=http://127.0.0.1:{self.server.server_address[1]}"

    def close(self):
        self.ended.set()
        self.server.shutdown()
        self.server.server_close()


class Trainer:
    """Publishes steps of an adapter."""

    def __init__(self, root, ref="main"):
        self.root, self.repo, self.ref, self.rank = root, root / "repo", ref, 4

    def publish(self, step, name="adapter_model.safetensors", **options):
        folder = self.root / f"in-{self.ref}-{step}-{len(list(self.root.iterdir()))}"
        folder.mkdir(parents=True)
        values = np.full((self.rank, 64), step, np.float32)
        values[0, :8] = np.arange(8) + step
        st.save_file({"a": values}, folder / name)
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": self.rank}))
        write(folder, self.repo, step=step, ref=self.ref, threads=1, **options)
        return values.tobytes()


def serving(trainer, engines, *adapters, **options):
    events = []
    made = AdapterServing(
        Repository.open(trainer.repo), trainer.root / "adapters", [engine.spec for engine in engines],
        [Adapter(*adapter) for adapter in adapters or [("math",)]], lambda name, fields: events.append((name, fields)),
        AdapterOptions(threads=1, timeout=30.0, **options),
    )  # fmt: skip
    return made, events
