"""Command-line options and stop criteria."""

from __future__ import annotations

import pytest

from rlzmq import ConfigurationError
from rlzmq.cli.main import main
from rlzmq.cli.train import StopCriteria, _config, _parse


def test_every_setting_is_a_flag() -> None:
    text = (
        "--env CartPole-v1 --env-runners 1 --learners 2 --lr 3e-4 --entropy-coeff [[0,0.1],[1000,0]] --quiet "
        '--stop return=475 --stop steps=9 --normalize-actions False --model-config {"fcnet_hiddens":[8]}'
    )
    options = _parse("ppo", text.split())
    config = _config("ppo", options)
    assert options.quiet
    assert options.stop == ["return=475", "steps=9"]
    assert (config.env, config.num_env_runners, config.num_learners, config.lr) == ("CartPole-v1", 1, 2, 3e-4)
    assert config.entropy_coeff == [(0.0, 0.1), (1000.0, 0.0)]
    assert config.normalize_actions is False
    assert config.model_config["fcnet_hiddens"] == [8]


def test_a_mistyped_flag_names_the_closest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "ppo", "--lrr", "3"]) == 2
    assert "--lr" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["trian"], 2, "Did you mean 'train'"),
        (["train", "pppo", "--env", "CartPole-v1"], 78, "Did you mean 'ppo'"),
        (["train", "ppo"], 78, "rlzmq train ppo --env CartPole-v1"),
        (["train", "ppo", "--env", "CartPole-v1", "--gamma", "2"], 78, "gamma: expected"),
        (["train", "ppo", "--env", "CartPole-v1", "--stop", "retrun=3"], 78, "Did you mean 'return'"),
        (["train", "ppo", "--env", "CartPol-v1", "--env-runners", "0"], 78, "CartPole"),
        (["evaluate", "/nowhere"], 78, "does not exist"),
    ],
)
def test_mistakes_end_with_their_code_and_text(
    arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    assert text in capsys.readouterr().err


def test_stop_criteria() -> None:
    result = {"training_iteration": 3, "env_runners": {"episode_return_mean": 10.0}, "time_total_s": 1.0}
    assert StopCriteria(["return=11"]).met_by(result) is None
    assert StopCriteria(["return=10"]).met_by(result) == "env_runners/episode_return_mean = 10 ≥ 10"
    assert StopCriteria(["iterations=3", "return=99"]).met_by(result) == "training_iteration = 3 ≥ 3"
    assert StopCriteria(["learners/x/y=1"]).met_by(result) is None
    with pytest.raises(ConfigurationError, match="not a number"):
        StopCriteria(["return=high"])
