"""Every Python block of README.md and docs/*.md runs, page by page, as a script of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlzmq import PPOConfig
from rlzmq.envs.examples import MultiAgentCartPole

ROOT = Path(__file__).parents[2]
RUN_PAGE = Path(__file__).with_name("run_page.py")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = {"connectors.md"}  # tests/connectors/test_connectors_page.py runs it and looks at what it did


def has_code(page: Path) -> bool:
    return re.search(r"^```python$", page.read_text(encoding="utf-8"), re.MULTILINE) is not None


@pytest.mark.parametrize(
    "page", [page for page in PAGES if has_code(page) and page.name not in ELSEWHERE], ids=lambda p: p.name
)
def test_the_pages_code_runs(page: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:rlzmq", str(RUN_PAGE), str(page)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{page.name}:\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_other_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_every_metric_of_a_result_is_explained() -> None:
    explained = set(re.findall(r"`([\w/]+)`", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")))
    config = (
        PPOConfig()
        .environment(MultiAgentCartPole, env_config={"num_agents": 2})
        .multi_agent(policies={"p0", "p1"}, policy_mapping_fn=lambda agent_id, episode: f"p{agent_id}")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=2)
        .training(train_batch_size_per_learner=200, minibatch_size=100, num_epochs=1)
        .evaluation(evaluation_interval=1, evaluation_duration=1)
    )
    with config.build() as algo:
        result = algo.train()
    ids = {"p0", "p1", "0", "1", "default_agent", "default_policy"}
    missing = {
        path
        for path in leaf_paths(result)
        if not any("/".join(path[i:]) in explained for i in range(len(path)))
        and not any("/".join(part) in explained for part in without(path, ids))
        and "accounting" not in path
    }
    assert not missing


def leaf_paths(tree: dict[Any, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    paths: list[tuple[str, ...]] = []
    for key, value in tree.items():
        path = (*above, str(key))
        paths += leaf_paths(value, path) if isinstance(value, dict) else [path]
    return paths


def without(path: tuple[str, ...], ids: set[str]) -> list[tuple[str, ...]]:
    """The ends of a path whose last part is an id, without it."""
    return [path[i:-1] for i in range(len(path) - 1)] if path[-1] in ids else []
