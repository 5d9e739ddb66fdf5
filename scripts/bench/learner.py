"""`Learner.update` of PPO against a bare torch loop with the same network, loss and data.

"tuned": two MLPs of 2×64; "default": of 2×256; "image": the CNN of Mnih et al. (2015) on frames (84, 84, 4) of
bytes, with a dense layer of 512 and two heads; "lstm": a dense layer of 64 and an LSTM of 64, sequences of 20
steps, two heads. The bare loop has the same loss terms (clipped surrogate, clipped value error, KL, entropy
logged), Adam in its fused form, a fresh permutation per epoch, the gradient norm, and no bookkeeping beyond that.
"threads": two torch threads against one (`torch_num_threads`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from scripts.bench._core import Comparison, Side, Turn, timed

CASES = ("tuned", "default", "image", "lstm")


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    for case in CASES:
        sides = {"rlzmq": Side(rlzmq, {"case": case}), "bare": Side(bare, {"case": case})}
        yield Comparison(case, sides, unit="rows/s", goal="≥ 0.95", turn_s=0.5)
    for case in CASES:
        sides = {f"{num} threads": Side(rlzmq, {"case": case, "num_threads": num}) for num in (2, 1)}
        yield Comparison(f"threads, {case}", sides, unit="rows/s", turn_s=0.5)


def rlzmq(case: str, root: str = "", num_threads: int = 1) -> Turn:
    """Return updates of the checkout in `root`, or of this one."""
    if root:
        sys.path.insert(0, root)
    from scripts.bench._updates import CASES, learner_of, make_episodes

    chosen = CASES[case]
    batch = make_episodes(chosen)
    learner = learner_of(batch, chosen, num_threads)

    def update() -> int:
        learner.update(episodes=batch)
        return chosen.num_rows * chosen.num_epochs

    return timed(update)


def bare(case: str) -> Turn:
    from scripts.bench._updates import CASES, BareLoop, make_episodes

    chosen = CASES[case]
    batch, loop = make_episodes(chosen), BareLoop(chosen)

    def update() -> int:
        loop.update(batch, chosen)
        return chosen.num_rows * chosen.num_epochs

    return timed(update)
