"""What recording a run for `rlzmq replay` costs its learner: updates with the arrival log against updates without.

A learner trains the same batch over and over: CartPole, ten epochs over 4,000 steps, and images (84, 84, 4), 28 kB
per env step, one epoch over 400. Only the learner of a recorded run does more than without.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from scripts.bench._core import Comparison, Side, Turn, timed
from scripts.bench.guarantees import make_config


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    for name, is_image in (("CartPole", False), ("images", True)):
        settings = {"is_image": is_image}
        sides = {
            "recorded": Side(updates, {**settings, "is_recorded": True}),
            "plain": Side(updates, settings),
        }
        yield Comparison(name, sides, turns=10, turn_s=1.0)


def updates(is_image: bool, is_recorded: bool = False) -> Turn:
    from rlzmq.roles.arrival_log import ArrivalLog
    from rlzmq.roles.learner_role import make_learner
    from rlzmq.roles.runner_role import make_env_runner
    from rlzmq.wire.codec import FragmentId
    from rlzmq.wire.fragment_message import encode_fragment
    from rlzmq.wire.messages import Fragment, Shard

    config: Any = make_config(is_image)
    config.training(train_batch_size_per_learner=4000, minibatch_size=128, num_epochs=1 if is_image else 10)
    runner = make_env_runner(config, 1)
    batch = runner.sample_lease((400 if is_image else 4000) // runner.num_envs)
    runner.stop()
    header, arrays = batch.to_wire()
    frames = tuple(encode_fragment(Fragment("u", 1, 0, 1, batch.num_env_steps, 0, 0, -1, header), arrays))
    spaces = {"__env_single__": config.single_spaces()}
    learner = make_learner(config, config.get_multi_rl_module_spec(spaces=spaces))
    log = ArrivalLog(".", "bench", config) if is_recorded else None
    update_id = 0

    def update() -> int:
        nonlocal update_id
        update_id += 1
        timesteps = {"num_env_steps_sampled_lifetime": update_id * batch.num_env_steps}
        if log is not None:
            fragment = FragmentId("u", 1, update_id)
            log.begin_update(
                learner,
                [(Shard(1, update_id, 1, 1, 0, fragment, 0, batch.num_env_steps), frames)],
                timesteps,
            )
        learner.update(episodes=[batch], timesteps=timesteps)
        if log is not None:
            log.end_update(learner)
        return batch.num_env_steps

    return timed(update)
