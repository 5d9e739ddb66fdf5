"""Every Python block of README.md and docs/**/*.md runs, each page in a namespace of its own, as a script.

So do the scripts in ``docs/examples``, some of which must compute what they say.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import select
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from tests.docs.pages import PAGES, name_of
from tests.support.runs import two_agents
from tests.support.warm_process import WarmPopen

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
TESTED_ALONE = {"league_connect_four"}  # it takes further arguments
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
# tests/connectors/test_connectors_page.py runs it and looks at what it did
ELSEWHERE = {"docs/connectors.md"}


def has_code(page: Path) -> bool:
    return re.search(r"^```python$", page.read_text(encoding="utf-8"), re.MULTILINE) is not None


class Pages:
    """A process that runs pages one after the other, so that torch and the fork server are there once."""

    def __init__(self, directory: Path) -> None:
        self._said = directory / "said"
        with self._said.open("a") as said:
            self._start(directory, said)

    def _start(self, directory: Path, said: IO[str]) -> None:
        self._process: subprocess.Popen[str] = WarmPopen(
            [sys.executable, "-m", "tests.docs.run_page"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True,
            env={**os.environ, "TMPDIR": str(directory), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    def run(self, page: Path, directory: Path, *arguments: str, timeout_s: float = 100.0) -> None:
        """Run the page in the directory, a script with arguments; what it raises fails the test."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        num_said = len(self._said.read_text())
        self._process.stdin.write(json.dumps([str(page), str(directory), *arguments]) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        answer = self._process.stdout.readline() if ready else ""
        said = self._said.read_text()[num_said:]
        assert answer, f"{page.name}: {'the process ended' if ready else 'it takes too long'}\n{said}"
        assert json.loads(answer) == "", f"{page.name}:\n{said}\n{json.loads(answer)}"

    def close(self) -> None:
        """Let it end by itself; after a page that takes too long, kill it."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    pages = Pages(tmp_path_factory.mktemp("pages"))
    yield pages
    pages.close()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if has_code(page) and name_of(page) not in ELSEWHERE], ids=name_of
)
def test_the_pages_code_runs(page: Path, tmp_path: Path, pages: Pages) -> None:
    pages.run(page, tmp_path)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebooks_cells_run_on_one_event_loop(notebook: Path, tmp_path: Path, pages: Pages) -> None:
    pages.run(notebook, tmp_path)


@pytest.mark.timeout(600)  # they train until there is something to see
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs_in_jupyter(notebook: Path, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="python3 scripts/test_optional.py installs it")
    pytest.importorskip("ipykernel")
    nbformat = importlib.import_module("nbformat")
    book = nbformat.read(notebook, as_version=4)
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert rich_outputs(json.loads(nbformat.writes(book))) == rich_outputs(json.loads(notebook.read_text()))


def rich_outputs(book: dict[str, Any]) -> list[list[str]]:
    """The kinds of what each cell shows: tables, curves and videos."""
    cells = [json.dumps(cell.get("outputs", [])) for cell in book["cells"]]
    return [re.findall("<table|<svg|data:image/gif", shown) for shown in cells]


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_runs_for_an_iteration_and_is_on_its_page(
    script: Path, tmp_path: Path, pages: Pages
) -> None:
    header = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", script.read_text(encoding="utf-8"))
    assert header is not None, "no PEP 723 header"
    needs = tomllib.loads(re.sub(r"^# ?", "", header[1], flags=re.MULTILINE))["dependencies"]
    assert any(re.match(r"rlzmq\b", need) for need in needs)
    assert f"../examples/{script.name}" in (ROOT / "docs/how_to/examples.md").read_text(encoding="utf-8")
    if script.stem not in TESTED_ALONE:
        pages.run(script, tmp_path, "--iterations", "1")


def test_every_metric_of_a_result_is_explained() -> None:
    explained = set(re.findall(r"`([\w/]+)`", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")))
    config = two_agents(train_batch_size_per_learner=200, evaluation_interval=1, evaluation_duration=1)
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


# -- what examples compute -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The old environment creation API:DeprecationWarning")
def test_a_league_that_grows_and_drops_its_oldest_player_plays_connect_four(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pettingzoo.classic")
    script = ROOT / "docs/examples" / "league_connect_four.py"
    options = (
        "--iterations 2 --win-rate 0 --snapshots 1 --num-env-runners 0 --batch 1024 --games 4 --target 0"
    )
    monkeypatch.setattr(sys, "argv", [str(script), *options.split()])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(script), run_name="__main__")
    assert " of 4 games won" in (said := capsys.readouterr().out)
    assert "league: ['random', 'main_2']" in said


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["td3", "crossq"])
def test_an_algorithm_outside_of_the_package_learns(name: str) -> None:
    result = runpy.run_path(str(ROOT / "docs/examples" / f"{name}.py"))["main"](iterations=14, seed=1)
    assert result["env_runners"]["episode_return_mean"] > -250.0


def test_ppo_from_its_parts_is_ppo() -> None:
    """It computes what PPOConfig's algorithm does, bit for bit."""
    example = runpy.run_path(str(ROOT / "docs/examples" / "ppo_from_parts.py"))
    mine = example["PPO"](example["make_config"](seed=3))
    with example["make_config"](seed=3).build() as algo:
        for _ in range(2):
            ours, result = mine.train(), algo.train()
            assert mine.num_env_steps == result["num_env_steps_sampled_lifetime"]
            wanted = result["learners"]["default_policy"]
            for name in ("policy_loss", "vf_loss", "entropy", "gradients_default_optimizer_global_norm"):
                assert ours[name] == wanted[name], name
        weights = algo.learner_group.get_weights()["default_policy"]
    for name, value in mine.learner.get_state("rl_module")["rl_module"]["default_policy"].items():
        np.testing.assert_array_equal(value, weights[name], err_msg=name)
    mine.runner.stop()
