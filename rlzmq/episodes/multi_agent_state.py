"""Conversion of a MultiAgentEpisode's timeline to plain values and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlzmq.core.plain import NotPlainError, from_plain, to_plain
from rlzmq.episodes.agent_timelines import AgentTrack, Pending, Timeline

__all__ = ["timeline_from_plain", "timeline_to_plain"]


def timeline_to_plain(timeline: Timeline, where: str) -> dict[str, Any]:
    """Return a timeline as plain values, or as ``{"objects": …}`` if a hanging action or reward has no plain form."""
    tracks = [
        {
            "agent_id": agent_id,
            "obs_env_ts": list(track.obs_env_ts),
            "pending": None
            if track.pending is None
            else {"action": track.pending.action, "outputs": dict(track.pending.extra_model_outputs)},
            "reward": track.reward,
            "reward_before_start": track.reward_before_start,
            "terminated": track.terminated,
            "truncated": track.truncated,
            "done_env_t": track.done_env_t,
            "output_keys": None if track.output_keys is None else sorted(track.output_keys),
        }
        for agent_id, track in timeline.tracks.items()
    ]
    data = {
        "env_t_started": timeline.env_t_started,
        "env_t": timeline.env_t,
        "lookback": timeline.lookback,
        "is_terminated": timeline.is_terminated,
        "is_truncated": timeline.is_truncated,
        "departed": dict(timeline.departed),
        "early_rewards": dict(timeline.early_rewards),
        "tracks": tracks,
    }
    try:
        plain: dict[str, Any] = to_plain(data, where)
    except NotPlainError:
        return {"objects": data}
    return plain


def timeline_from_plain(plain: Mapping[str, Any]) -> Timeline:
    """Return the timeline from a result of `timeline_to_plain`.

    Raises:
        ValueError: The value is not a timeline, or its numbers contradict each other.
    """
    try:
        data = plain["objects"] if "objects" in plain else from_plain(plain)
        timeline = Timeline(_count(data["env_t_started"]), _count(data["lookback"]))
        timeline.env_t = _count(data["env_t"])
        timeline.is_terminated = bool(data["is_terminated"])
        timeline.is_truncated = bool(data["is_truncated"])
        timeline.departed = {
            agent_id: (bool(terminated), bool(truncated), int(env_t))
            for agent_id, (terminated, truncated, env_t) in data["departed"].items()
        }
        timeline.early_rewards = dict(data["early_rewards"])
        for track in data["tracks"]:
            pending, keys = track["pending"], track["output_keys"]
            timeline.tracks[track["agent_id"]] = AgentTrack(
                [_count(env_t) for env_t in track["obs_env_ts"]],
                None if pending is None else Pending(pending["action"], dict(pending["outputs"])),
                track["reward"],
                track["reward_before_start"],
                bool(track["terminated"]),
                bool(track["truncated"]),
                int(track["done_env_t"]),
                None if keys is None else frozenset(map(str, keys)),
            )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"expected a timeline, got one with a wrong field: {error!r}.") from error
    if timeline.env_t < timeline.env_t_started or any(
        not track.obs_env_ts for track in timeline.tracks.values()
    ):
        raise ValueError("expected a timeline with env_t >= env_t_started and an observation per agent.")
    return timeline


def _count(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"expected an int, got {type(value).__name__}")
    return value
