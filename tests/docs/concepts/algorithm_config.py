"""AlgorithmConfig: generic settings, settings of an algorithm, a config that goes on changing after a build."""

from rlzmq import AlgorithmConfig, PPOConfig, PPOTorchLearner

config = AlgorithmConfig().training(lr=0.0005).learners(num_learners=2)
config.environment(env="CartPole-v1")
assert (config.lr, config.num_learners, config.env) == (0.0005, 2, "CartPole-v1")

config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0).training(lr=0.0004)
config.training(entropy_coeff=0.01)
ppo = config.build_algo()
config.training(lr=0.00123)
another_ppo = config.build_algo()
assert (ppo.config.lr, another_ppo.config.lr) == (0.0004, 0.00123)
ppo.stop()
another_ppo.stop()

config.learners(num_learners=2).training(train_batch_size_per_learner=256)
assert config.total_train_batch_size == 512

# facts of a config that other code asks for
assert config.framework_str == "torch"
assert config.is_online
assert not config.is_offline
assert not config.is_multi_agent
assert config.learner_class is PPOTorchLearner
config.training(learner_class=PPOTorchLearner)
config.debugging(log_level="WARN")
assert config.log_level == "WARN"
config.api_stack(enable_rl_module_and_learner=True, enable_env_runner_and_connector_v2=True)
assert config.rl_module_spec.module_class is not None
