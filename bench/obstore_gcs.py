"""Google Cloud Storage's XML API as far as obstore asks for it, on loopback: a stand-in, as tests/fake_gcs.py is."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from email.utils import format_datetime
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.support.fake_gcs import PAGE, _Handler

META = "x-goog-meta-"


class XmlHandler(_Handler):
    """What is no path of the JSON API is BUCKET, or BUCKET/KEY."""

    def handle_any(self) -> None:
        parts = urlsplit(self.path)
        if re.match(r"/(?:upload/|download/|)storage/v1/", parts.path):
            return super().handle_any()
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.query = dict(parse_qsl(parts.query, keep_blank_values=True))
        key = unquote(parts.path.lstrip("/").partition("/")[2])
        if not key:
            return self.pages()
        if self.command == "PUT":
            return self.put(key)
        with self.gcs.lock:
            entry = self.gcs.objects.get(key)
            if entry and self.command == "DELETE":
                del self.gcs.objects[key]
                return self.reply(204, b"")
        return self.reply(404, b"<Error><Code>NoSuchKey</Code></Error>") if entry is None else self.get(*entry)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = handle_any

    def put(self, key: str) -> None:
        metadata = {k.lower().removeprefix(META): v for k, v in self.headers.items() if k.lower().startswith(META)}
        condition = self.headers.get("x-goog-if-generation-match")
        made = self.gcs.store({"name": key, "metadata": metadata}, self.body, condition)
        if made is None:
            return self.reply(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        self.reply(200, b"", about(made))

    def get(self, made: dict[str, Any], body: bytes) -> None:
        headers = about(made)
        if self.headers.get("If-Match", headers["ETag"]) != headers["ETag"]:
            return self.reply(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        if self.headers.get("If-None-Match") == headers["ETag"]:
            return self.reply(304, b"")
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if span is None:
            return self.reply(200, body, headers)
        start, end = int(span[1]), min(int(span[2]) + 1, len(body))
        if start >= len(body):
            return self.reply(416, b"<Error><Code>InvalidRange</Code></Error>")
        self.reply(206, body[start:end], {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(body)}"})

    def pages(self) -> None:
        after, prefix = self.query.get("continuation-token", ""), self.query.get("prefix", "")
        with self.gcs.lock:
            names = sorted(name for name in self.gcs.objects if name.startswith(prefix) and name > after)
            found = [self.gcs.objects[name][0] for name in names[:PAGE]]
        entries = "".join(
            f"<Contents><Key>{escape(o['name'])}</Key><Size>{o['size']}</Size><ETag>{about(o)['ETag']}</ETag>"
            f"<LastModified>{o['updated']}</LastModified></Contents>"
            for o in found
        )
        token = f"<NextContinuationToken>{escape(names[PAGE - 1])}</NextContinuationToken>" if len(names) > PAGE else ""
        self.reply(200, f"<ListBucketResult>{entries}{token}</ListBucketResult>".encode())

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        if self.command != "HEAD":
            return super().reply(status, body, headers)
        super().reply(status, b"", {**(headers or {}), "Content-Length": str(len(body))})


def about(made: dict[str, Any]) -> dict[str, str]:
    moment = datetime.fromisoformat(made["updated"].replace("Z", "+00:00")).astimezone(timezone.utc)
    return {
        "ETag": f'"e{made["generation"]}"',
        "X-Goog-Generation": made["generation"],
        "Last-Modified": format_datetime(moment.replace(microsecond=0), usegmt=True),
        **{f"X-Goog-Meta-{name}": value for name, value in made["metadata"].items()},
    }
