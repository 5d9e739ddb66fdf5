"""Callbacks: lambdas, classes with state, lists of both in their order, metrics of one's own."""

import math

import numpy as np

from rlzmq import PPOConfig, RLlibCallback

returns = []
ppo = config = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=0)
    .callbacks(on_episode_end=(lambda episode, **kw: returns.append(episode.get_return())))
    .build()
)
ppo.train()
ppo.stop()
assert returns


class EpisodeReturn(RLlibCallback):
    def __init__(self):
        super().__init__()
        self.overall_sum_of_rewards = 0.0

    def on_episode_end(self, *, episode, **kwargs):
        self.overall_sum_of_rewards += episode.get_return()
        print(f"Episode done. R={episode.get_return()} Global SUM={self.overall_sum_of_rewards}")


ppo = PPOConfig().environment("CartPole-v1").callbacks(EpisodeReturn).build()
ppo.train()
ppo.stop()

called = []


class MyCallbacks(RLlibCallback):
    def on_train_result(self, *, algorithm, metrics_logger, result, **kwargs):
        called.append("RLlibCallback subclass")


class MyDebugCallbacks(RLlibCallback):
    def on_train_result(self, *, algorithm, metrics_logger, result, **kwargs):
        called.append("debug subclass")


config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0)
config.callbacks(
    callbacks_class=[MyDebugCallbacks, MyCallbacks],
    on_train_result=[
        lambda algorithm, **kw: called.append("lambda 1"),
        lambda algorithm, **kw: called.append("lambda 2"),
    ],
)
ppo = config.build()
ppo.train()
ppo.stop()
assert called == ["debug subclass", "RLlibCallback subclass", "lambda 1", "lambda 2"]

iterations = []


def _note_every_second(algorithm, metrics_logger, result):
    if algorithm.training_iteration % 2 == 0:
        iterations.append(algorithm.training_iteration)


ppo = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=0)
    .callbacks(on_train_result=_note_every_second)
    .build()
)
for _ in range(2):
    ppo.train()
ppo.stop()
assert iterations == [2]


class LogAcrobotAngle(RLlibCallback):
    def on_episode_created(self, *, episode, **kwargs):
        episode.custom_data["theta1"] = []

    def on_episode_step(self, *, episode, env, **kwargs):
        cos_theta1, sin_theta1 = env.envs[0].unwrapped.state[0], env.envs[0].unwrapped.state[1]
        episode.custom_data["theta1"].append(math.degrees(math.atan2(sin_theta1, cos_theta1)))

    def on_episode_end(self, *, episode, metrics_logger, env_runner, **kwargs):
        assert env_runner.config.in_evaluation is False
        metrics_logger.log_value(
            "theta1_mean", np.mean(episode.custom_data["theta1"]), reduce="mean", window=50
        )


ppo = (
    PPOConfig()
    .environment("Acrobot-v1", env_config={"max_episode_steps": 100})
    .env_runners(num_env_runners=0)
    .callbacks(callbacks_class=LogAcrobotAngle)
    .build()
)
for _ in range(2):
    results = ppo.train()
assert math.isfinite(results["env_runners"]["theta1_mean"])
assert results["env_runners"]["episode_return_mean"] <= 0.0
ppo.stop()


class StartArguments(RLlibCallback):
    def on_episode_start(self, *, episode, env_runner, metrics_logger, env, env_index, rl_module, **kwargs):
        assert metrics_logger.peek("episode_return_mean", default=0.0) is not None
        assert env_index in (0, 1)
        assert rl_module is env_runner.module


ppo = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=0, num_envs_per_env_runner=2)
    .callbacks(StartArguments)
    .build()
)
ppo.train()
ppo.stop()
