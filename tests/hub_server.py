"""A server that speaks the hub's protocol as far as its clients need it, from files in memory."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

LARGE = (".parquet", ".safetensors", ".gz")  # stored by LFS: their download is a redirect


class HubServer:
    """server.add("dataset", "owner/name", {"README.md": b"…"}) -> commit; `requests` lists (method, path)."""

    def __init__(self):
        self.repositories: dict[tuple[str, str], dict[str, tuple[str, dict[str, bytes]]]] = {}
        self.moved: dict[str, str] = {}  # old name -> new name
        self.gated: set[str] = set()
        self.requests: list[tuple[str, str]] = []
        self.broken_after: int | None = None  # bytes of a large file after which the connection ends
        handler = type("Bound", (Handler,), {"hub": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.cdn = f"http://localhost:{self.http.server_port}/cdn"  # a host of its own, as with the real hub
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def add(self, kind: str, name: str, files: dict[str, bytes], revision: str = "main") -> str:
        """A new commit of a repository, at the head of a branch."""
        commit = hashlib.sha1(repr((name, revision, sorted(files.items()))).encode()).hexdigest()
        revisions = self.repositories.setdefault((kind, name), {})
        revisions[revision] = revisions[commit] = (commit, files)
        return commit

    def downloads(self) -> list[str]:
        """The files whose bytes were asked for, in the order of the requests, each once."""
        found = [re.search(r"/resolve/[^/]+/(.*)", path) for method, path in self.requests if method == "GET"]
        return list(dict.fromkeys(match[1] for match in found if match))


class Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.0"  # a connection a request: none outlives close()

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.hub.requests.append(("POST", self.path))
        match = re.fullmatch(r"/api/(dataset|model)s/([^/]+/[^/]+)/paths-info/(.+)", unquote(self.path))
        found = self.found(*match.groups()) if match else None
        if found:
            self.json([entry for entry in tree(found[1], "", True) if entry["path"] in body["paths"]])

    def do_GET(self):
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        self.hub.requests.append((self.command, path))
        if path.startswith("/cdn/"):
            digest = path.removeprefix("/cdn/")
            self.data(next(data for _, data in self.all_files() if hashlib.sha256(data).hexdigest() == digest), {})
            return
        for old, new in self.hub.moved.items():
            if f"/{old}" in path:
                self.reply(307, b"", {"Location": self.path.replace(f"/{old}", f"/{new}", 1)})
                return
        if match := re.fullmatch(r"/api/(dataset|model)s/([^/]+(?:/[^/]+)?)(?:/revision/(.+))?", path):
            if found := self.found(match[1], match[2], match[3] or "main"):
                siblings = [{"rfilename": name, "size": len(data)} for name, data in found[1].items()]
                self.json({"id": match[2], "sha": found[0], "siblings": siblings, "tags": [], "private": False})
        elif match := re.fullmatch(r"/api/(dataset|model)s/([^/]+/[^/]+)/tree/([^?]+)", path):
            revision, _, folder = (match[3], "", "") if match[3].startswith("refs/") else match[3].partition("/")
            if found := self.found(match[1], match[2], revision):
                self.json(tree(found[1], folder, "recursive=true" in parts.query.lower()))
        elif match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/(refs/convert/parquet|[^/]+)/(.+)", path):
            self.resolve("dataset" if match[1] else "model", match[2], match[3], match[4])
        else:
            self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})

    def resolve(self, kind, name, revision, file):
        if name in self.hub.gated:
            self.reply(403, b"", {"X-Error-Code": "GatedRepo"})
        elif found := self.found(kind, name, revision):
            commit, files = found
            if file not in files:
                self.reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
                return
            data, headers = files[file], {"X-Repo-Commit": commit}
            if file.endswith(LARGE):
                digest = hashlib.sha256(data).hexdigest()
                headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
                self.reply(302, b"", headers | {"Location": f"{self.hub.cdn}/{digest}"})
            else:
                self.data(data, headers | {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'})

    def found(self, kind, name, revision):
        revisions = self.hub.repositories.get((kind, name))
        if revisions and revision in revisions:
            return revisions[revision]
        self.reply(404, b"", {"X-Error-Code": "RevisionNotFound" if revisions else "RepoNotFound"})
        return None

    def all_files(self):
        revisions = [revision for found in self.hub.repositories.values() for revision in found.values()]
        return [item for _, files in revisions for item in files.items()]

    def json(self, value):
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def data(self, data, headers):
        """The bytes of a file, or of the range that is asked for."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked:
            first, last = int(asked[1]), int(asked[2] or len(data) - 1)
            headers = headers | {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
            self.reply(206, data[first : last + 1], headers)
        else:
            self.reply(200, data, headers | {"Accept-Ranges": "bytes"})

    def reply(self, status, body, headers):
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            if self.hub.broken_after is not None and self.path.startswith("/cdn/"):
                body, self.close_connection = body[: self.hub.broken_after], True
            self.wfile.write(body)


def tree(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict]:
    """The entries below a folder of a repository."""
    found, start = [], f"{folder}/" if folder else ""
    inside = {name: data for name, data in files.items() if name.startswith(start)}
    parents = {parent.as_posix() for name in inside for parent in PurePosixPath(name).parents}
    for name in sorted(parents - {"."}):
        if name.startswith(start) and (recursive or "/" not in name.removeprefix(start)):
            found.append({"type": "directory", "path": name, "size": 0, "oid": hashlib.sha1(name.encode()).hexdigest()})
    for name, data in inside.items():
        if not recursive and "/" in name.removeprefix(start):
            continue
        entry = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        if name.endswith(LARGE):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        found.append(entry)
    return found
