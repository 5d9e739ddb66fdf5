"""A cluster file as a JobSet for Kubernetes."""

from __future__ import annotations

import json
import shlex
from typing import Any

from rlzmq.core.addresses import split_tcp
from rlzmq.launch.cluster import Cluster

__all__ = ["render"]

_IMAGE = "REGISTRY/IMAGE:TAG"
_JOIN, _LISTEN = "RLZMQ-JOIN-DIRECTORY", "RLZMQ-LISTEN"
_LAST_JOIN_FILE = "join.observer.toml"  # once it is there the others are
_WRONG_CONFIG = 78  # an exit code of the head


def _commands(cluster: Cluster) -> dict[str, tuple[int, list[str]]]:
    """Map each job to (number of processes, command): the head, and one for each role and its further arguments.

    `_JOIN` and `_LISTEN` are placeholders for the job's values.
    """
    base = [cluster.python, "-m", "rlzmq"]
    head = [*base, "train", *cluster.train, "--listen", _LISTEN, "--join-file", f"{_JOIN}/join.toml"]
    num = cluster.num_learners
    if num:
        head += ["--learners", str(num), "--num-remote-learners", str(num)]
    # The scheduler restarts a job that was interrupted (75); it resumes from its checkpoint.
    if not _has(cluster, "--run-dir"):
        head += ["--run-dir", "/join/run"]
    if not _has(cluster, "--resume"):
        head += ["--resume", "auto"]
    jobs = {"head": (1, head)}
    for role, places, file in (
        ("learner", cluster.learners, "join.learner.toml"),
        ("runner", cluster.runners, "join.toml"),
    ):
        counts: dict[tuple[str, ...], int] = {}
        for place in places:
            counts[place.arguments] = counts.get(place.arguments, 0) + place.count
        for number, (arguments, count) in enumerate(counts.items(), start=1):
            name = role if number == 1 else f"{role}-{number}"
            jobs[name] = (count, [*base, role, "--join", f"{_JOIN}/{file}", *arguments])
    return jobs


def _has(cluster: Cluster, option: str) -> bool:
    return any(argument == option or argument.startswith(f"{option}=") for argument in cluster.train)


def render(cluster: Cluster) -> str:
    """Return a JobSet whose roles share a directory on a volume, where the head writes each role's key for this run.

    The hosts of the cluster are ignored: Kubernetes chooses them.
    """
    port = split_tcp(cluster.listen)[1]
    jobs = []
    for role, (count, command) in _commands(cluster).items():
        text = shlex.join(command).replace(_LISTEN, f'"tcp://$POD_IP:{port}"').replace(_JOIN, "/join")
        wait = f"until [ -f /join/{_LAST_JOIN_FILE} ]; do sleep 1; done; "
        container = {
            "name": role,
            "image": _IMAGE,
            "workingDir": cluster.workdir,
            "command": ["sh", "-c", f"{'rm -f /join/*.toml; ' if role == 'head' else wait}exec {text}"],
            "env": [
                {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                *(
                    {"name": name, "value": value}
                    for name, value in {"OMP_NUM_THREADS": "1", **cluster.environment}.items()
                ),
            ],
            "volumeMounts": [{"name": "join", "mountPath": "/join"}],
        }
        pod = {
            # The run ends with the head: the JobSet is restarted and resumes from the checkpoint.
            "restartPolicy": "Never" if role == "head" else "OnFailure",
            "terminationGracePeriodSeconds": 60,
            # All pods run as one user, who owns the join files (mode 0600).
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000},
            "containers": [container],
            "volumes": [{"name": "join", "persistentVolumeClaim": {"claimName": "rlzmq-join"}}],
        }
        spec: dict[str, Any] = {
            "parallelism": count,
            "completions": count,
            "completionMode": "Indexed",
            "backoffLimit": 0 if role == "head" else 6,
            "template": {"spec": pod},
        }
        if role == "head":
            in_head = {"containerName": "head", "operator": "In", "values": [_WRONG_CONFIG]}
            spec["podFailurePolicy"] = {"rules": [{"action": "FailJob", "onExitCodes": in_head}]}
        jobs.append({"name": role, "replicas": 1, "template": {"spec": spec}})
    job_set = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "rlzmq"},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["head"]},
            "failurePolicy": {
                "maxRestarts": cluster.restarts,
                "rules": [
                    {
                        "name": "wrong-configuration",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                        "targetReplicatedJobs": ["head"],
                    }
                ],
            },
            "replicatedJobs": jobs,
        },
    }
    return json.dumps(job_set, indent=2) + "\n"  # JSON is YAML: kubectl apply -f takes it
