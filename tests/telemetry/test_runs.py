"""What others read in run directories: rlzmq runs, rlzmq plot, and what notebooks show."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from rlzmq import ConfigurationError, IMPALAConfig, PPOConfig, Run, find_runs
from rlzmq.cli.main import main
from rlzmq.telemetry.run_directory import RunDirectory
from rlzmq.telemetry.runs import RETURN_MEAN, group_by_settings, iqm_curves, mean_curve
from tests.support.runs import small


def make_run(
    path: Path,
    returns: list[float],
    *,
    seed: int = 0,
    steps_each: int = 100,
    env: str = "CartPole-v1",
    **settings: Any,
) -> RunDirectory:
    """A run of the given mean returns, still open."""
    config = PPOConfig().environment(env).debugging(seed=seed).training(**settings)
    directory = RunDirectory.create(path, config)
    for number, value in enumerate(returns, 1):
        directory.log(result(number, number * steps_each, value))
    return directory


def result(iteration: int, steps: int, value: float) -> dict[str, Any]:
    return {
        "training_iteration": iteration,
        "num_env_steps_sampled_lifetime": steps,
        "num_env_steps_trained_lifetime": steps,
        "time_total_s": iteration / 2,
        "env_runners": {"episode_return_mean": value},
    }


def ended(directory: RunDirectory) -> Path:
    directory.close()
    return directory.path


def test_a_runs_facts_settings_and_curve_are_read(tmp_path: Path) -> None:
    run = Run.open(ended(make_run(tmp_path / "a", [math.nan, 1.0, 3.0], seed=5, lr=0.25)))
    assert (run.algorithm, run.env, run.seed) == ("PPO", "CartPole-v1", 5)
    assert run.settings["lr"] == 0.25
    assert [list(values) for values in run.curve()] == [[200.0, 300.0], [1.0, 3.0]]
    assert list(run.curve(x="time")[0]) == [1.0, 1.5]
    with pytest.raises(ConfigurationError, match="Did you mean 'time_total_s'"):
        run.curve("time_total")
    with pytest.raises(ConfigurationError, match="expected one of steps, time, iterations"):
        run.curve(x="epochs")


def test_iterations_repeated_after_a_resume_count_once_and_torn_lines_not(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "a", [1.0, 2.0, 3.0])
    for iteration, value in ((2, 20.0), (3, 30.0)):
        directory.log(result(iteration, iteration * 100, value))
    ended(directory)
    with (directory.path / "metrics.jsonl").open("a") as file:
        file.write('{"training_iteration": 4, "env_run')
    assert list(Run.open(directory.path).curve()[1]) == [1.0, 20.0, 30.0]


def test_a_run_from_recorded_data_is_shown_by_its_trained_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_run(tmp_path / "a", [])
    offline = {**result(1, 64, 2.0), "num_env_steps_sampled_lifetime": 0}
    evaluation = {"env_runners": offline.pop("env_runners")}
    directory.log({**offline, "evaluation": evaluation})
    run = Run.open(ended(directory))
    evaluated = "evaluation/env_runners/episode_return_mean"
    assert [list(values) for values in run.curve(evaluated)] == [[64.0], [2.0]]
    with pytest.raises(ConfigurationError, match=f"It has '{evaluated}'"):
        run.curve()
    assert main(["runs", str(tmp_path)]) == 0
    assert re.search(r" 64 +2\.00 ", capsys.readouterr().out)


def test_a_search_and_a_trial_name_the_best_checkpoint_and_searches_have_no_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"metric": {"value": "score"}, "mode": {"value": "min"}}
    (tmp_path / "tuner.json").write_text(json.dumps({"tune_config": {"fields": fields}}))
    for trial, scores in (("t0", [3, 2]), ("t1", [1, 4]), ("t2", [])):
        results = [{"training_iteration": number, "score": score} for number, score in enumerate(scores)]
        saved = [{"name": f"c{number}", "result": result} for number, result in enumerate(results)]
        (tmp_path / trial).mkdir()
        (tmp_path / trial / "checkpoints.json").write_text(json.dumps(saved))
    for place, text in (
        ("", "search"),
        ("", "t1/c0"),
        ("t0", "trial"),
        ("t0", "t0/c1"),
        ("t2", "holds none"),
    ):
        for command in (["evaluate"], ["serve"], ["export"], ["ckpt", "ls"]):
            assert main([*command, str(tmp_path / place)]) == 78
            assert text in capsys.readouterr().err
    for command in ("plot", "runs"):
        assert main([command, str(tmp_path)]) == 78
        assert "rlzmq dashboard" in capsys.readouterr().err


def test_a_run_is_running_while_its_directory_is_open(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "a", [1.0])
    assert Run.open(directory.path).state == "running"
    facts = json.loads((directory.path / "run.json").read_text())
    (directory.path / "run.json").write_text(json.dumps({**facts, "host": "far"}))
    assert Run.open(directory.path).state == "running"
    directory.close()
    assert Run.open(directory.path).state == "on far"
    os.utime(directory.path / "metrics.jsonl", (0, 0))
    assert Run.open(directory.path).state == "ended"


def test_the_mean_and_interval_over_seeds_are_those_at_common_steps(tmp_path: Path) -> None:
    make = [([0.0, 10.0, 20.0], 100), ([30.0, 30.0, 30.0, 30.0], 150)]
    runs = [
        Run.open(ended(make_run(tmp_path / str(seed), returns, seed=seed, steps_each=each)))
        for seed, (returns, each) in enumerate(make)
    ]
    curve = mean_curve("both", runs, "env_runners/episode_return_mean", "steps")
    assert (curve.x[0], curve.x[-1]) == (150.0, 300.0)
    assert (curve.mean[0], curve.mean[-1]) == (17.5, 25.0)
    assert (curve.low[-1], curve.high[-1]) == (20.0, 30.0)
    far = Run.open(ended(make_run(tmp_path / "far", [1.0], steps_each=5000)))
    with pytest.raises(ConfigurationError, match="have no env steps in common"):
        mean_curve("all", [*runs, far], "env_runners/episode_return_mean", "steps")


def test_labels_name_the_settings_that_runs_of_one_algorithm_differ_in(tmp_path: Path) -> None:
    ended(make_run(tmp_path / "a", [1.0, 2.0], lr=0.5))
    other = IMPALAConfig().environment("CartPole-v1").rl_module(model_config={"fcnet_hiddens": [8] * 200})
    directory = RunDirectory.create(tmp_path / "b", other)
    for number in (1, 2):
        directory.log(result(number, number * 100, 3.0))
    directory.close()
    runs = find_runs(tmp_path)
    assert sorted(group_by_settings(runs)) == ["IMPALA CartPole-v1", "PPO CartPole-v1"]
    ended(make_run(tmp_path / "c", [1.0, 2.0], lr=0.25))
    assert sorted(group_by_settings(find_runs(tmp_path)))[1:] == [
        "PPO CartPole-v1 lr=0.25",
        "PPO CartPole-v1 lr=0.5",
    ]


def test_plot_draws_a_curve_for_each_set_of_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2, 3):
        ended(make_run(tmp_path / "runs" / f"a{seed}", [1.0 * seed, 10.0 * seed], seed=seed))
    ended(make_run(tmp_path / "runs" / "b", [5.0, 6.0], lr=0.5))
    assert main(["plot", "runs", "-o", "out.png"]) == 0
    out = capsys.readouterr().out
    assert "PPO CartPole-v1 lr=default (3 runs): 20.00 [10.00, 30.00] at steps 200" in out
    assert "PPO CartPole-v1 lr=0.5: 6.00 at steps 200" in out
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plot", "runs/a1", "runs/a2", "--each", "--x", "time", "--output", "out.svg"]) == 0
    assert "runs/a2: 20.00 at time 1" in capsys.readouterr().out
    drawn = ET.parse(tmp_path / "out.svg").getroot()
    assert drawn.tag.endswith("svg")
    for place in ("runs/a1", "runs"):
        assert main(["plot", place]) == 0
        assert capsys.readouterr().out.endswith(f"plot        {place}/curve.png\n")
        assert (tmp_path / place / "curve.png").exists()
    assert not (tmp_path / "curve.png").exists()
    ended(make_run(tmp_path / "runs" / "new", []))
    assert main(["plot", "runs"]) == 0
    assert "left out    runs/new has no results yet" in capsys.readouterr().out
    for arguments, text in (
        (["gone"], "no directory gone"),
        (["runs/new"], "has no results yet"),
        (["runs/b", "--y", "env_runners/episode_return"], "Did you mean 'env_runners/episode_return_mean'"),
        (["runs/b", "-o", "a/b.png"], "there is no directory a"),
        (["runs/b", "-o", "out.bmpp"], "cannot write the plot out.bmpp"),
        (["runs/a1", "runs/b"], "Add e.g. -o curve.png"),
    ):
        assert main(["plot", *arguments]) == 78
        assert text in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plot", "runs/b"]) == 78
    assert "A plot needs matplotlib: pip install 'rlzmq[plot]'" in capsys.readouterr().err


def test_iqm_compares_directories_of_runs_over_envs_and_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worked out by hand: CartPole-v1 goes from 0 to 100 at best, Acrobot-v1 from -500 to -100 at best."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    last = {
        "a": {"CartPole-v1": [100.0, 90.0], "Acrobot-v1": [-100.0, -140.0]},  # scores 1.0 0.9 1.0 0.9
        "b": {"CartPole-v1": [0.0, 20.0, 30.0], "Acrobot-v1": [-500.0, -420.0, -300.0]},  # 0 .2 .3 0 .2 .5
    }
    for name, envs in last.items():
        for env, values in envs.items():
            first = 0.0 if env == "CartPole-v1" else -500.0
            for seed, value in enumerate(values):
                ended(make_run(tmp_path / name / f"{env}-{seed}", [first, value], seed=seed, env=env))
    curves = {
        curve.label: curve for curve in iqm_curves({n: find_runs(n) for n in last}, RETURN_MEAN, "steps")
    }
    assert curves["a"].mean[[0, -1]].tolist() == pytest.approx([0.0, 0.95])
    assert curves["b"].mean[-1] == pytest.approx((0.0 + 0.2 + 0.2 + 0.3) / 4)
    assert (curves["a"].low[-1], curves["a"].high[-1]) == pytest.approx((0.9, 1.0))
    assert (curves["a"].x[0], curves["a"].x[-1]) == (0.0, 1.0)
    assert main(["plot", "--iqm", "a", "b", "-o", "iqm.png"]) == 0
    out = capsys.readouterr().out
    assert "a (4 runs): 0.95 [0.90, 1.00]" in out
    assert "b (6 runs): 0.17 [" in out
    assert (tmp_path / "iqm.png").exists()
    shutil.rmtree(tmp_path / "b" / "Acrobot-v1-0")
    assert main(["plot", "--iqm", "a", "b", "-o", "iqm.png"]) == 0, "numbers of seeds may differ"
    for path in (tmp_path / "b").glob("Acrobot-*"):
        shutil.rmtree(path)
    for arguments, text in (
        (["a", "b", "-o", "iqm.png"], "b has no run in Acrobot-v1"),
        (["a", "--each"], "choose one"),
    ):
        assert main(["plot", "--iqm", *arguments]) == 78
        assert text in capsys.readouterr().err


def test_runs_are_listed_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 78
    assert "no directory runs" in capsys.readouterr().err
    ended(make_run(Path("runs/a"), [3.0, 2.0], seed=1))
    live = make_run(Path("runs/deep/b"), [7.0], seed=2, lr=0.5)
    (tmp_path / "runs" / "mine").mkdir()
    with open("runs/a/video.mp4", "wb") as file:
        file.truncate(3_072_000_000)
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-2:] for line in lines[1:]] == [["3.1", "GB"], ["0.0", "MB"]]
    assert " ".join(lines[0].split()) == "run algorithm env seed steps return state changed size"
    rows = [line.split()[:7] for line in lines[1:]]
    assert ["runs/a", "PPO", "CartPole-v1", "1", "200", "2.00", "ended"] in rows
    assert ["runs/deep/b", "PPO", "CartPole-v1", "2", "100", "7.00", "running"] in rows
    assert main(["runs", "compare", "runs/a", "runs/deep/b"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["run", "algorithm", "steps", "return", "best", "lr", "seed"]
    assert ["runs/a", "PPO", "200", "2.00", "3.00", "default", "1"] in lines
    live.close()


def test_clean_removes_only_ended_runs_that_were_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    old, empty = (
        ended(make_run(Path("runs") / name, returns)) for name, returns in (("old", [1.0]), ("e", []))
    )
    os.utime(old / "metrics.jsonl", (1e9, 1e9))
    live = make_run(Path("runs/live"), [])
    (tmp_path / "runs" / "mine").mkdir()
    (tmp_path / "runs" / "link").symlink_to("old")

    def clean(*arguments: str) -> str:
        code = main(["runs", "clean", *arguments])
        said = capsys.readouterr()
        assert code == (78 if said.err else 0)
        return said.out + said.err

    assert "which runs should be removed?" in clean("--yes")
    assert "which runs should be removed?" in clean("runs", "--yes")
    assert "no run in runs/mine" in clean("runs/mine", "--yes")
    assert "runs/live: running" in clean("runs/live", "--yes")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "give --yes" in clean("--empty")
    assert empty.exists()
    out = clean("--empty", "--yes")
    assert "removed     runs/e" in out
    assert "kept        runs/live: running" in out
    monkeypatch.setattr("rlzmq.cli.runs._agrees", lambda question: False)
    assert "nothing was removed" in clean("runs/old")
    monkeypatch.setattr("rlzmq.cli.runs._agrees", lambda question: "1 run for good" in question)
    assert "it is a link" in clean("runs/link")
    assert "removed     runs/old" in clean("--older-than", "7")
    live.close()
    assert {path.name for path in Path("runs").iterdir()} == {"live", "mine", "link"}


def test_notebooks_show_runs_and_results_with_their_curve(tmp_path: Path) -> None:
    run = Run.open(ended(make_run(tmp_path / "a", [1.0, 3.0])))
    shown = run._repr_html_()
    assert "PPO on CartPole-v1, ended" in shown
    assert "<polyline" in shown
    assert "has no results yet" in Run.open(ended(make_run(tmp_path / "b", [])))._repr_html_()
    with small().build() as algo:
        algo.train()
        shown = algo.train()._repr_html_()
    assert "<th>iteration</th><td>2</td>" in shown
    assert "<polyline" in shown
    assert find_runs(tmp_path)[-1].path == tmp_path / "b"
