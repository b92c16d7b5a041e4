"""A server of one bucket that speaks as much of S3's protocol as the cache of compiled programs needs."""

import contextlib
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, content=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        objects = self.server.objects
        path, _, query = self.path.partition("?")
        if "list-type=2" in query:
            one = (
                "<Contents><Key>{}</Key><LastModified>2026-11-21T09:00:00.000Z</LastModified><ETag>e</ETag>"
                "<Size>{}</Size></Contents>"
            )
            names = "".join(one.format(k.removeprefix("/bucket/"), len(v)) for k, v in list(objects.items()))
            return self.reply(200, f"<ListBucketResult>{names}</ListBucketResult>".encode())
        content = objects.get(path)
        if content is None:
            return self.reply(404)
        headers = {"Last_Modified": formatdate(usegmt=True), "ETag": '"e"'}
        if wanted := self.headers.get("Range"):
            start, end = (int(n) for n in wanted.removeprefix("bytes=").split("-"))
            part = content[start : end + 1]
            headers["Content_Range"] = f"bytes {start}-{start + len(part) - 1}/{len(content)}"
            return self.reply(206, part, **headers)
        return self.reply(200, content, **headers)

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            if "If-None-Match" in self.headers and self.path in self.server.objects:
                return self.reply(412)
            self.server.objects[self.path] = content
        return self.reply(200, ETag='"e"')

    def do_DELETE(self):
        self.server.objects.pop(self.path, None)
        self.reply(204)


@contextlib.contextmanager
def bucket():
    """The objects of `s3://bucket` by their paths, and the variables with which a process finds it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.objects, server.lock = {}, threading.Lock()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    where = {
        "OXITORCH_CACHE_SHARED": "s3://bucket/some/prefix",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
    }
    try:
        yield server.objects, where
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
