"""What a run shows and what it leaves on disk, its warnings and errors among it."""

from __future__ import annotations

import json
import logging
import math
import resource
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlzmq import PPOConfig
from rlzmq.cli.main import main
from rlzmq.telemetry import run_directory
from rlzmq.telemetry.run_directory import EventLog, RunDirectory
from rlzmq.telemetry.view import LinesView, PanelView, make_view, summary_line
from tests.support.runs import ShortEnv
from tests.telemetry.test_runs import make_run


def result(mean: float = 12.5) -> dict[str, Any]:
    return {
        "training_iteration": 3,
        "num_env_steps_sampled_lifetime": 600,
        "time_total_s": 1.25,
        "env_runners": {
            "episode_return_mean": mean,
            "num_episodes_lifetime": 9,
            "num_env_steps_sampled_lifetime_throughput": 480.4,
        },
        "learners": {"default_policy": {"mean_kl_loss": 0.0123, "entropy": 0.5}},
        "accounting": {"sampled": 605, "trained": 600, "dropped": {"surplus": 5}, "pending": 0},
    }


def test_one_line_says_how_it_goes() -> None:
    line = summary_line(result())
    for text in (
        "iter 3",
        "return 12.5",
        "episodes 9",
        "steps 600",
        "steps/s 480",
        "dropped 5 (surplus)",
        "kl 0.012",
    ):
        assert text in line
    assert "return –" in summary_line(result(math.nan))
    lossy = result()
    lossy["accounting"]["dropped"] = {"surplus": 0, "stale": 2, "rejected": 3, "fenced": 0}
    assert "dropped 5 (stale, rejected)" in summary_line(lossy)
    assert "surplus" not in summary_line(lossy)


def test_output_that_is_no_terminal_gets_lines(capsys: pytest.CaptureFixture[str]) -> None:
    view = make_view("ppo", PPOConfig().environment("CartPole-v1"))
    assert isinstance(view, LinesView)
    with view:
        view.show(result())
    assert capsys.readouterr().out == summary_line(result()) + "\n"
    with make_view("ppo", PPOConfig(), quiet=True) as silent:
        silent.show(result())
    assert capsys.readouterr().out == ""


def test_the_panel_shows_the_curve(capsys: pytest.CaptureFixture[str]) -> None:
    with PanelView("a title") as panel:
        for mean in (1.0, 5.0, 9.0):
            panel.show(result(mean))
    shown = capsys.readouterr().out
    assert "a title" in shown
    assert "▁▅█" in shown or "▁▄█" in shown


def test_the_panel_shows_what_limits_the_run_and_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    judged = {**result(), "bottleneck": {"stage": "env", "advice": "Buy [faster] envs.", "shares": {}}}
    assert "bottleneck env" in summary_line(judged)
    assert "faster" not in summary_line(judged)
    with PanelView("a title") as panel:
        panel.show(judged)
    assert "Buy [faster] envs." in capsys.readouterr().out
    ill = {**result(), "health": {"values diverge": {"cause": "They are 1e9", "remedy": "Lower lr"}}}
    assert "health values diverge" in summary_line(ill)
    with PanelView("a title") as panel:
        panel.show(ill)
    assert "They are 1e9. Lower lr." in capsys.readouterr().out
    unknown = {**result(), "bottleneck": {"stage": "unknown", "advice": "Nothing.", "shares": {}}}
    assert "bottleneck" not in summary_line(unknown)


def test_metrics_are_json_lines_whatever_they_hold(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", PPOConfig().environment("CartPole-v1"))
    directory.log({"nan": math.nan, "numpy": np.float32(1.5), "array": np.arange(2), 3: {"x": (1, 2)}})
    directory.log({"object": object})
    directory.close()
    first, second = (
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    )
    assert first == {"nan": None, "numpy": 1.5, "array": [0, 1], "3": {"x": [1, 2]}}
    assert isinstance(second["object"], str)


def test_the_directory_names_the_commit_and_whether_files_differ_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    def git(*command: str) -> str:
        identity = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        done = subprocess.run(["git", *identity, *command], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def stored(name: str) -> object:
        RunDirectory.create(tmp_path / name, PPOConfig().environment("CartPole-v1")).close()
        return json.loads((tmp_path / name / "run.json").read_text())["git"]

    assert stored("without") is None
    git("init", "-q")
    Path("env.py").write_text("size = 3")
    git("add", "env.py")
    git("commit", "-q", "-m", "An environment")
    commit = git("rev-parse", "HEAD")
    assert stored("clean") == {"commit": commit, "is_dirty": False}
    Path("env.py").write_text("size = 4")
    assert stored("changed") == {"commit": commit, "is_dirty": True}


def test_the_directory_says_what_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = PPOConfig().environment("CartPole-v1").debugging(seed=5)
    assert RunDirectory.newest_path("ppo", config) is None
    directory = RunDirectory.open_new("ppo", config)
    directory.begin(config)
    directory.close()
    assert directory.path.name.startswith("ppo-CartPole-v1-")
    assert json.loads((directory.path / "run.json").read_text())["seed"] == 5
    assert PPOConfig.from_toml(directory.path / "config.toml").diff() == config.diff()
    assert RunDirectory.newest_path("ppo", config) == directory.path
    assert RunDirectory.newest_path("ppo", PPOConfig().environment("CartPole-v0")) is None
    with RunDirectory.open_new("ppo", config) as later:
        assert later.path != directory.path
        assert RunDirectory.newest_path("ppo", config) == directory.path, "nothing has begun in the later one"
        later.begin(config)
    assert RunDirectory.newest_path("ppo", config) == later.path


def test_the_directory_says_on_what_was_run(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, PPOConfig().environment("CartPole-v1")).close()
    hardware = json.loads((tmp_path / "run.json").read_text())["hardware"]
    assert hardware["num_usable_cores"] >= 1
    assert hardware["memory"].endswith("kB")
    assert hardware["processor"]
    assert isinstance(hardware["gpus"], list)
    packages = (tmp_path / "requirements.txt").read_text().splitlines()
    assert f"numpy=={np.__version__}" in packages
    assert all(line.count("==") == 1 for line in packages)


def test_a_config_that_holds_code_leaves_a_note_in_place_of_toml(tmp_path: Path) -> None:
    config = PPOConfig().environment(lambda env_config: None)
    directory = RunDirectory.create(tmp_path / "run", config)
    directory.close()
    assert (tmp_path / "run" / "config.toml").read_text().startswith("# config.env=")


def test_a_full_disk_ends_no_run_and_no_line_is_torn_or_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel's limit on a file's size stands for the disk: what fits of a line is written, then it fails."""
    run = RunDirectory.create(tmp_path / "r", PPOConfig().environment("CartPole-v1"))
    metrics = tmp_path / "r" / "metrics.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number in range(3):
        run.log({"number": number})
    resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.stat().st_size + 5, hard))
    try:
        for number in range(3, 6):
            run.log({"number": number})
        assert metrics.read_text().count("\n") == 3
        assert metrics.read_text().endswith("}\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [record.levelname for record in caplog.records] == ["WARNING"], "said once"
    run.log({"number": 6})
    run.close()
    assert [json.loads(line)["number"] for line in metrics.read_text().splitlines()] == list(range(7))


def test_a_log_has_the_first_iterations_then_a_line_per_some_seconds_and_the_last(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("rlzmq.telemetry.view.time.monotonic", lambda: now)
    with LinesView() as view:
        for iteration in range(1, 200):
            now += 0.1
            ill = {"health": {"values diverge": {}}} if iteration == 51 else {}
            evaluated = (
                {"evaluation": {"env_runners": {"episode_return_mean": 7.0}}} if iteration == 60 else {}
            )
            view.show({**result(), "training_iteration": iteration, **ill, **evaluated})
    lines = capsys.readouterr().out.splitlines()
    numbers = [int(line.split()[1]) for line in lines]
    assert numbers[:10] == list(range(1, 11))
    assert {51, 199} <= set(numbers)
    assert len(numbers) <= 20
    after = next(line for line, number in zip(lines, numbers, strict=True) if number >= 60)
    assert after.endswith("evaluation 7.00")


def events_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]


def test_warnings_are_kept_with_the_traceback_of_what_they_tell(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", [1.0])
    assert not (directory.path / "events.jsonl").exists()
    log = logging.getLogger("rlzmq.somewhere")
    log.info("not worth it")
    log.warning("%d of %d", 1, 2)
    try:
        raise KeyError("lost\x1b[31m")
    except KeyError as error:
        log.error("it died", extra={"error": error})
        log.exception("again")
    logging.getLogger("another").warning("not ours")
    directory.events.add_error(RuntimeError("the end"))
    directory.close()
    log.warning("too late")
    events = events_in(directory.path)
    assert [(event["level"], event["text"]) for event in events] == [
        ("warning", "1 of 2"), ("error", "it died"), ("error", "again"), ("error", "RuntimeError: the end"),
    ]  # fmt: skip
    assert events[0]["source"] == "rlzmq.somewhere"
    assert "trace" not in events[0]
    for event in events[1:3]:
        assert "test_view_and_run_directory.py" in event["trace"]
        assert "KeyError: 'lost" in event["trace"]
        assert "\x1b" not in event["trace"]


def test_a_flood_ends_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "_MAX_EVENTS", 3)
    events = EventLog(tmp_path / "events.jsonl")
    for number in range(9):
        logging.getLogger("rlzmq.x").warning("number %d", number)
    events.close()
    assert [event["text"] for event in events_in(tmp_path)] == [
        "number 0", "number 1", "3 events are written: later ones are left out.",
    ]  # fmt: skip


class Fragile(ShortEnv):
    def reward(self, action: Any) -> float:
        raise RuntimeError("the wheel came off")


def test_a_run_that_ends_with_an_error_keeps_the_users_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = f"{__name__}:Fragile"
    arguments = ["--env", env, "--num-env-runners", "0", "--preset", "none", "--run-dir", "run"]
    monkeypatch.chdir(tmp_path)
    assert main(["train", "ppo", *arguments, "--restart-failed-sub-environments", "false"]) == 70
    last = events_in(tmp_path / "run")[-1]
    assert (last["level"], last["source"]) == ("error", "run")
    assert "the wheel came off" in last["text"]
    assert "test_view_and_run_directory.py" in last["trace"]
