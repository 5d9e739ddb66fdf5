"""Roles on Kubernetes, through Helm: head and learners are one JobSet, runners a Deployment with an autoscaler.

    helm ──► claim of the run's volume (stays) · JobSet ─owns─► Secret, PodDisruptionBudget, Deployment, autoscaler

Only the head mounts the volume. The keys are made here and reach the pods as a Secret; peers know the head, which may
be restarted on another node, by its pod's name in the JobSet's headless service. Some minutes after the run's end,
Kubernetes removes the JobSet and what it owns. The objects are those of the chart in ``helm/``.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import make_directories, write_text
from rlzmq.driver.join_files import JoinKeys, keys_file, write_join_files
from rlzmq.launch.engine import EXIT_RESUMABLE, Engine, Jobs, command

__all__ = ["Kubernetes"]

_CHART = str(Path(__file__).with_name("helm"))
_CHANNELS = {"data": 5555, "weights": 5556, "control": 5557}  # the ports of a head that listens at the first
_LOGS = ("--prefix", "--tail=-1", "--ignore-errors", "--max-log-requests=1000")
_POLL_S = 3.0


class Kubernetes(Engine):
    """A release in the current context and namespace of helm and kubectl, which tell the places of pods themselves."""

    def __init__(self, jobs: Jobs) -> None:
        super().__init__(jobs)
        self._release = re.sub("[^a-z0-9]+", "-", jobs.run_dir.name.lower())[-36:].strip("-")
        self._run = f"rlzmq-{self._release}"

    def _helm(self, what: str, *words: str, **values: Any) -> str:
        """Run helm with the chart and the values of the run, and further ones."""
        values |= self.jobs.cluster.model_dump(exclude_none=True, exclude={"python", "workdir"})
        values["train"] = self.jobs.train
        argv = ("helm", what, self._release, _CHART, "--values=-", *words)
        return command(*argv, stdin=json.dumps(values), what=f"helm {what}")

    def _keys(self) -> dict[str, str]:
        """Return the files for the pods. The run's directory here keeps the keys, mode 0600, for other submissions."""
        key = self.jobs.key("head")
        make_directories(key.parent, mode=0o700)
        hosts = {name: f"tcp://{self._run}-head-0-0.{self._run}:{port}" for name, port in _CHANNELS.items()}
        files = write_join_files(JoinKeys.kept(keys_file(key)), key, hosts, self._run, keeps=True)
        return {file.name: file.read_text() for file in (keys_file(key), *files.values())}

    def start(self, role: str, places: Sequence[int] = ()) -> str:
        """Install the chart, with all roles, when the head is to start."""
        if role == "head":
            keys = self._keys()
            if not self.living("head"):  # the objects of an ended run are kept for some minutes
                self._remove()
            self._helm("install", keys=keys)
            try:
                self._helm("upgrade", keys=keys)  # now there is a JobSet, which gets the others
            except BaseException:
                self._remove()
                raise
        return f"{self._run}-{role}"

    def scale(self, role: str, count: int) -> None:
        """Set the number of pods of the learners' job, or of runners, and both bounds of their autoscaler."""
        if role == "learners":
            _patch(f"job/{self._run}-learners-0", parallelism=count, completions=count)
        else:
            _kubectl("scale", f"deployment/{self._run}-runners", f"--replicas={count}")  # 0: not autoscaled
            _patch(f"hpa/{self._run}-runners", minReplicas=max(count, 1), maxReplicas=max(count, 1))

    def logs(self, role: str, *, follow: bool) -> Iterator[str]:
        """Yield the lines of a role's pods, as long as the pods are kept, each with its pod's name."""
        since, is_last = 0.0, False
        while not is_last:
            is_last = not self.living("head") or not follow
            past = time.strftime("--since-time=%Y-%m-%dT%H:%M:%SZ", time.gmtime(since))
            argv = ["kubectl", "logs", self._pods(role), *_LOGS, past, f"--follow={not is_last}"]
            with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
                yield from (line.rstrip("\n") for line in process.stdout or ())
            since = time.time()
            time.sleep(0.0 if is_last else _POLL_S)

    def living(self, role: str) -> Sequence[int]:
        """Return whether the JobSet is there and has not ended."""
        state = "--output=jsonpath={.metadata.uid}/{.status.terminalState}"
        return (0,) * _kubectl("get", f"jobset/{self._run}", "--ignore-not-found", state).endswith("/")

    def exit_code(self) -> int:
        """Return the exit code of the head's last pod."""
        code = "--output=jsonpath={.items[-1:].status.containerStatuses[0].state.terminated.exitCode}"
        last = _kubectl("get", "pods", self._pods("head"), "--sort-by=.metadata.creationTimestamp", code)
        return int(last or EXIT_RESUMABLE)

    def end(self, role: str, places: Collection[int], grace_s: float) -> None:
        """Interrupt the head, whose end ends the others; then remove all objects but the volume."""
        deadline = time.monotonic() + grace_s
        with contextlib.suppress(ConfigurationError):  # no such pod runs
            _kubectl("exec", f"job/{self._run}-head-0", "--", "sh", "-c", "kill -INT 1")
            while self.living("head") and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        self._remove()

    def dry_run(self) -> str:
        """Return the objects without the keys, which are written to a file that only this user can read."""
        keys = self.jobs.key("head").with_name("keys.yaml")
        text = self._helm("template", "--show-only=templates/keys.yaml", keys=self._keys())
        write_text(keys, text, is_private=True)
        return f"# The keys are in {keys}: kubectl apply -f {keys} -f FILE\n{self._helm('template')}"

    def _pods(self, role: str) -> str:
        return f"--selector=app.kubernetes.io/instance={self._run},app.kubernetes.io/component={role}"

    def _remove(self) -> None:
        """Remove all objects but the volume."""
        _kubectl("delete", f"jobset/{self._run}", "--ignore-not-found", "--cascade=foreground")
        command("helm", "uninstall", self._release, "--ignore-not-found", what="helm uninstall")


def _patch(what: str, **spec: int) -> None:
    _kubectl("patch", what, "--type=merge", f"--patch={json.dumps({'spec': spec})}")


def _kubectl(*words: str) -> str:
    return command("kubectl", *words, what=f"kubectl {words[0]}")
