"""Words of Stable-Baselines3, RL Zoo, RLlib, CleanRL, TorchRL, Tianshou: each is answered with what to write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import pytest

import rlzmq
from rlzmq import Algorithm, Policy
from rlzmq.cli.main import main
from tests.support.runs import small

ENV = gym.make("CartPole-v1")


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Algorithm, dict[str, object], Policy]]:
    with small().build() as algo:
        result = algo.train()
        yield algo, result, Policy.load(algo.save_to_path(tmp_path_factory.mktemp("run") / "checkpoint"))


CONFIGS = {
    'PPO("MlpPolicy", ENV)': "PPOConfig().environment(env)",
    'PPOConfig("CartPole-v1")': "PPOConfig().environment(…)",
    "PPOConfig(lr=1e-3)": ".training(lr=…)",
    "PPOConfig().rollouts(num_rollout_workers=2)": "env_runners(num_env_runners=…)",
    "PPOConfig().training(n_steps=128)": ".training(train_batch_size_per_learner=…)",
    "PPOConfig().framework('tf2')": "except for 'torch'",
    "DQNConfig().training(buffer_size=1000)": ".training(replay_buffer_config=…)",
    "PPOConfig().training(frames_per_batch=128)": ".training(train_batch_size_per_learner=…)",
    "PPOConfig().training(total_frames=1000)": "num_env_steps_sampled_lifetime",
    "DQNConfig().training(update_per_step=0.1)": ".training(training_intensity=…)",
    "PPOConfig().evaluation(episode_per_test=10)": ".evaluation(evaluation_duration=…)",
    "PPOConfig().evaluation(eval_env=ENV)": "evaluation_config={'env': …}",
    "PPOConfig().stop()": "rlzmq train --stop",
}
NAMES = {
    "A3CConfig": "IMPALA",
    "PPOTrainer": "PPOConfig",
    "make_vec_env": "num_envs_per_env_runner",
    "make": "gymnasium's",
    "rllib": "from rlzmq import",
    "get": "ActorSystem",
    "RandomRLModule": "_forward(batch) returns {'actions'",
    "TensorDictModule": "TorchRLModule builds in setup()",
    "spaces": "from gymnasium import spaces",
}
USES = {
    "algo.learn(total_timesteps=100)": "algo.train() in a loop",
    "algo.predict(ENV.reset()[0])": "compute_action(observation)",
    "algo.load('run')": "Policy.load(path)",
    "algo.compute_action(ENV.reset())": "you passed (observation, info)",
    "result['episode_reward_mean']": "result['env_runners']['episode_return_mean']",
    "algo.train(1000)": "each call is one iteration",
    "policy.get_initial_state()": "policy.reset()",
}
FLAGS = {
    "--learning-rate 1e-3": "--lr",
    "--timesteps 1000": "--stop steps=",
    "--stop reward=200": "--stop return=200",
    "--tensorboard-log logs": "--log tb",
    "--capture-video": "rlzmq evaluate",
    "--lr-schedule linear": "--lr '[[",
    "--max-episode-steps 200": "TimeLimit(max_episode_steps=",
    "--upload-model": "copied anywhere",
}


def _check(text: str, answer: str) -> None:
    assert answer in text
    assert "Valid:" not in text
    assert "Did you mean" not in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("code", CONFIGS)
def test_a_word_about_configs(code: str) -> None:
    with pytest.raises((TypeError, AttributeError, rlzmq.ConfigurationError)) as caught:
        exec(f"from rlzmq import *\n{code}", {"ENV": ENV})
    _check(str(caught.value), CONFIGS[code])


@pytest.mark.parametrize("name", NAMES)
def test_a_name_to_import(name: str) -> None:
    with pytest.raises(ImportError) as imported:
        exec(f"from rlzmq import {name}")
    _check(str(imported.value), NAMES[name])
    with pytest.raises(AttributeError) as read:
        getattr(rlzmq, name)
    _check(str(read.value), NAMES[name])


@pytest.mark.parametrize("code", USES)
def test_a_word_about_algorithms_policies_and_results(
    code: str, trained: tuple[Algorithm, dict[str, object], Policy]
) -> None:
    algo, result, policy = trained
    with pytest.raises((TypeError, AttributeError, KeyError, ValueError)) as caught:
        exec(code, {"algo": algo, "result": result, "policy": policy, "ENV": ENV})
    _check(str(caught.value.args[0]), USES[code])


@pytest.mark.parametrize("flags", FLAGS)
def test_a_word_on_the_command_line(
    flags: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "ppo", "--quiet", "--env", "CartPole-v1", *flags.split()]) in (2, 78)
    _check(capsys.readouterr().err, FLAGS[flags])


@pytest.mark.parametrize(("name", "answer"), [("a2c", "PPO"), ("ddpg", "TD3"), ("TRPO", "PPO")])
def test_an_algorithm_on_the_command_line(name: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", name, "--env", "CartPole-v1"]) == 78
    _check(capsys.readouterr().err, answer)


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("learn ppo", "rlzmq train"), ("enjoy --algo ppo", "rlzmq evaluate"), ("resume run", "--resume"),
        ("train --algo ppo --env CartPole-v1 -n 100000", "rlzmq train ppo --env CartPole-v1 -n 100000"),
        ("train CartPole-v1", "rlzmq train ppo --env CartPole-v1"), ("record run --out d", "--output"),
        ("train ppo --env CartPole-v1 --buffer-size 3", "--replay-buffer-config of "),
        ("evaluate run --deterministic", "without --explore"), ("serve run -p 80", "--port"),
        ("tune ppo --n-trials 3", "--trials"), ("check-env CartPole-v1 --num-steps 3", "--steps"),
    ],
)  # fmt: skip
def test_a_command(line: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    _check(capsys.readouterr().err, answer)


def test_a_request_with_observation_is_told_obs() -> None:
    pytest.importorskip("starlette")
    from rlzmq.deploy.policy_server import RequestError, _parsed

    with pytest.raises(RequestError) as caught:
        _parsed(b'{"observation": [0, 0, 0, 0]}')
    _check(str(caught.value), "'obs'")
