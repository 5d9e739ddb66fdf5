"""Sampling speed of one env runner against a bare loop, and RLlib's runner.

CartPole-v1, MLP 2×64, categorical actions; also with an LSTM of 64, pieces in the env-to-module pipeline (a custom
per-episode one, MeanStdFilter, four stacked frames), images (84, 84, 4) of bytes with the default CNN, and two
agents with a module each. The bare loop is what one would write by hand for exactly that case: Gymnasium's own
vector env, the same torch module under ``inference_mode``, actions from the same distribution; it stores nothing.
The runners store whole episodes with log-probabilities. The resets of autoreset steps are not counted on any side.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from scripts.bench._core import Comparison, Side, Turn, timed

VECTOR = "vector_entry_point"
LEASE = 200  # vector steps per call
# variant: (how environments are vectorized, how many)
CASES = {
    "": [("sync", 1), ("sync", 8), ("sync", 32), ("sync", 256), (VECTOR, 8), (VECTOR, 32), (VECTOR, 256)],
    "lstm": [("sync", 8)],
    "custom piece": [("sync", 8)],
    "MeanStdFilter": [("sync", 8)],
    "stacked frames": [("sync", 8)],
    "images": [("sync", 8)],
    "two agents": [("sync", 8)],
}
NUM_FRAMES = 4
OF_RLLIB = ("", "lstm", "custom piece")  # images: its default CNN takes no bytes


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    for variant, sizes in CASES.items():
        for mode, num_envs in sizes:
            settings = {"variant": variant, "mode": mode, "num_envs": num_envs}
            sides = {"rlzmq": Side(rlzmq, settings), "bare": Side(bare, settings)}
            if variant in OF_RLLIB:
                sides["RLlib"] = Side(rllib, settings, "rllib")
            title = f"{variant or 'MLP'}, {'native vector' if mode == VECTOR else mode}, {num_envs} envs"
            yield Comparison(title, sides, turns=15, turn_s=0.25)


def configured(config: Any, base: Any, variant: str, mode: str, num_envs: int) -> Any:
    """Set a config of either library; `base` is its ConnectorV2."""
    model: dict[str, Any] = {"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh"}
    if variant == "lstm":
        model |= {"use_lstm": True, "lstm_cell_size": 64, "max_seq_len": 20}
    if variant == "custom piece":
        config.env_runners(env_to_module_connector=lambda env, spaces, device: halver(base)())
    if variant == "images":
        from scripts.bench._envs import Frames

        config.environment(Frames)
    else:
        config.environment("CartPole-v1").rl_module(model_config=model)
    return config.env_runners(num_envs_per_env_runner=num_envs, gym_env_vectorize_mode=mode).debugging(seed=0)


def halver(base: Any) -> Any:
    """A piece for either library that reads and rewrites each episode's last observation."""

    class HalveObservations(base):  # type: ignore[misc]
        def __call__(self, *, rl_module: Any, batch: Any, episodes: Any, **kwargs: Any) -> Any:
            for episode in self.single_agent_episode_iterator(episodes):
                episode.set_observations(new_data=episode.get_observations(-1) * 0.5, at_indices=-1)
            return batch

    return HalveObservations


def rlzmq(root: str = "", **settings: Any) -> Turn:
    """Return the sampling of the checkout in `root`, or of this one."""
    if root:
        sys.path.insert(0, root)
    runner = our_runner(**settings)
    return timed(lambda: runner.sample_lease(LEASE).num_env_steps)


def our_runner(variant: str, mode: str, num_envs: int) -> Any:
    from rlzmq import ConnectorV2, PPOConfig, SingleAgentEnvRunner

    config = configured(PPOConfig(), ConnectorV2, variant, mode, num_envs)
    if variant == "MeanStdFilter":
        from rlzmq.connectors.env_to_module import MeanStdFilter

        config.env_runners(env_to_module_connector=lambda env, spaces, device: MeanStdFilter())
    if variant == "stacked frames":
        from rlzmq.connectors.env_to_module import FrameStackingEnvToModule

        config.env_runners(
            env_to_module_connector=lambda env, spaces, device: FrameStackingEnvToModule(
                num_frames=NUM_FRAMES
            )
        )
    if variant == "two agents":
        from rlzmq import MultiAgentEnvRunner
        from rlzmq.envs.examples import MultiAgentCartPole, module_of_agent

        config.environment(MultiAgentCartPole, env_config={"num_agents": 2})
        config.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=module_of_agent)
        return MultiAgentEnvRunner(config=config)
    return SingleAgentEnvRunner(config=config)


def rllib(variant: str, mode: str, num_envs: int) -> Turn:
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.connectors.connector_v2 import ConnectorV2
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    config = configured(PPOConfig(), ConnectorV2, variant, mode, num_envs)
    config.env_runners(num_env_runners=0, rollout_fragment_length=LEASE)
    runner = SingleAgentEnvRunner(config=config, worker_index=0)
    return timed(lambda: sum(len(episode) for episode in runner.sample(num_timesteps=LEASE * num_envs)))


def bare(variant: str, mode: str, num_envs: int) -> Turn:
    module = our_runner(variant, mode, num_envs).module
    loops = {
        "custom piece": HalvedLoop,
        "MeanStdFilter": FilteredLoop,
        "stacked frames": StackedLoop,
        "two agents": MultiAgentLoop,
    }
    loop = loops.get(variant, BareLoop)(variant, mode, num_envs, module)
    return timed(lambda: LEASE * num_envs - loop.run(LEASE))


class BareLoop:
    """Env, module and sampling by hand."""

    def __init__(self, variant: str, mode: str, num_envs: int, module: Any) -> None:
        import gymnasium as gym
        import numpy as np
        import torch

        if variant == "images":
            from scripts.bench._envs import Frames

            self.env: Any = gym.vector.SyncVectorEnv([Frames] * num_envs)
        else:
            self.env = gym.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode=mode)
        self.module, self.num_envs = module, num_envs
        self.dist_cls = module.get_exploration_action_dist_cls()
        self.generator = torch.Generator().manual_seed(0)
        self.observations, _ = self.env.reset(seed=0)
        # Of the latest observations: which begin an episode, and which end one.
        self.is_first, self.is_done = np.ones(num_envs, bool), np.zeros(num_envs, bool)
        self.state: Any = None
        if module.is_stateful():
            from rlzmq.core.tree import tree_map

            initial = module.get_initial_state()
            self.state = tree_map(
                lambda leaf: torch.as_tensor(leaf)[None].repeat(num_envs, *[1] * leaf.ndim), initial
            )

    def run(self, num_steps: int) -> int:
        """Make vector steps; return how many rows of them were resets."""
        import torch

        env, forward, dist_cls = self.env, self.module.forward_exploration, self.dist_cls
        generator, observations, state = self.generator, self.observations, self.state
        done_flags = []
        with torch.inference_mode():
            for _ in range(num_steps):
                batch = {"obs": torch.from_numpy(self.preprocess(observations))}
                if state is not None:
                    batch = {"obs": batch["obs"].unsqueeze(1), "state_in": state}
                outputs = forward(batch)
                logits = outputs["action_dist_inputs"]
                if state is not None:
                    state, logits = outputs["state_out"], logits.squeeze(1)
                actions = dist_cls.from_logits(logits).sample(generator=generator).numpy()
                observations, _, terminated, truncated, _ = env.step(actions)
                self.is_first, self.is_done = self.is_done, terminated | truncated
                done_flags.append(self.is_done)
                if state is not None and self.is_first.any():
                    for leaf in state.values():
                        leaf[torch.from_numpy(self.is_first)] = 0.0
        self.observations, self.state = observations, state
        return sum(int(flags.sum()) for flags in done_flags)

    def preprocess(self, observations: Any) -> Any:
        """The module's inputs."""
        return observations


class HalvedLoop(BareLoop):
    """What the custom piece does."""

    def preprocess(self, observations: Any) -> Any:
        return observations * 0.5


class FilteredLoop(BareLoop):
    """Observations normalized by a running mean and variance, as Gymnasium's NormalizeObservation does."""

    count, mean, m2 = 1e-4, 0.0, 0.0

    def preprocess(self, observations: Any) -> Any:
        import numpy as np

        num = len(observations)
        mean, count = observations.mean(0, dtype=np.float64), self.count + num
        delta = mean - self.mean
        self.mean = self.mean + delta * (num / count)
        self.m2 = (
            self.m2 + observations.var(0, dtype=np.float64) * num + delta**2 * (self.count * num / count)
        )
        self.count = count
        normalized = (observations - self.mean) / np.sqrt(self.m2 / count + 1e-8)
        return np.clip(normalized, -10.0, 10.0).astype(np.float32)


class StackedLoop(BareLoop):
    """The last observations in a rolling array, zeros before an episode's first."""

    frames: Any = None

    def preprocess(self, observations: Any) -> Any:
        import numpy as np

        frames = self.frames
        if frames is None:
            self.frames = frames = np.zeros((self.num_envs, NUM_FRAMES, observations.shape[1]), np.float32)
        frames[:, :-1] = frames[:, 1:]
        frames[:, -1] = observations
        if self.is_first.any():
            frames[self.is_first, :-1] = 0.0
        return frames.reshape(self.num_envs, -1)


class MultiAgentLoop(BareLoop):
    """Two agents in each environment; one batched forward pass for each of their modules."""

    def __init__(self, variant: str, mode: str, num_envs: int, module: Any) -> None:
        import torch

        from rlzmq.envs.examples import MultiAgentCartPole

        self.envs = [MultiAgentCartPole({"num_agents": 2}) for _ in range(num_envs)]
        self.num_envs = num_envs
        self.latest = [env.reset(seed=1000 * index)[0] for index, env in enumerate(self.envs)]
        self.modules = [module["p0"], module["p1"]]
        self.dist_classes = [own.get_exploration_action_dist_cls() for own in self.modules]
        self.generator = torch.Generator().manual_seed(0)

    def run(self, num_steps: int) -> int:
        import numpy as np
        import torch

        latest = self.latest
        with torch.inference_mode():
            for _ in range(num_steps):
                actions: list[dict[int, Any]] = [{} for _ in latest]
                for agent, (module, dist_cls) in enumerate(zip(self.modules, self.dist_classes, strict=True)):
                    acting = [index for index, own in enumerate(latest) if agent in own]
                    if not acting:
                        continue
                    observations = torch.from_numpy(np.stack([latest[index][agent] for index in acting]))
                    logits = module.forward_exploration({"obs": observations})["action_dist_inputs"]
                    drawn = dist_cls.from_logits(logits).sample(generator=self.generator).numpy()
                    for index, action in zip(acting, drawn, strict=True):
                        actions[index][agent] = action
                for index, env in enumerate(self.envs):
                    own, _, terminated, truncated, _ = env.step(actions[index])
                    if terminated["__all__"] or truncated["__all__"]:
                        own, _ = env.reset()
                    elif any(terminated.values()) or any(truncated.values()):
                        gone = terminated, truncated
                        own = {a: o for a, o in own.items() if not any(flags.get(a) for flags in gone)}
                    latest[index] = own
        return 0  # a reset takes no step here
