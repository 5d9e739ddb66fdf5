"""Job files for schedulers, rendered from a cluster file: Slurm (sbatch, requeued on 75) and Kubernetes (JobSet)."""

from __future__ import annotations

import json
import shlex
from typing import Any

from rlzmq.core.addresses import split_tcp
from rlzmq.launch.cluster import Cluster

__all__ = ["render"]

_IMAGE = "REGISTRY/IMAGE:TAG"
_JOIN, _LISTEN, _RUN = "RLZMQ-JOIN-DIRECTORY", "RLZMQ-LISTEN", "RLZMQ-RUN-DIRECTORY"
_LAST_JOIN_FILE = "join.observer.toml"  # once it is there the others are
_RESUMABLE, _WRONG_CONFIG = 75, 78  # the head's exit codes


def render(scheduler: str, cluster: Cluster) -> str:
    """Return the job file's text.

    Args:
        scheduler: ``"slurm"`` or ``"kubernetes"``.
        cluster: The cluster; its hosts are ignored, because the scheduler chooses them.
    """
    return _slurm(cluster) if scheduler == "slurm" else _kubernetes(cluster)


def _commands(cluster: Cluster, run_dir: str) -> dict[str, tuple[int, list[str]]]:
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
        head += ["--run-dir", run_dir]
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


def _slurm(cluster: Cluster) -> str:
    port = split_tcp(cluster.listen)[1]
    jobs = _commands(cluster, _RUN)

    def line(job: str) -> str:
        # The placeholders become shell variables; everything else is quoted.
        text = shlex.join(jobs[job][1])
        text = text.replace(_LISTEN, f'"tcp://$HEAD:{port}"').replace(f"{_JOIN}/", '"$JOIN"/')
        return text.replace(_RUN, '"runs/slurm-$SLURM_JOB_ID"')

    total = sum(count for count, _ in jobs.values())
    lines = [
        "#!/bin/bash",
        "#SBATCH --job-name=rlzmq",
        f"#SBATCH --ntasks={total}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=B:TERM@60",
        "set -u",
        f"cd {shlex.quote(cluster.workdir)}",
        *(f"export {name}={shlex.quote(value)}" for name, value in _environment(cluster).items()),
        "# The address of this node that the others reach; RLZMQ_HEAD names another one.",
        'HEAD=${RLZMQ_HEAD:-$(hostname -I | cut -d" " -f1)}',
        "# On a file system that all nodes share; the join files in it have mode 0600.",
        'JOIN="$PWD/.rlzmq-$SLURM_JOB_ID"; mkdir -m 700 -p "$JOIN"; rm -f "$JOIN"/*.toml',
        "trap 'kill -TERM $head 2>/dev/null' TERM INT",
        f'srun --exact -n1 -w "$SLURMD_NODENAME" {line("head")} & head=$!',
        f'until [ -f "$JOIN/{_LAST_JOIN_FILE}" ] || ! kill -0 $head 2>/dev/null; do sleep 1; done',
        "peers=",
    ]
    for job in jobs:
        if job != "head":
            lines.append(f'srun --exact -n{jobs[job][0]} {line(job)} & peers="$peers $!"')
    lines += [
        "wait $head; code=$?",
        "# A wait that a signal interrupts returns more than 128, and the head still runs.",
        "while [ $code -gt 128 ] && kill -0 $head 2>/dev/null; do wait $head; code=$?; done",
        "# The run's goodbye ends the others; any that are left after 10 s are killed.",
        "for i in 1 2 3 4 5 6 7 8 9 10; do kill -0 $peers 2>/dev/null || break; sleep 1; done",
        'kill $peers 2>/dev/null; rm -rf "$JOIN"',
        f'[ $code -eq {_RESUMABLE} ] && scontrol requeue "$SLURM_JOB_ID"  # interrupted, to be resumed',
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _environment(cluster: Cluster) -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", **cluster.environment}


def _kubernetes(cluster: Cluster) -> str:
    """Return a JobSet whose roles share a directory on a volume, where the head writes each role's key for this run."""
    port = split_tcp(cluster.listen)[1]
    jobs = []
    for role, (count, command) in _commands(cluster, "/join/run").items():
        text = shlex.join(command).replace(_LISTEN, f'"tcp://$POD_IP:{port}"').replace(_JOIN, "/join")
        wait = f"until [ -f /join/{_LAST_JOIN_FILE} ]; do sleep 1; done; "
        container = {
            "name": role,
            "image": _IMAGE,
            "workingDir": cluster.workdir,
            "command": ["sh", "-c", f"{'rm -f /join/*.toml; ' if role == 'head' else wait}exec {text}"],
            "env": [
                {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                *({"name": name, "value": value} for name, value in _environment(cluster).items()),
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
