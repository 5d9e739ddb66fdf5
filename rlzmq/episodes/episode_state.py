"""Conversion of single-agent episodes to plain values and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from rlzmq.core.plain import NotPlainError, from_plain, to_plain
from rlzmq.core.space_plain import space_from_plain, space_to_plain
from rlzmq.episodes.episode_chunks import EpisodeChunks
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer

__all__ = ["from_state", "get_state", "plain_infos"]

E = TypeVar("E", bound=EpisodeChunks)


class _Episode(Protocol):
    id_: str

    def get_state(self) -> dict[str, Any]: ...


_FACTS = (
    "id_",
    "agent_id",
    "module_id",
    "multi_agent_episode_id",
    "t",
    "t_started",
    "is_terminated",
    "is_truncated",
)


def plain_infos(infos: Any) -> tuple[Any, int]:
    """Return the entries of an info dict that have a plain form, and the number of those left out.

    Infos that are not a dict are converted as a whole, or become ``{}``.
    """
    try:
        return to_plain(infos, "infos"), 0
    except NotPlainError:
        if not isinstance(infos, dict):
            return {}, 1
        kept: dict[Any, Any] = {}
        for key, value in infos.items():
            try:
                to_plain({key: value}, "infos")
            except NotPlainError:
                continue
            kept[key] = value
        return to_plain(kept), len(infos) - len(kept)


def _infos_state(infos: list[Any]) -> tuple[Any, int]:
    """Return a state's ``"infos"`` and the number of values left out of info dicts."""
    state, num_left_out = [], 0
    for info in infos:
        plain, left_out = plain_infos(info)
        if left_out and not isinstance(info, dict):
            return {"objects": list(infos)}, 0
        state.append(plain)
        num_left_out += left_out
    return state, num_left_out


def get_state(episode: EpisodeChunks) -> dict[str, Any]:
    """See `SingleAgentEpisode.get_state`."""
    infos, num_left_out = _infos_state(episode.infos.data)
    where = f"episode {episode.id_!r}"
    return {
        **{name: to_plain(getattr(episode, name), f"{where}.{name}") for name in _FACTS},
        "observations": episode.observations.get_state(),
        "actions": episode.actions.get_state(),
        "rewards": episode.rewards.get_state(),
        "infos": infos,
        "num_infos_left_out": num_left_out,
        "extra_model_outputs": {
            key: buffer.get_state() for key, buffer in episode.extra_model_outputs.items()
        },
        "observation_space": space_to_plain(episode.observation_space),
        "action_space": space_to_plain(episode.action_space),
        "custom_data": to_plain(episode.custom_data, f"{where}.custom_data"),
        "initial_state": to_plain(episode.initial_state, f"{where}.initial_state"),
        "duration_s": episode._duration_s,
    }


def _infos_of(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return list(state["objects"])
    return [from_plain(info) for info in state]


def from_state(cls: Callable[..., E], state: dict[str, Any]) -> E:
    """See `SingleAgentEpisode.from_state`."""
    try:
        lookback = state["rewards"]["lookback"]
        observation_space = space_from_plain(state["observation_space"])
        action_space = space_from_plain(state["action_space"])
        episode = cls(
            state["id_"],
            observations=InfiniteLookbackBuffer.from_state(state["observations"], observation_space),
            actions=InfiniteLookbackBuffer.from_state(state["actions"], action_space),
            rewards=InfiniteLookbackBuffer.from_state(state["rewards"]),
            infos=_infos_of(state["infos"]),
            extra_model_outputs={
                key: InfiniteLookbackBuffer.from_state(column)
                for key, column in state["extra_model_outputs"].items()
            },
            t_started=state["t_started"],
            len_lookback_buffer=lookback,
            observation_space=observation_space,
            action_space=action_space,
        )
        for name in _FACTS:
            setattr(episode, name, from_plain(state[name]))
        episode.custom_data = from_plain(state["custom_data"])
        episode.initial_state = from_plain(state["initial_state"])
        episode._duration_s = float(state["duration_s"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected a SingleAgentEpisode's state, got one with a wrong field: {error!r}."
        ) from error
    return episode
