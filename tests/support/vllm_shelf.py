"""A directory over HTTP that can be read only, as a process that can be killed:  python shelf.py FOLDER PORT"""

from __future__ import annotations

import functools
import re
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Shelf(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        path = Path(self.translate_path(self.path))
        if asked is None or not path.is_file():
            super().do_GET()
            return
        data, first = path.read_bytes(), int(asked[1])
        part = data[first : int(asked[2]) + 1 if asked[2] else None]
        self.send_response(206 if part else 416)
        self.send_header("content-range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.send_header("content-length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def do_PUT(self) -> None:
        """A reader asks for a lease, and does without."""
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_error(403)

    def log_message(self, *_: object) -> None: ...


if __name__ == "__main__":
    handler = functools.partial(Shelf, directory=sys.argv[1])
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), handler).serve_forever()
