"""APPO against Sample Factory 2.1: two processes that sample, one that learns.

"CartPole": 2 × 8 environments, a shared tanh MLP of 2×64. "images": frames (84, 84, 4), 2 × 8, convolutions
32-64-128 (kernels 8, 4, 3, strides 4, 2, 2, no padding) and a dense layer of 512, ELU. Both: each batch of 1,024
steps is trained once, as one minibatch; Adam; one torch thread in each process. Sample Factory samples
asynchronously (its default) from two groups of environments per worker, sees frames as (4, 84, 84), and normalizes
neither observations nor returns here; rlzmq has V-trace and a target network, Sample Factory has neither. Sample
Factory's processes are stopped while it is not its turn, rlzmq's run out of leases.
"""

from __future__ import annotations

import argparse
import atexit
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
import numpy as np

from scripts.bench._core import Comparison, Side, Turn
from scripts.bench._envs import Frames
from scripts.bench.ppo import trained

# the last one is the dense layer: its kernel is the whole map
CONV = [[32, 8, 4, "valid"], [64, 4, 2, "valid"], [128, 3, 2, "valid"], [512, 4, 1, "valid"]]
MODELS = {
    "CartPole": {"fcnet_hiddens": [64, 64], "vf_share_layers": True},
    "images": {
        "conv_filters": CONV,
        "conv_activation": "elu",
        "vf_share_layers": True,
    },
}


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    for name, goal in (("CartPole", "≥ 2.5"), ("images", "≥ 1.3")):
        peer = Side(sample_factory, {"name": name}, "sample_factory")
        yield Comparison(
            name, {"rlzmq": Side(rlzmq, {"name": name}), "Sample Factory": peer}, goal=goal, turn_s=6.0
        )


def rlzmq(name: str) -> Turn:
    from rlzmq import APPOConfig

    config = APPOConfig().environment("CartPole-v1" if name == "CartPole" else Frames).debugging(seed=0)
    config.env_runners(num_env_runners=2, num_envs_per_env_runner=8).learners(num_learners=1)
    config.rl_module(model_config=MODELS[name]).reporting(min_time_s_per_iteration=0)
    config.training(train_batch_size_per_learner=1024, use_circular_buffer=False)
    return trained(config.build_algo())


def sample_factory(name: str) -> Turn:
    context = multiprocessing.get_context("spawn")
    progress, told = context.Pipe(duplex=False)  # env steps trained, and when
    run = context.Process(target=train, args=(name, told))
    run.start()
    told.close()
    assert run.pid is not None

    def to_all(kind: signal.Signals) -> None:
        import psutil

        for process in [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]:
            process.send_signal(kind)

    atexit.register(lambda: to_all(signal.SIGKILL))
    after_step(progress)
    to_all(signal.SIGSTOP)

    def turn(seconds: float) -> float:
        to_all(signal.SIGCONT)
        begin = after_step(progress)
        time.sleep(seconds)
        end = after_step(progress)
        to_all(signal.SIGSTOP)
        return (end[0] - begin[0]) / (end[1] - begin[1])

    return turn


def after_step(progress: Connection) -> tuple[float, float]:
    """Wait for the next training step; return the env steps trained until then, and its time."""
    while progress.poll():
        progress.recv()
    try:
        num_steps, at = progress.recv()
    except EOFError:
        raise SystemExit("Sample Factory ended") from None
    return num_steps, at


def train(name: str, progress: Connection) -> None:
    """Run Sample Factory until the process is killed."""
    from sample_factory.algo.runners.runner import AlgoObserver
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import make_runner

    class Progress(AlgoObserver):  # type: ignore[misc]
        def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
            progress.send((float(sum(runner.env_steps.values())), time.monotonic()))

    register_env("bench", make_env)
    settings = {
        "env": "bench",
        "experiment": name,
        "train_dir": os.getcwd(),
        "device": "cpu",
        "num_workers": 2,
        "num_envs_per_worker": 8,
        "rollout": 32,
        "recurrence": 1,
        "batch_size": 1024,
        "num_batches_per_epoch": 1,
        "num_epochs": 1,
        "use_rnn": False,
        "normalize_input": False,
        "normalize_returns": False,
        "train_for_env_steps": 10**9,
        "save_every_sec": 10**6,
    }
    if name == "images":
        settings |= {"obs_scale": 255.0, "encoder_conv_architecture": "convnet_simple", "nonlinearity": "elu"}
        settings |= {"encoder_conv_mlp_layers": 512}
    else:
        settings |= {"nonlinearity": "tanh"}
    arguments = [f"--{key}={value}" for key, value in settings.items()]
    arguments += ["--encoder_mlp_layers", "64", "64"]
    parser, _ = parse_sf_args(arguments)
    _, runner = make_runner(parse_full_cfg(parser, arguments))
    runner.register_observer(Progress())
    runner.init()
    runner.run()


def make_env(full_env_name: str, cfg: Any = None, _env_config: Any = None, render_mode: Any = None) -> Any:
    return FramesFirst() if cfg.experiment == "images" else gym.make("CartPole-v1")


class FramesFirst(Frames):
    """The same images with the channels first, the only order that Sample Factory takes."""

    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    images = np.ascontiguousarray(Frames.images.transpose(0, 3, 1, 2))
