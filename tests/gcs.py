"""A stand-in for Google Cloud Storage on this machine: as much of its JSON API as gcsfs, TensorStore and Orbax use.

Objects live in a dictionary of the process that serves. Nothing is ever asked of the network.
"""

import base64
import contextlib
import json
import re
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Bucket:
    """Objects by name, each with its generation."""

    def __init__(self):
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.uploads: dict[str, str] = {}  # resumable ones that have begun: the object of each
        self.generation, self.lock = 0, threading.Lock()

    def put(self, name: str, data: bytes) -> dict:
        with self.lock:
            self.generation += 1
            self.objects[name] = self.generation, data
        return self.metadata(name)

    def metadata(self, name: str) -> dict:
        generation, data = self.objects[name]
        return {
            "kind": "storage#object",
            "bucket": "bucket",
            "name": name,
            "size": str(len(data)),
            "generation": str(generation),
            "metageneration": "1",
            "updated": "2026-01-01T00:00:00Z",
            "timeCreated": "2026-01-01T00:00:00Z",
            "etag": base64.b64encode(str(generation).encode()).decode(),
            "contentType": "application/octet-stream",
        }

    def listed(self, query: dict[str, str]) -> dict:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        low, high = query.get("startOffset", ""), query.get("endOffset")
        items, prefixes = [], set()
        for name in sorted(self.objects):
            if not name.startswith(prefix) or name < low or (high is not None and name >= high):
                continue
            head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            prefixes |= {prefix + head + delimiter} if found else set()
            items += [] if found else [self.metadata(name)]
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: Bucket

    def do_GET(self):
        path, query = self._where()
        if found := re.fullmatch(r"(?:/download)?/storage/v1/b/[^/]+/o/(.+)", path):
            return self._object(urllib.parse.unquote(found[1]), query)
        if re.fullmatch(r"/storage/v1/b/[^/]+/o", path):
            return self._answer(self.bucket.listed(query))
        if re.fullmatch(r"/storage/v1/b/[^/]+", path):
            return self._answer({"kind": "storage#bucket", "name": "bucket", "location": "HERE"})
        if found := re.fullmatch(r"/storage/v1/b/[^/]+/storageLayout", path):
            return self._answer({"kind": "storage#storageLayout", "hierarchicalNamespace": {"enabled": False}})
        return self._answer({"error": {"code": 404, "message": path}}, 404)

    do_HEAD = do_GET

    def do_DELETE(self):
        name = urllib.parse.unquote(self._where()[0].split("/o/")[1])
        with self.bucket.lock:
            known = self.bucket.objects.pop(name, None)
        return self._answer(None, 204 if known else 404)

    def do_POST(self):
        path, query = self._where()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path.startswith("/batch"):
            return self._batch(body)
        if found := re.fullmatch(r"/storage/v1/b/[^/]+/o/(.+)/(?:copyTo|rewriteTo)/b/[^/]+/o/(.+)", path):
            source, target = map(urllib.parse.unquote, found.groups())
            made = self.bucket.put(target, self.bucket.objects[source][1])
            return self._answer({"kind": "storage#rewriteResponse", "done": True, "resource": made} | made)
        if "upload_id" in query:
            return self._answer(self.bucket.put(self.bucket.uploads[query["upload_id"]], body))
        kind, name = query["uploadType"], query.get("name", "")
        if kind == "multipart":
            boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
            head, data = (part.split(b"\r\n\r\n", 1)[1] for part in body.split(b"--" + boundary)[1:3])
            name, body = json.loads(head).get("name", name), data[:-2]
        elif kind == "resumable":
            name = json.loads(body or b"{}").get("name", name)
            upload = str(len(self.bucket.uploads))
            self.bucket.uploads[upload] = name
            at = f"http://{self.headers['Host']}{path}?uploadType=resumable&upload_id={upload}"
            return self._answer({}, 200, {"Location": at})
        if query.get("ifGenerationMatch") == "0" and name in self.bucket.objects:
            return self._answer({"error": {"code": 412, "message": "exists"}}, 412)
        return self._answer(self.bucket.put(name, body))

    def do_PUT(self):
        """The rest of a resumable upload; all in one."""
        name = self.bucket.uploads[self._where()[1]["upload_id"]]
        return self._answer(self.bucket.put(name, self.rfile.read(int(self.headers["Content-Length"]))))

    def _object(self, name: str, query: dict[str, str]):
        if name not in self.bucket.objects:
            return self._answer({"error": {"code": 404, "message": f"No such object: {name}"}}, 404)
        if query.get("alt") != "media" and not self.path.startswith("/download"):
            return self._answer(self.bucket.metadata(name))
        generation, data = self.bucket.objects[name]
        status, headers = 200, {"x-goog-generation": str(generation), "Content-Type": "application/octet-stream"}
        if found := re.match(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            first = int(found[1]) if found[1] else len(data) - int(found[2])
            last = min(int(found[2]) if found[1] and found[2] else len(data) - 1, len(data) - 1)
            if first >= len(data):
                return self._answer(None, 416)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            status, data = 206, data[first : last + 1]
        return self._answer(data, status, headers)

    def _batch(self, body: bytes):
        """Deletions in one request, as gcsfs sends them."""
        answers = []
        for name in re.findall(rb"DELETE \S*/o/(\S+) HTTP", body):
            self.bucket.objects.pop(urllib.parse.unquote(name.decode()), None)
            answers.append("--x\r\nContent-Type: application/http\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n\r\n")
        return self._answer(("".join(answers) + "--x--").encode(), 200, {"Content-Type": "multipart/mixed; boundary=x"})

    def _where(self) -> tuple[str, dict[str, str]]:
        path, _, query = self.path.partition("?")
        return path, dict(urllib.parse.parse_qsl(query, keep_blank_values=True))

    def _answer(self, content, status: int = 200, headers: dict[str, str] | None = None):
        data = b"" if content is None else content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args): ...


class Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """A client that hangs up, as they do when they cancel a read, is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def served():
    """A bucket that is served, and the variables by which gcsfs, TensorStore and Google's client find it."""
    bucket = Bucket()
    server = Server(("localhost", 0), type("Here", (Handler,), {"bucket": bucket}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    at = f"http://localhost:{server.server_port}"
    yield (
        bucket,
        {
            "STORAGE_EMULATOR_HOST": at,
            "TENSORSTORE_GCS_HTTP_URL": at,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "GOOGLE_CLOUD_PROJECT": "here",
            "FSSPEC_GCS": '{"token": "anon"}',
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # which asks Google
        },
    )
    server.shutdown()
