"""Sampling speed of one env runner against a bare loop (and RLlib), all in one run.

The bare loop is what one would write by hand: Gymnasium's own vector env, the same torch module under
``inference_mode``, actions from the same distribution; it stores nothing. With connector pieces or two agents it does
what one would write for exactly that case. The sampler stores whole episodes, with log-probabilities. Both are timed in
short turns, and the ratio is the median over the turns. Rates are env steps per second; the resets of autoreset steps
do not count, in neither of them.

    python scripts/bench_sampling.py                                    # CartPole, MLP 2x64, several sizes
    python scripts/bench_sampling.py --envs 8 --lstm
    python scripts/bench_sampling.py --envs 8 --image
    python scripts/bench_sampling.py --envs 8 --custom-piece
    python scripts/bench_sampling.py --envs 8 --mean-std-filter
    python scripts/bench_sampling.py --envs 8 --frame-stacking
    python scripts/bench_sampling.py --envs 8 --multi-agent             # two agents with a module each
    python scripts/bench_sampling.py --peer rllib --peer-python /path/to/venv/with/ray/bin/python
    python scripts/bench_sampling.py --memory --mode sync --peer rllib --peer-python …
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

IMAGE_SHAPE = (84, 84, 4)
NUM_FRAMES = 4


def main() -> None:
    options = parse()
    if options.as_peer:
        serve_rllib(options)
        return
    import gymnasium
    import torch

    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, gymnasium {gymnasium.__version__}, 1 torch thread"
    )
    if options.memory:
        print_memory(options)
        return
    print(f"{options.turns} turns of {options.turn_s} s each")
    print(f"{'mode':20} {'envs':>5} {'bare/s':>11} {'rlzmq/s':>11} {'ratio':>7}", end="")
    print(f" {'rllib/s':>11} {'ratio':>7}" if options.peer else "")
    for mode in options.mode:
        for num_envs in options.envs or default_sizes(mode, options):
            print(f"{mode:20} {num_envs:5d}", end="", flush=True)
            bare, ours, peer = zip(*measure(options, mode, num_envs), strict=True)
            print(f" {median(bare):11,.0f} {median(ours):11,.0f} {median_ratio(ours, bare):7.2f}", end="")
            if options.peer:
                print(f" {median(peer):11,.0f} {median_ratio(ours, peer):7.2f}", end="")
            print(flush=True)


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the turns' ratios."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--envs", type=int, nargs="+", help="numbers of environments (default: several, by mode)"
    )
    parser.add_argument(
        "--mode",
        nargs="+",
        default=["sync", "vector_entry_point"],
        choices=["sync", "async", "vector_entry_point"],
        help="how environments are vectorised (default: sync and vector_entry_point)",
    )
    parser.add_argument("--lstm", action="store_true", help="the default module with an LSTM of 64 cells")
    parser.add_argument("--image", action="store_true", help="images (84,84,4) of uint8, the default CNN")
    parser.add_argument(
        "--custom-piece", action="store_true", help="one per-episode piece in the env-to-module pipeline"
    )
    parser.add_argument("--mean-std-filter", action="store_true", help="MeanStdFilter over the observations")
    parser.add_argument("--frame-stacking", action="store_true", help="the last 4 observations side by side")
    parser.add_argument(
        "--multi-agent", action="store_true", help="two agents in each env, a module for each"
    )
    parser.add_argument("--hiddens", type=int, nargs="+", default=[64, 64], help="hidden layers of the MLP")
    parser.add_argument("--lease", type=int, default=200, help="vector steps per call (default 200)")
    parser.add_argument("--turns", type=int, default=15, help="turns of each side (default 15)")
    parser.add_argument("--turn-s", type=float, default=0.25, help="seconds per turn (default 0.25)")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="instead of speed: memory (PSS) of one runner process of a run, after --memory-steps vector steps",
    )
    parser.add_argument("--memory-steps", type=int, default=2000, help="vector steps before (default 2000)")
    parser.add_argument("--peer", choices=["rllib"], help="also measure RLlib's SingleAgentEnvRunner")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter in which ray is installed")
    parser.add_argument("--as-peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.image or options.multi_agent:
        options.mode = [mode for mode in options.mode if mode != "vector_entry_point"]
    if options.peer and (options.mean_std_filter or options.frame_stacking or options.multi_agent):
        parser.error("--peer has no such case.")
    return options


def default_sizes(mode: str, options: argparse.Namespace) -> list[int]:
    if options.image:
        return [8]
    return {"sync": [1, 8, 32], "async": [2, 8], "vector_entry_point": [8, 32, 256]}[mode]


def static_image_env(config: Any = None) -> Any:
    """Gives one of a few random images at every step and ends every 100 steps: costs next to nothing."""
    import gymnasium as gym
    import numpy as np

    class StaticImages(gym.Env):  # type: ignore[type-arg]
        observation_space = gym.spaces.Box(0, 255, IMAGE_SHAPE, np.uint8)
        action_space = gym.spaces.Discrete(6)
        images = np.random.default_rng(0).integers(0, 255, (8, *IMAGE_SHAPE), np.uint8)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.num_steps = 0
            return self.images[0], {}

        def step(self, action: Any) -> Any:
            self.num_steps += 1
            return self.images[self.num_steps % 8], 1.0, False, self.num_steps >= 100, {}

    return StaticImages()


# -- both sides in this process --------------------------------------------------------------------


def measure(options: argparse.Namespace, mode: str, num_envs: int) -> list[tuple[float, float, float]]:
    """Env steps per second of each turn: (bare loop, rlzmq, RLlib or nan)."""
    import torch

    from rlzmq import MultiAgentEnvRunner, SingleAgentEnvRunner

    torch.set_num_threads(1)
    rates = []
    runner_class = MultiAgentEnvRunner if options.multi_agent else SingleAgentEnvRunner
    bare_class = bare_loop_class(options)
    with (
        runner_class(config=our_config(options, mode, num_envs)) as runner,
        contextlib.closing(bare_class(options, mode, num_envs, runner.module)) as bare,
        contextlib.closing(Peer(options, mode, num_envs)) as peer,
    ):
        for turn in range(options.turns + 1):
            row = bare.rate(options.turn_s), our_rate(runner, options), peer.rate()
            if turn:  # the first one warms up
                rates.append(row)
    return rates


def our_config(options: argparse.Namespace, mode: str, num_envs: int) -> Any:
    from rlzmq import PPOConfig
    from rlzmq.connectors.env_to_module import FrameStackingEnvToModule, MeanStdFilter
    from rlzmq.envs.examples import MultiAgentCartPole, module_of_agent

    config = (
        PPOConfig()
        .environment(static_image_env if options.image else "CartPole-v1")
        .env_runners(num_envs_per_env_runner=num_envs, gym_env_vectorize_mode=mode)
        .rl_module(model_config=model_config(options))
        .debugging(seed=0)
    )
    if options.custom_piece:
        from rlzmq import ConnectorV2

        config.env_runners(env_to_module_connector=lambda env, spaces, device: halver(ConnectorV2)())
    if options.mean_std_filter:
        config.env_runners(env_to_module_connector=lambda env, spaces, device: MeanStdFilter())
    if options.frame_stacking:
        config.env_runners(
            env_to_module_connector=lambda env, spaces, device: FrameStackingEnvToModule(
                num_frames=NUM_FRAMES
            )
        )
    if options.multi_agent:
        config.environment(MultiAgentCartPole, env_config={"num_agents": 2})
        config.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=module_of_agent)
    return config


def model_config(options: argparse.Namespace) -> dict[str, Any]:
    if options.image:
        return {}
    model: dict[str, Any] = {"fcnet_hiddens": list(options.hiddens), "fcnet_activation": "tanh"}
    if options.lstm:
        model.update(use_lstm=True, lstm_cell_size=64, max_seq_len=20)
    return model


def halver(base: Any) -> Any:
    """A custom piece for either library: reads and rewrites each episode's last observation."""

    class HalveObservations(base):  # type: ignore[misc]
        def __call__(self, *, rl_module: Any, batch: Any, episodes: Any, **kwargs: Any) -> Any:
            for episode in self.single_agent_episode_iterator(episodes):
                episode.set_observations(new_data=episode.get_observations(-1) * 0.5, at_indices=-1)
            return batch

    return HalveObservations


def our_rate(runner: Any, options: argparse.Namespace) -> float:
    num_steps, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < options.turn_s:
        num_steps += runner.sample_lease(options.lease).num_env_steps
    return num_steps / elapsed


# -- memory ----------------------------------------------------------------------------------------


def proportional_bytes(pid: int) -> int:
    """A process's proportional set size: pages shared by n processes count as 1/n of each."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/{pid}/smaps_rollup has no line 'Pss:'.")


def print_memory(options: argparse.Namespace) -> None:
    """The runner process of a run of each library: same net, same environments, same steps."""
    print(f"hidden layers {options.hiddens}, {options.memory_steps} vector steps")
    print(
        f"{'mode':20} {'envs':>5} {'rlzmq MB':>9}"
        + (f" {'rllib MB':>9} {'ratio':>6}" if options.peer else "")
    )
    for mode in options.mode:
        for num_envs in options.envs or default_sizes(mode, options):
            ours = our_memory(options, mode, num_envs) / 1e6
            print(f"{mode:20} {num_envs:5d} {ours:9.0f}", end="", flush=True)
            if options.peer:
                with contextlib.closing(Peer(options, mode, num_envs)) as peer:
                    theirs = peer.ask("memory ") / 1e6
                print(f" {theirs:9.0f} {ours / theirs:6.2f}", end="")
            print(flush=True)


def our_memory(options: argparse.Namespace, mode: str, num_envs: int) -> int:
    config = our_config(options, mode, num_envs).env_runners(num_env_runners=1)
    with config.build() as algo:
        for _ in range(-(-options.memory_steps // options.lease)):
            algo.env_runner_group.sample(num_timesteps=options.lease * num_envs)
        (pid,) = algo.env_runner_group.foreach_env_runner(lambda runner: os.getpid())
        return proportional_bytes(pid)


def rllib_memory(config: Any, options: argparse.Namespace, num_envs: int) -> int:
    """Of RLlib's runner actor; raylet, object store and driver are not counted."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    config.env_runners(num_env_runners=1, rollout_fragment_length="auto")
    algo = config.build_algo()
    try:
        for _ in range(-(-options.memory_steps // options.lease)):
            algo.env_runner_group.foreach_env_runner(
                lambda runner: len(runner.sample(num_timesteps=options.lease * num_envs)),
                local_env_runner=False,
            )
        (pid,) = algo.env_runner_group.foreach_env_runner(lambda runner: os.getpid(), local_env_runner=False)
        return proportional_bytes(pid)
    finally:
        algo.stop()
        ray.shutdown()


class BareLoop:
    """Env, module and sampling by hand."""

    def __init__(self, options: argparse.Namespace, mode: str, num_envs: int, module: Any) -> None:
        import gymnasium as gym
        import numpy as np
        import torch

        if options.image:
            self.env: Any = gym.vector.SyncVectorEnv([static_image_env] * num_envs)
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

    def rate(self, turn_s: float) -> float:
        num_vector_steps, num_resets, start = 0, 0, time.perf_counter()
        while time.perf_counter() - start < turn_s:
            num_resets += self.run(50)
            num_vector_steps += 50
        return (num_vector_steps * self.num_envs - num_resets) / (time.perf_counter() - start)

    def run(self, num_steps: int) -> int:
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

    def close(self) -> None:
        self.env.close()


class HalvedLoop(BareLoop):
    """What the custom piece does."""

    def preprocess(self, observations: Any) -> Any:
        return observations * 0.5


class FilteredLoop(BareLoop):
    """Observations normalised by a running mean and variance, as Gymnasium's NormalizeObservation does."""

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

    def __init__(self, options: argparse.Namespace, mode: str, num_envs: int, module: Any) -> None:
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

    def close(self) -> None:
        for env in self.envs:
            env.close()


def bare_loop_class(options: argparse.Namespace) -> type[BareLoop]:
    if options.multi_agent:
        return MultiAgentLoop
    if options.mean_std_filter:
        return FilteredLoop
    if options.frame_stacking:
        return StackedLoop
    return HalvedLoop if options.custom_piece else BareLoop


# -- RLlib, in the interpreter that has it ----------------------------------------------------------


class Peer:
    """RLlib's runner in a process of its own, which makes one turn per line that it is sent."""

    def __init__(self, options: argparse.Namespace, mode: str, num_envs: int) -> None:
        self.process: subprocess.Popen[str] | None = None
        if not options.peer:
            return
        command = [options.peer_python, str(Path(__file__).resolve()), "--as-peer", "--mode", mode]
        command += ["--envs", str(num_envs), "--lease", str(options.lease)]
        command += ["--turn-s", str(options.turn_s), "--hiddens", *map(str, options.hiddens)]
        command += [f"--{name}" for name in ("lstm", "image") if getattr(options, name)]
        command += ["--custom-piece"] if options.custom_piece else []
        command += ["--memory", "--memory-steps", str(options.memory_steps)] if options.memory else []
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def rate(self) -> float:
        """Env steps per second of one turn; nan without a peer."""
        return self.ask("rate ")

    def ask(self, name: str) -> float:
        """Have it do its work once; the number on the line of its answer that begins with `name`."""
        if self.process is None:
            return math.nan
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print("turn", file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith(name):
                return float(line.split()[1])
        raise SystemExit(f"RLlib's process ended with exit status {self.process.wait()}.")

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()


def serve_rllib(options: argparse.Namespace) -> None:
    """Makes a turn with RLlib's own runner for each line on stdin."""
    import logging

    import ray  # noqa: F401
    import torch
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.connectors.connector_v2 import ConnectorV2
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
    from ray.tune.registry import register_env

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    register_env("static-images", static_image_env)
    (mode,), (num_envs,) = options.mode, options.envs
    config = (
        PPOConfig()
        .environment("static-images" if options.image else "CartPole-v1")
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=num_envs,
            gym_env_vectorize_mode=mode,
            rollout_fragment_length=options.lease,
        )
        .rl_module(model_config=model_config(options))
        .debugging(seed=0)
    )
    if options.custom_piece:
        config.env_runners(env_to_module_connector=lambda env, spaces, device: halver(ConnectorV2)())
    if options.memory:
        sys.stdin.readline()
        print("memory", rllib_memory(config, options, num_envs), flush=True)
        return
    runner = SingleAgentEnvRunner(config=config, worker_index=0)
    for _ in sys.stdin:
        num_steps, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < options.turn_s:
            num_steps += sum(
                len(episode) for episode in runner.sample(num_timesteps=options.lease * num_envs)
            )
        print("rate", num_steps / elapsed, flush=True)


if __name__ == "__main__":
    main()
