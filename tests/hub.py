"""A hub on loopback: what the real client asks of huggingface.co for models, answered from folders."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SHA = "0123456789abcdef0123456789abcdef01234567"
_PATH = re.compile(
    r"/(?:api/models/(?P<repo>[^/]+/[^/]+)/(?P<what>revision|tree)|(?P<of>[^/]+/[^/]+)/resolve)/(?P<revision>[^/?]+)"
    r"(?:/(?P<file>[^?]*))?(?:\?.*)?"
)


class Hub(ThreadingHTTPServer):
    """Serves the folders in `repos` by their ids.

    Attributes:
        url: for `HF_ENDPOINT`.
        asked: method and path of each request.
        ranges: the parts of files that were asked for, as headers.
        gated: ids that need a login.
        refused: ids that are refused with a 403 of no further reason.
        dropped: numbers of bytes by file, after which the next answer breaks off.
        held: files of which half is sent, and no more.
        reached: set when half of a held file was sent.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, Path] = {}
        self.asked: list[tuple[str, str]] = []
        self.ranges: list[str] = []
        self.gated: set[str] = set()
        self.refused: set[str] = set()
        self.dropped: dict[str, int] = {}
        self.held: set[str] = set()
        self.reached, self.closing = threading.Event(), threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is none."""

    def files(self) -> list[str]:
        """The files that were sent, or begun, in order."""
        return [path.rpartition("/")[2] for method, path in self.asked if method == "GET" and "/resolve/" in path]


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.asked.append((self.command, self.path))
        found = _PATH.fullmatch(self.path)
        repo = None if found is None else found["repo"] or found["of"]
        if found is None or repo not in self.server.repos:
            return self._fail(401, "RepoNotFound")
        if repo in self.server.gated:
            return self._fail(401, "GatedRepo")
        if repo in self.server.refused:
            return self._fail(403, "")
        if found["revision"] not in ("main", SHA):
            return self._fail(404, "RevisionNotFound")
        folder = self.server.repos[repo]
        if found["what"] == "revision":
            siblings = [{"rfilename": path.name, "size": path.stat().st_size} for path in _in(folder)]
            return self._json({"id": repo, "sha": SHA, "siblings": siblings})
        if found["what"] == "tree":
            return self._json([_entry(each) for each in _in(folder)])
        path = folder / str(found["file"])
        return self._file(path) if path.is_file() else self._fail(404, "EntryNotFound")

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, path: Path) -> None:
        content, status = path.read_bytes(), 200
        headers = {"ETag": f'"{_hash(path)}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range")
        if asked is not None and self.command == "GET":
            self.server.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content, status = content[start:], 206
        self._send(status, content, headers, path.name)

    def _send(self, status: int, content: bytes, headers: dict[str, str], name: str = "") -> None:
        self.send_response(status)
        for each in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(*each)
        self.end_headers()
        if self.command == "HEAD":
            return
        if name in self.server.held:
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.server.reached.set()
            self.server.closing.wait()
            return
        sent = self.server.dropped.pop(name, len(content))
        self.wfile.write(content[:sent])
        self.close_connection = True


def _in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _entry(path: Path) -> dict[str, Any]:
    entry = {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _hash(path)}
    if path.suffix == ".safetensors":
        entry["lfs"] = {"oid": _hash(path), "size": path.stat().st_size, "pointerSize": 100}
    return entry


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def running_hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.closing.set()
            hub.shutdown()
            thread.join()
