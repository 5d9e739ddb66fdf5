"""DQN and SAC end to end, against RLlib and Stable-Baselines3, turn about in one run.

    python scripts/bench/off_policy.py
    python scripts/bench/off_policy.py --algorithms dqn --peers sb3 --turns 5 --seconds 5

Env steps per second of whole runs in one process with one thread: CartPole-v1 (DQN) and Pendulum-v1 (SAC), one
environment, one minibatch per env step. Against RLlib: its defaults, which are also rlzmq's (DQN: double and dueling,
prioritized replay, batches of 32, tanh 2×256; SAC: twin critics, prioritized replay, batches of 256, 2×256). Against
Stable-Baselines3: what it has, so a single Q network without dueling and a uniform buffer; same widths, batches,
target updates and clipping.

Each contender is a process that trains past its warm-up and then for `--seconds` at each of its turns. Ratios are
medians over turns, with their range, of wall time and of processor time (the measure on a machine with other load; of
the main process only). Peers are installed in virtualenvs under ``~/.cache/rlzmq/peers`` when missing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENVS = {"dqn": "CartPole-v1", "sac": "Pendulum-v1"}
REQUIREMENTS = {"sb3": "stable-baselines3", "rllib": "ray[rllib]"}
TORCH = "torch==2.13.0"  # exactly: a looser request would fetch gigabytes of CUDA packages
WARM_UP = {"dqn": 200, "sac": 300}  # env steps before the first update
HIDDENS = [256, 256]
CAPACITY = 50_000

# Trains at least so many env steps.
Train = Callable[[int], None]
# (env steps, rows of minibatches trained) so far.
Counts = Callable[[], tuple[int, int]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithms", nargs="+", choices=tuple(ENVS), default=list(ENVS))
    parser.add_argument("--peers", nargs="+", choices=tuple(REQUIREMENTS), default=list(REQUIREMENTS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--serve", nargs=2, metavar=("CONTENDER", "ALGORITHM"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return
    pythons = {peer: peer_python(peer) for peer in options.peers}
    print(f"load at the start: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    for algorithm in options.algorithms:
        for peer, python in pythons.items():
            compare(algorithm, peer, python, options.turns, options.seconds)
    print(f"load at the end: {os.getloadavg()[0]:.1f}")


def peer_python(peer: str) -> Path:
    """Return the interpreter of a peer's virtualenv, which is made when missing."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlzmq" / "peers" / peer
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if not stamp.exists():
        print(f"installing {REQUIREMENTS[peer]} in {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, TORCH], check=True)
        subprocess.run([*pip, TORCH, REQUIREMENTS[peer]], check=True)
        stamp.touch()
    return python


def compare(algorithm: str, peer: str, python: Path, turns: int, seconds: float) -> None:
    """Time a peer and rlzmq with its settings, turn about, and print both rates and their ratios."""
    names = {f"rlzmq-{peer}": sys.executable, peer: str(python)}
    contenders = {name: Contender(name, algorithm, interpreter) for name, interpreter in names.items()}
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    per_step: dict[str, float] = {}
    try:
        for turn in range(turns + 1):
            for name, contender in contenders.items():
                took = contender.run(seconds if turn else 1.0)
                if turn:  # the first turn warms up
                    rates[name].append((took["steps"] / took["wall_s"], took["steps"] / took["cpu_s"]))
                    per_step[name] = took["rows"] / took["steps"]
    finally:
        for contender in contenders.values():
            contender.stop()
    print(f"{algorithm.upper()} on {ENVS[algorithm]}, settings as {peer}:")
    for name, contender in contenders.items():
        wall, cpu = (statistics.median(values) for values in zip(*rates[name], strict=True))
        print(
            f"  {contender.version:28} {wall:7,.0f} env steps/s, {cpu:7,.0f} per CPU second, "
            f"{per_step[name]:.0f} rows trained per env step"
        )
    for index, what in enumerate(("wall time", "processor time")):
        ratios = [ours[index] / theirs[index] for ours, theirs in zip(*rates.values(), strict=True)]
        print(
            f"  {statistics.median(ratios):.2f} × by {what} ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


class Contender:
    """A process that trains at request."""

    def __init__(self, name: str, algorithm: str, python: str) -> None:
        self._process = subprocess.Popen(
            [python, str(Path(__file__).resolve()), "--serve", name, algorithm],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.version: str = self._answer()

    def run(self, seconds: float) -> dict[str, float]:
        """Train for a time; return env steps, rows trained, and seconds of wall and processor time."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        took: dict[str, float] = self._answer()
        return took

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # peers print, too
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise SystemExit(f"{self._process.args} ended with code {self._process.wait()}")

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# -- in the contenders' processes ----------------------------------------------------------------------


def serve(contender: str, algorithm: str) -> None:
    import torch

    torch.set_num_threads(1)
    makers = {"rlzmq-rllib": ours, "rlzmq-sb3": ours, "rllib": rllib, "sb3": sb3}
    version, train, counts = makers[contender](algorithm, contender)
    train(WARM_UP[algorithm] + 100)
    answer(version)
    for line in sys.stdin:
        before, began_at, used_s = counts(), time.perf_counter(), time.process_time()
        while time.perf_counter() - began_at < float(line):
            train(100)
        wall_s, cpu_s, after = time.perf_counter() - began_at, time.process_time() - used_s, counts()
        answer(
            {"steps": after[0] - before[0], "rows": after[1] - before[1], "wall_s": wall_s, "cpu_s": cpu_s}
        )


def answer(value: Any) -> None:
    print("answer", json.dumps(value), flush=True)


def ours(algorithm: str, contender: str) -> tuple[str, Train, Counts]:
    """Return rlzmq with RLlib's defaults, or with what Stable-Baselines3 has."""
    import rlzmq
    from rlzmq.algorithms.dqn import DQNConfig
    from rlzmq.algorithms.sac import SACConfig

    config: Any = (DQNConfig if algorithm == "dqn" else SACConfig)()
    config.environment(ENVS[algorithm]).debugging(seed=0)
    config.reporting(min_sample_timesteps_per_iteration=100, min_time_s_per_iteration=0)
    config.training(num_steps_sampled_before_learning_starts=WARM_UP[algorithm])
    if contender == "rlzmq-sb3":
        config.training(replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": CAPACITY})
        if algorithm == "dqn":
            config.training(double_q=False, dueling=False)
        else:
            config.rl_module(model_config={"fcnet_activation": "relu", "head_fcnet_activation": "relu"})
    return f"rlzmq {rlzmq.__version__}", *trained(config.build_algo())


def rllib(algorithm: str, contender: str) -> tuple[str, Train, Counts]:
    """Return RLlib with its defaults, everything in the driver's process."""
    import ray
    from ray.rllib.algorithms.dqn import DQNConfig
    from ray.rllib.algorithms.sac import SACConfig

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    config: Any = (DQNConfig if algorithm == "dqn" else SACConfig)()
    config.environment(ENVS[algorithm]).debugging(seed=0)
    config.env_runners(num_env_runners=0).learners(num_learners=0)
    config.reporting(min_sample_timesteps_per_iteration=100, min_time_s_per_iteration=0)
    config.training(num_steps_sampled_before_learning_starts=WARM_UP[algorithm])
    return f"RLlib {ray.__version__}", *trained(config.build_algo())


def trained(algo: Any) -> tuple[Train, Counts]:
    """Return the functions of an Algorithm of RLlib or of rlzmq."""
    totals = {"steps": 0, "rows": 0}

    def train(num_steps: int) -> None:
        least = totals["steps"] + num_steps
        while totals["steps"] < least:
            result = algo.train()
            totals["steps"] = result["env_runners"]["num_env_steps_sampled_lifetime"]
            trained = result.get("learners", {}).get("default_policy", {})
            totals["rows"] = int(trained.get("num_module_steps_trained_lifetime", 0))

    return train, lambda: (totals["steps"], totals["rows"])


def sb3(algorithm: str, contender: str) -> tuple[str, Train, Counts]:
    """Return Stable-Baselines3 with the same network, batches and updates per env step."""
    import stable_baselines3
    import torch

    common: dict[str, Any] = {
        "env": ENVS[algorithm],
        "learning_starts": WARM_UP[algorithm],
        "buffer_size": CAPACITY,
        "train_freq": 1,
        "gradient_steps": 1,
        "seed": 0,
        "device": "cpu",
    }
    model: Any
    if algorithm == "dqn":
        model = stable_baselines3.DQN(
            "MlpPolicy",
            learning_rate=5e-4,
            batch_size=32,
            target_update_interval=500,
            max_grad_norm=40.0,
            policy_kwargs={"net_arch": HIDDENS, "activation_fn": torch.nn.Tanh},
            **common,
        )
    else:
        model = stable_baselines3.SAC(
            "MlpPolicy", learning_rate=3e-4, batch_size=256, policy_kwargs={"net_arch": HIDDENS}, **common
        )

    def train(num_steps: int) -> None:
        model.learn(num_steps, reset_num_timesteps=False)

    return (
        f"Stable-Baselines3 {stable_baselines3.__version__}",
        train,
        lambda: (model.num_timesteps, model._n_updates * model.batch_size),
    )


if __name__ == "__main__":
    main()
