"""What a user reads when a part of theirs breaks: their own frames, one of ours, once; the whole text."""

from __future__ import annotations

import logging
import re
import traceback
from pathlib import Path
from typing import Any

import pytest
from broken_parts import broken

from rlzmq.cli.main import main
from rlzmq.core.tracebacks import FULL

HERE = str(Path(__file__).parent)


def shown_by(config: Any) -> list[str]:
    """The lines that Python prints below the user's line ``algo.train()``."""
    with config.build() as algo:
        try:
            for _ in range(2):
                algo.train()
        except Exception as error:
            below = error.__traceback__.tb_next  # type: ignore[union-attr]
            return normalized("".join(traceback.format_exception(type(error), error, below)))
    raise AssertionError("no error")


def normalized(text: str) -> list[str]:
    text = re.sub(r'File ".*/(\w+\.py)", line \d+', r"\1", text)
    text = re.sub(r"pid \d+ on \S+\)", "pid)", text)
    text = re.sub(r"(seed|seed=) ?\d+", r"\1 N", text)
    text = re.sub(r"actions \[[01, ]+\]", "actions […]", text)
    text = re.sub(r"\.py:\d+ in", ".py:N in", text)
    return [line for line in text.splitlines() if line.strip(" ^~")]


HEADER = "Traceback (most recent call last):"
OURS = [
    HEADER,
    "  synchronous.py, in train",
    "    return self._run(result) if inspect.iscoroutine(result) else result",
]
CONNECTOR = ["  broken_parts.py, in __call__", '    return {}["the connector\'s own"]']
KEY_ERROR = 'KeyError: "the connector\'s own"'
RAISED: dict[str, tuple[Any, ...]] = {
    "module": (
        ["  broken_parts.py, in _forward", '    raise RuntimeError("the module\'s own")'],
        "RuntimeError: the module's own",
    ),
    "env_to_module": (
        CONNECTOR,
        KEY_ERROR,
        "in connector piece 'BrokenConnector' (number 1 of 6 in EnvToModulePipeline)",
    ),
    "learner_connector": (
        CONNECTOR,
        KEY_ERROR,
        "in connector piece 'BrokenConnector' (number 2 of 9 in LearnerConnectorPipeline)",
    ),
    "loss": (
        ["  broken_parts.py, in compute_loss_for_module", '    raise ZeroDivisionError("the loss\'s own")'],
        "ZeroDivisionError: the loss's own",
    ),
    "callback": (
        ["  broken_parts.py, in on_episode_end", '    raise LookupError("the callback\'s own")'],
        "LookupError: the callback's own",
    ),
}
ENV_FRAMES = [
    HEADER,
    "  runs.py, in step",
    "    reward = self.reward(action)",
    "  broken_parts.py, in reward",
    "    self.helper()",
    "  broken_parts.py, in helper",
    '    raise ValueError("the env\'s own")',
    "ValueError: the env's own",
]


def env_error(worker: int, advice: str) -> str:
    return (
        f"Environment 0 of env runner {worker} raised ValueError in step(): the env's own ({HERE}/broken_parts.py:N in "
        f"helper). {advice} To reproduce: reset(seed= N), then 2 steps (after an episode's end a step is a reset) with "
        "the actions […]. (env_config {'breaks': True}, run seed N, env seed N, incarnation 0, vector env number 1, 0 "
        "env steps before)"
    )


TOO_MANY = (
    "These are 5 failures within 60 s, more than env_failures_per_minute_tolerance=4: correct the environment, or "
    "raise the tolerance (None: any number)."
)


@pytest.mark.parametrize("part", RAISED)
def test_in_this_process_the_users_frames_and_one_of_ours(part: str) -> None:
    frames, *texts = RAISED[part]
    assert shown_by(broken(part)) == [*OURS, *frames, *texts]


def test_an_env_in_this_process_is_logged_once_and_shown_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rlzmq"):
        shown = shown_by(broken("env"))
    assert shown == [
        *ENV_FRAMES,
        "The above exception was the direct cause of the following exception:",
        *OURS,
        f"rlzmq.core.errors.EnvError: {env_error(0, TOO_MANY)}",
    ]
    logged = [re.sub(r"py:\d+", "py:N", line) for line in normalized("\n".join(caplog.messages))]
    assert logged == [env_error(0, "The environment is recreated.")]


@pytest.mark.parametrize(
    ("part", "role"), [("env", "runner-0"), ("env_to_module", "runner-0"), ("loss", "learner-0")]
)
def test_out_of_another_process_the_same_frames_follow_the_error(part: str, role: str) -> None:
    text = f"rlzmq.core.errors.EnvError: {env_error(1, TOO_MANY)}"
    frames, text, *notes = (ENV_FRAMES, text) if part == "env" else RAISED[part]
    assert shown_by(broken(part, 1)) == [*OURS, text, f"raised in actor '{role}' (pid):", *frames, *notes]


def test_an_error_out_of_the_middle_of_this_library_keeps_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    with broken("").build() as algo:
        monkeypatch.setattr(algo.env_runner, "sample_lease", None)
        with pytest.raises(TypeError) as caught:
            algo.train()
    assert "in take_fragment" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("all_frames", [False, True])
def test_the_command_ends_with_one_line(
    all_frames: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FULL, "")  # restored, whatever the command makes of it
    monkeypatch.syspath_prepend(HERE)
    arguments = ["train", "ppo", "--env", "broken_parts:Env", "--env-config", '{"breaks": true}', "--quiet"]
    serial = ["--num-env-runners", "0", "--num-learners", "0", "--run-dir", str(tmp_path / "run")]
    code = main([*arguments, *serial, *(["--verbose"] if all_frames else [])])
    captured = capfd.readouterr()
    assert code == 70
    last = captured.err.splitlines()[-1]
    assert last.startswith(
        "rlzmq: ended by EnvError: Environment 0 of env runner 0 raised ValueError in step(): "
    )
    assert last.endswith(" (--verbose shows all frames)") is not all_frames
    assert ("in step_sparse" in captured.err) is all_frames
    assert "accounting: sampled" in captured.out
