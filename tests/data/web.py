"""A web server in this process, which serves files by ranges and may fail."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Web:
    """`files`: content by path. `gets`: path and range of each GET. `status`: the answer to a path."""

    files: dict[str, bytes] = field(default_factory=dict)
    gets: list[str] = field(default_factory=list)
    status: Callable[[str], int] = lambda path: 200
    serves_ranges: bool = True
    has_versions: bool = True
    url: str = ""


@contextmanager
def serving() -> Iterator[Web]:
    web = Web()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(sends=False)

        def do_GET(self) -> None:
            web.gets.append(f"{self.path} {self.headers.get('Range', '')}")
            self.answer(sends=True)

        def answer(self, *, sends: bool) -> None:
            path = self.path.partition("?")[0]
            data = web.files.get(path)
            status = 404 if data is None else web.status(self.path)
            if data is None or status != 200:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            body, asked = data, self.headers.get("Range")
            if asked and web.serves_ranges:
                first, last = asked.removeprefix("bytes=").split("-")
                body = data[int(first) : int(last) + 1]
            self.send_response(200 if body is data else 206)
            if web.has_versions:
                self.send_header("ETag", f'"{md5(data).hexdigest()}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if sends:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    web.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield web
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
