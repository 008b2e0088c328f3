"""SGLang's HTTP routes, as far as they are used, and nothing behind them."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class FakeSglang:
    """Remembers calls; ``refuses`` steps, by their folder's name."""

    def __init__(self):
        self.calls, self.path, self.version, self.paused = [], "start", "default", False
        self.refuses, self.vanishes, self.fails = set(), False, {}  # fails: {route: how often still}
        self.loses = False  # the answer to an update, once
        self.weights, self.checks, self.breaks = b"", True, None  # breaks: how often a load until one goes wrong
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer({"weight_version": fake.version, "model_path": fake.path})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
                fake.calls.append(self.path)
                if fake.fails.get(self.path, 0) > 0:
                    fake.fails[self.path] -= 1
                    self.answer("no", 400)
                    return
                if self.path == "/weights_checker":
                    self.checksums()
                    return
                if self.path == "/update_weights_from_disk":
                    fake.load(body["model_path"])  # 0.5.23 goes back to the path that it was just given
                    if any(body["model_path"].split("/")[-1].startswith(r) for r in fake.refuses):
                        self.answer({"success": False, "message": "no such weights"})
                        return
                    assert fake.paused
                    fake.path = body["model_path"]
                    fake.version = body.get("weight_version", fake.version)
                    lost, fake.loses = fake.loses, False
                    self.answer({"success": True, "message": ""}, 500 if lost else 200)
                    return
                if self.path == "/flush_cache":
                    self.answer("Cache flushed.\n")
                    return
                fake.paused = {"/pause_generation": True, "/continue_generation": False}.get(self.path, fake.paused)
                self.answer({})

            def checksums(self):
                if not fake.checks:
                    self.answer({"detail": "Not Found"}, 404)
                    return
                found = {"checksums": {"model.w": hashlib.sha256(fake.weights).hexdigest()[:16]}}
                self.answer({"success": True, "message": "Success.", "ranks": [found]})

            def answer(self, body, status=200):
                raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(503 if fake.vanishes else status)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_): ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.spec = f"sglang=http://127.0.0.1:{self.server.server_address[1]}"

    def load(self, path):
        """What is in its memory, as a process of its own reads it."""
        files = sorted(Path(path).resolve().glob("*.safetensors"))
        if files:
            self.weights = b"".join(file.read_bytes() for file in files)
            if self.breaks is not None:
                self.breaks -= 1
                self.weights += b"broken" * (self.breaks == 0)

    def close(self):
        self.server.shutdown()
        self.server.server_close()
