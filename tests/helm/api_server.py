"""As much of a Kubernetes API server as Helm asks for: discovery, and objects that are kept, patched and deleted.
Nothing runs in it."""

from __future__ import annotations

import copy
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Object = dict[str, Any]

# group/version → plural → kind; what a Deployment or a hook needs to be seen as done is put in by `_settle`.
KINDS = {
    "v1": {
        "configmaps": "ConfigMap",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "pods": "Pod",
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "services": "Service",
    },
    "apps/v1": {"deployments": "Deployment", "replicasets": "ReplicaSet", "statefulsets": "StatefulSet"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "monitoring.coreos.com/v1": {"servicemonitors": "ServiceMonitor", "prometheusrules": "PrometheusRule"},
    "keda.sh/v1alpha1": {"scaledobjects": "ScaledObject"},
    "gateway.networking.k8s.io/v1": {"grpcroutes": "GRPCRoute"},
    "inference.networking.k8s.io/v1": {"inferencepools": "InferencePool"},
    "leaderworkerset.x-k8s.io/v1": {"leaderworkersets": "LeaderWorkerSet"},
}


@dataclass
class Cluster:
    """What there is, and every change of it in order."""

    version: str
    objects: dict[tuple[str, str], Object] = field(default_factory=dict)  # (plural, name); one namespace
    changes: list[tuple[str, str, str]] = field(default_factory=list)  # (verb, plural, name)
    lock: threading.Lock = field(default_factory=threading.Lock)
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    server: Any = None

    def named(self, plural: str) -> dict[str, Object]:
        with self.lock:
            return {name: copy.deepcopy(one) for (of, name), one in self.objects.items() if of == plural}

    def config(self, folder: Path) -> Path:
        """A file that tells Helm where the server is."""
        path = folder / "kubeconfig"
        address = f"http://127.0.0.1:{self.server.server_address[1]}"
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "test", "cluster": {"server": address}}],
                    "users": [{"name": "test", "user": {}}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                    "current-context": "test",
                }
            )
        )
        path.chmod(0o600)
        return path


def merged(old: Any, patch: Any) -> Any:
    """A merge patch, and of a strategic one what Helm's need: entries with names, ports with numbers, directives."""
    if isinstance(old, dict) and isinstance(patch, dict):
        result = dict(old)
        for key, value in patch.items():
            if key.startswith("$"):
                continue
            if value is None:
                result.pop(key, None)
            else:
                result[key] = merged(result.get(key), value)
        return result
    if isinstance(old, list) and isinstance(patch, list) and patch and all(isinstance(one, dict) for one in patch):
        key = next(
            (key for key in ("name", "mountPath", "port", "containerPort") if all(key in one for one in patch)), ""
        )
        if key:
            by_key = {one.get(key): one for one in old}
            for one in patch:
                if one.get("$patch") == "delete":
                    by_key.pop(one[key], None)
                else:
                    by_key[one[key]] = merged(by_key.get(one[key], {}), one)
            return list(by_key.values())
    return copy.deepcopy(patch)


def settle(one: Object) -> None:
    """As controllers would, at once: what is asked for is there."""
    if one["kind"] in ("Deployment", "ReplicaSet", "StatefulSet"):
        count = one["spec"].get("replicas", 1)
        parts = ("replicas", "readyReplicas", "updatedReplicas", "availableReplicas")
        one["status"] = dict.fromkeys(parts, count)
    if one["kind"] in ("Pod", "PersistentVolumeClaim"):
        one["status"] = {"phase": "Succeeded" if one["kind"] == "Pod" else "Bound"}
    if one["kind"] == "Service":
        one["spec"].setdefault("clusterIP", "10.0.0.1")


def replica_set(deployment: Object) -> Object:
    """The one that a Deployment makes for its present pods."""
    metadata = deployment["metadata"]
    owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": metadata["name"], "uid": metadata["uid"]}
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {
            "name": f"{metadata['name']}-pods",
            "namespace": "default",
            "uid": f"{metadata['uid']}-pods",
            "labels": deployment["spec"]["selector"]["matchLabels"],
            "ownerReferences": [{**owner, "controller": True}],
        },
        "spec": {key: deployment["spec"][key] for key in ("selector", "template")},
    }


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    cluster: Cluster
    body: Any

    def log_message(self, *words: object) -> None:
        """Quiet."""

    def answer(self, code: int, body: Object) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, code: int, reason: str) -> None:
        self.answer(code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code})

    def parse_request(self) -> bool:
        """And its body, which is on the wire whether or not it is looked at."""
        if not super().parse_request():
            return False
        self.body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        return True

    def discovery(self, path: str) -> Object | None:
        major, minor = self.cluster.version.split(".")
        if path == "/version":
            return {"major": major, "minor": minor, "gitVersion": f"v{self.cluster.version}.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            groups = [group for group in KINDS if "/" in group]
            return {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [
                    {
                        "name": group.partition("/")[0],
                        "versions": [{"groupVersion": group, "version": group.partition("/")[2]}],
                        "preferredVersion": {"groupVersion": group, "version": group.partition("/")[2]},
                    }
                    for group in groups
                ],
            }
        group = path.removeprefix("/apis/").removeprefix("/api/")
        if group not in KINDS:
            return None
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": group,
            "resources": [
                {
                    "name": plural,
                    "singularName": "",
                    "namespaced": True,
                    "kind": kind,
                    "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
                }
                for plural, kind in KINDS[group].items()
            ],
        }

    def place(self) -> tuple[str, str, str, str] | None:
        """(group, plural, name, label selector) of an object's path."""
        url = urlsplit(self.path)
        parts = url.path.strip("/").split("/")
        group, rest = ("v1", parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
        if rest[:1] == ["namespaces"] and len(rest) > 2:
            rest = rest[2:]
        if group not in KINDS or not rest or rest[0] not in KINDS[group]:
            return None
        selector = parse_qs(url.query).get("labelSelector", [""])[0]
        return group, rest[0], rest[1] if len(rest) > 1 else "", selector

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/openapi/v2":  # asked for as protobuf; kinds that it does not name are not checked
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"\x0a\x032.0")
            return None
        known = self.discovery(path)
        if known is not None:
            return self.answer(200, known)
        place = self.place()
        if place is None:
            return self.refuse(404, "NotFound")
        group, plural, name, selector = place
        found = self.cluster.named(plural)
        if name:
            return self.answer(200, found[name]) if name in found else self.refuse(404, "NotFound")
        wanted = dict(one.split("=") for one in selector.split(",") if one)
        items = [one for one in found.values() if wanted.items() <= (one["metadata"].get("labels") or {}).items()]
        kind = KINDS[group][plural]
        return self.answer(200, {"kind": f"{kind}List", "apiVersion": group, "metadata": {}, "items": items})

    def keep(self, verb: str, plural: str, one: Object, code: int = 200) -> None:
        name = one["metadata"]["name"]
        settle(one)
        one["metadata"]["resourceVersion"] = str(next(self.cluster.versions))
        one["metadata"].setdefault("uid", f"uid-{plural}-{name}")
        with self.cluster.lock:
            before = self.cluster.objects.get((plural, name))
            self.cluster.objects[plural, name] = one
            if before is None or {**before, "metadata": 0} != {**one, "metadata": 0} or verb == "create":
                self.cluster.changes.append((verb, plural, name))
            if one["kind"] == "Deployment":
                made = replica_set(one)
                settle(made)
                self.cluster.objects["replicasets", made["metadata"]["name"]] = made
        self.answer(code, one)

    def do_POST(self) -> None:
        place = self.place()
        if place is None:
            return self.refuse(404, "NotFound")
        one = self.body
        if one["metadata"]["name"] in self.cluster.named(place[1]):
            return self.refuse(409, "AlreadyExists")
        return self.keep("create", place[1], one, 201)

    def do_PUT(self) -> None:
        place = self.place()
        if place is None:
            return self.refuse(404, "NotFound")
        return self.keep("update", place[1], self.body)

    def do_PATCH(self) -> None:
        place = self.place()
        if place is None or place[2] not in self.cluster.named(place[1]):
            return self.refuse(404, "NotFound")
        return self.keep("update", place[1], merged(self.cluster.named(place[1])[place[2]], self.body))

    def do_DELETE(self) -> None:
        place = self.place()
        if place is None or place[2] not in self.cluster.named(place[1]):
            return self.refuse(404, "NotFound")
        with self.cluster.lock:
            del self.cluster.objects[place[1], place[2]]
            self.cluster.changes.append(("delete", place[1], place[2]))
        return self.answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})


@contextmanager
def cluster(version: str = "1.32") -> Iterator[Cluster]:
    """A cluster of that version, empty."""
    one = Cluster(version)
    one.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"cluster": one}))
    thread = threading.Thread(target=one.server.serve_forever)
    thread.start()
    try:
        yield one
    finally:
        one.server.shutdown()
        thread.join()
        one.server.server_close()
