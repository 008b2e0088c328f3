"""The part of Google Cloud Storage's JSON API that gcsfs and the store ask for, on loopback, in memory."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

PAGE = 3  # entries of a page of a listing: small, so that tests turn pages


@dataclass
class FakeGcs:
    """Objects by name, in any bucket; preconditions are checked under one lock."""

    objects: dict[str, tuple[dict[str, Any], bytes]] = field(default_factory=dict)
    uploads: dict[str, tuple[dict[str, Any], str | None, bytearray]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    generations: int = 0

    @contextmanager
    def serve(self) -> Iterator[str]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"gcs": self}))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def store(self, about: dict[str, Any], body: bytes, condition: str | None) -> dict[str, Any] | None:
        """The new object, None if the generation is not the one that the condition names; "0" is no object."""
        with self.lock:
            have, _ = self.objects.get(about["name"], ({"generation": "0"}, b""))
            if condition is not None and condition != have["generation"]:
                return None
            self.generations += 1
            moment = time.strftime("%Y-%m-%dT%H:%M:%S.123Z", time.gmtime())
            made = {"name": about["name"], "size": str(len(body)), "updated": moment, "bucket": "b"}
            made |= {"generation": str(1000 + self.generations), "metadata": about.get("metadata", {})}
            self.objects[about["name"]] = (made, body)
            return made


class _Handler(BaseHTTPRequestHandler):
    gcs: FakeGcs
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def log_message(self, *args: object) -> None:
        pass

    def handle_any(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        self.query = dict(parse_qsl(parts.query))
        found = re.fullmatch(r"(/upload|/download|)/storage/v1/b/[^/]+/o(?:/([^/]+))?", parts.path)
        if found is None or "/b/no-such-bucket/" in parts.path:
            return self.reply(404, b"")
        kind, name = found[1], unquote(found[2] or "")
        if kind == "/upload":
            return self.upload()
        if not name:
            return self.listing()
        with self.gcs.lock:
            entry = self.gcs.objects.get(name)
            if entry and self.command == "DELETE":
                del self.gcs.objects[name]
                return self.reply(204, b"")
        if entry is None:
            return self.reply(404, b"Not Found")
        return self.media(*entry) if kind == "/download" else self.reply(200, json.dumps(entry[0]).encode())

    do_GET = do_POST = do_PUT = do_DELETE = handle_any

    def upload(self) -> None:
        condition = self.query.get("ifGenerationMatch")
        if self.query["uploadType"] == "multipart":
            boundary = self.headers["Content-Type"].partition("boundary=")[2].strip('"').encode()
            _, about, data, _ = self.body.split(b"--" + boundary)
            texts = [re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1] for part in (about, data)]
            return self.made(self.gcs.store(json.loads(texts[0]), re.sub(rb"\r?\n\Z", b"", texts[1]), condition))
        if "upload_id" not in self.query:
            number = str(len(self.gcs.uploads))
            self.gcs.uploads[number] = (json.loads(self.body), condition, bytearray())
            host = f"http://{self.headers['Host']}"
            at = f"{host}{urlsplit(self.path).path}?uploadType=resumable&upload_id={number}"
            return self.reply(200, b"", {"Location": at})
        about, condition, gathered = self.gcs.uploads[self.query["upload_id"]]
        gathered += self.body
        if len(gathered) < int(self.headers["Content-Range"].rpartition("/")[2]):
            return self.reply(308, b"", {"Range": f"bytes=0-{len(gathered) - 1}"})
        return self.made(self.gcs.store(about, bytes(gathered), condition))

    def made(self, made: dict[str, Any] | None) -> None:
        self.reply(412, b"{}") if made is None else self.reply(200, json.dumps(made).encode())

    def listing(self) -> None:
        after, prefix = self.query.get("pageToken", ""), self.query.get("prefix", "")
        with self.gcs.lock:
            names = sorted(name for name in self.gcs.objects if name.startswith(prefix) and name > after)
            page: dict[str, Any] = {"items": [self.gcs.objects[name][0] for name in names[:PAGE]]}
        if len(names) > PAGE:
            page["nextPageToken"] = names[PAGE - 1]
        self.reply(200, json.dumps(page).encode())

    def media(self, about: dict[str, Any], body: bytes) -> None:
        headers = {"X-Goog-Generation": about["generation"]}
        if self.query.get("ifGenerationMatch", about["generation"]) != about["generation"]:
            return self.reply(412, b"{}")
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if span is None:
            return self.reply(200, body, headers)
        start, end = int(span[1]), min(int(span[2]) + 1, len(body))
        if start >= len(body):
            return self.reply(416, b"")
        return self.reply(206, body[start:end], {"Content-Range": f"bytes {start}-{end - 1}/{len(body)}", **headers})

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
