"""A model hub on loopback: the few endpoints of huggingface.co that a download uses."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

COMMIT = "c0ffee" * 6 + "c0ff"


@dataclass
class FakeHub:
    """One repository, `owner/model`, whose large files are those that end with .safetensors."""

    files: dict[str, bytes]
    url: str = ""
    # Where it is private: the token that calls must have.
    token: str | None = None
    # Content that is sent in place of a file's own.
    damaged: dict[str, bytes] = field(default_factory=dict)
    # Bytes after which the next download of a file breaks off, once.
    cut: dict[str, int] = field(default_factory=dict)
    gets: Counter[str] = field(default_factory=Counter)
    # The first byte of each download.
    ranges: list[tuple[str, int]] = field(default_factory=list)

    def listing(self) -> bytes:
        """The body of the answer to `model_info`."""
        siblings = []
        for name, content in self.files.items():
            entry: dict[str, object] = {
                "rfilename": name,
                "size": len(content),
                "blobId": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
            }
            if name.endswith(".safetensors"):
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
            siblings.append(entry)
        return json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": siblings}).encode()

    def etag(self, name: str) -> str:
        """The hub's name of a file's content."""
        content = self.files[name]
        if name.endswith(".safetensors"):
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextlib.contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serves the hub at `hub.url`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, *arguments: object) -> None:
            """Keeps requests out of the output."""

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            if hub.token and self.headers.get("authorization") != f"Bearer {hub.token}":
                return self._refuse(401, "RepoNotFound")
            if path.startswith("/api/models/owner/model"):
                hub.gets["listing"] += 1
                return self._send(hub.listing(), {"content-type": "application/json"}, with_body)
            name = path.removeprefix(f"/owner/model/resolve/{COMMIT}/")
            if name not in hub.files:
                return self._refuse(404, "RepoNotFound")
            headers = {"etag": f'"{hub.etag(name)}"', "x-repo-commit": COMMIT, "accept-ranges": "bytes"}
            content = hub.damaged.get(name, hub.files[name])
            first = int(self.headers.get("range", "bytes=0-")[6:].partition("-")[0])
            if with_body:
                hub.gets[name] += 1
                hub.ranges.append((name, first))
            if first:
                headers["content-range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            cut = hub.cut.pop(name, None) if with_body else None
            self._send(content[first:], headers, with_body, 206 if first else 200, cut)

        def _send(
            self,
            content: bytes,
            headers: dict[str, str],
            with_body: bool,
            status: int = 200,
            cut: int | None = None,
        ) -> None:
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(content[:cut])
            if cut is not None:
                self.close_connection = True

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("x-error-code", code)
            self.send_header("content-length", "0")
            self.end_headers()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
