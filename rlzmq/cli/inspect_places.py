"""``rlzmq inspect PATH``: checks every byte of checkpoints and of shards of recorded episodes, and shows them."""

from __future__ import annotations

from pathlib import Path

from rlzmq.cli.main import EXIT_CONFIG
from rlzmq.core.errors import CheckpointError
from rlzmq.core.printable import printable

__all__ = ["show_checkpoints", "show_shards"]


def show_checkpoints(place: Path) -> int:
    """Check and print the checkpoints, and the one to resume from; return 0, or 78 if none is usable.

    Args:
        place: A checkpoint, a directory of them, or a run directory.
    """
    from rlzmq.core.checkpoint import read_checkpoint, read_manifest
    from rlzmq.core.checkpoint_series import CheckpointSeries, find_checkpoint

    found = find_checkpoint(place)
    paths = [*CheckpointSeries(place / "checkpoints").paths(), *CheckpointSeries(place).paths()]
    for path in paths or [path for path in (place / "checkpoint", place) if path.is_dir()][:1]:
        try:
            read_checkpoint(path)
            manifest = read_manifest(path)
        except CheckpointError as error:
            print(f"{path.name:<12} NOT USABLE  {printable(str(error))}")
            continue
        about, files = manifest["about"], manifest["files"]
        facts = [f"{sum(file['bytes'] for file in files.values())} bytes in {len(files)} files"]
        names = {"score": "return", "num_env_steps_trained_lifetime": "steps", "written": "written"}
        facts += [f"{label} {about[name]}" for name, label in names.items() if about.get(name) is not None]
        print(printable(f"{path.name:<12} whole       {about.get('algorithm', '?')}  {'  '.join(facts)}"))
        if len(paths) < 2:
            for name in sorted({str(Path(name).parent) for name in files}):
                print(f"             {printable(name)}")
    if found.path is None:
        print("nothing here to resume")
        return EXIT_CONFIG
    print(f"resume from  {found.path}")
    return 0


def show_shards(place: Path) -> int:
    """Check and print the shards of a directory; return 0. Raises ConfigurationError if none is usable."""
    import numpy as np

    from rlzmq.connectors.explain import describe_batch
    from rlzmq.core.printable import printable
    from rlzmq.replay.shards import open_shards

    opened = open_shards(place)
    returns, lengths, is_done = [], [], []
    for shard, path in zip(opened.shards, opened.paths, strict=True):
        returns.append(shard.get_returns())
        lengths.append(shard.length)
        is_done.append(shard.terminated | shard.truncated)
        print(
            f"{path.name:<40} whole       {len(shard)} episodes  {shard.num_env_steps} steps  "
            f"return {returns[-1].mean():.2f}"
        )
    for skipped in opened.skipped:
        print(f"{skipped.path.name:<40} NOT USABLE  {printable(skipped.reason)}")
    all_returns, all_lengths = np.concatenate(returns), np.concatenate(lengths)
    first = opened.shards[0]
    print(f"\nobservations  {first.observation_space}\nactions       {first.action_space}")
    print("\n".join(describe_batch(dict(first.columns))))
    num_ended, num_steps = int(np.concatenate(is_done).sum()), int(all_lengths.sum())
    print(f"\n{len(all_returns)} episodes ({num_ended} ended), {num_steps} env steps in", end=" ")
    print(f"{len(opened.shards)} shards; {len(opened.skipped)} files skipped")
    for name, values in (("return", all_returns), ("length", all_lengths)):
        print(f"{name}  mean {values.mean():.2f}  min {values.min():.2f}  max {values.max():.2f}")
    return 0
