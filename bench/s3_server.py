"""moto's S3 server with connections that stay open, as every real store has them.

    python bench/s3_server.py PORT

werkzeug answers each request with "Connection: close", since it does not know whether a body was read to its end. Here
it is, before the request is handed on.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from http.client import responses

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server


class KeepAlive(MotoRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and a small body in one packet

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def run_wsgi(self) -> None:
        environ = self.make_environ()
        if "HTTP_TRANSFER_ENCODING" in environ:
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read())  # werkzeug takes the chunks apart
        else:
            environ["wsgi.input"] = io.BytesIO(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        said: list[tuple[str, list[tuple[str, str]]]] = []

        def start(status: str, headers: list[tuple[str, str]], _: object = None) -> Callable[[bytes], object]:
            said.append((status, headers))
            return self.wfile.write

        parts = list(self.server.app(environ, start))
        status, headers = said[-1]
        code = int(status.split()[0])
        self.send_response(code, responses.get(code, ""))
        for name, value in headers:
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers) and code not in (204, 304):
            self.send_header("Content-Length", str(sum(map(len, parts))))
        self.end_headers()
        if self.command != "HEAD":
            for part in parts:
                self.wfile.write(part)
        self.wfile.flush()


def main() -> None:
    app = DomainDispatcherApplication(create_backend_app)
    make_server("127.0.0.1", int(sys.argv[1]), app, threaded=True, request_handler=KeepAlive).serve_forever()


if __name__ == "__main__":
    main()
