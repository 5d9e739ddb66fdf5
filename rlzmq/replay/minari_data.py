"""Conversion of Minari datasets to shards, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.imports import import_optional
from rlzmq.core.tree import tree_map
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.replay.shards import open_shards, write_shard

__all__ = ["export_to_minari", "import_from_minari"]


def import_from_minari(
    dataset: Any, directory: str | Path, *, normalize_actions: bool = True, max_env_steps: int = 100_000
) -> int:
    """Write all episodes of a Minari dataset as shards.

    Args:
        dataset: A MinariDataset, or the id of one that is installed (``minari download``), e.g. "D4RL/door/human-v2".
        directory: Directory of the shards.
        normalize_actions: Scale bounded Box actions to [-1, 1], the range of modules with
            ``config.normalize_actions`` (the default).
        max_env_steps: Env steps after which a shard is written.

    Returns:
        Number of episodes.

    Raises:
        ImportError: Minari is not installed (``pip install 'rlzmq[minari]'``).
        ConfigurationError: The dataset holds no episode.
    """
    if isinstance(dataset, str):
        dataset = _minari().load_dataset(dataset)
    spaces = dataset.observation_space, dataset.action_space
    held: list[EpisodeBatch] = []
    num_episodes = num_held = 0
    for episode in dataset.iterate_episodes():
        batch = _batch_of(episode, spaces, normalize_actions)
        if not batch.num_env_steps:
            continue
        held.append(batch)
        num_episodes, num_held = num_episodes + 1, num_held + batch.num_env_steps
        if num_held >= max_env_steps:
            write_shard(directory, EpisodeBatch.concat(held), normalize_actions=normalize_actions)
            held, num_held = [], 0
    if held:
        write_shard(directory, EpisodeBatch.concat(held), normalize_actions=normalize_actions)
    if not num_episodes:
        raise ConfigurationError(f"Minari dataset {dataset.id!r}: expected at least one episode, got none.")
    return num_episodes


def export_to_minari(paths: str | Path | Sequence[str | Path], dataset_id: str, **options: Any) -> Any:
    """Create a Minari dataset from recorded episodes, with actions in the environment's range.

    Args:
        paths: See `open_shards`.
        dataset_id: Id of the new dataset, e.g. "cartpole/ppo-v0".
        options: Further arguments of ``minari.create_dataset_from_buffers``: env, algorithm_name, author, ….

    Returns:
        The MinariDataset.

    Raises:
        ImportError: Minari is not installed (``pip install 'rlzmq[minari]'``).
        ConfigurationError: No shard is usable, the shards lack their spaces or the range of their actions, or `env` has
            other actions.
    """
    minari = _minari()
    shards = open_shards(paths).shards
    spaces = shards[0].observation_space, shards[0].action_space
    if None in spaces:
        raise ConfigurationError(
            f"export to Minari: the shards below {paths} were written without spaces. Give the episodes "
            "observation_space and action_space before write_shard."
        )
    for shard in shards:
        if shard.meta["normalize_actions"] is None and _is_scaled(spaces[1]):
            raise ConfigurationError(
                f"export to Minari: shards below {paths} do not say whether their actions are in [-1, 1] or within "
                f"the bounds of {spaces[1]}. Write them with write_shard(…, normalize_actions=True), or False."
            )
    actions = _action_space_of(options.get("env"))
    if actions not in (None, spaces[1]):
        raise ConfigurationError(
            f"export to Minari: expected env with the recorded episodes' actions {spaces[1]}, got {options['env']} "
            f"with {actions}. Name the environment that they were recorded in."
        )
    return minari.create_dataset_from_buffers(
        dataset_id,
        buffer=list(_buffers(shards)),
        **{"observation_space": spaces[0], "action_space": spaces[1], "jpeg_encoding": False, **options},
    )


def _action_space_of(env: Any) -> Any:
    """Return the action space of ``env`` of ``minari.create_dataset_from_buffers``: an env, a spec, an id or None."""
    if env is None or isinstance(env, gym.Env):
        return env and env.action_space
    made = gym.make(env)
    made.close()
    return made.action_space


def _is_scaled(space: Any) -> bool:
    """Return whether actions of a module differ from those of the space."""
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        return any(
            map(_is_scaled, space.spaces.values() if isinstance(space, gym.spaces.Dict) else space.spaces)
        )
    is_bounded = isinstance(space, gym.spaces.Box) and space.dtype.kind == "f" and space.is_bounded()
    return bool(is_bounded and not ((space.low == -1.0).all() and (space.high == 1.0).all()))


def _minari() -> Any:
    return import_optional("minari", "A Minari dataset", "rlzmq[minari]")


def _batch_of(episode: Any, spaces: tuple[Any, Any], normalize_actions: bool) -> EpisodeBatch:
    """Return one Minari episode as a batch of one chunk."""
    num = len(episode.rewards)

    def padded(leaf: object) -> np.ndarray:
        """Return the leaf with an extra slot for the final observation, which has no step."""
        array = np.asarray(leaf)
        return np.concatenate([array, array[-1:]])

    actions = episode.actions
    if normalize_actions:
        actions = _scaled(spaces[1], actions, to_module=True)
    columns = {
        Columns.OBS: tree_map(np.asarray, episode.observations),
        Columns.ACTIONS: tree_map(padded, actions),
        Columns.REWARDS: padded(np.asarray(episode.rewards, np.float32)),
    }
    terminated = bool(num and episode.terminations[-1])
    return EpisodeBatch(
        columns,
        start=[0],
        length=[num],
        terminated=[terminated],
        truncated=[not terminated and bool(num and episode.truncations[-1])],
        observation_space=spaces[0],
        action_space=spaces[1],
    )


def _buffers(shards: Sequence[EpisodeBatch]) -> Iterator[Any]:
    from minari.data_collector import EpisodeBuffer

    number = 0
    for shard in shards:
        for start, length, terminated, truncated in zip(
            shard.start.tolist(), shard.length.tolist(), shard.terminated, shard.truncated, strict=True
        ):
            steps = slice(start, start + length)
            actions = tree_map(lambda leaf, at=steps: np.array(leaf[at]), shard.columns[Columns.ACTIONS])
            if shard.meta["normalize_actions"]:
                actions = _scaled(shard.action_space, actions, to_module=False)
            last = np.arange(length) == length - 1
            yield EpisodeBuffer(
                id=number,
                observations=tree_map(
                    lambda leaf, at=slice(start, start + length + 1): np.array(leaf[at]),
                    shard.columns[Columns.OBS],
                ),
                actions=actions,
                rewards=shard.columns[Columns.REWARDS][steps].tolist(),
                terminations=(last & terminated).tolist(),
                # In Minari all episodes end, so an unfinished one is truncated here.
                truncations=(last & (truncated or not terminated)).tolist(),
            )
            number += 1


def _scaled(space: gym.Space[Any], actions: Any, *, to_module: bool) -> Any:
    """Scale bounded Box actions from the space's bounds to [-1, 1], or back."""
    if isinstance(space, gym.spaces.Dict):
        return {key: _scaled(space[key], actions[key], to_module=to_module) for key in space}
    if isinstance(space, gym.spaces.Tuple):
        parts = zip(space.spaces, actions, strict=True)
        return tuple(_scaled(part, values, to_module=to_module) for part, values in parts)
    if not isinstance(space, gym.spaces.Box) or space.dtype.kind != "f" or not space.is_bounded():
        return actions
    low, width = space.low, space.high - space.low
    scaled = (
        (np.asarray(actions) - low) / width * 2 - 1
        if to_module
        else low + (np.asarray(actions) + 1) * width / 2
    )
    return scaled.astype(space.dtype)
