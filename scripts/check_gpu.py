"""Run the CUDA and NCCL paths on a machine with a GPU and print the results; exit code 1 on a failure.

``python scripts/check_gpu.py`` runs serial and distributed PPO with the learner on the GPU, with equal weights after
a round trip, an NCCL process group, DQN, SAC, BC and IQL plain, with each way of clipping, in mixed precision and
compiled, and compares the time of an update on the CPU and the GPU.
"""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlzmq import BCConfig, DQNConfig, IQLConfig, PPOConfig, SACConfig, SingleAgentEnvRunner
from rlzmq.learners.distributed import RankGroup
from rlzmq.replay import write_shard


def config_for(num_env_runners: int, num_learners: int, num_gpus: float, *, hiddens: int = 64) -> Any:
    """Return a config of PPO on CartPole with the learner on `num_gpus` GPUs."""
    return (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=8)
        .learners(num_learners=num_learners, num_gpus_per_learner=num_gpus)
        .training(train_batch_size_per_learner=4000, minibatch_size=500, num_epochs=6, lr=3e-4)
        .rl_module(model_config={"fcnet_hiddens": [hiddens, hiddens]})
        .debugging(seed=1)
    )


def train_on_gpu(num_env_runners: int, num_learners: int) -> str:
    """Train ten iterations. The return must rise, and the runners must act with the learner's weights."""
    with config_for(num_env_runners, num_learners, 1).build() as algo:
        first = algo.train()["env_runners"]["episode_return_mean"]
        for _ in range(9):
            result = algo.train()
        last = result["env_runners"]["episode_return_mean"]
        device = algo.learner_group.foreach_learner(lambda learner: str(learner.device))[0]
        assert device.startswith("cuda"), device
        assert last > first, (first, last)
        with tempfile.TemporaryDirectory() as folder:
            algo.restore_from_path(algo.save_to_path(Path(folder) / "c"))
            algo.train()
        return f"return {first:.1f} → {last:.1f} in 10 iterations on {device}; saved, restored, went on"


class Autocast:
    """Mix-in of a learner: forward passes and losses in mixed precision."""

    def forward_train(self: Any, batch: Any) -> Any:
        with torch.autocast(self.device.type, torch.bfloat16):
            return super().forward_train(batch)  # type: ignore[misc]

    def compute_losses(self: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device.type, torch.bfloat16):
            return super().compute_losses(**kwargs)  # type: ignore[misc]


def replay_config(algorithm: str, data: str) -> Any:
    """Return a config of DQN on CartPole, SAC on Pendulum, or BC or IQL on recorded steps, learning on the GPU."""
    classes: dict[str, Any] = {"dqn": DQNConfig, "sac": SACConfig, "bc": BCConfig, "iql": IQLConfig}
    config = classes[algorithm]().environment("CartPole-v1" if algorithm == "dqn" else "Pendulum-v1")
    config.learners(num_gpus_per_learner=1).debugging(seed=1)
    if algorithm in ("bc", "iql"):
        config.offline_data(input_=data, dataset_num_iters_per_learner=20)
        return config.training(train_batch_size_per_learner=64)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=8, rollout_fragment_length=8)
    return config.training(
        train_batch_size=64, training_intensity=8.0, num_steps_sampled_before_learning_starts=64
    )


def learner_options(algorithm: str) -> str:
    """Train two iterations with each option; check for finite results, weights on the GPU, no skipped step."""
    done = []
    with tempfile.TemporaryDirectory() as folder:
        runner: Any = SingleAgentEnvRunner(config=PPOConfig().environment("Pendulum-v1").debugging(seed=1))
        write_shard(folder, runner.sample(num_timesteps=1000, random_actions=True))
        runner.stop()

        def check(name: str, config: Any) -> None:
            with config.build() as algo:
                algo.train()
                result = algo.train()["learners"]
                device = algo.learner_group.foreach_learner(lambda learner: str(learner.device))[0]
            assert device.startswith("cuda"), (name, device)
            assert result["__all_modules__"]["num_gradient_updates_lifetime"] > 0, name
            own = result["default_policy"]
            assert own["num_nonfinite_gradients_skipped"] == 0, (name, own)
            assert all(np.isfinite(value) for value in own.values()), (name, own)
            done.append(name)

        check("plain", replay_config(algorithm, folder))
        for way in ("value", "norm", "global_norm"):
            check(
                f"clipped by {way}",
                replay_config(algorithm, folder).training(grad_clip=0.1, grad_clip_by=way),
            )
        mixed = replay_config(algorithm, folder)
        learner_class = type("MixedLearner", (Autocast, mixed.learner_class), {})
        check("mixed precision", mixed.training(learner_class=learner_class))
        check("compiled", replay_config(algorithm, folder).framework(torch_compile_learner=True))
    return ", ".join(done)


def nccl_group() -> str:
    """Form a group of one rank over NCCL; reduce, broadcast, vote."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    with tempfile.TemporaryDirectory() as folder:
        group = RankGroup(
            backend="nccl",
            rank=0,
            world_size=1,
            store=FileStore(str(Path(folder) / "store"), 1),
            timeout_s=60.0,
            generation=0,
            device=torch.device("cuda", 0),
        )
        try:
            tensor = group.all_reduce(torch.ones(4, device="cuda"))
            assert tensor.tolist() == [1.0] * 4
            assert group.vote([True, False], 1) == [True, False]
        finally:
            group.close()
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    return f"all-reduce and vote over NCCL {version}"


def update_times() -> str:
    """Return the median seconds of one update on the CPU (one thread) and the GPU, MLP 2×64 and 2×1024."""
    texts = []
    for hiddens in (64, 1024):
        medians = []
        batch: Any = None
        for num_gpus in (0, 1):
            config = config_for(0, 0, num_gpus, hiddens=hiddens)
            if batch is None:
                batch = SingleAgentEnvRunner(config=config).sample(num_timesteps=4000)
            learner = config.build_learner()
            seconds = []
            for _ in range(4):
                start = time.perf_counter()
                learner.update(episodes=batch)
                seconds.append(time.perf_counter() - start)
            medians.append(float(np.median(seconds[1:])))
        cpu_s, gpu_s = medians
        texts.append(f"2×{hiddens}: CPU {cpu_s:.3f} s, GPU {gpu_s:.3f} s, ratio {cpu_s / gpu_s:.1f}")
    return "; ".join(texts)


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU here: nothing to check")
        return 0
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    checks: dict[str, Callable[[], str]] = {
        "serial": lambda: train_on_gpu(0, 0),
        "1 runner, local learner": lambda: train_on_gpu(1, 0),
        "2 runners, 1 learner process": lambda: train_on_gpu(2, 1),
        "NCCL": nccl_group,
        **{name: lambda name=name: learner_options(name) for name in ("dqn", "sac", "bc", "iql")},  # type: ignore[misc]
        "update time": update_times,
    }
    failed = 0
    for name, check in checks.items():
        try:
            print(f"{name}: {check()}", flush=True)
        except Exception:
            failed += 1
            print(f"{name}: FAILED", flush=True)
            traceback.print_exc()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
