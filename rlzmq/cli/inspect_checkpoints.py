"""The checkpoints of a run, each checked byte by byte: what ``rlzmq inspect PATH`` shows."""

from __future__ import annotations

from pathlib import Path

from rlzmq.cli.main import EXIT_CONFIG
from rlzmq.core.errors import CheckpointError
from rlzmq.core.printable import printable

__all__ = ["show_checkpoints"]


def show_checkpoints(place: Path) -> int:
    """Check and print the checkpoints and the one to resume from; return 0, or 78 if none is usable.

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
