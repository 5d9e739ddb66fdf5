"""Files of the package whose code runs for a fragment and its update, by process.

    python scripts/files_on_the_way.py            # three numbers
    python scripts/files_on_the_way.py --names    # and the files

PPO trains CartPole with one runner and one learner process. After two updates, the files of all functions called in
the next two are noted in the runner, the broker and the learner: on their event loops, and on the threads that sample
and train. Calls from the driver (`rlzmq.actors`) are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from rlzmq import PPOConfig

PACKAGE = str(Path(__file__).resolve().parents[1] / "rlzmq") + "/"


def note_files(role: Any) -> None:
    """Note the file of each function that this thread calls from now on."""
    files: set[str] = vars(sys).setdefault("files_on_the_way", set())

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)


async def note_files_of_loop(role: Any) -> None:
    """Do the same on the event loop."""
    note_files(role)


async def noted_files(role: Any) -> list[str]:
    """Return the files noted so far."""
    return sorted(vars(sys)["files_on_the_way"])


async def files_by_process() -> dict[str, list[str]]:
    """Return the files by process, relative to the package."""
    config = PPOConfig().environment("CartPole-v1").debugging(seed=7)
    config.env_runners(num_env_runners=1, num_envs_per_env_runner=4).learners(num_learners=1)
    config.training(train_batch_size_per_learner=256, minibatch_size=64, num_epochs=2)
    config.reporting(min_train_timesteps_per_iteration=1)
    async with config.build_async() as algorithm:
        for _ in range(2):
            await algorithm.train()
        session = algorithm.session
        handles = {
            "runner": session.env_runner_group.handles[0],
            "broker": session.pipeline._broker.handle,
            "learner": session.learner_group.handles[0],
        }
        for handle in handles.values():
            await handle.apply(note_files)
            await handle.apply(note_files_of_loop)
        for _ in range(2):
            await algorithm.train()
        found = {name: await handle.apply(noted_files) for name, handle in handles.items()}
    return {
        name: [
            short
            for file in files
            if (short := file.removeprefix(PACKAGE)) != file and not short.startswith("actors/")
        ]
        for name, files in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--names", action="store_true", help="also print the files")
    asks_names = parser.parse_args().names
    for name, files in asyncio.run(files_by_process()).items():
        print(f"{name:8} {len(files):3}")
        if asks_names:
            print(*(f"    {file}" for file in files), sep="\n")


if __name__ == "__main__":
    main()
