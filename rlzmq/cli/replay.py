"""``rlzmq replay``: a quarantined fragment: what is in it, and, with its run's config, what it does to a learner."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from rlzmq.core.printable import printable

__all__ = ["ReplayOptions", "describe", "run"]

_MAX_BYTES = 1 << 30


@dataclass
class ReplayOptions:
    """Options of ``rlzmq replay``."""

    fragment: tyro.conf.Positional[Path]
    """NAME.fragment in the run's quarantine_dir."""
    run_dir: Path | None = None
    """Run directory whose config.toml makes a learner that trains the fragment (default: only look at it)."""
    algorithm: str = "ppo"
    """Algorithm of that run (default: ppo)."""
    import_: list[str] = field(default_factory=list)
    """Module to import first, e.g. one that registers envs; repeatable (default: none)."""


def run(arguments: Sequence[str]) -> int:
    """The command: `arguments` without ``rlzmq replay``; 0, or what the learner's error or death makes of it."""
    from rlzmq.cli.joining import import_first
    from rlzmq.cli.parsing import parse

    options = parse(
        ReplayOptions,
        arguments,
        usage="rlzmq replay FRAGMENT [options]",
        description="Look at a quarantined fragment, and train it.",
    )
    import_first(options.import_)
    if (reason := _reason(options.fragment.with_suffix(".json"))) is not None:
        print(f"quarantined: {printable(str(reason))}")
    batch = _read(options.fragment)
    print("\n".join(describe(batch)), flush=True)
    if options.run_dir is not None:
        results = _train(batch, options)
        print("trained:", json.dumps(results, default=float, sort_keys=True)[:2000])
    return 0


def _reason(path: Path) -> Any:
    """Why the fragment lies there; None where nobody wrote it down.

    Raises:
        ConfigurationError: What was written is torn.
    """
    from rlzmq.core.errors import ConfigurationError

    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))["reason"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} does not say why: {error!r}. Without this file the fragment can be looked at."
        ) from error


def _read(path: Path) -> Any:
    """The fragment's EpisodeBatch.

    Raises:
        ConfigurationError: No such file, or it holds no fragment.
    """
    from rlzmq.core.errors import ConfigurationError, ProtocolError
    from rlzmq.episodes.episode_batch import EpisodeBatch
    from rlzmq.episodes.multi_agent_batch import MultiAgentEpisodeBatch
    from rlzmq.wire.fragment_message import decode_fragment, fragment_from_bytes

    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        raise ConfigurationError(f"{path}: no such file, or larger than {_MAX_BYTES} bytes")
    try:
        header, arrays, _ = decode_fragment(fragment_from_bytes(path.read_bytes()))
        print(
            f"fragment    {header.fragment_id}: {header.num_env_steps} env steps, weights version "
            f"{header.weights_version}, generation {header.generation}"
        )
        try:
            return EpisodeBatch.from_wire(header.batch, arrays)
        except ProtocolError:
            return MultiAgentEpisodeBatch.from_wire(header.batch, arrays)
    except ProtocolError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def describe(batch: Any) -> list[str]:
    """Chunks, columns, and what in them is not finite."""
    import numpy as np

    lines = [f"chunks      {len(batch)}, {batch.num_env_steps} env steps"]
    for name, column in getattr(batch, "columns", {}).items():
        for where, leaf in _leaves(column):
            array = np.asarray(leaf)
            bad = ""
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                slots = np.argwhere(~np.isfinite(array))
                bad = f"  NOT FINITE at {len(slots)} places, first at slot {slots[0].tolist()}"
            lines.append(f"{name + where:<28}{array.dtype.str:<6}{list(array.shape)}{bad}")
    return [printable(line) for line in lines]


def _leaves(tree: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{where}[{key!r}]")
    elif isinstance(tree, tuple | list):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{where}[{index}]")
    else:
        yield where, tree


def _train(batch: Any, options: ReplayOptions) -> Any:
    from rlzmq.algorithms.registry import get_config_class

    assert options.run_dir is not None
    config = get_config_class(options.algorithm).from_toml(options.run_dir / "config.toml")
    config.networking(listen=None, advertise=None, join_file=None, broker=None, num_remote_learners=0)
    config.learners(num_learners=0).env_runners(num_env_runners=0)
    learner = config.build_learner()
    print("training it …", flush=True)  # the last line, if it kills the process
    return learner.update(episodes=batch)
