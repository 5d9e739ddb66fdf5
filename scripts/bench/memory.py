"""Memory of a whole PPO run against RLlib's: the proportional set size (PSS) of all processes.

A page that n processes share counts as 1/n in each. Settings as in the case ppo: "tuned" and "defaults", two
runners. Measured after some iterations.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from scripts.bench import ppo
from scripts.bench._core import Comparison, Side


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    for name in ("tuned", "defaults"):
        for num_learners, where in ((0, "in the driver"), (1, "in a process")):
            sides = {
                "rlzmq": Side(ppo.rlzmq, {"name": name, "num_learners": num_learners}),
                "RLlib": Side(ppo.rllib, {"name": name}, "rllib"),
            }
            yield Comparison(
                f"{name}, learner {where}",
                sides,
                unit="MB",
                goal="≤ 0.30",
                is_rate=False,
                measures_memory=True,
            )
