"""Roles on Kubernetes: head and learners are one JobSet, runners a Deployment with an autoscaler.

    kubectl ──► claim of the run's volume (stays) · JobSet ─owns─► Secret, PodDisruptionBudget, Deployment, autoscaler

Only the head mounts the volume. The keys are made here and reach the pods as a Secret; peers know the head, which may
be restarted on another node, by its pod's name in the JobSet's headless service. Some minutes after the run's end,
Kubernetes removes the JobSet and what it owns. The objects are in ``helm/objects.json``; ``"$NAME"`` there is filled in
here, or by the chart.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import make_directories, write_private_file
from rlzmq.driver.join_files import JoinKeys, keys_file
from rlzmq.launch.engine import EXIT_RESUMABLE, LISTEN, Engine, Jobs, Role, command
from rlzmq.net.keys import JoinFile

__all__ = ["Kubernetes"]

_OBJECTS = json.loads(Path(__file__).with_name("helm").joinpath("objects.json").read_text(encoding="utf-8"))
_CHANNELS = {"data": 5555, "weights": 5556, "control": 5557}  # the ports of a head that listens at the first
_PATIENCE = ["--timeout", "600", "--patience", "600"]  # of runners: the head may come back as late
_LOGS = ("--prefix", "--tail=-1", "--ignore-errors", "--max-log-requests=1000")
_POLL_S = 3.0


class Kubernetes(Engine):
    """Creates objects with kubectl, in its current context and namespace, which tell the places of pods themselves."""

    def __init__(self, jobs: Jobs) -> None:
        super().__init__(jobs)
        self._head = jobs.roles["head"]
        self._run = "rlzmq-" + re.sub("[^a-z0-9]+", "-", jobs.name.lower())[-36:].strip("-")
        self._host = f"{self._run}-head-0-0.{self._run}"
        for name, role in jobs.roles.items():
            if not (role.image or self._head.image):
                raise ConfigurationError(
                    f"--on k8s: [{name}] image is missing: one with rlzmq and your code."
                )
            unfit = [key for key in ("time", "hosts") if getattr(role, key)]
            unfit += [word for word in role.arguments if word.startswith("--run-dir")]
            if unfit:  # pods have only the run's directory on a volume
                raise ConfigurationError(f"--on k8s: [{name}]: leave out {unfit[0]}.")

    def _values(self, role: Role) -> dict[str, Any]:
        """Return what the objects of a role are filled with."""
        own = {**_OBJECTS["peer"], **_OBJECTS[role.name]}
        options = dict(map(_option, role.options))
        here = {str(role.key): f"/join/{role.key.name}", LISTEN: f"tcp://$(POD_IP):{_CHANNELS['data']}"}
        here |= {str(role.key.parents[1]): f"/work/runs/{self.jobs.name}", sys.executable: "python"}
        argv = [*own["before"], *(here.get(word, word.replace("$(", "$$(")) for word in role.argv)]
        if role.name == "head":
            argv += ["--advertise", self._host]
        elif role.name == "runners":
            argv[6:6] = _PATIENCE  # before the user's arguments
        memory = {"memory": role.memory} if role.memory else {}
        values = {
            "run": self._run,
            "role": role.name,
            "runners": f"{self._run}-runners",
            "storage": options.pop("storage", "10Gi"),
            "most": options.pop("maxReplicas", role.count),
            "count": role.count,
            "image": role.image or self._head.image,
            "command": argv,
            "key": keys_file(role.key).name if role.name == "head" else role.key.name,
            "cpus": str(role.cpus),
            "requests": {"cpu": str(role.cpus), **memory},
            "limits": {**memory, **({"nvidia.com/gpu": str(role.gpus)} if role.gpus else {})},
        }
        values |= _fill(own, values)
        values["containers"] = [{**_fill(_OBJECTS["container"], values), **values["probes"]}]
        values["pod"] = _fill(_OBJECTS["pod"], values)
        values["pod"]["spec"] |= options
        return values

    def _objects(self, name: str) -> list[dict[str, Any]]:
        """Return the objects of a role without the keys; the learners' are among the head's."""
        parts = {"head": ("claim", "jobset", "budget"), "runners": ("deployment", "autoscaler")}.get(name, ())
        values = self._values(self.jobs.roles[name])
        trained = [role for role in self.jobs.roles.values() if role.name != "runners"]
        values["jobs"] = [_fill(_OBJECTS["job"], self._values(role)) for role in trained]
        return [_fill(_OBJECTS[part], values) for part in parts]

    def _secret(self) -> dict[str, Any]:
        """Return the keys for the pods. The run's directory here keeps them, mode 0600, for further submissions."""
        key, file = self._head.key, keys_file(self._head.key)
        make_directories(key.parent, mode=0o700)
        keys = JoinKeys.kept(file)
        hosts = {name: f"tcp://{self._host}:{port}" for name, port in _CHANNELS.items()}
        keys.keep(file, hosts)
        texts = {file.name: file.read_text()}
        for role, name in (("runner", key.name), ("learner", f"{key.stem}.learner.toml")):
            texts[name] = JoinFile(role, hosts, keys.server.public, keys.clients[role].secret).to_text()
        secret: dict[str, Any] = _fill(_OBJECTS["secret"], {"run": self._run, "keys": texts})
        return secret

    def start(self, role: Role, places: Sequence[int] = ()) -> str:
        """Create the objects of a role; those of the learners are in the head's JobSet."""
        if role.name == "learners":
            return f"job/{self._run}-learners-0"
        objects, jobs = self._objects(role.name), f"jobset/{self._run}"
        if role.name == "head":
            claim, job_set, *objects = objects
            if not _kubectl("get", f"pvc/{self._run}", "--ignore-not-found"):
                _create(claim)
            if self._is_over():  # the objects of an ended run are kept for some minutes
                _kubectl("delete", jobs, "--ignore-not-found", "--cascade=foreground")
            _create(job_set)
            objects.append(self._secret())
        try:
            uid = _kubectl("get", jobs, "--output=jsonpath={.metadata.uid}")
            owner = _fill(_OBJECTS["owner"], {"run": self._run, "uid": uid})
            for each in objects:
                each["metadata"]["ownerReferences"] = [owner]
            _create(*objects)
        except BaseException:
            self.end(self._head, (), 0.0)
            raise
        return jobs if role.name == "head" else f"deployment/{self._run}-runners"

    def scale(self, role: Role, count: int) -> None:
        """Set the number of pods of the learners' job, or of runners, and both bounds of their autoscaler."""
        handle, spec = self.jobs.handles[role.name], {"parallelism": count, "completions": count}
        if not handle.startswith("job/"):
            _kubectl("scale", handle, f"--replicas={count}")  # 0 switches the autoscaler off
            handle, least = f"hpa/{self._run}-runners", max(count, 1)
            spec = {"minReplicas": least, "maxReplicas": least}
        _kubectl("patch", handle, "--type=merge", f"--patch={json.dumps({'spec': spec})}")

    def logs(self, role: Role, *, follow: bool) -> Iterator[str]:
        """Yield the lines of a role's pods, as long as the pods are kept, each with its pod's name."""
        pods = self._pods(role.name)
        since = 0.0
        while True:
            is_last = self._is_over() or not follow
            past = time.strftime("--since-time=%Y-%m-%dT%H:%M:%SZ", time.gmtime(since))
            argv = ["kubectl", "logs", pods, *_LOGS, past, f"--follow={not is_last}"]
            with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
                yield from (line.rstrip("\n") for line in process.stdout or ())
            if is_last:
                return
            since = time.time()
            time.sleep(_POLL_S)

    def living(self, role: Role) -> Sequence[int]:
        """Return whether the JobSet lives."""
        return () if self._is_over() else (0,)

    def exit_code(self, head: Role) -> int:
        """Return the exit code of the head's last pod."""
        code = "--output=jsonpath={.items[-1:].status.containerStatuses[0].state.terminated.exitCode}"
        last = _kubectl("get", "pods", self._pods("head"), "--sort-by=.metadata.creationTimestamp", code)
        return int(last or EXIT_RESUMABLE)

    def end(self, role: Role, places: Collection[int], grace_s: float) -> None:
        """Interrupt the head, whose end ends the others; then remove the objects, but not the volume."""
        if role is self._head:
            deadline = time.monotonic() + grace_s
            with contextlib.suppress(ConfigurationError):  # no such pod runs
                _kubectl("exec", f"job/{self._run}-head-0", "--", "sh", "-c", "kill -INT 1")
                while not self._is_over() and time.monotonic() < deadline:
                    time.sleep(_POLL_S)
        handle = self.jobs.handles.get(role.name, f"jobset/{self._run}")  # it may not have been started
        _kubectl("delete", handle, "--ignore-not-found", "--cascade=foreground")

    def dry_run(self) -> str:
        """Return the objects without the keys, which are written to a file that only this user can read."""
        keys = self._head.key.with_name("keys.yaml")
        write_private_file(keys, _text(self._secret()))
        objects = [each for name in self.jobs.roles for each in self._objects(name)]
        return f"# The keys are in {keys}, mode 0600: kubectl apply -f {keys} -f FILE\n{_text(*objects)}"

    def _pods(self, role: str) -> str:
        return f"--selector=app.kubernetes.io/instance={self._run},app.kubernetes.io/component={role}"

    def _is_over(self) -> bool:
        """Return whether the JobSet has ended or is not there."""
        state = "--output=jsonpath={.metadata.uid}/{.status.terminalState}"
        return not _kubectl("get", f"jobset/{self._run}", "--ignore-not-found", state).endswith("/")


def _fill(tree: Any, values: Mapping[str, Any]) -> Any:
    """Return a tree whose ``"$NAME"`` are replaced by values."""
    if isinstance(tree, dict):
        return {key: _fill(value, values) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_fill(value, values) for value in tree]
    return values[tree[1:]] if isinstance(tree, str) and tree.startswith("$") else tree


def _text(*objects: dict[str, Any]) -> str:
    return "".join(f"---\n{json.dumps(each, indent=2)}\n" for each in objects)  # JSON is YAML


def _create(*objects: dict[str, Any]) -> None:
    _kubectl("create", "--filename=-", stdin=_text(*objects))


def _option(text: str) -> tuple[str, Any]:
    """Return the name and value of ``NAME=VALUE``; the value is JSON, or else a text."""
    name, _, value = text.partition("=")
    with contextlib.suppress(ValueError):
        return name, json.loads(value)
    return name, value


def _kubectl(*words: str, stdin: str = "") -> str:
    return command("kubectl", *words, stdin=stdin, what=f"kubectl {words[0]}")
