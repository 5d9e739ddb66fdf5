"""Job files for schedulers, made of a cluster file: Slurm (sbatch, requeued on 75) and Kubernetes (JobSet)."""

from __future__ import annotations

import json
import shlex

from rlzmq.launch.cluster import Cluster
from rlzmq.net.addresses import split_tcp

__all__ = ["render"]

_IMAGE = "REGISTRY/IMAGE:TAG"


def render(scheduler: str, cluster: Cluster) -> str:
    """The job file's text.

    Args:
        scheduler: ``"slurm"`` or ``"kubernetes"``.
        cluster: Its counts, arguments, interpreter and port count; the scheduler chooses the hosts.
    """
    return _slurm(cluster) if scheduler == "slurm" else _kubernetes(cluster)


def _commands(cluster: Cluster, join_dir: str, listen: str) -> dict[str, tuple[int, list[str]]]:
    """Role → (processes, command)."""
    base = [cluster.python, "-m", "rlzmq"]
    head = [*base, "train", *cluster.train, "--listen", listen, "--join-file", f"{join_dir}/join.toml"]
    num = cluster.num_learners
    if num:
        head += ["--learners", str(num), "--num-remote-learners", str(num)]
    return {
        "head": (1, head),
        "learner": (num, [*base, "learner", "--join", f"{join_dir}/join.learner.toml"]),
        "runner": (
            sum(place.count for place in cluster.runners),
            [*base, "runner", "--join", f"{join_dir}/join.toml"],
        ),
    }


def _slurm(cluster: Cluster) -> str:
    port = split_tcp(cluster.listen)[1]
    roles = _commands(cluster, "JOIN", "LISTEN")

    def line(role: str) -> str:
        # The two names stand for shell variables: everything else is quoted.
        text = shlex.join(roles[role][1])
        return text.replace("LISTEN", f'"tcp://$HEAD:{port}"').replace("JOIN/", '"$JOIN"/')

    total = sum(count for count, _ in roles.values())
    lines = [
        "#!/bin/bash",
        "#SBATCH --job-name=rlzmq",
        f"#SBATCH --ntasks={total}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=B:TERM@60",
        "set -u",
        f"cd {shlex.quote(cluster.workdir)}",
        "export OMP_NUM_THREADS=1",
        'HEAD=$(hostname -I | cut -d" " -f1)',
        "# On a file system that all nodes share; the join files in it have mode 0600.",
        'JOIN="$PWD/.rlzmq-$SLURM_JOB_ID"; mkdir -m 700 -p "$JOIN"; rm -f "$JOIN"/*.toml',
        "trap 'kill -TERM $head 2>/dev/null' TERM INT",
        f'srun --exact -n1 -w "$SLURMD_NODENAME" {line("head")} & head=$!',
        'until [ -f "$JOIN/join.toml" ] || ! kill -0 $head 2>/dev/null; do sleep 1; done',
    ]
    for role in ("learner", "runner"):
        if roles[role][0]:
            lines.append(f"srun --exact -n{roles[role][0]} {line(role)} &")
    lines += [
        "wait $head; code=$?",
        "[ $code -gt 128 ] && { wait $head; code=$?; }  # the first wait was cut short by the signal",
        'rm -rf "$JOIN"',
        '[ $code -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"  # interrupted, to be resumed',
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _kubernetes(cluster: Cluster) -> str:
    """A JobSet; the roles meet in a directory on a shared volume, and by the head pod's stable name."""
    port = split_tcp(cluster.listen)[1]
    roles = _commands(cluster, "/join", "LISTEN")
    jobs = []
    for role, (count, command) in roles.items():
        if not count:
            continue
        text = shlex.join(command).replace("LISTEN", f'"tcp://$POD_IP:{port}"')
        file = {"learner": "/join/join.learner.toml", "runner": "/join/join.toml"}.get(role)
        wait = f"until [ -f {file} ]; do sleep 1; done; " if file else "rm -f /join/*.toml; "
        container = {
            "name": role,
            "image": _IMAGE,
            "workingDir": cluster.workdir,
            "command": ["sh", "-c", f"{wait}exec {text}"],
            "env": [
                {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                {"name": "OMP_NUM_THREADS", "value": "1"},
            ],
            "volumeMounts": [{"name": "join", "mountPath": "/join"}],
        }
        pod = {
            "restartPolicy": "OnFailure",
            "terminationGracePeriodSeconds": 60,
            "containers": [container],
            "volumes": [{"name": "join", "persistentVolumeClaim": {"claimName": "rlzmq-join"}}],
        }
        spec = {
            "parallelism": count, "completions": count, "completionMode": "Indexed", "backoffLimit": 6,
            "template": {"spec": pod},
        }  # fmt: skip
        jobs.append({"name": role, "replicas": 1, "template": {"spec": spec}})
    job_set = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "rlzmq"},
        "spec": {
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["head"]},
            "replicatedJobs": jobs,
        },
    }
    return json.dumps(job_set, indent=2) + "\n"  # JSON is YAML: kubectl apply -f takes it
