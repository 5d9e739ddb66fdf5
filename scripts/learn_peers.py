"""Learning per env step: rlzmq's presets beside Stable-Baselines3 with the settings of its RL Zoo, over seeds.

``python scripts/learn_peers.py --runs DIR`` trains what is missing, both sides for the same number of env steps, and
prints a table; ``--plot FILE`` draws the curves. The curve of each finished run is a line of ``docs/learning.jsonl``:
remove lines to train again. In DIR, each is a run directory, so that ``rlzmq plot --iqm DIR/rlzmq DIR/sb3`` compares
them, too. A value is the mean return of the newest training episodes, by the env's own rewards.

Stable-Baselines3 runs in its own virtualenv (see `scripts.bench._peers`). It has no IMPALA: A2C stands beside it, an
actor and a critic without off-policy correction. MiniGrid's views are flattened on both sides.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CURVES = ROOT / "docs" / "learning.jsonl"
NUM_POINTS = 50  # of a curve
LIBRARIES = {"rlzmq": "rlzmq", "sb3": "Stable-Baselines3"}


@dataclass(frozen=True)
class Zoo:
    """The RL Zoo's settings.

    Args:
        algorithm: Class of Stable-Baselines3.
        num_envs: Number of environments.
        settings: Its arguments; ``"lin_0.001"``: falls to 0 over `falls_over` env steps.
        policy: ``policy_kwargs``; `activation` is a name in ``torch.nn``.
        normalizes: Whether observations and rewards are normalised.
        falls_over: Number of env steps of the zoo's run, which its schedules refer to.
    """

    algorithm: str
    num_envs: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    normalizes: bool = False
    falls_over: int = 1_000_000


@dataclass(frozen=True)
class Task:
    """What both sides learn.

    Args:
        algorithm, env: Of rlzmq's preset.
        num_env_steps: Number of env steps of a run.
        zoo: The peer's settings.
        num_episodes: Number of newest episodes that a value is the mean of.
        is_minigrid: Whether the observation is MiniGrid's view, as a vector.
        num_seeds: Number of seeds, from 1 on.
    """

    algorithm: str
    env: str
    num_env_steps: int
    zoo: Zoo
    num_episodes: int = 100
    is_minigrid: bool = False
    num_seeds: int = 5


OFF_POLICY = {"learning_starts": 10_000}
MUJOCO = {"log_std_init": -2, "ortho_init": False, "activation": "ReLU", "net_arch": [256, 256]}

TASKS = {
    "CartPole-v1 PPO": Task(
        "ppo", "CartPole-v1", 40_000,
        Zoo("PPO", 8, {"n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20,
                       "learning_rate": "lin_0.001", "clip_range": "lin_0.2"}, falls_over=100_000),
        num_episodes=20,
    ),
    "CartPole-v1 DQN": Task(
        "dqn", "CartPole-v1", 30_000,
        Zoo("DQN", 1, {"learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1000,
                       "gamma": 0.99, "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128,
                       "exploration_fraction": 0.16 * 50 / 30, "exploration_final_eps": 0.04},
            {"net_arch": [256, 256]}),
        num_episodes=20,
    ),
    "Acrobot-v1 PPO": Task(
        "ppo", "Acrobot-v1", 60_000,
        Zoo("PPO", 16, {"n_steps": 256, "gae_lambda": 0.94, "n_epochs": 4}, normalizes=True),
        num_episodes=20,
    ),
    "CartPole-v1 IMPALA": Task(
        "impala", "CartPole-v1", 100_000, Zoo("A2C", 8, {"ent_coef": 0.0}), num_episodes=20
    ),
    "Pendulum-v1 SAC": Task(
        "sac", "Pendulum-v1", 5_000, Zoo("SAC", 1, {"learning_rate": 1e-3}, {"net_arch": [64, 64]}), num_episodes=5
    ),
    "MiniGrid-DoorKey-5x5-v0 PPO": Task(
        "ppo", "MiniGrid-DoorKey-5x5-v0", 40_000,
        Zoo("PPO", 8, {"n_steps": 128, "gae_lambda": 0.95, "learning_rate": 2.5e-4}, normalizes=True),
        is_minigrid=True,
    ),
    "InvertedDoublePendulum-v5 PPO": Task(
        "ppo", "InvertedDoublePendulum-v5", 1_000_000,
        Zoo("PPO", 1, {"n_steps": 128, "batch_size": 128, "gamma": 0.98, "learning_rate": 0.000155454,
                       "ent_coef": 1.05057e-06, "clip_range": 0.4, "gae_lambda": 0.8, "vf_coef": 0.695929},
            normalizes=True),
    ),
    "Hopper-v5 PPO": Task(
        "ppo", "Hopper-v5", 1_000_000,
        Zoo("PPO", 1, {"n_steps": 512, "batch_size": 32, "gamma": 0.999, "learning_rate": 9.80828e-05,
                       "ent_coef": 0.00229519, "clip_range": 0.2, "n_epochs": 5, "gae_lambda": 0.99,
                       "max_grad_norm": 0.7, "vf_coef": 0.835671}, MUJOCO, normalizes=True),
    ),
    "Reacher-v5 PPO": Task(
        "ppo", "Reacher-v5", 1_000_000,
        Zoo("PPO", 1, {"n_steps": 512, "batch_size": 32, "gamma": 0.9, "learning_rate": 0.000104019,
                       "ent_coef": 7.52585e-08, "clip_range": 0.3, "n_epochs": 5, "gae_lambda": 1.0,
                       "max_grad_norm": 0.9, "vf_coef": 0.950368}, normalizes=True),
    ),
    "HalfCheetah-v5 SAC": Task("sac", "HalfCheetah-v5", 100_000, Zoo("SAC", settings=OFF_POLICY), 5, num_seeds=3),
    "Hopper-v5 SAC": Task("sac", "Hopper-v5", 100_000, Zoo("SAC", settings=OFF_POLICY), 20, num_seeds=3),
    "HalfCheetah-v5 PPO": Task(
        "ppo", "HalfCheetah-v5", 1_000_000,
        Zoo("PPO", 1, {"n_steps": 512, "batch_size": 64, "gamma": 0.98, "learning_rate": 2.0633e-05,
                       "ent_coef": 0.000401762, "clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.92,
                       "max_grad_norm": 0.8, "vf_coef": 0.58096}, MUJOCO, normalizes=True),
    ),
    "Walker2d-v5 PPO": Task(
        "ppo", "Walker2d-v5", 1_000_000,
        Zoo("PPO", 1, {"n_steps": 512, "batch_size": 32, "gamma": 0.99, "learning_rate": 5.05041e-05,
                       "ent_coef": 0.000585045, "clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.95,
                       "max_grad_norm": 1.0, "vf_coef": 0.871923}, normalizes=True),
    ),
    "HalfCheetah-v5 TQC": Task("tqc", "HalfCheetah-v5", 100_000, Zoo("TQC", settings=OFF_POLICY), 5, num_seeds=3),
    "Hopper-v5 TQC": Task(
        "tqc", "Hopper-v5", 100_000, Zoo("TQC", 1, {**OFF_POLICY, "top_quantiles_to_drop_per_net": 5}), 20, num_seeds=3
    ),
}  # fmt: skip


def sb3(name: str, seed: int, path: str | Path) -> None:
    """Train a task with Stable-Baselines3 and write the run directory `path`. Runs in the peer's interpreter."""
    import gymnasium
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    task = TASKS[name]
    zoo = task.zoo

    def env() -> Any:
        if not task.is_minigrid:
            return gymnasium.make(task.env)
        import minigrid.wrappers  # it registers the env, too

        return gymnasium.wrappers.FlattenObservation(
            minigrid.wrappers.ImgObsWrapper(gymnasium.make(task.env))
        )

    class Log(BaseCallback):
        """Writes a result every 1/200 of the run."""

        def __init__(self) -> None:
            super().__init__()
            self.newest: deque[float] = deque(maxlen=task.num_episodes)
            self.iteration = 0
            self.start = time.perf_counter()

        def _on_step(self) -> bool:
            self.newest.extend(info["episode"]["r"] for info in self.locals["infos"] if "episode" in info)
            is_due = self.num_timesteps >= self.iteration * task.num_env_steps / 200
            if self.newest and (is_due or self.num_timesteps >= task.num_env_steps):
                self.iteration += 1
                result = {
                    "training_iteration": self.iteration,
                    "num_env_steps_sampled_lifetime": self.num_timesteps,
                    "time_total_s": time.perf_counter() - self.start,
                    "env_runners": {"episode_return_mean": sum(self.newest) / len(self.newest)},
                }
                metrics.write(json.dumps(result) + "\n")
            return True

    torch.set_num_threads(1)
    vector: Any = make_vec_env(env, zoo.num_envs, seed=seed)
    if zoo.normalizes:
        vector = VecNormalize(vector, gamma=zoo.settings.get("gamma", 0.99))
    settings = dict(zoo.settings)
    for key, value in settings.items():
        if isinstance(value, str):
            first, part = float(value.removeprefix("lin_")), task.num_env_steps / zoo.falls_over
            settings[key] = lambda left, first=first, part=part: first * (1 - part * (1 - left))
    policy = dict(zoo.policy)
    if "activation" in policy:
        policy["activation_fn"] = getattr(torch.nn, policy.pop("activation"))
    package = importlib.import_module("sb3_contrib" if zoo.algorithm == "TQC" else "stable_baselines3")
    model = getattr(package, zoo.algorithm)(
        "MlpPolicy", vector, policy_kwargs=policy, seed=seed, device="cpu", **settings
    )
    unfinished = Path(f"{path}.unfinished")
    unfinished.mkdir(parents=True)
    facts = {"command": sys.argv, "algorithm": zoo.algorithm, "env": task.env, "seed": seed}
    (unfinished / "run.json").write_text(json.dumps(facts))
    (unfinished / "config.toml").write_text(f"[debugging]\nseed = {seed}\n")
    with open(unfinished / "metrics.jsonl", "w", buffering=1) as metrics:
        model.learn(task.num_env_steps, callback=Log())
    unfinished.rename(path)


def rlzmq(name: str, seed: int, path: str | Path) -> None:
    """Train a task with its preset in this process and write the run directory `path`."""
    from rlzmq.algorithms.registry import find_preset
    from rlzmq.telemetry.run_directory import RunDirectory
    from scripts import learn

    task = TASKS[name]
    config = learn.configure(find_preset(task.algorithm, task.env), "serial", seed)
    config.reporting(metrics_num_episodes_for_smoothing=task.num_episodes, min_time_s_per_iteration=0)
    unfinished = Path(f"{path}.unfinished")
    with RunDirectory.create(unfinished, config) as directory, config.build() as algo:
        steps = 0
        while steps < task.num_env_steps:
            result = algo.train()
            directory.log(result)
            steps = result["num_env_steps_sampled_lifetime"]
    unfinished.rename(path)


def path_of(runs: Path, library: str, name: str, seed: int) -> Path:
    """Return the run directory of a task and a seed."""
    return runs / library / f"{name.replace(' ', '-')}-{seed}"


@dataclass(frozen=True)
class Curve:
    """A finished run: the values at some numbers of env steps, from the first value to the end of the task."""

    library: str
    task: str
    seed: int
    steps: list[int]
    values: list[float]

    @classmethod
    def of(cls, path: Path, library: str, task: str, seed: int) -> Curve:
        """Return the curve of a run directory."""
        import numpy as np

        from rlzmq import Run

        steps, values = Run.open(path).curve()
        grid = np.linspace(steps[0], TASKS[task].num_env_steps, NUM_POINTS).round()
        at = np.interp(grid, steps, values)
        return cls(library, task, seed, [int(step) for step in grid], [float(f"{value:.5g}") for value in at])


def finished() -> list[Curve]:
    """Return the curves of all runs that have finished."""
    lines = CURVES.read_text().splitlines() if CURVES.exists() else []
    return [Curve(**json.loads(line)) for line in lines]


def curves_of(library: str, name: str) -> list[Curve]:
    """Return the curves of a task."""
    return [curve for curve in finished() if (curve.library, curve.task) == (library, name)]


def train(runs: Path, names: list[str], seeds: list[int] | None) -> None:
    """Train what is missing, each run in its own process, task by task; a run that was interrupted begins again."""
    from scripts.bench._peers import python_of

    pythons = {"rlzmq": Path(sys.executable), "sb3": python_of("sb3")}
    queue = [(task, seed) for task in names for seed in seeds or range(1, 1 + TASKS[task].num_seeds)]
    for (name, seed), library in itertools.product(queue, LIBRARIES):
        path, python = path_of(runs, library, name, seed), pythons[library]
        if python is None or seed in [curve.seed for curve in curves_of(library, name)]:
            continue
        if not path.exists():
            shutil.rmtree(f"{path}.unfinished", ignore_errors=True)
            print(f"{library:5} {name}, seed {seed}", flush=True)
            code = f"from scripts import learn_peers; learn_peers.{library}({name!r}, {seed}, {str(path)!r})"
            subprocess.run([python, "-c", code], check=True, cwd=ROOT)
        with CURVES.open("a") as file:
            file.write(json.dumps(asdict(Curve.of(path, library, name, seed))) + "\n")


def table(names: list[str]) -> str:
    """Return a row per task in Markdown: env steps, and each side's interquartile mean with its 95 % interval."""
    from rlzmq.core.score_statistics import bootstrap_interval, interquartile_mean

    rows = ["| task | env steps | rlzmq | Stable-Baselines3 |", "|---|---|---|---|"]
    for name in names:
        cells = []
        for library in LIBRARIES:
            values = [curve.values[-1] for curve in curves_of(library, name)]
            low, high = bootstrap_interval(values, interquartile_mean) if values else (0.0, 0.0)
            peer = f" ({TASKS[name].zoo.algorithm})" if library == "sb3" and "IMPALA" in name else ""
            mean = interquartile_mean(values) if values else float("nan")
            cells.append(f"{_number(mean)} [{_number(low)}, {_number(high)}]{peer}")
        rows.append(f"| {name} | {TASKS[name].num_env_steps // 1000}k | {cells[0]} | {cells[1]} |")
    return "\n".join(rows)


def _number(value: float) -> str:
    """Return a number with three digits, as text."""
    return f"{value:,.0f}".replace("-", "−") if abs(value) >= 10 else f"{value:.2f}"


def plot(names: list[str], path: Path) -> None:
    """Draw each task's curves, the mean over seeds and its 95 % interval."""
    import matplotlib.pyplot as plt
    import numpy as np

    from rlzmq.core.score_statistics import bootstrap_interval

    rows = -(-len(names) // 3)
    figure, axes = plt.subplots(rows, 3, figsize=(10, 2.7 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(names) :]:
        axis.remove()
    for axis, name in zip(axes.flat, names, strict=False):
        task = TASKS[name]
        for library, label in LIBRARIES.items():
            if found := curves_of(library, name):
                begin = max(curve.steps[0] for curve in found)
                grid = np.linspace(begin, task.num_env_steps, 4 * NUM_POINTS)
                values = np.stack([np.interp(grid, curve.steps, curve.values) for curve in found])
                (line,) = axis.plot(grid / 1000, values.mean(axis=0), label=label)
                axis.fill_between(grid / 1000, *bootstrap_interval(values), alpha=0.2, color=line.get_color())
        peer = f" (beside {task.zoo.algorithm})" if "IMPALA" in name else ""
        axis.set_title(f"{name}{peer}", fontsize=9)
        axis.set_xlim(0, task.num_env_steps / 1000)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
    axes[-1, 0].set_xlabel("thousand env steps", fontsize=8)
    axes[0, 0].set_ylabel("mean return", fontsize=8)
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)} (default: all)")
    parser.add_argument("--runs", type=Path, required=True, help="where the run directories are")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: the task's")
    parser.add_argument("--plot", type=Path, help="picture to write (needs matplotlib)")
    options = parser.parse_args()
    names = options.task or list(TASKS)
    if unknown := set(names) - set(TASKS):
        parser.error(f"no such task: {', '.join(sorted(unknown))}")
    train(options.runs.absolute(), names, options.seeds)
    print(table(names))
    if options.plot:
        plot(names, options.plot)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
