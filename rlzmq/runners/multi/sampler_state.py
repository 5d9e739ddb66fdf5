"""What multi-agent samplers carry from one fragment to the next, as plain values and arrays.

The samplers call these with themselves; what they carry is theirs, only how it is written down is here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from rlzmq.core.plain import from_plain, to_plain
from rlzmq.core.tree import tree_map
from rlzmq.core.typed_values import freeze, thaw
from rlzmq.episodes.episode_state import plain_infos, plain_state
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.multi_agent_state import timeline_from_plain, timeline_to_plain
from rlzmq.runners.multi.episode_totals import EpisodeTotals
from rlzmq.runners.multi.ongoing_episodes import AgentRecord, LiveEpisode
from rlzmq.runners.single.sampler_state import check_sampler

if TYPE_CHECKING:
    from rlzmq.runners.multi.episode_sampler import MultiAgentSampler
    from rlzmq.runners.multi.fused_sampler import FusedMultiAgentSampler
    from rlzmq.runners.multi.module_rows import ModuleStore

__all__ = ["get_episode_sampler", "get_fused_sampler", "set_episode_sampler", "set_fused_sampler"]


def get_episode_sampler(sampler: MultiAgentSampler) -> dict[str, Any]:
    """Of a MultiAgentSampler with ongoing episodes, between two fragments.

    Raises:
        NotPlainError: Something that has no plain form.
    """
    return {
        "kind": "agents' episodes",
        "lookback": sampler.lookback,
        "episodes": [plain_state(episode) for episode in sampler._episodes],
        # An env that is about to be reset still acts as the episode that ended.
        "acting": [
            None if acting is episode else plain_state(acting)
            for acting, episode in zip(sampler._acting, sampler._episodes, strict=True)
        ],
        "prev_chunks": [[plain_state(chunk) for chunk in chunks] for chunks in sampler._prev_chunks],
        "totals": [totals.get_state() for totals in sampler._totals],
        "starting": sorted(sampler._starting),
        "templates": freeze(sampler._templates, "model outputs"),
        "to_module": freeze(sampler._to_module, "the modules' batch"),
    }


def set_episode_sampler(sampler: MultiAgentSampler, state: Mapping[str, Any], lost: Collection[int]) -> None:
    """Go on from what `get_episode_sampler` gave; arguments and errors as of `carried.set_fused_sampler`."""
    check_sampler(sampler, state, "agents' episodes", len(state["episodes"]))
    mapping_fn = sampler.runner.mapping_fn
    sampler._episodes = [_episode(episode, mapping_fn) for episode in state["episodes"]]
    sampler._acting = [
        episode if acting is None else _episode(acting, mapping_fn)
        for episode, acting in zip(sampler._episodes, state["acting"], strict=True)
    ]
    sampler._prev_chunks = [
        [_episode(chunk, mapping_fn) for chunk in chunks] for chunks in state["prev_chunks"]
    ]
    sampler._totals = [EpisodeTotals.from_state(totals) for totals in state["totals"]]
    sampler._starting = set(state["starting"])
    sampler._templates = thaw(state["templates"])
    sampler._to_module = thaw(state["to_module"])
    for index in lost:
        sampler._begin_episode(index)
    sampler.has_episodes = True


def _episode(state: Mapping[str, Any], mapping_fn: Any) -> MultiAgentEpisode:
    episode = MultiAgentEpisode.from_state(dict(state))
    episode.agent_to_module_mapping_fn = mapping_fn
    return episode


def get_fused_sampler(sampler: FusedMultiAgentSampler) -> dict[str, Any]:
    """Of a FusedMultiAgentSampler with ongoing episodes, between two fragments.

    Raises:
        NotPlainError: Something that has no plain form.
    """
    return {
        "kind": "fused agents",
        "lookback": sampler.lookback,
        "stores": {module_id: store.get_state() for module_id, store in sampler._stores.items()},
        "live": [_live_state(live) for live in sampler._live],
        "acting": [
            [
                store.module_id,
                freeze(block, "observations"),
                [[index, to_plain(record.agent_id)] for index, record in rows],
            ]
            for store, block, rows in sampler._acting
        ],
    }


def set_fused_sampler(
    sampler: FusedMultiAgentSampler, state: Mapping[str, Any], lost: Collection[int]
) -> None:
    """Go on from what `get_fused_sampler` gave; arguments and errors as of `carried.set_fused_sampler`."""
    check_sampler(sampler, state, "fused agents", len(state["live"]))
    stores = sampler._stores
    for module_id, own in state["stores"].items():
        if module_id in stores:  # else the module was removed
            stores[module_id].set_state(own)
    sampler._live = live_episodes = [
        _set_live(sampler._new_episode(str(live["id"])), live, stores) for live in state["live"]
    ]
    sampler._acting = [
        (
            stores[module_id],
            thaw(block),
            [(index, live_episodes[index].records[from_plain(agent_id)]) for index, agent_id in rows],
        )
        for module_id, block, rows in state["acting"]
    ]
    for index in lost:
        sampler._live[index] = sampler._new_episode()
    sampler.has_episodes = True


def _live_state(live: LiveEpisode) -> dict[str, Any]:
    where = f"episode {live.id_!r}"
    return {
        "id": live.id_,
        "is_reset": live.is_reset,
        "timeline": timeline_to_plain(live.timeline, where),
        "agent_module_ids": to_plain(dict(live.face._agent_module_ids), where),
        "custom_data": to_plain(live.face.custom_data, f"{where}.custom_data"),
        "totals": live.totals.get_state(),
        "records": [_record_state(record) for record in live.records.values()],
    }


def _set_live(live: LiveEpisode, state: Mapping[str, Any], stores: Mapping[str, ModuleStore]) -> LiveEpisode:
    live.is_reset = bool(state["is_reset"])
    live.timeline = live.face._timeline = timeline_from_plain(state["timeline"])
    live.face._agent_module_ids = from_plain(state["agent_module_ids"])
    live.face.custom_data = from_plain(state["custom_data"])
    live.totals = EpisodeTotals.from_state(state["totals"])
    for own in state["records"]:
        agent_id = from_plain(own["agent_id"])
        store = stores[live.face.module_for(agent_id)]
        record = live.records[agent_id] = AgentRecord(agent_id, store, live.timeline.tracks[agent_id])
        record.observation_rows, record.act_rows = list(own["observation_rows"]), list(own["act_rows"])
        record.rewards = from_plain(own["rewards"])
        record.infos = {position: from_plain(info) for position, info in own["infos"]}
        record.lookback, record.t_started = int(own["lookback"]), int(own["t_started"])
        record.initial_state = thaw(own["initial_state"])
        if own["state"] is not None:
            record.state = (thaw(own["state"]), 0, 1)
    return live


def _record_state(record: AgentRecord) -> dict[str, Any]:
    state = record.state
    if state is not None:
        block, row, _ = state
        state = freeze(tree_map(lambda leaf: leaf[row : row + 1], block), "the module's state")
    return {
        "agent_id": to_plain(record.agent_id),
        "observation_rows": list(record.observation_rows),
        "act_rows": list(record.act_rows),
        "rewards": to_plain(record.rewards),
        "infos": [[position, plain_infos(info)[0]] for position, info in record.infos.items()],
        "lookback": record.lookback,
        "t_started": record.t_started,
        "initial_state": freeze(record.initial_state, "the module's state"),
        "state": state,
    }
