"""A cluster for the real kubectl: its API, strict about fields, with pods that are processes of this machine.

What Kubernetes promises about the objects that rlzmq makes is done here in the simplest way: Jobs of a JobSet with
their failure policies, Deployments with the least replicas of their autoscaler, Secrets as files, owners that take
along what they own. Volumes are directories, and the image is this machine. Every head has another address, to which
its pod's name leads: pods see the /etc/hosts of the cluster, which needs root.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

_KINDS = {
    "v1": {"persistentvolumeclaims": "PersistentVolumeClaim", "secrets": "Secret", "pods": "Pod"},
    "apps/v1": {"deployments": "Deployment", "deployments/scale": "Scale"},
    "batch/v1": {"jobs": "Job"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "jobset.x-k8s.io/v1alpha2": {"jobsets": "JobSet"},
}
_SHORT = {
    "persistentvolumeclaims": ["pvc"],
    "horizontalpodautoscalers": ["hpa"],
    "poddisruptionbudgets": ["pdb"],
}
_PORTS = (5555, 5556, 5557)


class Pod:
    """A pod: a process.

    Attributes:
        name: Its name.
        directory: Where its volumes and its log are.
        process: The process of its container.
        is_disrupted: Whether it was evicted.
    """

    def __init__(self, cluster: Cluster, owner: str, template: Any, index: int) -> None:
        cluster.num_pods += 1
        self.name = f"{owner}-{index}-{cluster.num_pods}"
        self.owner, self.index, self.template, self.number = owner, index, template, cluster.num_pods
        self.is_disrupted = False
        self.directory = cluster.directory / self.name
        (container,) = template["spec"]["containers"]
        self.container: str = container["name"]
        paths = {}
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        for mount in container["volumeMounts"]:
            path = self.directory / mount["name"]
            volume = volumes[mount["name"]]
            if claim := volume.get("persistentVolumeClaim"):
                assert ("persistentvolumeclaims", claim["claimName"]) in cluster.objects, (
                    "the pod waits for ever"
                )
                path = cluster.directory / claim["claimName"]
            path.mkdir(parents=True, exist_ok=True)
            if secret := volume.get("secret"):
                files = cluster.objects["secrets", secret["secretName"]]["stringData"]
                for item in secret["items"]:
                    (path / item["path"]).write_text(cluster.local(files[item["key"]]))
                    (path / item["path"]).chmod(secret["defaultMode"])
            paths[mount["mountPath"]] = str(path)
        env = {each["name"]: each.get("value", f"127.0.1.{self.number}") for each in container["env"]}
        if self.container == "head":
            host = f"{owner}-{index}.{owner.removesuffix('-head-0')}"
            cluster.hosts.write_text(f"127.0.0.1 localhost\n{env['POD_IP']} {host}\n")
        env |= {"HOME": paths["/tmp"], "TMPDIR": paths["/tmp"], "JOB_COMPLETION_INDEX": str(index)}
        mounted = re.compile(rf"(?<!\w)({'|'.join(paths)})(?![\w.])")
        words = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            'mount --bind "$0" /etc/hosts && exec "$@"',
            str(cluster.hosts),
        ]
        for word in container["command"]:
            word = mounted.sub(lambda found: paths[found[0]], word).replace("$(POD_IP)", env["POD_IP"])
            words.append(sys.executable if word == "python" else cluster.local(word))
        self.log = self.directory / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                words,
                cwd=self.directory,
                env={**cluster.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    @property
    def said(self) -> str:
        """Its log."""
        return self.log.read_text(errors="replace")

    def evict(self) -> None:
        """End it as an eviction does: SIGTERM, and the condition DisruptionTarget."""
        self.is_disrupted = True
        self.process.terminate()

    def describe(self) -> dict[str, Any]:
        code = self.process.poll()
        state = (
            {"running": {}}
            if code is None
            else {"terminated": {"exitCode": code if code >= 0 else 128 - code}}
        )
        phase = "Running" if code is None else "Failed" if code else "Succeeded"
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": self.name,
                "namespace": "default",
                "labels": {**self.template["metadata"]["labels"], "job-name": self.owner},
                "creationTimestamp": f"2026-01-01T00:{self.number // 60:02}:{self.number % 60:02}Z",
            },
            "spec": self.template["spec"],
            "status": {"phase": phase, "containerStatuses": [{"name": self.container, "state": state}]},
        }


class Cluster:
    """The API server and all that acts behind it.

    Args:
        directory: Where volumes and logs are.
        validate: Raises for an object that the API refuses.
        port: The first of three free ports, for the head.

    Attributes:
        objects: (plural, name) → the object.
        pods: All pods so far.
        kubeconfig: What ``KUBECONFIG`` names.
        has_nodes: Whether pods start.
    """

    def __init__(self, directory: Path, validate: Callable[[Any], None], port: int) -> None:
        self.directory, self._validate, self._port = directory, validate, port
        self.environ = dict(os.environ)
        self.objects: dict[tuple[str, str], Any] = {}
        self.pods: list[Pod] = []
        self.num_pods = 0
        self.has_nodes = True
        self.lock = threading.RLock()
        self._is_closed = False
        self.hosts = directory / "hosts"
        self.hosts.touch()
        self._counted: set[str] = set()
        self._failures: dict[str, int] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._threads = [
            threading.Thread(target=self._server.serve_forever),
            threading.Thread(target=self._act),
        ]
        for thread in self._threads:
            thread.start()
        self.kubeconfig = directory / "kubeconfig"
        server = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1", "kind": "Config", "current-context": "here",
                    "clusters": [{"name": "here", "cluster": {"server": server}}],
                    "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
                    "users": [{"name": "me", "user": {}}],
                }
            )
        )  # fmt: skip

    def close(self) -> None:
        """End all pods and the server."""
        self._is_closed = True
        self._server.shutdown()
        for thread in self._threads:
            thread.join()
        self._server.server_close()
        for pod in self.pods:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pod.process.pid, signal.SIGKILL)
            pod.process.wait()

    def local(self, text: str) -> str:
        """Return a text with the ports of this machine."""
        for number, port in enumerate(_PORTS):
            text = text.replace(f":{port}", f":{self._port + number}")
        return text

    def running(self, role: str) -> list[Pod]:
        """Return the pods of a role that run."""
        with self.lock:
            return [pod for pod in self.pods if pod.container == role and pod.process.poll() is None]

    def _act(self) -> None:
        while not self._is_closed:
            with self.lock:
                for (plural, _), each in list(self.objects.items()):
                    if plural == "jobs":
                        self._act_on_job(each)
                    elif plural == "deployments":
                        scaler = self.objects.get(("horizontalpodautoscalers", each["metadata"]["name"]))
                        count = each["spec"].get("replicas", 1)
                        if scaler and count:
                            least, most = scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]
                            count = min(max(count, least), most)
                        self._keep(each, count)
            time.sleep(0.05)

    def _act_on_job(self, job: Any) -> None:
        name, spec = job["metadata"]["name"], job["spec"]
        job_set = self.objects["jobsets", job["metadata"]["ownerReferences"][0]["name"]]
        if job_set["status"]:
            return
        for pod in self.pods:
            code = pod.process.poll()
            if pod.owner != name or code is None or pod.name in self._counted:
                continue
            self._counted.add(pod.name)
            if code == 0 and pod.container == "head":
                job_set["status"] = {"terminalState": "Completed"}
            elif code:
                action = self._action(pod, spec, code if code > 0 else 128 - code)
                self._failures[name] = self._failures.get(name, 0) + (action == "Count")
                if action == "FailJob" or self._failures[name] > spec["backoffLimit"]:
                    job_set["status"] = {"terminalState": "Failed"}
        if job_set["status"]:
            for pod in self.pods:
                if pod.owner.startswith(job_set["metadata"]["name"]) and pod.container == "learners":
                    pod.process.terminate()
            return
        self._keep(job, spec["parallelism"])

    def _action(self, pod: Pod, spec: Any, code: int) -> str:
        for rule in spec["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes", {}).get("values", ())
            if code in codes or (pod.is_disrupted and "onPodConditions" in rule):
                return str(rule["action"])
        return "Count"

    def _keep(self, owner: Any, count: int) -> None:
        """Start what is missing of a number of pods, and end what is surplus."""
        name = owner["metadata"]["name"]
        there = {pod.index: pod for pod in self.pods if pod.owner == name and pod.process.poll() is None}
        volumes = owner["spec"]["template"]["spec"]["volumes"]
        needed = {("secrets", each["secret"]["secretName"]) for each in volumes if "secret" in each}
        claims = [each["persistentVolumeClaim"] for each in volumes if "persistentVolumeClaim" in each]
        needed |= {("persistentvolumeclaims", claim["claimName"]) for claim in claims}
        for index in range(count if self.has_nodes and needed <= self.objects.keys() else 0):
            if index not in there:
                self.pods.append(Pod(self, name, owner["spec"]["template"], index))
        for index, pod in there.items():
            if index >= count:
                pod.process.terminate()

    def create(self, plural: str, each: Any) -> Any:
        """Add an object, as the API and JobSet's controller do."""
        key = (plural, each["metadata"]["name"])
        each = {**each, "metadata": {**each["metadata"], "namespace": "default", "uid": "/".join(key)}}
        if plural == "jobsets":
            each["status"] = {}
            owner = {"kind": "JobSet", "name": key[1], "uid": each["metadata"]["uid"]}
            for part in each["spec"]["replicatedJobs"]:
                name = f"{key[1]}-{part['name']}-0"
                meta = {"name": name, "namespace": "default", "ownerReferences": [owner]}
                spec = {**part["template"]["spec"], "selector": {"matchLabels": {"job-name": name}}}
                job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec}
                self.objects["jobs", name] = job
        self.objects[key] = each
        return each

    def delete(self, plural: str, name: str) -> None:
        """Remove an object and what it owns; end its pods with SIGTERM."""
        with self.lock:
            each = self.objects.pop((plural, name))
            uid = each["metadata"].get("uid", "")
            for other, found in list(self.objects.items()):
                if any(owner["uid"] == uid for owner in found["metadata"].get("ownerReferences", ())):
                    self.delete(*other)
            ended = [pod for pod in self.pods if pod.owner == name]
            for pod in ended:
                pod.process.terminate()
        for pod in ended:
            pod.process.wait(60)


def _handler(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *words: Any) -> None:
            """Print nothing."""

        def answer(self, content: Any, code: int = 200) -> None:
            data = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def refuse(self, code: int, reason: str, message: str) -> None:
            status = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code}
            self.answer({**status, "reason": reason, "message": message}, code)

        def handle_any(self) -> None:
            url = urlsplit(self.path)
            size = int(self.headers.get("Content-Length", 0))
            text = self.rfile.read(size)
            body = None if self.command == "DELETE" else _parse(text)
            parts = url.path.strip("/").split("/")
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            if "namespaces" not in parts:
                self.answer(_discovery(url.path))
                return
            plural, name, sub = (*parts[parts.index("default") + 1 :], "", "")[:3]
            with cluster.lock:
                there = cluster.objects.get((plural, name))
            if plural == "pods":
                self.pods(name, sub, query)
            elif self.command == "POST" or (there is None and self.command == "PATCH"):
                try:
                    cluster._validate(body)
                except Exception as error:
                    self.refuse(422, "Invalid", str(error).partition("\n")[0])
                    return
                with cluster.lock:
                    if (plural, body["metadata"]["name"]) in cluster.objects:
                        self.refuse(
                            409, "AlreadyExists", f"{plural} {body['metadata']['name']!r} already exists"
                        )
                        return
                    self.answer(cluster.create(plural, body), 201)
            elif not name:
                wanted = query.get("fieldSelector", "").partition("metadata.name=")[2]
                found = [
                    each
                    for key, each in cluster.objects.items()
                    if key[0] == plural
                    and wanted in ("", key[1])
                    and _labels(query) <= each["metadata"].get("labels", {}).items()
                ]
                kind = f"{_KINDS[parts[1]][plural]}List" if parts[0] == "api" else "List"
                self.answer({"apiVersion": parts[1], "kind": kind, "metadata": {}, "items": found})
            elif there is None:
                self.refuse(404, "NotFound", f'{plural} "{name}" not found')
            elif self.command == "DELETE":
                cluster.delete(plural, name)
                self.answer({"apiVersion": "v1", "kind": "Status", "status": "Success"})
            else:
                if self.command in ("PATCH", "PUT"):
                    with cluster.lock:
                        _merge(there, body)
                scale = {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": there["metadata"]}
                scale["spec"] = {"replicas": there.get("spec", {}).get("replicas", 1)}
                self.answer(scale if sub == "scale" else there)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

        def pods(self, name: str, sub: str, query: dict[str, str]) -> None:
            pod = next((pod for pod in cluster.pods if pod.name == name), None)
            if pod is None:
                found = [each.describe() for each in cluster.pods]
                found = [each for each in found if _labels(query) <= each["metadata"]["labels"].items()]
                self.answer({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": found})
            elif sub == "log":
                self.send_response(200)
                self.send_header("Connection", "close")
                self.end_headers()
                for chunk in _log(pod, follows=query.get("follow") == "true"):
                    self.wfile.write(chunk)
                    self.wfile.flush()
                self.close_connection = True
            elif sub == "exec":
                command = parse_qs(urlsplit(self.path).query)["command"]
                assert command == ["sh", "-c", "kill -INT 1"], command
                pod.process.send_signal(signal.SIGINT)
                key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
                self.send_response(101)
                self.send_header("Upgrade", "websocket")
                self.send_header("Connection", "Upgrade")
                accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
                self.send_header("Sec-WebSocket-Accept", accept)
                self.send_header("Sec-WebSocket-Protocol", "v5.channel.k8s.io")
                self.end_headers()
                status = b"\x03" + json.dumps({"metadata": {}, "status": "Success"}).encode()
                self.wfile.write(bytes((0x82, len(status))) + status + b"\x88\x02\x03\xe8")
                self.close_connection = True
            else:
                self.answer(pod.describe())

    return Handler


def _parse(body: bytes) -> Any:
    """Return an object in JSON, or a Secret in Kubernetes' protobuf, in which Helm writes its releases."""
    if not body.startswith(b"k8s\0"):
        return json.loads(body or b"null")
    secret = _fields(_fields(body[4:])[2][0])
    metadata = _fields(secret[1][0])
    pairs = [[_fields(entry) for entry in entries] for entries in (metadata[11], secret[2])]
    labels, data = ({pair[1][0].decode(): pair[2][0] for pair in each} for each in pairs)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": metadata[1][0].decode(),
            "labels": {name: value.decode() for name, value in labels.items()},
        },
        "type": secret[3][0].decode(),
        "data": {name: base64.b64encode(value).decode() for name, value in data.items()},
    }


def _fields(message: bytes) -> dict[int, list[Any]]:
    """Return the fields of a protobuf message by number: bytes, or numbers."""
    found: dict[int, list[Any]] = {}
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        tag = number()
        value: Any = number()
        if tag & 7 == 2:
            at, value = at + value, message[at : at + value]
        found.setdefault(tag >> 3, []).append(value)
    return found


def _labels(query: dict[str, str]) -> set[tuple[str, str]]:
    pairs = (each.partition("=") for each in query.get("labelSelector", "").split(",") if each)
    return {(name, value) for name, _, value in pairs}


def _log(pod: Pod, *, follows: bool) -> Iterator[bytes]:
    with pod.log.open("rb") as file:
        while True:
            is_over = pod.process.poll() is not None or not follows
            yield file.read()
            if is_over:
                return
            time.sleep(0.05)


def _merge(target: Any, patch: Any) -> None:
    for key, value in patch.items():
        if isinstance(value, dict):
            _merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


def _discovery(path: str) -> Any:
    """Return what kubectl asks for before anything else."""
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = []
        for version in _KINDS.keys() - {"v1"}:
            group, _, number = version.partition("/")
            entry = {"groupVersion": version, "version": number}
            groups.append({"name": group, "versions": [entry], "preferredVersion": entry})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path.startswith("/openapi/v3/"):  # that the server refuses unknown fields
        version = path.partition("/v3/")[2].removeprefix("apis/").removeprefix("api/")
        group, _, number = version.rpartition("/")
        query = [{"in": "query", "name": "fieldValidation", "schema": {"type": "string"}}]
        paths = {}
        for plural, kind in _KINDS[version].items():
            what = {"group": group, "kind": kind, "version": number}
            paths[f"/{plural}"] = {"patch": {"parameters": query, "x-kubernetes-group-version-kind": what}}
        return {"openapi": "3.0.0", "info": {"title": "", "version": ""}, "paths": paths}
    if path == "/openapi/v3":
        names = [f"apis/{version}" if "/" in version else f"api/{version}" for version in _KINDS]
        return {"paths": {name: {"serverRelativeURL": f"/openapi/v3/{name}?hash=1"} for name in names}}
    version = path.strip("/").removeprefix("apis/").removeprefix("api/")
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources = []
    for plural, kind in _KINDS.get(version, {}).items():
        each = {
            "name": plural,
            "kind": kind,
            "namespaced": True,
            "verbs": verbs,
            "singularName": kind.lower(),
        }
        more = {"group": "autoscaling", "version": "v1"} if kind == "Scale" else {}
        resources.append({**each, **more, "shortNames": _SHORT.get(plural, [])})
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
