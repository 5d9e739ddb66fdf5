"""Classes and functions of the user's own script, however it is run; what a user reads when they break."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from rlzmq import ConnectorV2, PPOLearner
from rlzmq.cli.main import main
from rlzmq.core.errors import ClosedError, ExitRaisedError
from rlzmq.core.tracebacks import FULL
from tests.support.runs import ShortEnv, small
from tests.support.warm_process import run_warm

DEFINITIONS = """
import warnings

warnings.simplefilter("error")
warnings.simplefilter("ignore", ResourceWarning)

import gymnasium as gym
import torch

from rlzmq import Callback, Columns, ConnectorV2, PPOConfig, RLModuleSpec, TorchRLModule, ValueFunctionAPI
from rlzmq.envs.examples import RandomEnv

LENGTH = 10


class Countdown(RandomEnv):
    def __init__(self, config=None):
        space = gym.spaces.Box(0.0, 1.0, (1,))
        super().__init__({"observation_space": space, "p_terminated": 0, "max_episode_steps": LENGTH})


class Linear(TorchRLModule, ValueFunctionAPI):
    def setup(self):
        self.pi, self.vf = torch.nn.Linear(1, 2), torch.nn.Linear(1, 1)

    def _forward(self, batch, **kwargs):
        return {Columns.ACTION_DIST_INPUTS: self.pi(batch[Columns.OBS])}

    def compute_values(self, batch, embeddings=None):
        return self.vf(batch[Columns.OBS]).squeeze(-1)


class Halved(ConnectorV2):
    def __call__(self, *, rl_module, batch, episodes, explore=None, shared_data=None, **kwargs):
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            episode.set_rewards(new_data=episode.get_rewards() / 2)
        return batch


class Count(Callback):
    def on_episode_end(self, *, metrics_logger, **kwargs):
        metrics_logger.log_value("ended", 1, reduce="sum")


def with_halves(observation_space, action_space):
    return Halved()


config = (
    PPOConfig()
    .environment(Countdown)
    .env_runners(num_env_runners=1, num_envs_per_env_runner=2)
    .learners(num_learners=1, learner_connector=with_halves)
    .rl_module(rl_module_spec=RLModuleSpec(module_class=Linear))
    .training(train_batch_size_per_learner=80, minibatch_size=40, num_epochs=1)
    .callbacks(Count, on_train_result=lambda *, result, **kwargs: result.update(seen=LENGTH))
    .debugging(seed=1)
)


def report(result):
    print("trained", result["accounting"]["trained"], result["seen"], result["env_runners"]["ended"] > 0)
"""

NEVER_STOPPED = """
algo = config.build()
report(algo.train())
"""

ENDS_WITH_AN_ERROR = """
import asyncio


async def cell():
    algo = config.build()
    report(algo.train())
    raise ValueError("my own")


asyncio.run(cell())
"""

EXITS_IN_A_COROUTINE = """
import asyncio


async def main():
    algo = config.build_async()
    await algo.start()
    report(await algo.train())
    raise SystemExit("my last words")


asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("how", "ending", "code", "last_words"),
    [
        ("file", NEVER_STOPPED, 0, ""),
        ("-c", ENDS_WITH_AN_ERROR, 1, "ValueError: my own\n"),
        pytest.param("stdin", EXITS_IN_A_COROUTINE, 1, "my last words\n", marks=pytest.mark.slow),
    ],
    ids=[
        "a script without a guard that stops nothing",
        "python -c, inside a running loop, with an error",
        "stdin, async, exit",
    ],
)
def test_a_script_needs_no_guard_no_module_of_its_own_and_no_stop(
    how: str, ending: str, code: int, last_words: str, tmp_path: Path
) -> None:
    source = DEFINITIONS + ending
    if how != "file":
        source = source.replace("num_learners=1", "num_learners=0")  # fewer processes; one case has them all
    script = tmp_path / "script.py"
    script.write_text(source)
    place = {"cwd": tmp_path, "env": {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}}
    if how == "stdin":
        command = [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", "-"]
        done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=100, **place)
    else:
        arguments = [str(script)] if how == "file" else ["-c", source]
        done = run_warm(*arguments, stdin=subprocess.DEVNULL, timeout=100, **place)
    # Nothing of ours comes with or after the user's own words: no process is mourned that the end took along.
    said = re.sub(r"Traceback \(most recent call last\):\n(  .*\n)+(?=ValueError)", "", done.stderr)
    assert (done.returncode, said) == (code, last_words), done.stderr
    assert done.stdout == "trained 80 10 True\n"
    assert [path.name for path in tmp_path.iterdir() if path.name != "script.py"] == []


class ExitsAtThree(ShortEnv):
    length = 10

    def step(self, action: Any) -> Any:
        if self.t == 2 and self.config.get("exits", True):
            sys.exit("no license for the simulator")
        return super().step(action)


class RankOneIsInterrupted(PPOLearner):
    def compute_loss_for_module(self, **kwargs: Any) -> Any:
        if self.rank == 1 or self.ranks.num == 1:
            raise KeyboardInterrupt
        return super().compute_loss_for_module(**kwargs)


@pytest.mark.parametrize(
    ("part", "num_runners", "num_learners", "role", "what"),
    [
        ("env", 2, 0, "runner-", "sys.exit('no license for the simulator')"),
        ("loss", 1, 2, "learner-1", "KeyboardInterrupt"),
        ("loss", 1, 0, "", "KeyboardInterrupt"),
    ],
)
def test_code_that_exits_ends_the_run_at_once_and_restarts_nothing(
    part: str, num_runners: int, num_learners: int, role: str, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    config = small(env=ExitsAtThree, num_env_runners=num_runners, num_learners=num_learners)
    config.environment(env_config={"exits": part == "env"})
    if part == "loss":
        config.training(learner_class=RankOneIsInterrupted)
    with config.build() as algo, pytest.raises(ExitRaisedError) as caught:
        algo.train()
    function = {"env": "step", "loss": "compute_loss_for_module"}[part]
    assert what in str(caught.value)
    assert re.search(rf"test_users_own_code\.py:\d+ in {function}", str(caught.value))
    notes = "".join(getattr(caught.value, "__notes__", []))
    if role:
        assert f"raised in actor '{role}" in notes
        assert f"in {function}" in notes
    assert "Restarted" not in notes
    assert "Traceback" not in capfd.readouterr().err


class Own(BaseException):
    pass


def raises_own(**kwargs: Any) -> None:
    raise BaseExceptionGroup("several", [Own("mine")])


def is_cancelled(*args: Any, **kwargs: Any) -> None:
    raise asyncio.CancelledError


async def is_cancelled_later(*args: Any, **kwargs: Any) -> None:
    await asyncio.sleep(0)
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("name", "num_runners"), [("raises_own", 0), ("is_cancelled", 0), ("is_cancelled_later", 1)]
)
def test_what_user_code_in_the_driver_raises_is_an_error_of_it(name: str, num_runners: int) -> None:
    config = small(num_env_runners=num_runners)
    if name == "is_cancelled_later":
        config.evaluation(evaluation_interval=1, custom_evaluation_function=is_cancelled_later)
    else:
        config.callbacks(on_train_result=globals()[name])
    with config.build() as algo, pytest.raises(ExitRaisedError, match=rf"\.py:\d+ in {name}"):
        algo.train()


async def test_a_task_that_trains_can_be_cancelled() -> None:
    async with small(num_env_runners=1).build_async() as algo:
        training = asyncio.create_task(anext(algo.results()))
        await asyncio.sleep(0)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training


def test_an_env_that_raises_no_error_when_it_is_closed_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Env(ExitsAtThree):
        def close(self) -> None:
            raise GeneratorExit

    small(env=Env, env_config={"exits": False}, observation_space=Env.observation_space,
          action_space=Env.action_space).build().stop()  # fmt: skip
    assert "raised in close()" in caplog.text


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


async def test_an_async_caller_sees_no_frames_of_ours() -> None:
    with pytest.raises(ZeroDivisionError, match="the loss's own") as caught:
        async with small(learner_class=BrokenLoss).build_async() as algo:
            await algo.train()
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.name for frame in frames] == [
        "test_an_async_caller_sees_no_frames_of_ours",
        "compute_loss_for_module",
    ]


async def test_a_callback_that_breaks_the_start_stops_what_was_started() -> None:
    events = []

    def break_it(**kwargs: Any) -> None:
        raise ValueError("not this one")

    config = small().callbacks(on_algorithm_init=break_it, on_algorithm_end=lambda **_: events.append("end"))
    algo = config.build_async()
    with pytest.raises(ValueError, match="not this one"):
        await algo.start()
    assert events == []
    with pytest.raises(ClosedError):
        await algo.train()


async def test_a_serial_run_lets_other_tasks_go_on() -> None:
    async with small().build_async() as algo:
        others = asyncio.Event()
        asyncio.get_running_loop().call_soon(others.set)
        await algo.train()
        assert others.is_set()


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
