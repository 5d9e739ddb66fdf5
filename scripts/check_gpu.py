"""Run the CUDA and NCCL paths on a machine with a GPU and print the results; exit code 1 on a failure.

``python scripts/check_gpu.py`` runs serial and distributed PPO with the learner on the GPU, with equal weights after
a round trip, an NCCL process group, every algorithm plain, with each way of clipping, in mixed precision and
compiled, and compares the time of an update on the CPU and the GPU, in float32 and in bfloat16. ``--only`` runs the
named checks. ``--cpu`` runs them on the CPU, in small, to check this script.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rlzmq
from rlzmq import PPOConfig, SingleAgentEnvRunner
from rlzmq.algorithms.registry import ALGORITHMS
from rlzmq.learners.distributed import RankGroup
from rlzmq.replay import write_shard

_WITH_CARTPOLE = ("ppo", "impala", "appo", "dqn")
_OFFLINE = ("bc", "marwil", "cql", "iql")


@dataclass(frozen=True)
class Place:
    """Where learners train, and how long.

    Attributes:
        device: "cuda" or "cpu".
        num_iterations: Iterations of each run that has to learn; with fewer than 10 it need not.
        train_batch_size: Env steps per iteration of these runs.
        timed_widths: Widths of the MLPs whose updates are timed.
        backend: Backend of torch.compile.
    """

    device: str
    num_iterations: int
    train_batch_size: int
    timed_widths: tuple[int, ...]
    backend: str

    @property
    def num_gpus(self) -> int:
        return int(self.device == "cuda")


GPU = Place("cuda", num_iterations=10, train_batch_size=4000, timed_widths=(64, 1024), backend="inductor")
CPU = Place("cpu", num_iterations=2, train_batch_size=200, timed_widths=(16,), backend="eager")


def ppo_config(
    place: Place, num_env_runners: int = 0, num_learners: int = 0, *, hiddens: int = 64
) -> PPOConfig:
    """Return a config of PPO on CartPole."""
    return (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=8)
        .learners(num_learners=num_learners, num_gpus_per_learner=place.num_gpus)
        .training(
            train_batch_size_per_learner=place.train_batch_size,
            minibatch_size=place.train_batch_size // 8,
            num_epochs=6,
            lr=3e-4,
        )
        .rl_module(model_config={"fcnet_hiddens": [hiddens, hiddens]})
        .debugging(seed=1)
    )


def check_device(algo: Any, place: Place) -> str:
    """Return the device of the first learner, which must be the place's."""
    device: str = algo.learner_group.foreach_learner(lambda learner: str(learner.device))[0]
    assert device.startswith(place.device), device
    return device


def train(place: Place, num_env_runners: int, num_learners: int) -> str:
    """Train. The return must rise, and the runners must act with the learner's weights."""
    with ppo_config(place, num_env_runners, num_learners).build() as algo:
        returns = [
            algo.train()["env_runners"]["episode_return_mean"] for _ in range(max(2, place.num_iterations))
        ]
        device = check_device(algo, place)
        assert place.num_iterations < 10 or returns[-1] > returns[0], returns
        with tempfile.TemporaryDirectory() as folder:
            algo.restore_from_path(algo.save_to_path(Path(folder) / "c"))
            algo.train()
        return (
            f"return {returns[0]:.1f} → {returns[-1]:.1f} in {len(returns)} iterations on {device}; saved, "
            "restored, went on"
        )


def small_config(algorithm: str, place: Place, data: str) -> Any:
    """Return a config of an algorithm with small batches, on CartPole, Pendulum, or recorded steps of Pendulum."""
    config: Any = getattr(rlzmq, f"{algorithm.upper()}Config")()
    config.environment("CartPole-v1" if algorithm in _WITH_CARTPOLE else "Pendulum-v1")
    config.learners(num_learners=0, num_gpus_per_learner=place.num_gpus).debugging(seed=1)
    config.reporting(min_time_s_per_iteration=0)
    if algorithm in _OFFLINE:
        config.offline_data(input_=data, dataset_num_iters_per_learner=4)
        return config.training(train_batch_size_per_learner=64)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=8)
    if algorithm in ("ppo", "impala", "appo"):
        return config.training(train_batch_size_per_learner=128, minibatch_size=64)
    config.env_runners(rollout_fragment_length=8).reporting(min_sample_timesteps_per_iteration=1)
    return config.training(
        train_batch_size=64, training_intensity=2.0, num_steps_sampled_before_learning_starts=64
    )


def learner_options(algorithm: str, place: Place) -> str:
    """Train two iterations with each option; check for finite results, float32 weights, no skipped step."""
    done = []
    with tempfile.TemporaryDirectory() as folder:
        runner: Any = SingleAgentEnvRunner(config=PPOConfig().environment("Pendulum-v1").debugging(seed=1))
        write_shard(folder, runner.sample(num_timesteps=400), normalize_actions=True)
        runner.stop()

        def check(name: str, *, training: dict[str, Any] | None = None, **framework: Any) -> None:
            # The learners of one process share the limit of torch.compile, after which code is no longer compiled.
            torch._dynamo.reset()
            config = small_config(algorithm, place, folder).training(**training or {}).framework(**framework)
            with config.build() as algo:
                algo.train()
                result = algo.train()["learners"]
                check_device(algo, place)
                weights = algo.get_module().get_state().values()
            assert {value.dtype for value in weights} == {np.dtype(np.float32)}, name
            assert result["__all_modules__"]["num_gradient_updates_lifetime"] > 0, name
            own = result["default_policy"]
            assert own["num_nonfinite_gradients_skipped"] == 0, (name, own)
            assert all(np.isfinite(value) for value in own.values()), (name, own)
            done.append(name)

        mixed = {"torch_amp_dtype": "bfloat16"}
        compiled = {"torch_compile_learner": True, "torch_compile_learner_dynamo_backend": place.backend}
        check("plain")
        for way in ("value", "norm", "global_norm"):
            check(f"clipped by {way}", training={"grad_clip": 0.1, "grad_clip_by": way})
        check("bfloat16", **mixed)
        check("compiled", **compiled)
        check("compiled in bfloat16", **mixed, **compiled)
    return ", ".join(done)


def process_group(place: Place) -> str:
    """Form a group of one rank, over NCCL on a GPU; gather, broadcast, average gradients."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    backend = "nccl" if place.device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        group = RankGroup(
            backend=backend,
            rank=0,
            world_size=1,
            store=FileStore(str(Path(folder) / "store"), 1),
            timeout_s=60.0,
            generation=0,
            device=torch.device(place.device, 0) if place.device == "cuda" else torch.device("cpu"),
        )
        try:
            assert group.gather([1, 2, 3]).tolist() == [[1, 2, 3]]
            assert group.broadcast_bytes(b"weights", 0) == b"weights"
            config = PPOConfig().environment("CartPole-v1").learners(num_gpus_per_learner=place.num_gpus)
            learner = config.build_learner()
            learner.ranks.group = group
            parameter = next(learner.module["default_policy"].parameters())
            parameter.grad = torch.ones_like(parameter)
            learner.ranks.average_gradients()
            assert bool((parameter.grad == 1.0).all())
        finally:
            group.close()
    version = ".".join(str(part) for part in torch.cuda.nccl.version()) if backend == "nccl" else ""
    return f"gathering and averaging over {backend} {version}".strip()


def update_times(place: Place) -> str:
    """Return the median seconds of one update on the CPU (one thread) and at the place, by width of the MLP."""
    texts = []
    for hiddens in place.timed_widths:
        batch: Any = SingleAgentEnvRunner(config=ppo_config(CPU)).sample(num_timesteps=place.train_batch_size)

        def median_s(
            where: Place, amp_dtype: Any = None, hiddens: int = hiddens, batch: Any = batch
        ) -> float:
            config = ppo_config(where, hiddens=hiddens).framework(torch_amp_dtype=amp_dtype)
            # The same minibatches at both places.
            config.training(
                train_batch_size_per_learner=place.train_batch_size,
                minibatch_size=place.train_batch_size // 8,
            )
            learner = config.build_learner()
            seconds = []
            for _ in range(4):
                start = time.perf_counter()
                learner.update(episodes=batch)
                seconds.append(time.perf_counter() - start)
            return float(np.median(seconds[1:]))

        cpu_s, here_s, mixed_s = median_s(CPU), median_s(place), median_s(place, "bfloat16")
        texts.append(
            f"2×{hiddens}: CPU {cpu_s:.3f} s, {place.device} {here_s:.3f} s, in bfloat16 {mixed_s:.3f} s, "
            f"CPU ÷ {place.device} {cpu_s / here_s:.1f}"
        )
    return "; ".join(texts)


CHECKS: dict[str, Callable[[Place], str]] = {
    "serial": lambda place: train(place, 0, 0),
    "local-learner": lambda place: train(place, 1, 0),
    "learner-process": lambda place: train(place, 2, 1),
    "group": process_group,
    **{name: lambda place, name=name: learner_options(name, place) for name in ALGORITHMS},  # type: ignore[misc]
    "update-time": update_times,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, in small")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="CHECK")
    given = parser.parse_args(arguments)
    if not given.cpu and not torch.cuda.is_available():
        print("no GPU here: nothing to check (--cpu checks the script)")
        return 0
    place = CPU if given.cpu else GPU
    name = "CPU" if given.cpu else torch.cuda.get_device_name(0)
    print(f"{name}, torch {torch.__version__}")
    failed = 0
    for check in given.only:
        try:
            print(f"{check}: {CHECKS[check](place)}", flush=True)
        except Exception:
            failed += 1
            print(f"{check}: FAILED", flush=True)
            traceback.print_exc()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
