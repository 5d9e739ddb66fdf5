"""What recording a run for `rlzmq replay` costs its learner: seconds per update with the arrival log and without.

    python scripts/bench_recording.py
    python scripts/bench_recording.py --image      # (84,84,4) observations: 28 kB per env step

One learner in this process trains the same batch over and over; with and without the log take turns, so that other
work on the machine meets both. Printed: the median of each, and the median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    """Measure, print."""
    from rlzmq.protocol.events import DecodeShard
    from rlzmq.roles.learner.arrival_log import ArrivalLog
    from rlzmq.roles.learner.learner_role import make_learner
    from rlzmq.roles.runner.runner_role import make_env_runner
    from rlzmq.wire.fragment_message import encode_fragment
    from rlzmq.wire.messages import Fragment
    from rlzmq.wire.schema import FragmentId
    from scripts.bench_guarantees import make_config

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--image", action="store_true")
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    config: Any = make_config(options.image)
    config.training(
        train_batch_size_per_learner=4000, minibatch_size=128, num_epochs=1 if options.image else 10
    )
    num_steps = 400 if options.image else 4000
    runner = make_env_runner(config, 1)
    batch = runner.sample_lease(num_steps // runner.num_envs)
    runner.stop()
    header, arrays = batch.to_wire()
    frames = tuple(encode_fragment(Fragment("u", 1, 0, 1, batch.num_env_steps, 0, 0, -1, header), arrays))
    spaces = {"__env_single__": config.single_spaces()}
    learner = make_learner(config, config.get_multi_rl_module_spec(spaces=spaces))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(dir=".") as directory:
        log = ArrivalLog(directory, "bench", config)
        for turn in range(2 * options.turns + 2):
            is_recorded = bool(turn % 2)
            shard = DecodeShard(turn, 1, 0, FragmentId("u", 1, turn), 0, batch.num_env_steps, frames)
            timesteps = {"num_env_steps_sampled_lifetime": turn * batch.num_env_steps}
            start = time.perf_counter()
            if is_recorded:
                log.begin_update(learner, [shard], timesteps)
            learner.update(episodes=[batch], timesteps=timesteps)
            if is_recorded:
                log.end_update(learner)
            if turn > 1:  # the first of each opens files and warms up
                seconds[is_recorded].append(time.perf_counter() - start)
        log.close()
        num_bytes = sum(path.stat().st_size for path in Path(directory).iterdir())
    ratio = median(a / b for a, b in zip(seconds[True], seconds[False], strict=True))
    num_recorded = (options.turns + 1) * batch.num_env_steps
    print(f"without {median(seconds[False]):.4f} s per update of {batch.num_env_steps} env steps")
    print(f"recorded {median(seconds[True]):.4f} s: {100 * (ratio - 1):.1f} % more")
    print(f"{num_bytes / num_recorded:.0f} bytes per env step")


if __name__ == "__main__":
    main()
