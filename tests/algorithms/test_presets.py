"""Presets: known settings for known environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlzmq import PPO, ConfigurationError, PPOConfig, SACConfig
from rlzmq.algorithms.registry import (
    ALGORITHMS,
    Preset,
    find_preset,
    get_config_class,
    preset_for,
    presets_of,
)
from rlzmq.cli.main import main
from rlzmq.cli.train import _config, _parse
from rlzmq.config.plain import code_names
from rlzmq.core.trust import NOBODY

PRESETS = [preset for algorithm in ALGORITHMS for preset in presets_of(algorithm).values()]


def parsed(algorithm: str, arguments: list[str]) -> Any:
    """Return the config that `rlzmq train` makes of a command line."""
    return _config(algorithm, _parse(algorithm, arguments))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: f"{preset.algorithm}-{preset.name}")
def test_every_preset_is_valid_and_says_where_it_is_from(preset: Preset) -> None:
    for num_learners in (0, 1, 2, 4):
        config = get_config_class(preset.algorithm)()
        env = {"ALE/*": "ALE/Pong-v5", "*": "Pendulum-v1"}.get(preset.env)
        preset.apply(config, env)
        if not config.is_online:
            config.offline_data(input_="recorded")
        config.learners(num_learners=num_learners).validate()
    assert preset.source
    assert (preset.target is None) == (preset.budget is None) == (not preset.seeds) == (not preset.curve)
    assert preset.target is None or len(preset.seeds) >= 3
    assert all(0 < steps <= (preset.budget or 0) for steps in preset.seeds.values())
    steps = [steps for steps, _ in preset.curve]
    assert steps == sorted(set(steps))
    assert not steps or steps[-1] == preset.seeds["1"]
    assert not steps or preset.curve[-1][1] >= (preset.target or 0)
    assert find_preset(preset.algorithm, preset.name.upper()) is preset
    assert preset_for(preset.algorithm, preset.name) is preset


def test_a_pattern_takes_the_environment_from_the_caller() -> None:
    config = PPOConfig.preset("ALE/Pong-v5")
    assert (config.env, config.is_atari, config.clip_param) == ("ALE/Pong-v5", True, 0.1)
    with pytest.raises(ConfigurationError, match=r"preset 'ALE/\*' is for several environments"):
        PPOConfig.preset("ALE/*")
    for arguments in (["--env", "ALE/Pong-v5"], ["--preset", "ALE/Pong-v5"]):
        flags = parsed("ppo", [*arguments, "--quiet"])
        assert flags.to_dict() == config.to_dict()


def test_rllibs_defaults_are_a_preset_for_any_environment_and_never_chosen_unasked(capsys: Any) -> None:
    assert preset_for("sac", "Acrobot-v1") is None
    config = SACConfig.preset("rllib", env="Acrobot-v1")
    assert (config.env, config.actor_lr, config.td_error_loss_fn) == ("Acrobot-v1", 3e-5, "huber")
    assert (SACConfig().actor_lr, SACConfig().td_error_loss_fn) == (3e-4, "mse")
    assert PPOConfig.preset("rllib", env="Acrobot-v1").vf_clip_param == 10.0
    flags = parsed("sac", ["--preset", "rllib", "--env", "Acrobot-v1"])
    assert flags.to_dict() == config.to_dict()
    assert "the preset for rllib" in capsys.readouterr().out
    parsed("sac", ["--env", "Acrobot-v1"])
    assert "settings: SAC's defaults: no preset is for Acrobot-v1" in capsys.readouterr().out


def test_what_several_processes_change_is_said_when_a_run_is_built() -> None:
    assert PPOConfig().learners(num_learners=1).build_notes() == []
    config = SACConfig().env_runners(num_env_runners=2, rollout_fragment_length=4).learners(num_learners=3)
    batches, ratio = config.training(train_batch_size_per_learner=100).build_notes()
    assert "3 learners train 100 env steps each, so an update has 300" in batches
    assert "for every 8 env steps" in ratio
    assert f"training_intensity={300 / 4:g}" in ratio
    assert len(config.training(training_intensity=8.0).build_notes()) == 1


def test_a_preset_by_name_brings_its_environment_or_takes_another() -> None:
    config = parsed("ppo", ["--preset", "stateless-cartpole", "--lr", "1e-4", "--quiet"])
    assert config.to_dict() == PPOConfig.preset("stateless-cartpole").training(lr=1e-4).to_dict()
    assert config.env == "rlzmq.envs.examples:StatelessCartPole"
    other = parsed("ppo", ["--preset", "cartpole", "--env", "Acrobot-v1", "--quiet"])
    assert (other.env, other.clip_param) == ("Acrobot-v1", 0.2)
    with pytest.raises(ConfigurationError, match="ppo has no preset 'cartpol'"):
        parsed("ppo", ["--preset", "cartpol"])


def test_a_checkpoint_with_a_presets_code_needs_no_trust() -> None:
    for preset in PRESETS:
        config = get_config_class(preset.algorithm)()
        env = {"ALE/*": "ALE/Pong-v5", "*": "Pendulum-v1"}.get(preset.env)
        preset.apply(config, env)
        stored = config.get_state()
        assert all(map(NOBODY.covers, code_names(stored))), (preset.name, stored)


def test_the_command_lists_all_presets_and_shows_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    listed = capsys.readouterr().out.splitlines()[: 2 * len(PRESETS)]
    assert [line.split()[:2] for line in listed[::2]] == [[p.algorithm, p.name] for p in PRESETS]
    assert [line.strip() for line in listed[1::2]] == [p.source for p in PRESETS]
    assert main(["presets", "ppo", "cartpole"]) == 0
    shown = capsys.readouterr().out
    assert f"seed 1: {presets_of('ppo')['CartPole-v1'].seeds['1']:,} env steps" in shown
    _, _, text = shown.partition("$ rlzmq train ppo --preset 'CartPole-v1'\n")
    assert PPOConfig.from_toml(text).to_dict() == PPOConfig.preset("cartpole").to_dict()
    assert main(["presets", "sac"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()[:-2:2]} == {"sac"}
    assert main(["presets", "pp"]) == 78
    assert "Did you mean 'ppo'" in capsys.readouterr().err


def test_config_files_and_flags_win_over_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[training]\nlr = 5e-05\n")  # the algorithm's own default, given on purpose
    arguments = ["--env", "CartPole-v1", "--config", str(file), "--num-epochs", "3", "--quiet"]
    config = parsed("ppo", arguments)
    assert (config.lr, config.num_epochs, config.clip_param, config.vf_clip_param) == (5e-5, 3, 0.2, None)
    plain = parsed("ppo", [*arguments, "--preset", "none"])
    assert (plain.lr, plain.num_epochs, plain.clip_param) == (5e-5, 3, 0.3)


def test_an_unknown_preset_names_the_closest() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'CartPole-v1'"):
        PPOConfig.preset("CartPol-v1")

    class MyConfig(PPOConfig):
        pass

    assert isinstance(MyConfig.preset("pendulum"), MyConfig)


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("CartPole-v1", "PPOConfig().environment('CartPole-v1').build()"),
        (PPOConfig, "PPOConfig().environment(…).build()"),
    ],
)
def test_an_algorithm_made_of_something_else_says_what_to_write(given: object, advice: str) -> None:
    with pytest.raises(TypeError) as caught:
        PPO(given)
    assert advice in str(caught.value)
