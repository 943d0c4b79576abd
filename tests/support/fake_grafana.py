"""A Grafana with a memory, on a real socket: enough of its HTTP API to push to.

    with fake_grafana() as grafana:
        grafana.url, grafana.token
        grafana.dashboards, grafana.groups, grafana.folders, grafana.annotations
        grafana.fail_next(500)                  the next request is answered with that
        grafana.requests                        (verb, path) of all, in order

It keeps what it is given the way Grafana does: dashboards get an id and count their versions, and
one that is written with another version than the stored one is refused with 412 unless
`overwrite`; a rule group is replaced as a whole, its rules get ids and a provenance, and the models
of their queries get defaults that nobody sent. Whatever is written is checked with the official
schemas when `schemas` is given; a complaint is a 400, as Grafana would say.

Threads: served by one thread each; the state is only looked at between requests.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.schemas import GrafanaSchemas

TOKEN = "glsa_0123456789abcdefTEST"
Answer = tuple[int, Any]


class RefusedError(Exception):
    """An answer that is not 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Saved:
    """A stored dashboard."""

    body: dict[str, Any]
    folder: str
    message: str
    provisioned: bool = False


@dataclass
class FakeGrafana:
    """See the module docstring."""

    schemas: GrafanaSchemas | None = None
    prefix: str = ""
    token: str = TOKEN
    sources: list[dict[str, Any]] = field(
        default_factory=lambda: [{"id": 1, "uid": "prom-1", "type": "prometheus", "name": "P"}]
    )
    folders: dict[str, dict[str, Any]] = field(default_factory=dict)
    dashboards: dict[str, Saved] = field(default_factory=dict)
    groups: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    annotations: list[dict[str, Any]] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""
    before: Callable[[str, str], None] | None = None  # called ahead of each request
    _failures: list[tuple[int, bytes | None]] = field(default_factory=list)
    _ids: int = 0

    def fail_next(self, status: int, body: bytes | None = None, *, times: int = 1) -> None:
        """Answer the next requests with `status` (and `body` as it is), whatever they ask."""
        self._failures += [(status, body)] * times

    @property
    def writes(self) -> list[tuple[str, str]]:
        """The requests that were no questions."""
        return [r for r in self.requests if r[0] != "GET"]

    # ---- answering --------------------------------------------------------------------

    def answer(self, verb: str, target: str, auth: str, raw: bytes) -> tuple[int, bytes]:
        """One request."""
        parts = urlsplit(target)
        self.requests.append((verb, parts.path))
        if self.before is not None:
            self.before(verb, parts.path)
        if self._failures:
            status, body = self._failures.pop(0)
            return status, _json({"message": f"asked to say {status}"}) if body is None else body
        try:
            if auth != f"Bearer {self.token}":
                raise RefusedError(401, "Invalid API key")
            body = json.loads(raw) if raw else None
            for method, pattern, serve in self._routes():
                found = re.fullmatch(self.prefix + "/api" + pattern, parts.path)
                if method == verb and found:
                    names = [unquote(g) for g in found.groups()]
                    return 200, _json(serve(names, body, parse_qs(parts.query)))
            raise RefusedError(404, "Not found")
        except RefusedError as error:
            return error.status, _json({"message": str(error)})

    def _routes(self) -> Iterator[tuple[str, str, Callable[[list[str], Any, Any], Any]]]:
        one, group = "([^/]+)", "/v1/provisioning/folder/([^/]+)/rule-groups/([^/]+)"
        yield "GET", f"/folders/{one}", lambda n, b, q: self._folder(n[0])
        yield "POST", "/folders", lambda n, b, q: self._make_folder(b)
        yield "GET", f"/dashboards/uid/{one}", lambda n, b, q: self._dashboard(n[0])
        yield "POST", "/dashboards/db", lambda n, b, q: self._save(b)
        yield "GET", group, lambda n, b, q: self._group(n[0], n[1])
        yield "PUT", group, lambda n, b, q: self._put_group(n[0], n[1], b)
        yield "GET", "/datasources", lambda n, b, q: self.sources
        yield "POST", "/annotations", lambda n, b, q: self._annotate(b)
        yield "GET", "/annotations", lambda n, b, q: self._find_annotations(q)

    def _id(self) -> int:
        self._ids += 1
        return self._ids

    def _check(self, complaints: Callable[[GrafanaSchemas], list[str]]) -> None:
        found = complaints(self.schemas) if self.schemas is not None else []
        if found:
            raise RefusedError(400, "; ".join(found[:5]))

    def _folder(self, uid: str) -> Any:
        if uid not in self.folders:
            raise RefusedError(404, "folder not found")
        return self.folders[uid]

    def _make_folder(self, body: Any) -> Any:
        uid, title = body.get("uid"), body.get("title")
        if not title:
            raise RefusedError(400, "folder title cannot be empty")
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", uid):
            raise RefusedError(400, "uid contains illegal characters")
        if uid in self.folders:
            raise RefusedError(412, "a folder with that UID already exists")
        self.folders[uid] = {"id": self._id(), "uid": uid, "title": title, "version": 1}
        return self.folders[uid]

    def _dashboard(self, uid: str) -> Any:
        if uid not in self.dashboards:
            raise RefusedError(404, "Dashboard not found")
        saved = self.dashboards[uid]
        meta = {
            "folderUid": saved.folder,
            "version": saved.body["version"],
            "provisioned": saved.provisioned,
        }
        return {"dashboard": copy.deepcopy(saved.body), "meta": meta}

    def _save(self, body: Any) -> Any:
        board = dict(body["dashboard"])
        self._check(lambda s: s.dashboard({k: v for k, v in board.items() if k != "id"}))
        if body.get("folderUid") not in self.folders:
            raise RefusedError(400, "folder not found")
        if not board.get("title"):
            raise RefusedError(400, "Dashboard title cannot be empty")
        uid = board["uid"]
        old = self.dashboards.get(uid)
        if old is None:
            if board.get("id") is not None:
                raise RefusedError(404, "Dashboard not found")
            board |= {"id": self._id(), "version": 1}
        else:
            if old.provisioned:
                raise RefusedError(400, "Cannot save provisioned dashboard")
            if board.get("version") != old.body["version"] and not body.get("overwrite"):
                raise RefusedError(412, "The dashboard has been changed by someone else")
            board |= {"id": old.body["id"], "version": old.body["version"] + 1}
        self.dashboards[uid] = Saved(board, body["folderUid"], body.get("message", ""))
        return {
            "id": board["id"],
            "uid": uid,
            "status": "success",
            "version": board["version"],
            "url": f"/d/{uid}/x",
        }

    def _group(self, folder: str, name: str) -> Any:
        if (folder, name) not in self.groups:
            raise RefusedError(404, "rule group does not exist")
        return copy.deepcopy(self.groups[folder, name])

    def _put_group(self, folder: str, name: str, body: Any) -> Any:
        self._check(lambda s: s.rule_group(body))
        if folder not in self.folders:
            raise RefusedError(400, "folder does not exist")
        group = copy.deepcopy(body)
        if group.get("interval", 0) % 10 and group["interval"] % 5:
            raise RefusedError(400, "interval must be a multiple of the base interval")
        uids = [r.get("uid") for r in group["rules"]]
        if len(set(uids)) != len(uids):
            raise RefusedError(400, "rule UIDs must be unique")
        known = {s["uid"] for s in self.sources} | {"__expr__"}
        for rule in group["rules"]:
            refs = {q["refId"] for q in rule["data"]}
            if rule["condition"] not in refs:
                raise RefusedError(400, f"condition {rule['condition']} does not exist")
            for query in rule["data"]:
                if query["datasourceUid"] not in known:
                    raise RefusedError(400, f"data source {query['datasourceUid']} not found")
                query["queryType"] = ""
                query["model"] |= {"intervalMs": 1000, "maxDataPoints": 43200}
            rule |= {
                "id": self._id(),
                "provenance": "api",
                "updated": "2026-11-29T00:00:00Z",
                "folderUID": folder,
                "ruleGroup": name,
                "keepFiringFor": "0s",
            }
        group["rules"].sort(key=lambda r: r["title"])
        self.groups[folder, name] = group
        return group

    def _annotate(self, body: Any) -> Any:
        if not body.get("text"):
            raise RefusedError(400, "Failed to save annotation: text field should not be empty")
        if not isinstance(body.get("time"), int) or body["time"] < 10**12:
            raise RefusedError(400, f"time must be in milliseconds, got {body.get('time')}")
        if not all(isinstance(t, str) and len(t) <= 100 for t in body.get("tags", [])):
            raise RefusedError(400, "a tag is text of at most 100 characters")
        body = {**body, "id": self._id()}
        self.annotations.append(body)
        return {"id": body["id"], "message": "Annotation added"}

    def _find_annotations(self, query: dict[str, list[str]]) -> Any:
        tags = set(query.get("tags", []))
        first = int(query.get("from", ["0"])[0])
        last = int(query.get("to", [str(2**62)])[0])
        found = [a for a in self.annotations if tags <= set(a["tags"])]
        return [a for a in found if first <= a["time"] <= last]


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@contextmanager
def fake_grafana(
    schemas: GrafanaSchemas | None = None, *, prefix: str = "", port: int = 0
) -> Iterator[FakeGrafana]:
    """A fake Grafana that listens, gone at the end."""
    grafana = FakeGrafana(schemas, prefix)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def serve(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            raw = self.rfile.read(length)
            auth = self.headers.get("authorization", "")
            status, body = grafana.answer(self.command, self.path, auth, raw)
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = serve

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    grafana.url = f"http://127.0.0.1:{server.server_port}{prefix}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield grafana
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
