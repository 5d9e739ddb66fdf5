# /// script
# requires-python = ">=3.11"
# dependencies = ["rlzmq[marl]", "pygame"]
# ///
"""A league learns Connect Four by playing against frozen copies of its best player.

    python docs/examples/league_connect_four.py
    python docs/examples/league_connect_four.py --iterations 2 --batch 1024 --target 0     # only to see it run

The module "main" is trained. Its first opponent plays at random. Whenever main has won enough of its last games, a copy
of it is frozen and joins the league; each game is against an opponent drawn by ``policy_mapping_fn``, and main plays
either side. At the end main plays against the random player alone. Exit code 1: it did not win the share of
``--target``.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from pettingzoo.classic import connect_four_v3

from rlzmq import Columns, PettingZooEnv, PPOConfig, RLModuleSpec, TorchRLModule

PLAYERS = ("player_0", "player_1")
RANDOM_SHARE = 0.4


class ConnectFour(PettingZooEnv):
    """PettingZoo's game, with the board as one row of numbers beside the mask of the columns that are not full."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(connect_four_v3.raw_env())
        self.observation_spaces = {
            player: gym.spaces.Dict(
                {
                    "observation": gym.spaces.Box(0.0, 1.0, (84,), np.float32),
                    "action_mask": gym.spaces.Box(0, 1, (7,), np.int8),
                }
            )
            for player in PLAYERS
        }

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        observations, infos = super().reset(seed=seed, options=options)
        return flat(observations), infos

    def step(self, action_dict: dict[Any, Any]) -> Any:  # type: ignore[override]
        observations, *others = super().step(action_dict)
        return flat(observations), *others


def flat(observations: dict[Any, Any]) -> dict[Any, Any]:
    return {
        player: {
            **seen,
            "observation": seen["observation"].ravel().astype(np.float32),
        }
        for player, seen in observations.items()
    }


class RandomPlayer(TorchRLModule):
    """Draws each legal move with the same probability; nothing is learned."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        is_legal = batch[Columns.OBS]["action_mask"] > 0
        return {
            Columns.ACTION_DIST_INPUTS: torch.where(
                is_legal, 0.0, torch.finfo(torch.float32).min
            )
        }


def against(opponents: list[str]) -> Callable[[Any, Any], str]:
    """Return a mapping that gives main one side of each game, and the other to the random player or an opponent."""

    def module_of(player: Any, episode: Any) -> str:
        draw = random.Random(episode.id_)
        if player == draw.choice(PLAYERS):
            return "main"
        return (
            "random" if draw.random() < RANDOM_SHARE else draw.choice(opponents)
        )

    return module_of


def league_config(args: argparse.Namespace) -> PPOConfig:
    """Return the config of a run that begins with main against the random player."""
    return (
        PPOConfig()
        .environment(ConnectFour)
        .multi_agent(
            policies={
                "main": RLModuleSpec(),
                "random": RLModuleSpec(module_class=RandomPlayer),
            },
            policy_mapping_fn=against(["random"]),
            policies_to_train=["main"],
        )
        .env_runners(
            num_env_runners=args.num_env_runners, num_envs_per_env_runner=32
        )
        .training(
            train_batch_size_per_learner=args.batch,
            minibatch_size=256,
            num_epochs=8,
            lr=[[0, 6e-4], [args.iterations * args.batch, 1e-4]],
            gamma=0.99,
            lambda_=0.9,
            entropy_coeff=0.01,
            grad_clip=0.5,
        )
        .rl_module(
            model_config={
                "fcnet_hiddens": [512, 256],
                "fcnet_activation": "relu",
            }
        )
        .debugging(seed=args.seed)
    )


def games_won(module: Any, num_games: int, seed: int) -> int:
    """Play against the random player, on either side in turn, and return the number of games that `module` won."""
    rng, num_won = np.random.default_rng(seed), 0
    for number in range(num_games):
        env, own = ConnectFour(), PLAYERS[number % 2]
        observations, _ = env.reset(seed=seed + number)
        rewards: dict[Any, float] = {}
        while env.agents:
            ((player, seen),) = observations.items()
            if player == own:
                batch = {
                    name: torch.as_tensor(part)[None]
                    for name, part in seen.items()
                }
                with torch.no_grad():
                    outputs = module.forward_inference({Columns.OBS: batch})
                action = int(outputs[Columns.ACTION_DIST_INPUTS].argmax())
            else:
                action = int(rng.choice(np.flatnonzero(seen["action_mask"])))
            observations, rewards, *_ = env.step({player: action})
        num_won += rewards[own] > 0
    return num_won


def main() -> int:
    """Train, evaluate, print."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--iterations", type=int, default=60, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=4096,
        help="moves of an iteration (default: %(default)s)",
    )
    parser.add_argument(
        "--win-rate",
        type=float,
        default=0.8,
        help="of main's last 100 games, for a snapshot",
    )
    parser.add_argument(
        "--snapshots",
        type=int,
        default=4,
        help="in the league at once; the oldest leaves",
    )
    parser.add_argument(
        "--games",
        type=int,
        default=200,
        help="against the random player at the end",
    )
    parser.add_argument(
        "--target", type=float, default=0.95, help="share of these to be won"
    )
    parser.add_argument(
        "--num-env-runners",
        type=int,
        default=1,
        help="processes; 0: one process in all",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begin, league = time.monotonic(), ["random"]
    with (
        league_config(args).build() as algo,
        tempfile.TemporaryDirectory() as folder,
    ):
        for iteration in range(1, args.iterations + 1):
            result = algo.train()
            # A game counts 1 if main won it, -1 if it lost.
            rate = (
                0.5
                + 0.5
                * result["env_runners"]["module_episode_return_mean"]["main"]
            )
            if iteration % 10 == 0:
                passed_s, num_moves = (
                    time.monotonic() - begin,
                    result["num_env_steps_sampled_lifetime"],
                )
                print(
                    f"{passed_s:4.0f} s, {num_moves} moves: main wins {rate:.0%} against {league}",
                    flush=True,
                )
            if rate >= args.win_rate:
                name = f"main_{iteration}"
                path = Path(folder) / name
                algo.get_module("main").save_to_path(path)
                league = ["random", *league[1:], name]
                algo.add_module(
                    name,
                    RLModuleSpec(load_state_path=str(path)),
                    add_to_learners=False,  # it only plays
                    new_agent_to_module_mapping_fn=against(league),
                )
                if len(league) > 1 + args.snapshots:
                    oldest = league.pop(1)
                    algo.remove_module(
                        oldest, new_agent_to_module_mapping_fn=against(league)
                    )
        num_won = games_won(algo.get_module("main"), args.games, args.seed)
    print(
        f"seed {args.seed}: {num_won} of {args.games} games won against the random player, after "
        f"{(time.monotonic() - begin) / 60:.1f} minutes, {iteration} iterations; league: {league}"
    )
    return 0 if num_won >= args.target * args.games else 1


if __name__ == "__main__":
    sys.exit(main())
