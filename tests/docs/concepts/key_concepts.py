"""Key concepts: an algorithm, env runners as actors that sample in parallel, a learner as an actor."""

import asyncio

import gymnasium as gym

from rlzmq import ActorSystem, DefaultModelConfig, PPOConfig, SingleAgentEnvRunner

config = PPOConfig().environment("CartPole-v1").training(train_batch_size_per_learner=200, lr=0.0004)
algo = config.build()
assert algo.train()["num_env_steps_sampled_lifetime"] == 200
algo.stop()

config = PPOConfig().environment("Acrobot-v1").env_runners(num_env_runners=2, num_envs_per_env_runner=1)


async def gather_experiences():
    async with ActorSystem() as system:
        env_runners = [
            await system.spawn(SingleAgentEnvRunner, config=config) for _ in range(config.num_env_runners)
        ]
        return await asyncio.gather(*(runner.sample(num_episodes=1) for runner in env_runners))


episodes = asyncio.run(gather_experiences())
assert len(episodes) == 2
assert all(len(of_runner) == 1 for of_runner in episodes)
flat = [episode for of_runner in episodes for episode in of_runner]
assert all(episode.get_return() <= 0.0 for episode in flat)

config = (
    PPOConfig()
    .environment("Acrobot-v1")
    .training(lr=0.0001, num_epochs=1)
    .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 32]))
)
ppo_learner_class = config.get_default_learner_class()


async def update_from_episodes():
    async with ActorSystem() as system:
        learner = await system.spawn(
            ppo_learner_class,
            config=config,
            module_spec=config.get_multi_rl_module_spec(env=gym.make("Acrobot-v1")),
        )
        await learner.build()
        return await learner.update(episodes=flat)


results = asyncio.run(update_from_episodes())
assert isinstance(float(results["default_policy"]["policy_loss"]), float)
