"""What a user reads when a part of theirs breaks: their own frames, one of ours, and how to see it again."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import pytest

from rlzmq import ConnectorV2, PPOLearner
from rlzmq.cli.main import main
from rlzmq.core.tracebacks import FULL
from tests.support.runs import ShortEnv, small

HERE = Path(__file__)


class Env(ShortEnv):
    length = 10

    def reward(self, action: Any) -> float:
        if self.t == 2 and self.config.get("breaks"):
            self.helper()
        return 1.0

    def helper(self) -> None:
        raise ValueError("the env's own")


class BrokenConnector(ConnectorV2):
    def __call__(self, **kwargs: Any) -> Any:
        return {}["the connector's own"]


class BrokenLoss(PPOLearner):
    def compute_loss_for_module(self, **kwargs: Any) -> Any:
        raise ZeroDivisionError("the loss's own")


BREAKS: dict[str, dict[str, Any]] = {
    "env": {"env_config": {"breaks": True}},
    "connector": {"env_to_module_connector": lambda env, spaces, device: BrokenConnector()},
    "loss": {"learner_class": BrokenLoss},
}
FRAMES = {
    "env": [("runs.py", "step"), (HERE.name, "reward"), (HERE.name, "helper")],
    "connector": [(HERE.name, "__call__")],
    "loss": [(HERE.name, "compute_loss_for_module")],
}
SAYS = {
    "env": r"EnvError: Environment 0 of env runner \d raised ValueError in step\(\): the env's own .* failures within "
    r"60 s, more than .* To reproduce: reset\(seed=\d+\), then 2 steps .* with the actions \[[01], [01]\]",
    "connector": "KeyError: \"the connector's own\"(.|\n)*in connector piece 'BrokenConnector'",
    "loss": "ZeroDivisionError: the loss's own",
}


@pytest.mark.parametrize("num_processes", [0, 1])
@pytest.mark.parametrize("part", BREAKS)
def test_the_users_frames_and_one_of_ours(
    part: str, num_processes: int, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"train_batch_size_per_learner": 40, "num_learners": num_processes, **BREAKS[part]}
    config = small(env=Env, num_env_runners=num_processes, **settings)
    with config.build() as algo, pytest.raises(Exception, match="own") as caught:
        algo.train()
    error = caught.value
    shown = "".join(traceback.format_exception(type(error), error, error.__traceback__.tb_next))  # type: ignore[union-attr]
    frames = re.findall(r'File "[^"]*/(\w+\.py)", line \d+, in (\w+)', shown)
    assert frames.count(("synchronous.py", "train")) == 1, shown
    assert [frame for frame in frames if frame[0] != "synchronous.py"] == FRAMES[part], shown
    assert re.search(SAYS[part], shown), shown
    assert ("raised in actor" in shown) is bool(num_processes)
    if part == "env" and not num_processes:
        assert sum("The environment is recreated." in text for text in caplog.messages) == 1


def test_an_error_out_of_the_middle_of_this_library_keeps_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    with small().build() as algo:
        monkeypatch.setattr(algo.env_runner, "sample_lease", None)
        with pytest.raises(TypeError) as caught:
            algo.train()
    assert "in take_fragment" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("all_frames", [False, True])
def test_the_command_ends_with_one_line(
    all_frames: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FULL, "")  # restored, whatever the command makes of it
    monkeypatch.syspath_prepend(str(HERE.parent))
    env = ["--env", f"{HERE.stem}:Env", "--env-config", '{"breaks": true}']
    serial = ["--num-env-runners", "0", "--num-learners", "0", "--run-dir", str(tmp_path / "run"), "--quiet"]
    assert main(["train", "ppo", *env, *serial, *(["--verbose"] if all_frames else [])]) == 70
    captured = capfd.readouterr()
    last = captured.err.splitlines()[-1]
    assert last.startswith(
        "rlzmq: ended by EnvError: Environment 0 of env runner 0 raised ValueError in step(): "
    )
    assert last.endswith(" (--verbose shows all frames)") is not all_frames
    assert ("in step_sparse" in captured.err) is all_frames
    assert "accounting: sampled" in captured.out
