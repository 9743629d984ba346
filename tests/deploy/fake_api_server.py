"""The part of a Kubernetes API server that Helm asks while it renders: discovery, and single objects."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Object = dict[str, Any]

# Resources by group and version: plural, kind.
_RESOURCES = {
    "v1": (("secrets", "Secret"), ("services", "Service"), ("configmaps", "ConfigMap")),
    "apps/v1": (("deployments", "Deployment"),),
}
_MISSING = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
_VERSION = {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}


def _resources(version: str) -> Object:
    common = {"namespaced": True, "verbs": ["get", "list"]}
    found = [
        {"name": plural, "singularName": kind.lower(), "kind": kind, **common}
        for plural, kind in _RESOURCES[version]
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": found}


def _answers(objects: Mapping[str, Object]) -> dict[str, Object]:
    """Answers by path. `objects`: by their path below the version, such as `namespaces/a/deployments/b`."""
    apps = {"groupVersion": "apps/v1", "version": "v1"}
    groups = [{"name": "apps", "versions": [apps], "preferredVersion": apps}]
    return {
        "/version": _VERSION,
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
        "/api/v1": _resources("v1"),
        "/apis/apps/v1": _resources("apps/v1"),
        **{f"/apis/apps/v1/{path}": one for path, one in objects.items()},
    }


@contextlib.contextmanager
def serving(objects: Mapping[str, Object]) -> Iterator[str]:
    """Serves while the context is open; yields the URL."""
    answers = _answers(objects)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path.partition("?")[0])
            body = json.dumps(_MISSING if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
