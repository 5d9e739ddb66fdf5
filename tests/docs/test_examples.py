"""Scripts in docs/examples: what they compute."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.mark.filterwarnings("ignore:The old environment creation API:DeprecationWarning")
def test_a_league_that_grows_and_drops_its_oldest_player_plays_connect_four(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pettingzoo.classic")
    script = EXAMPLES / "league_connect_four.py"
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
    result = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](iterations=14, seed=1)
    assert result["env_runners"]["episode_return_mean"] > -250.0


def test_ppo_from_its_parts_is_ppo() -> None:
    """It computes what PPOConfig's algorithm does, bit for bit."""
    example = runpy.run_path(str(EXAMPLES / "ppo_from_parts.py"))
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
