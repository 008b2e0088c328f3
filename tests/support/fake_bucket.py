"""A Hugging Face Buckets endpoint on loopback, and a stand-in for hf_xet that stores into a folder.

It speaks what huggingface_hub 2.4 asks for: create, batch (NDJSON), paths-info, tree (paged, lexical prefix), resolve
(a redirect to the storage, as the real one), xet tokens.  ``folder`` holds contents by hash; with the stock hf_xet
wheel instead of the stand-in it is that wheel's local storage.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import time
import types
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

TOKEN = "hf_loopbackonly0000000000"
PAGE = 3  # entries of a page of a tree: small, so that tests turn pages


@dataclass
class FakeBucket:
    """What the endpoint holds, and the faults it is told to show."""

    folder: Path
    buckets: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    refuse: dict[str, str] = field(default_factory=dict)  # path -> why a batch that answers 200 lists it as failed
    url: str = ""

    @contextmanager
    def serve(self) -> Iterator[FakeBucket]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"bucket": self}))
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def content(self, xet_hash: str) -> bytes:
        """The bytes of a hash; with the stock wheel, by that wheel."""
        path = self.folder / xet_hash
        if path.exists():
            return path.read_bytes()
        import hf_xet

        out = self.folder / f"out-{threading.get_ident()}"
        with hf_xet.XetSession().new_file_download_group(endpoint=f"local://{self.folder}") as group:
            group.start_download_file(hf_xet.XetFileInfo(xet_hash, self.size(xet_hash)), str(out))
        return out.read_bytes()

    def size(self, xet_hash: str) -> int:
        """Of a stored content: what the stock wheel's shards know, read by the simplest way that works on both."""
        if (self.folder / xet_hash).exists():
            return (self.folder / xet_hash).stat().st_size
        import hf_xet

        out = self.folder / f"size-{threading.get_ident()}"
        with hf_xet.XetSession().new_file_download_group(endpoint=f"local://{self.folder}") as group:
            group.start_download_file(hf_xet.XetFileInfo(xet_hash, None), str(out))
        return out.stat().st_size


class _Handler(BaseHTTPRequestHandler):
    bucket: FakeBucket
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet: else the client's delayed acknowledgement costs 40 ms a request

    def log_message(self, *args: object) -> None:
        pass

    def handle_any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        self.bucket.requests.append((self.command, self.path))
        self.host = f"http://{self.headers['Host']}"
        parts = urlsplit(self.path)
        if parts.path.startswith("/storage/"):
            return self.storage(parts.path.removeprefix("/storage/"))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.refuse(401, "Unauthorized")
        for method, pattern, answer in _ROUTES:
            if (found := re.fullmatch(pattern, parts.path)) and method == self.command:
                return answer(self, *map(unquote, found.groups()))
        return self.refuse(404, "NotFound")

    do_GET = do_POST = do_HEAD = handle_any

    def create(self, name: str) -> None:
        status = 409 if name in self.bucket.buckets else 200
        self.bucket.buckets.setdefault(name, {})
        self.bucket.private.setdefault(name, json.loads(self.body or b"{}").get("visibility") == "private")
        self.reply(status, {"url": f"{self.host}/buckets/{name}", "error": "exists"})

    def about(self, name: str) -> None:
        if (files := self.files(name)) is not None:
            about = {"id": name, "private": True, "createdAt": _now(), "size": 0, "totalFiles": len(files)}
            self.reply(200, about)

    def batch(self, name: str) -> None:
        if (files := self.files(name)) is None:
            return
        failed = []
        for line in map(json.loads, self.body.splitlines()):
            path = line["path"]
            if path in self.bucket.refuse:
                failed.append({"path": path, "error": self.bucket.refuse[path]})
            elif line["type"] == "deleteFile":
                if files.pop(path, None) is None:
                    failed.append({"path": path, "error": "not found"})
            else:
                size, now = self.bucket.size(line["xetHash"]), _now()
                entry = {"type": "file", "path": path, "size": size, "xetHash": line["xetHash"]}
                files[path] = {**entry, "mtime": now, "uploadedAt": now}
        self.reply(200, {"success": not failed, "failed": failed})

    def paths_info(self, name: str) -> None:
        if (files := self.files(name)) is not None:
            self.reply(200, [files[path] for path in json.loads(self.body)["paths"] if path in files])

    def tree(self, name: str, prefix: str = "") -> None:
        if (files := self.files(name)) is None:
            return
        after = parse_qs(urlsplit(self.path).query).get("cursor", [""])[0]
        names = sorted(path for path in files if path.startswith(prefix) and path > after)
        more = {}
        if len(names) > PAGE:
            at = f"{self.host}{urlsplit(self.path).path}?recursive=true&cursor={quote(names[PAGE - 1], safe='')}"
            more = {"Link": f'<{at}>; rel="next"'}
        self.reply(200, [files[path] for path in names[:PAGE]], more)

    def resolve(self, name: str, path: str) -> None:
        if (files := self.files(name)) is None:
            return
        if path not in files:
            return self.refuse(404, "EntryNotFound")
        entry = files[path]
        headers = {
            "X-Xet-Hash": entry["xetHash"],
            "X-Linked-Size": str(entry["size"]),
            "X-Xet-Refresh-Route": f"{self.host}/api/buckets/{name}/xet-read-token",
        }
        if self.command == "HEAD":
            return self.reply(200, None, headers)
        return self.reply(302, None, {**headers, "Location": f"{self.host}/storage/{entry['xetHash']}"})

    def token(self, name: str, kind: str) -> None:
        answer = {"accessToken": "xet-token", "exp": int(time.time()) + 900, "casUrl": f"local://{self.bucket.folder}"}
        self.reply(200, answer)

    def storage(self, xet_hash: str) -> None:
        body = self.bucket.content(xet_hash)
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if span is None:
            return self.send(200, body, {})
        start, end = int(span[1]), min(int(span[2]) + 1, len(body))
        if start >= len(body):
            return self.send(416, b"", {"Content-Range": f"bytes */{len(body)}"})
        return self.send(206, body[start:end], {"Content-Range": f"bytes {start}-{end - 1}/{len(body)}"})

    def files(self, name: str) -> dict[str, dict[str, Any]] | None:
        found = self.bucket.buckets.get(name)
        if found is None:
            self.refuse(404, "RepoNotFound")
        return found

    def refuse(self, status: int, code: str) -> None:
        self.reply(status, {"error": code}, {"X-Error-Code": code})

    def reply(self, status: int, value: object, headers: dict[str, str] | None = None) -> None:
        self.send(status, b"" if value is None else json.dumps(value).encode(), headers or {})

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


_BUCKET = r"/api/buckets/([^/]+/[^/]+)"
_ROUTES = [
    ("POST", _BUCKET, _Handler.create),
    ("GET", _BUCKET, _Handler.about),
    ("POST", f"{_BUCKET}/batch", _Handler.batch),
    ("POST", f"{_BUCKET}/paths-info", _Handler.paths_info),
    ("GET", f"{_BUCKET}/tree", _Handler.tree),
    ("GET", f"{_BUCKET}/tree/([^/]+)", _Handler.tree),
    ("GET", f"{_BUCKET}/xet-(read|write)-token", _Handler.token),
    ("HEAD", r"/buckets/([^/]+/[^/]+)/resolve/([^/]+)", _Handler.resolve),
    ("GET", r"/buckets/([^/]+/[^/]+)/resolve/([^/]+)", _Handler.resolve),
]


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# The stand-in for hf_xet


def stub_hf_xet() -> types.ModuleType:
    """A module that can take the place of ``hf_xet``: contents by sha256 in the folder that a token names."""
    module = types.ModuleType("hf_xet")
    module.__dict__.update(SKIP_SHA256=object(), XetFileInfo=_Info, XetSession=_Session)
    return module


@contextmanager
def installed(module: types.ModuleType) -> Iterator[None]:
    """``import hf_xet`` gives this module, and huggingface_hub begins with a session of it."""
    from huggingface_hub.utils import _xet

    before = sys.modules.get("hf_xet")
    sys.modules["hf_xet"] = module
    _xet._GLOBAL_XET_HOLDER._session = None
    try:
        yield
    finally:
        _xet._GLOBAL_XET_HOLDER._session = None
        del sys.modules["hf_xet"]
        if before is not None:
            sys.modules["hf_xet"] = before


@dataclass
class _Info:
    hash: str
    file_size: int | None


class _Session:
    def new_upload_commit(self, *, token_refresh_url: str, token_refresh_headers: Any, **_: object) -> _Group:
        return _Group(token_refresh_url, token_refresh_headers)

    new_file_download_group = new_upload_commit


class _Group:
    def __init__(self, url: str, headers: dict[str, str]) -> None:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            self._folder = Path(json.load(answer)["casUrl"].removeprefix("local://"))

    def __enter__(self) -> _Group:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start_upload_file(self, path: str, sha256: object) -> types.SimpleNamespace:
        return self.start_upload_bytes(Path(path).read_bytes(), sha256)

    def start_upload_bytes(self, data: bytes, sha256: object) -> types.SimpleNamespace:
        name = hashlib.sha256(data).hexdigest()
        temporary = self._folder / f"{name}.{threading.get_ident()}"
        temporary.write_bytes(data)
        temporary.replace(self._folder / name)
        result = types.SimpleNamespace(xet_info=_Info(name, len(data)))
        return types.SimpleNamespace(result=lambda: result)

    def start_download_file(self, info: _Info, path: str) -> None:
        Path(path).write_bytes((self._folder / info.hash).read_bytes())
