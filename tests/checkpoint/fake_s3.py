"""A small S3 in this process, on the loopback, whose bytes can be changed."""

import base64
import hashlib
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from fullshard.system import object_store
from tests.checkpoint.store import environment


@dataclass
class Request:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def name(self) -> str:
        """The bucket, or bucket and key."""
        return unquote(urlsplit(self.target).path).strip("/")

    @property
    def query(self) -> dict[str, str]:
        return {
            key: one[0] for key, one in parse_qs(urlsplit(self.target).query, keep_blank_values=True).items()
        }

    def puts(self, text: str) -> bool:
        """Returns whether it sends an object, or a part of one, whose URL contains `text`."""
        return self.method == "PUT" and text in self.target


class Silence(Exception):
    """Raised by `hear`: nobody answers the request."""


@dataclass
class FakeS3:
    """`hear` is called with every request; `take` gives the body of a PUT as it arrives.

    `compares`: a body whose checksum is another is refused. `port`: where it answers.
    """

    hear: Callable[[Request], None] = lambda request: None
    take: Callable[[Request], bytes] = lambda request: request.body
    compares: bool = False
    asked: list[Request] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    port: int = 0

    def answer(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        """Status, headers, body."""
        self.hear(request)
        query, name = request.query, request.name
        if request.method in ("GET", "HEAD"):
            if "list-type" in query or "uploads" in query:
                return 200, {}, self._listed(name, query)
            return self._got(request)
        if request.method == "DELETE":
            self.uploads.pop(query["uploadId"], None)
            return 204, {}, b""
        return self._put(request) if request.method == "PUT" else (200, {}, self._posted(request))

    def _posted(self, request: Request) -> bytes:
        query, name = request.query, request.name
        if "delete" in query:
            for key in re.findall(rb"<Key>(.*?)</Key>", request.body):
                self.objects.pop(f"{name}/{key.decode()}", None)
            return b"<DeleteResult/>"
        if "uploads" in query:
            self.uploads[number := str(len(self.asked))] = {}
            return f"<R><UploadId>{number}</UploadId></R>".encode()
        parts = self.uploads.pop(query["uploadId"])
        self.objects[name] = b"".join(parts[number] for number in sorted(parts))
        return b"<CompleteMultipartUploadResult/>"

    def _put(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        body, digest = self.take(request), request.headers.get("x-amz-checksum-crc32")
        if self.compares and digest != base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode():
            return 400, {}, b"<Error><Code>BadDigest</Code></Error>"
        if "If-None-Match" in request.headers and request.name in self.objects:
            return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
        if "partNumber" in request.query:
            self.uploads[request.query["uploadId"]][int(request.query["partNumber"])] = body
        else:
            self.objects[request.name], self.checksums[request.name] = body, str(digest)
        return 200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, b""

    def _got(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        data = self.objects.get(request.name)
        if data is None:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        bounds = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if bounds:
            return 206, {}, data[int(bounds[1]) : int(bounds[2] or len(data)) + 1]
        digest = self.checksums.get(request.name)
        return 200, {} if digest is None else {"x-amz-checksum-crc32": digest}, data

    def _listed(self, bucket: str, query: dict[str, str]) -> bytes:
        prefix, keys, below = query.get("prefix", ""), list[str](), set[str]()
        for name in sorted(self.objects):
            key = name.removeprefix(f"{bucket}/")
            head, found, _ = key.removeprefix(prefix).partition(query.get("delimiter") or "\n")
            if key.startswith(prefix) and "uploads" not in query:
                below |= {prefix + head + found} if found else set()
                keys += [] if found else [key]
        contents = "".join(
            f"<Contents><Key>{key}</Key><Size>{len(self.objects[f'{bucket}/{key}'])}</Size></Contents>"
            for key in keys
        )
        common = "".join(f"<CommonPrefixes><Prefix>{one}</Prefix></CommonPrefixes>" for one in sorted(below))
        return f"<ListBucketResult>{contents}{common}</ListBucketResult>".encode()


@contextmanager
def served_by(store: FakeS3) -> Iterator[FakeS3]:
    """While it is open, this process asks `store` for S3. Skips the test where s3fs is not installed."""
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'fullshard[dev]'")
    closing = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = Request(self.command, self.path, dict(self.headers), body)
            store.asked.append(request)
            try:
                status, headers, content = store.answer(request)
            except Silence:
                closing.wait()
                self.close_connection = True
                return
            self.send_response_only(status)
            for name, one in ({"Content-Length": str(len(content))} | headers).items():
                self.send_header(name, one)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    store.port = server.server_address[1]
    with server, asked_at(store.port):
        thread.start()
        try:
            yield store
        finally:
            closing.set()
            server.shutdown()
            thread.join()


@contextmanager
def asked_at(port: int) -> Iterator[None]:
    """While it is open, this process asks a port of this machine for S3."""
    import s3fs

    def forget() -> None:
        object_store._shared_file_system.cache_clear()
        s3fs.S3FileSystem.clear_instance_cache()

    before = dict(os.environ)
    os.environ.update(environment(port))
    forget()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        forget()
