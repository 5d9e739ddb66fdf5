"""The learner's time: of one PPO update against a bare torch loop; its busy share in an asynchronous run.

    python scripts/bench_learner.py [--cases tuned default image lstm] [--rounds 5]
    python scripts/bench_learner.py --busy-share impala appo [--seconds 30]
    python scripts/bench_learner.py --ranks 2 [--nets default small nature] [--rounds 5]

The first compares with a hand-written torch loop with the same network, loss and data. Both run on one thread of
this process, turn about; the figures to quote are the ratios of the medians. "tuned": two MLPs of 2×64; "default": of
2×256; "image": the CNN of Mnih et al. (2015) on frames (84, 84, 4) of bytes, with a dense layer of 512 and two heads;
"lstm": a dense layer of 64 and an LSTM of 64, sequences of 20 steps, two heads. The bare loop has the same loss terms
(clipped surrogate, clipped value error, KL, entropy logged), Adam in its fused form, a fresh permutation per epoch, the
gradient norm, and no bookkeeping beyond that.

The second trains CartPole-v1 with two runner processes and a learner process, and prints how an update's time
is spent, in milliseconds: in the learner connector, in the rest of the update, and between two updates
(publication of the weights, the next batch if it is not there yet).

The third updates the same network with one rank and with several, turn about: PPO with equally many rows for each rank,
no runners. It prints rows per second, by how much several ranks exceed one, and the processor time of a rank's update
as a multiple of that of one alone; also with gloo in place of shared memory, and without any exchange ("apart").
"default": 2×256 and minibatches of 128; "small": 2×64 and 64, as in the preset for
CartPole-v1; "nature": the CNN of Mnih et al. (2015) on frames (84, 84, 4), minibatches of 64.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlzmq.algorithms.appo import APPOConfig
from rlzmq.algorithms.impala import IMPALAConfig
from rlzmq.algorithms.ppo import PPOConfig
from rlzmq.connectors.learner.gae import compute_gae, standardize
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.learners.distributed import RankGroup, loopback_interface

NUM_UPDATES = 3
OBSERVATION_SPACE = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
NATURE = {"fcnet_hiddens": [512], "vf_share_layers": True}
LSTM_UNITS, SEQUENCE = 64, 20
LSTM = {
    "fcnet_hiddens": [64],
    "use_lstm": True,
    "lstm_cell_size": LSTM_UNITS,
    "max_seq_len": SEQUENCE,
    "vf_share_layers": True,
}
# model_config, minibatch, rows, epochs
CASES: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "tuned": ({"fcnet_hiddens": [64, 64]}, 128, 4000, 30),
    "default": ({"fcnet_hiddens": [256, 256]}, 128, 4000, 6),
    "image": (NATURE, 64, 320, 1),
    "lstm": (LSTM, 200, 4000, 6),
}
# model_config, minibatch, rows, epochs
NETS: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "default": ({"fcnet_hiddens": [256, 256]}, 128, 2048, 4),
    "small": ({"fcnet_hiddens": [64, 64]}, 64, 1024, 8),
    "nature": (NATURE, 64, 256, 2),
}


def make_episodes(
    num_rows: int, num_envs: int = 8, *, is_image: bool = False, has_state: bool = False
) -> EpisodeBatch:
    """`num_rows` steps of random data in `num_envs` chunks."""
    rng = np.random.default_rng(0)
    steps = num_rows // num_envs
    num_slots = num_envs * (steps + 1)
    obs = rng.integers(0, 255, (num_slots, 84, 84, 4)) if is_image else rng.normal(size=(num_slots, 4))
    states = {name: np.zeros((num_slots, LSTM_UNITS), np.float32) for name in ("h", "c")}
    return EpisodeBatch(
        ({"state_out": states} if has_state else {})
        | {
            "obs": obs.astype(np.uint8 if is_image else np.float32),
            "actions": rng.integers(0, 2, num_slots),
            "rewards": np.ones(num_slots),
            "action_logp": np.full(num_slots, np.log(0.5), np.float32),
            "action_dist_inputs": np.zeros((num_slots, 2), np.float32),
        },
        start=np.arange(num_envs) * (steps + 1),
        length=np.full(num_envs, steps),
        terminated=np.ones(num_envs, bool),
        initial_state={name: column[:num_envs] for name, column in states.items()} if has_state else None,
        observation_space=gym.spaces.Box(0, 255, obs.shape[1:], np.uint8) if is_image else OBSERVATION_SPACE,
        action_space=gym.spaces.Discrete(2),
    )


class BareMLPs(nn.Module):
    """A policy and a value network."""

    def __init__(self, num_units: int) -> None:
        super().__init__()
        self.policy, self.value = self._mlp(num_units, 2), self._mlp(num_units, 1)

    @staticmethod
    def _mlp(num_units: int, num_outputs: int) -> nn.Sequential:
        first, second = nn.Linear(4, num_units), nn.Linear(num_units, num_units)
        return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(num_units, num_outputs))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(obs), self.value(obs).squeeze(-1)


class BareCNN(nn.Module):
    """The network of Mnih et al. (2015) with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU()),
        )
        self.policy, self.value = nn.Linear(512, 2), nn.Linear(512, 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(obs.permute(0, 3, 1, 2).float() / 255.0)
        return self.policy(features), self.value(features).squeeze(-1)


class BareLSTM(nn.Module):
    """A dense layer, an LSTM and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 64)
        self.lstm = nn.LSTM(64, LSTM_UNITS, batch_first=True)
        self.policy, self.value = nn.Linear(LSTM_UNITS, 2), nn.Linear(LSTM_UNITS, 1)

    def forward(self, obs: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        features, _ = self.lstm(torch.tanh(self.dense(obs)), (h[None], c[None]))
        return self.policy(features), self.value(features).squeeze(-1)


class BareLoop:
    """PPO as one would write it by hand for exactly this case."""

    def __init__(self, case: str) -> None:
        torch.manual_seed(0)
        self.is_recurrent = case == "lstm"
        self.net: nn.Module
        if case == "image":
            self.net = BareCNN()
        else:
            self.net = BareLSTM() if self.is_recurrent else BareMLPs(64 if case == "tuned" else 256)
        self.parameters = list(self.net.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=5e-5, fused=True)
        self.rng = np.random.default_rng(0)

    def update(self, batch: EpisodeBatch, num_epochs: int, minibatch_size: int) -> None:
        slots = batch.step_slots()
        names = ("obs", "actions", "rewards", "action_logp", "action_dist_inputs")
        columns = {name: torch.from_numpy(batch.columns[name][slots]) for name in names}
        num_rows = len(slots)
        inputs = [columns["obs"]]
        if self.is_recurrent:
            columns = {name: column.unflatten(0, (-1, SEQUENCE)) for name, column in columns.items()}
            num_rows, minibatch_size = num_rows // SEQUENCE, minibatch_size // SEQUENCE
            states = (batch.columns["state_out"][name][slots[::SEQUENCE]] for name in ("h", "c"))
            inputs = [columns["obs"], *map(torch.from_numpy, states)]
        with torch.no_grad():
            values = self.net(*inputs)[1]
        advantages, targets = compute_gae(
            columns["rewards"].flatten().numpy(),
            values.flatten().numpy(),
            np.zeros(len(batch)),
            batch.length,
            gamma=0.99,
            lambda_=1.0,
        )
        data = [columns["actions"], columns["action_logp"], columns["action_dist_inputs"]]
        data += [torch.from_numpy(one).view(values.shape) for one in (standardize(advantages), targets)]
        for _ in range(num_epochs):
            order = torch.from_numpy(self.rng.permutation(num_rows))
            for begin in range(0, num_rows, minibatch_size):
                rows = order[begin : begin + minibatch_size]
                self.step([column[rows] for column in inputs], *(column[rows] for column in data))

    def step(
        self,
        inputs: list[Tensor],
        actions: Tensor,
        old_logp: Tensor,
        old_logits: Tensor,
        adv: Tensor,
        tgt: Tensor,
    ) -> Any:
        logits, values = self.net(*inputs)
        log_probs = torch.log_softmax(logits, -1)
        logp = log_probs.gather(-1, actions[..., None]).squeeze(-1)
        ratio = torch.exp(logp - old_logp)
        policy_loss = -torch.minimum(adv * ratio, adv * ratio.clamp(0.7, 1.3)).mean()
        value_loss = (values - tgt).square().clamp(max=10.0).mean()
        old_log_probs = torch.log_softmax(old_logits, -1)
        kl = (old_log_probs.exp() * (old_log_probs - log_probs)).sum(-1).mean()
        with torch.no_grad():
            entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
        loss = policy_loss + value_loss + 0.2 * kl
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        self.optimizer.step()
        return policy_loss.detach(), value_loss.detach(), kl.detach(), entropy, norm


def ppo_config(
    batch: EpisodeBatch, model_config: dict[str, Any], num_rows: int, num_epochs: int, minibatch_size: int
) -> PPOConfig:
    return (
        PPOConfig()
        .environment(observation_space=batch.observation_space, action_space=batch.action_space)
        .rl_module(model_config=model_config)
        .training(train_batch_size_per_learner=num_rows, minibatch_size=minibatch_size, num_epochs=num_epochs)
        .debugging(seed=0)
    )


def compare_with_bare_loop(case: str, rounds: int) -> Iterator[str]:
    """Time `Learner.update` and the bare loop, turn about; yield lines."""
    model_config, minibatch_size, num_rows, num_epochs = CASES[case]
    batch = make_episodes(num_rows, is_image=case == "image", has_state=case == "lstm")
    learner = ppo_config(batch, model_config, num_rows, num_epochs, minibatch_size).build_learner()
    bare = BareLoop(case)
    sizes = (sum(p.numel() for p in net.parameters()) for net in (bare.net, learner.module["default_policy"]))
    assert len(set(sizes)) == 1
    updates: dict[str, Callable[[], Any]] = {
        "rlzmq": lambda: learner.update(episodes=batch),
        "bare": lambda: bare.update(batch, num_epochs, minibatch_size),
    }
    wall: dict[str, list[float]] = {name: [] for name in updates}
    cpu: dict[str, list[float]] = {name: [] for name in updates}
    for round_index in range(rounds + 1):
        for name, update in updates.items():
            began_at, used_s = time.perf_counter(), time.process_time()
            update()
            if round_index:  # the first round warms up
                wall[name].append(time.perf_counter() - began_at)
                cpu[name].append(time.process_time() - used_s)
    for name in updates:
        median, used = statistics.median(wall[name]), statistics.median(cpu[name])
        rate = num_rows * num_epochs / median
        yield f"{case:8} {name:6} {median:7.3f} s ({used:.3f} CPU s) per update  {rate:10,.0f} rows/s"
    ratios = [statistics.median(times["bare"]) / statistics.median(times["rlzmq"]) for times in (wall, cpu)]
    yield f"{case:8} ratio  {ratios[0]:.3f} of the bare loop's speed, {ratios[1]:.3f} in CPU time"


def busy_share(name: str, seconds: float) -> str:
    """Train for some seconds with two runners and one learner; return a line with the learner's times."""
    config = (
        {"impala": IMPALAConfig, "appo": APPOConfig}[name]()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=5)
        .learners(num_learners=1)
        .reporting(min_time_s_per_iteration=2)
        .debugging(seed=0)
    )
    times: dict[str, list[float]] = {"connector": [], "update": [], "between": []}
    with config.build_algo() as algo:
        before = algo.train()["num_env_steps_sampled_lifetime"]
        began_at = time.monotonic()
        while (elapsed_s := time.monotonic() - began_at) < seconds:
            result = algo.train()
            timers, learners = result["timers"], result["learners"]["__all_modules__"]
            times["connector"].append(learners["learner_connector"]["connector_pipeline_timer"])
            times["update"].append(timers["learner_thread_update_timer"])
            times["between"].append(timers["learner_thread_in_queue_wait_timer"])
        steps = result["num_env_steps_sampled_lifetime"] - before
    connector, update, between = (1e3 * statistics.fmean(values) for values in times.values())
    return (
        f"{name:7} busy {update / (update + between):.2f}: connector {connector:.1f} ms, rest of the update "
        f"{update - connector:.1f} ms, between updates {between:.1f} ms; {steps / elapsed_s:,.0f} env steps/s"
    )


def run_rank(pipe: Connection, rank: int, world_size: int, net: str, directory: str) -> None:
    """Time updates of a rank: (generation, takes part) in, seconds and CPU s out.

    A rank is alone in generation 0; ranks of negative generations use gloo.
    """
    torch.set_num_threads(1)
    model_config, minibatch_size, num_rows, num_epochs = NETS[net]
    batch = make_episodes(num_rows, is_image=net == "nature")
    config = ppo_config(batch, model_config, num_rows, num_epochs, minibatch_size).training(kl_coeff=0.0)
    learner = config.build_learner()
    share_rows = RankGroup.share_rows
    while (order := pipe.recv()) is not None:
        generation, takes_part = order
        if generation:
            store = dist.FileStore(f"{directory}/{generation}", world_size)  # type: ignore[attr-defined]
            RankGroup.share_rows = share_rows if generation > 0 else lambda *_: None  # type: ignore[method-assign]
            learner.setup_distributed(
                rank=rank,
                world_size=world_size,
                store=store,
                generation=abs(generation),
                interface=loopback_interface(),
            )
            learner.adopt_newest_state()
        if takes_part:
            learner.update(episodes=batch)
            began_at, used_s = time.perf_counter(), time.process_time()
            for _ in range(NUM_UPDATES):
                learner.update(episodes=batch)
            pipe.send((time.perf_counter() - began_at, time.process_time() - used_s))
        else:
            pipe.send((0.0, 0.0))
        learner.leave_distributed()
    pipe.send(None)


def compare_ranks(net: str, world_size: int, rounds: int) -> Iterator[str]:
    """Time one rank and several, turn about; yield lines."""
    context = multiprocessing.get_context("spawn")
    pipes = []
    with tempfile.TemporaryDirectory() as directory:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            context.Process(
                target=run_rank, args=(theirs, rank, world_size, net, directory), daemon=True
            ).start()
            pipes.append(ours)
        # name: sign of the generation, number of ranks
        cases = {
            "1 rank": (0, 1),
            f"{world_size} ranks": (1, world_size),
            f"{world_size} ranks, gloo": (-1, world_size),
            f"{world_size} ranks, apart": (0, world_size),
        }
        times: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
        for round_index in range(rounds + 1):
            for number, (case, (sign, num_ranks)) in enumerate(cases.items()):
                for rank, pipe in enumerate(pipes):
                    pipe.send((sign * (1 + len(cases) * round_index + number), rank < num_ranks))
                slowest = max(pipe.recv() for pipe in pipes)
                if round_index:  # the first round warms up
                    times[case].append(slowest)
        for pipe in pipes:
            pipe.send(None)
            pipe.recv()
    for case, of_ranks in times.items():
        num_ranks = cases[case][1]
        pairs = list(zip(times["1 rank"], of_ranks, strict=True))
        ratios = [num_ranks * one[0] / several[0] for one, several in pairs]
        cpu = statistics.median(several[1] / one[1] for one, several in pairs)
        rate = num_ranks * NUM_UPDATES * NETS[net][2] / statistics.median(elapsed for elapsed, _ in of_ranks)
        yield (
            f"{net:8} {case:14} {rate:9,.0f} rows/s: {statistics.median(ratios):.2f} × one rank "
            f"({min(ratios):.2f} to {max(ratios):.2f}), {cpu:.2f} × its processor time"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy-share", nargs="+", choices=("impala", "appo"), default=[])
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--nets", nargs="+", choices=tuple(NETS), default=list(NETS))
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.busy_share:
        print(busy_share(name, arguments.seconds), flush=True)
    if arguments.ranks:
        for net in arguments.nets:
            for line in compare_ranks(net, arguments.ranks, arguments.rounds):
                print(line, flush=True)
    if arguments.busy_share or arguments.ranks:
        return

    for case in arguments.cases:
        for line in compare_with_bare_loop(case, arguments.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
