"""PPO updates without sampling: random episodes, a learner that trains on them, and the same update by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rlzmq import Learner, PPOConfig
from rlzmq.connectors.learner.advantages import compute_gae, standardize
from rlzmq.episodes.episode_batch import EpisodeBatch

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


@dataclass(frozen=True)
class Case:
    """A network and what an update of it trains."""

    model_config: dict[str, Any]
    minibatch_size: int
    num_rows: int
    num_epochs: int


CASES = {
    "tuned": Case({"fcnet_hiddens": [64, 64]}, 128, 4000, 30),
    "default": Case({"fcnet_hiddens": [256, 256]}, 128, 4000, 6),
    "image": Case(NATURE, 64, 320, 1),
    "lstm": Case(LSTM, 200, 4000, 6),
}
# For ranks, each of which has so many rows.
RANK_CASES = {
    "default": Case({"fcnet_hiddens": [256, 256]}, 128, 2048, 4),
    "small": Case({"fcnet_hiddens": [64, 64]}, 64, 1024, 8),
    "image": Case(NATURE, 64, 256, 2),
}


def make_episodes(case: Case, num_envs: int = 8) -> EpisodeBatch:
    """Return a case's rows of random data in `num_envs` chunks."""
    is_image, has_state = case.model_config is NATURE, case.model_config is LSTM
    rng = np.random.default_rng(0)
    steps = case.num_rows // num_envs
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


def learner_of(batch: EpisodeBatch, case: Case, num_threads: int = 1) -> Learner:
    """Return PPO's learner for a case's network, which trains on the whole batch."""
    config = PPOConfig().environment(
        observation_space=batch.observation_space, action_space=batch.action_space
    )
    config.rl_module(model_config=case.model_config).debugging(seed=0)
    config.training(
        train_batch_size_per_learner=case.num_rows,
        minibatch_size=case.minibatch_size,
        num_epochs=case.num_epochs,
    )
    return config.learners(torch_num_threads=num_threads).build_learner()


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

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.is_recurrent = case.model_config is LSTM
        self.net: nn.Module
        if case.model_config is NATURE:
            self.net = BareCNN()
        else:
            self.net = BareLSTM() if self.is_recurrent else BareMLPs(case.model_config["fcnet_hiddens"][0])
        self.parameters = list(self.net.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=5e-5, fused=True)
        self.rng = np.random.default_rng(0)

    def update(self, batch: EpisodeBatch, case: Case) -> None:
        slots = batch.step_slots()
        names = ("obs", "actions", "rewards", "action_logp", "action_dist_inputs")
        columns = {name: torch.from_numpy(batch.columns[name][slots]) for name in names}
        num_rows, minibatch_size = len(slots), case.minibatch_size
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
        for _ in range(case.num_epochs):
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
