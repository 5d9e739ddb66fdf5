"""Words of Stable-Baselines3, RL Zoo, RLlib's old stack, CleanRL, Tianshou: each is answered with what to write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import pytest

import rlzmq
from rlzmq import Algorithm, Policy, PPOConfig
from rlzmq.cli.main import main

ENV = gym.make("CartPole-v1")


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Algorithm, dict[str, object], Policy]]:
    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0).debugging(seed=0)
    config.training(train_batch_size_per_learner=64, minibatch_size=64, num_epochs=1)
    with config.build() as algo:
        result = algo.train()
        yield algo, result, Policy.load(algo.save_to_path(tmp_path_factory.mktemp("run") / "checkpoint"))


CONFIGS = {
    'PPO("MlpPolicy", ENV)': "PPOConfig().environment(env)",
    'PPO("CartPole-v1")': "PPOConfig().environment('CartPole-v1').build()",
    'PPOConfig("CartPole-v1")': "PPOConfig().environment(…)",
    'PPOConfig({"lr": 1e-3})': "PPOConfig().update_from_dict({…})",
    "PPOConfig(lr=1e-3)": ".training(lr=…)",
    'PPOConfig(env="CartPole-v1")': ".environment(env=…)",
    "PPOConfig(num_workers=2)": ".env_runners(num_env_runners=…)",
    "PPOConfig().learn(1000)": "algo.train() in a loop",
    "PPOConfig().rollouts(num_rollout_workers=2)": "env_runners(num_env_runners=…)",
    "PPOConfig().exploration(explore=False)": "env_runners(explore=…)",
    "PPOConfig().resources(num_gpus=1)": "learners(num_gpus_per_learner=…)",
    "PPOConfig().training(n_steps=128)": ".training(train_batch_size_per_learner=…)",
    "PPOConfig().training(n_epochs=4)": ".training(num_epochs=…)",
    "PPOConfig().training(batch_size=64)": ".training(minibatch_size=…)",
    "PPOConfig().training(ent_coef=0.1)": ".training(entropy_coeff=…)",
    "PPOConfig().training(vf_coef=0.5)": ".training(vf_loss_coeff=…)",
    "PPOConfig().training(gae_lambda=0.95)": ".training(lambda_=…)",
    "PPOConfig().training(clip_range=0.2)": ".training(clip_param=…)",
    "PPOConfig().training(max_grad_norm=0.5)": ".training(grad_clip=…)",
    "PPOConfig().training(norm_adv=True)": ".training(standardize_advantages=…)",
    "PPOConfig().training(policy_kwargs={})": ".rl_module(model_config=…)",
    "PPOConfig().training(device='cuda')": ".learners(num_gpus_per_learner=…)",
    "PPOConfig().training(seed=1)": ".debugging(seed=…)",
    "PPOConfig().training(verbose=1)": "debugging(log_level=…)",
    "PPOConfig().training(tensorboard_log='logs')": "--log tb",
    "PPOConfig().env_runners(num_envs=2)": ".env_runners(num_envs_per_env_runner=…)",
    "PPOConfig().environment(env_kwargs={})": ".environment(env_config=…)",
    "PPOConfig().framework('tf2')": "except for 'torch'",
    "DQNConfig().training(buffer_size=1000)": ".training(replay_buffer_config=…)",
    "DQNConfig().training(learning_starts=100)": ".training(num_steps_sampled_before_learning_starts=…)",
    "DQNConfig().training(exploration_fraction=0.1)": ".training(epsilon=…)",
    "DQNConfig().training(train_freq=4)": ".training(training_intensity=…)",
    "DQNConfig().training(target_update_interval=1)": ".training(target_network_update_freq=…)",
    "SACConfig().training(ent_coef=0.1)": ".training(initial_alpha=…)",
    "SACConfig().training(policy_lr=0.1)": ".training(actor_lr=…)",
    "SACConfig().training(q_lr=0.1)": ".training(critic_lr=…)",
    "PPOConfig().training(discount_factor=0.99)": ".training(gamma=…)",
    "PPOConfig().training(optimizer='adam')": "configure_optimizers_for_module",
    "PPOConfig().training(use_sde=True)": "no state-dependent exploration",
    "PPOConfig().training(stats_window_size=100)": ".reporting(metrics_num_episodes_for_smoothing=…)",
    "PPOConfig().evaluation(evaluation_num_workers=2)": ".evaluation(evaluation_num_env_runners=…)",
    "PPOConfig().evaluation(evaluation_num_episodes=2)": ".evaluation(evaluation_duration=…)",
    "PPOConfig().evaluation(eval_freq=2)": ".evaluation(evaluation_interval=…)",
    "PPOConfig().env_runners(num_cpus_per_worker=1)": "processes have no quota",
    "PPOConfig().env_runners(observation_filter='MeanStdFilter')": "env_to_module_connector",
    "PPOConfig().env_runners(remote_worker_envs=True)": "gym_env_vectorize_mode",
    "PPOConfig().checkpointing(checkpoint_frequency=3)": ".checkpointing(checkpoint_every_s=…)",
    "PPOConfig().fault_tolerance(recreate_failed_workers=True)": "restart_failed_env_runners",
    "DQNConfig().training(estimation_step=3)": ".training(n_step=…)",
    "DQNConfig().training(eps_test=0.05)": "{'explore': False}",
    "SACConfig().training(autotune=True)": ".training(target_entropy=…)",
    "SACConfig().training(policy_frequency=2)": "TD3",
    "TD3Config().training(policy_freq=2)": ".training(policy_delay=…)",
    "TD3Config().training(action_noise=0.1)": ".training(exploration_noise=…)",
    "DQNConfig().training(optimize_memory_usage=True)": "stores each observation once",
    "SACConfig().training(polyak=0.5)": ".training(tau=…)",
    "PPOConfig().training(rollout_buffer_class=None)": "algo.env_runner_group.sample(…)",
    "PPOConfig().training(create_eval_env=True)": "leave it out",
    "PPOConfig().evaluation(best_model_save_path='x')": "algo.keep_checkpoints(directory)",
    "PPOConfig().evaluation(eval_env=ENV)": "evaluation_config={'env': …}",
    "PPOConfig().experimental(_enable_new_api_stack=True)": "only the new API stack",
    "PPOConfig().stop()": "rlzmq train --stop",
    "PPO.load('run')": "Policy.load(path)",
}
NAMES = {
    "A2C": "PPO",
    "A3CConfig": "IMPALA",
    "DDPG": "TD3",
    "RecurrentPPO": "use_lstm",
    "PPOTrainer": "PPOConfig",
    "make_vec_env": "num_envs_per_env_runner",
    "VecNormalize": "MeanStdFilter",
    "VecFrameStack": "FrameStackingEnvToModule",
    "BaseCallback": "Callback",
    "Monitor": "returns and lengths",
    "MlpPolicy": "model_config",
    "check_env": "rlzmq check-env",
    "evaluate_policy": "rlzmq evaluate",
    "Trainer": "algo.train() in a loop",
    "Collector": "SingleAgentEnvRunner",
    "PPOPolicy": "Policy.load(run)",
    "make": "gymnasium's",
    "RecordVideo": "--video",
    "get_schedule_fn": "training(lr=[",
    "set_random_seed": "debugging(seed=…)",
    "StopTrainingOnRewardThreshold": "--stop return=",
    "NormalActionNoise": "exploration_noise",
    "results_plotter": "rlzmq plot",
    "safe_mean": "numpy.mean",
    "register": "register_env",
    "rllib": "from rlzmq import",
    "init": "no cluster",
    "shutdown": "algo.stop()",
    "CheckpointCallback": "algo.keep_checkpoints(directory)",
    "StopTrainingOnNoModelImprovement": "algo.train()",
    "ProgressBarCallback": "shows its progress",
    "WandbCallback": "--log wandb",
    "configure": "--log tb",
    "RolloutBuffer": "forgotten",
    "PrioritizedReplayBuffer": "PrioritizedEpisodeReplayBuffer",
    "VecTransposeImage": "take images",
    "ActionMasker": "action_mask",
    "CombinedExtractor": "TorchRLModule",
    "GAIL": "BC or MARWIL",
    "get": "ActorSystem",
    "serve": "rlzmq serve RUN",
    "spaces": "from gymnasium import spaces",
    "Box": "from gymnasium.spaces import Box",
    "TimeLimit": "environment(wrappers=['TimeLimit(…)'])",
    "make_vec": "from gymnasium import make_vec",
    "with_parameters": "from rlzmq.tune import with_parameters",
    "ClipPPOLoss": "compute_loss_for_module",
}
USES = {
    "algo.learn(total_timesteps=100)": "algo.train() in a loop",
    "algo.predict(ENV.reset()[0])": "compute_action(observation)",
    "algo.compute_actions([])": "policy.compute_actions(observations)",
    "algo.load('run')": "Policy.load(path)",
    "algo.workers": "algo.env_runner_group",
    "algo.policy": "algo.get_module()",
    "algo.set_env(ENV)": "config.environment(env)",
    "algo.export_model('file')": "rlzmq export",
    "algo.compute_action(ENV.reset())": "you passed (observation, info)",
    "policy.compute_action(ENV.step(0))": "you passed (observation, reward, terminated, truncated, info)",
    "result['episode_reward_mean']": "result['env_runners']['episode_return_mean']",
    "result['episode_len_mean']": "result['env_runners']['episode_len_mean']",
    "result['timesteps_total']": "result['num_env_steps_sampled_lifetime']",
    "result['episodes_total']": "result['env_runners']['num_episodes_lifetime']",
    "result['info']": "result['learners']['default_policy']",
    "result['num_env_steps_trained']": "result['num_env_steps_trained_lifetime']",
    "algo.train(1000)": "each call is one iteration",
    "algo.save_replay_buffer('x')": "checkpoint_replay=True",
    "algo.close()": "algo.stop()",
    "algo.get_config()": "algo.config",
    "algo.logger": "--log tb",
    "policy.get_initial_state()": "policy.reset()",
    "policy.evaluate()": "evaluate_checkpoint(run)",
}
FLAGS = {
    "--learning-rate 1e-3": "--lr",
    "--timesteps 1000": "--stop steps=",
    "--stop reward=200": "--stop return=200",
    "--stop timesteps_total=200": "--stop steps=200",
    "--stop-reward 200": "--stop return=",
    "--stop-iters 200": "--stop iterations=",
    "--device cuda": "--num-gpus-per-learner 1",
    "--num-workers 2": "--num-env-runners",
    "--n-envs 2": "--num-envs-per-env-runner",
    "--n-steps 128": "--train-batch-size-per-learner",
    "--ent-coef 0.1": "--entropy-coeff",
    "--gae-lambda 0.9": "--lambda",
    "--clip-range 0.9": "--clip-param",
    "--env-id CartPole-v1": "--env",
    "--tensorboard-log logs": "--log tb",
    "--track": "--log wandb",
    "--log-folder logs": "--run-dir",
    "--checkpoint-freq 10": "--checkpoint-every-s",
    "--eval-freq 10": "--evaluation-interval",
    "--capture-video": "rlzmq evaluate",
    "--lr-schedule linear": "--lr '[[",
    "--hidden-sizes 64 64": "fcnet_hiddens",
    "--epochs 2": "--num-epochs",
    "--save-model": "checkpoints are written",
    "--no-cuda": "--num-gpus-per-learner 0",
    "--gpu 0": "--num-gpus-per-learner",
    "--framework tf2": "PyTorch",
    "--input shards": "rlzmq train bc",
    "--vec-env subproc": "--gym-env-vectorize-mode",
    "--conf-file a.yml": "--config",
    "--optimize": "rlzmq tune",
    "--resume-from a": "--resume",
    "--torch-deterministic": "--seed",
    "--lstm": "use_lstm=true",
    "--render-mode human": "--video",
    "--frame-stack 4": "FrameStackObservation",
    "--force": "--overwrite",
    "--wandb-entity me": "WANDB_ENTITY",
    "--max-episode-steps 200": "TimeLimit(max_episode_steps=",
    "--reward-scale 0.1": "NormalizeReward",
    "--atari": "--is-atari",
    "--local-mode": "--num-env-runners 0",
    "--policy MlpPolicy": "default networks",
    "--max-time 60": "--stop time=",
    "--sampler tpe": "[tune] table",
    "--save-replay-buffer": "--checkpoint-replay",
    "--log-interval 10": "metrics.jsonl",
    "-P": "shows the progress",
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


def test_a_name_of_rllibs_old_stack_in_its_own_module() -> None:
    with pytest.raises(ImportError) as caught:
        exec("from rlzmq.algorithms.ppo import PPOTrainer")
    _check(str(caught.value), "PPOConfig")


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
    [("learn ppo", "rlzmq train"), ("enjoy --algo ppo", "rlzmq evaluate"), ("play run", "rlzmq evaluate"),
     ("tensorboard runs", "--log tb"), ("optimize", "rlzmq tune"), ("init", "nothing to start"),
     ("resume run", "rlzmq train ALGORITHM --resume"), ("stop run", "rlzmq launch stop"), ("version", "--version"),
     ("status run", "rlzmq top"), ("predict run", "rlzmq serve"), ("worker", "rlzmq runner"), ("envs", "check-env"),
     ("train --algo ppo --env CartPole-v1 -n 100000", "rlzmq train ppo --env CartPole-v1 -n 100000"),
     ("train CartPole-v1", "rlzmq train ppo --env CartPole-v1"),
     ("train ppo --env CartPole-v1 --buffer-size 3", "--replay-buffer-config of "),
     ("record run -o d --num-env-runners 2", "--env-runners"), ("record run --out d", "--output"),
     ("record run -o d --num-envs 3", "--envs-per-env-runner"), ("record run -o d -n 3", "--episodes"),
     ("evaluate run --num-episodes 3", "--episodes"), ("evaluate run --deterministic", "without --explore"),
     ("evaluate run --render", "--video"), ("evaluate run --output x", "--json"), ("serve run -p 80", "--port"),
     ("scale run --num-learners 2", "--learners"), ("demo --runners 1", "--env-runners"),
     ("export run --onnx", "--format onnx"), ("plot run --save x", "--output"),
     ("tune ppo --jobs 3", "--max-concurrent"),
     ("tune ppo --run-dir x", "--dir"), ("tune ppo --timeout 3", "--time-budget"),
     ("tune ppo --n-trials 3", "--trials"),
     ("check-env CartPole-v1 --num-steps 3", "--steps"), ("launch stop run --timeout 3", "--grace"),
     ("top --refresh 3", "--interval"), ("runner --address x", "--join")],
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
