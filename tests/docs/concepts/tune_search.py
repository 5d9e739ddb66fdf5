"""Tune's example of the page of key concepts, with a small batch."""

from rlzmq import PPOConfig, tune

config = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=0)
    .training(lr=tune.grid_search([0.001, 0.0005]), train_batch_size_per_learner=1000, num_epochs=1)
)
results = tune.Tuner(
    "PPO",
    param_space=config,
    run_config=tune.RunConfig(stop={"num_env_steps_sampled_lifetime": 1000}),
).fit()
assert len(results) == 2
assert not results.errors
best = results.get_best_result(metric="env_runners/episode_return_mean", mode="max")
assert best.checkpoint is not None
