"""Callbacks: lambdas, classes with state, lists of both in their order, metrics of one's own."""

import math

import numpy as np

from rlzmq import PPOConfig, RLlibCallback

called, returns = [], []


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
    on_episode_end=(lambda episode, **kw: returns.append(episode.get_return())),
)
ppo = config.build()
ppo.train()
ppo.stop()
assert called == ["debug subclass", "RLlibCallback subclass", "lambda 1", "lambda 2"]
assert returns


class LogAcrobotAngle(RLlibCallback):
    def on_episode_created(self, *, episode, **kwargs):
        episode.custom_data["theta1"] = []

    def on_episode_start(self, *, episode, env_runner, metrics_logger, env, env_index, rl_module, **kwargs):
        assert metrics_logger.peek("episode_return_mean", default=0.0) is not None
        assert env_index == 0
        assert rl_module is env_runner.module

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
