"""Advanced APIs, fault tolerance and the new API stack's settings: evaluation, curricula, recovery, schedules."""

import gymnasium as gym

from rlzmq import MeanStdFilter, PPOConfig, RLlibCallback

config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0)
config.evaluation(evaluation_interval=1)
config.evaluation(evaluation_duration=2, evaluation_duration_unit="episodes")
config.evaluation(evaluation_config={"env_config": {"max_episode_steps": 30}, "explore": False})


def custom_eval_function(algorithm, eval_workers):
    assert eval_workers is not None
    episodes = algorithm.eval_env_runner_group.sample(num_episodes=2)
    returns = [episode.get_return() for episode in episodes]
    return {"episode_return_mean": sum(returns) / len(returns)}, sum(map(len, episodes)), 0


algo = config.build()
result = algo.train()["evaluation"]["env_runners"]
assert result["num_episodes"] == 2
assert result["episode_len_max"] <= 30
algo.stop()

config.evaluation(custom_evaluation_function=custom_eval_function)
algo = config.build()
assert 0.0 < algo.train()["evaluation"]["env_runners"]["episode_return_mean"] <= 30.0
algo.stop()

parallel = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=1)
    .evaluation(
        evaluation_interval=1,
        evaluation_num_env_runners=1,
        evaluation_parallel_to_training=True,
        evaluation_duration="auto",
    )
    .fault_tolerance(
        restart_failed_env_runners=True,
        restart_failed_sub_environments=True,
        ignore_env_runner_failures=False,
        num_consecutive_env_runner_failures_tolerance=3,
    )
)
algo = parallel.build()
assert "evaluation" in algo.train()
assert algo.env_runner_group.num_healthy_remote_workers() == 1
algo.stop()


class Levels(gym.Wrapper):
    def __init__(self, config=None):
        super().__init__(gym.make("CartPole-v1"))
        self.task = 0

    def set_task(self, task):
        self.task = task
        return self.task


class Curriculum(RLlibCallback):
    def on_train_result(self, algorithm, result, **kwargs):
        task = 2 if result["env_runners"]["episode_return_mean"] > 0 else 1
        algorithm.env_runner_group.foreach_env_runner(
            lambda runner: runner.foreach_env(lambda env: env.get_wrapper_attr("set_task")(task))
        )


algo = (
    PPOConfig()
    .environment(Levels)
    .env_runners(num_env_runners=1, num_envs_per_env_runner=2)
    .callbacks(Curriculum)
    .build()
)
algo.train()
assert algo.env_runner_group.foreach_env(lambda env: env.get_wrapper_attr("task")) == [[2, 2]]
algo.stop()

# settings of the migration guide
config = PPOConfig().environment("CartPole-v1")
config.api_stack(enable_rl_module_and_learner=True, enable_env_runner_and_connector_v2=True)
config.framework("torch")
config.learners(num_learners=2, num_cpus_per_learner=1, num_gpus_per_learner=0)
config.resources(num_cpus_for_main_process=0)
config.training(train_batch_size_per_learner=512, lr=[[0, 1e-5], [1000000, 1e-4]])
config.training(entropy_coeff=[[0, 0.05], [1000000, 0.1], [1000001, 0.0]])
config.env_runners(num_env_runners=0, env_to_module_connector=lambda env: MeanStdFilter(multi_agent=False))
config.env_runners(explore=True)
config.learners(num_learners=0, learner_config_dict={"my_setting": 1})
algo = config.build()
settings = algo.learner_group.foreach_learner(lambda learner: learner.config.learner_config_dict)
assert settings == [{"my_setting": 1}]
result = algo.train()
assert 1e-5 <= result["learners"]["default_policy"]["default_optimizer_learning_rate"] < 2e-5
algo.stop()
