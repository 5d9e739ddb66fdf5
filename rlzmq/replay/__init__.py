"""Columnar replay buffers and offline data, usable on their own and through the learners' batch sources.

``EpisodeReplayBuffer`` samples uniformly, ``PrioritizedEpisodeReplayBuffer`` by priorities,
``HindsightEpisodeReplayBuffer`` with other goals; all store each observation once and return samples as an
`EpisodeBatch`. The multi-agent variants of the first two have one of them per module. ``ReplayBuffer`` is the base of
your own.
``EpisodeRecorder`` joins fragments into whole episodes; ``write_shard`` writes an `EpisodeBatch` to a file, and
``open_shards`` maps such files into memory. Minari datasets can be converted in both directions.
"""

from typing import Protocol

from rlzmq.replay.episode_replay_buffer import (
    EpisodeReplayBuffer,
    HindsightEpisodeReplayBuffer,
    PrioritizedEpisodeReplayBuffer,
)
from rlzmq.replay.multi_agent_episode_replay_buffer import (
    MultiAgentEpisodeReplayBuffer,
    MultiAgentPrioritizedEpisodeReplayBuffer,
    joined,
)
from rlzmq.replay.replay_buffer import ReplayBuffer
from rlzmq.replay.shards import (
    EpisodeRecorder,
    export_to_minari,
    import_from_minari,
    open_shards,
    write_shard,
)

__all__ = [
    "EpisodeRecorder",
    "EpisodeReplayBuffer",
    "HindsightEpisodeReplayBuffer",
    "MultiAgentEpisodeReplayBuffer",
    "MultiAgentPrioritizedEpisodeReplayBuffer",
    "PrioritizedEpisodeReplayBuffer",
    "ReplayBuffer",
    "buffer_class",
    "export_to_minari",
    "import_from_minari",
    "joined",
    "open_shards",
    "write_shard",
]

_BY_NAME: dict[str, type[ReplayBuffer]] = {
    cls.__name__: cls
    for cls in (
        EpisodeReplayBuffer,
        PrioritizedEpisodeReplayBuffer,
        HindsightEpisodeReplayBuffer,
        MultiAgentEpisodeReplayBuffer,
        MultiAgentPrioritizedEpisodeReplayBuffer,
    )
}


class _Agents(Protocol):
    @property
    def is_multi_agent(self) -> bool: ...


def buffer_class(kind: object, config: _Agents) -> type[ReplayBuffer]:
    """Return the class that a name or a class stands for; several agents get the "MultiAgent…" variant of a name.

    Raises:
        ValueError: There is none.
    """
    several = config.is_multi_agent
    if isinstance(kind, str):
        kind = _BY_NAME.get(f"MultiAgent{kind}" if several else kind, _BY_NAME.get(kind))
    if isinstance(kind, type) and issubclass(kind, ReplayBuffer) and kind.divides_by_module == several:
        return kind
    names = ", ".join(name for name, cls in _BY_NAME.items() if cls.divides_by_module == several)
    agents, settings = ("several agents", "are") if several else ("one agent", "are no")
    raise ValueError(
        f"expected a ReplayBuffer of {agents} ({names}, or your own subclass), as there {settings} multi_agent() "
        "settings"
    )
