"""FoundBroker: the driver's view of a standalone broker (``rlzmq broker``)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rlzmq.core.errors import AuthenticationError, ConfigurationError
from rlzmq.driver.supervision import Supervisor
from rlzmq.net.join_file import JoinFile
from rlzmq.roles.remote_peer import Conversation
from rlzmq.wire.messages import Config, ConfigRequest, Refused

__all__ = ["FoundBroker"]

_WAIT_S = 30.0  # the broker may still be starting


class FoundBroker(Supervisor):
    """Counterpart of `BrokerKeeper` for a broker that someone else has started, and restarts.

    Args:
        path: Its ``*.driver.toml``. The files of runners and learners are next to it.

    Attributes:
        addresses, failed, num_restarts, handle: See `BrokerKeeper`.
        run_id: The broker's run id.
        epoch: Epoch of this driver, above those of earlier ones. Milliseconds of wall time, unless that was set back.

    Raises:
        ConfigurationError: A file is missing, readable by others, or for another role.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        driver = Path(path)
        if not driver.name.endswith(".driver.toml"):
            raise ConfigurationError(
                f"config.broker={path!r}: expected the *.driver.toml file written by the broker"
            )
        stem = driver.name.removesuffix(".driver.toml")
        files = {
            "driver": driver,
            "runner": driver.with_name(f"{stem}.toml"),
            "learner": driver.with_name(f"{stem}.learner.toml"),
        }
        self._joins = {role: JoinFile.read(file) for role, file in files.items()}
        for role, join in self._joins.items():
            if join.role != role:
                raise ConfigurationError(f"{files[role]} lets a {join.role} in, not a {role}")
        self.run_id: str = self._joins["driver"].run_id
        self.addresses: dict[str, str] = dict(self._joins["driver"].addresses)
        self.handle: Any = None
        self.epoch: int = 0

    def keys(self, role: str) -> tuple[str, str]:
        """Return (server's public key, own secret key) for a local peer of this role."""
        join = self._joins[role]
        return join.server_public_key, join.client_secret_key

    async def start(self) -> None:
        """Check that the broker runs and accepts the driver's key, without disturbing the peers that it serves.

        Raises:
            PeerLostError: There is no answer within half a minute, or the broker has another version.
            AuthenticationError: The broker has other keys: the files are from an earlier broker.
        """
        join = self._joins["driver"]
        async with Conversation(join.addresses["data"], join) as conversation:
            answer, _ = await conversation.ask(ConfigRequest(), (Config, Refused), timeout_s=_WAIT_S)
        if isinstance(answer, Refused) and answer.reason != "no_driver":
            raise AuthenticationError(
                f"the broker at {join.addresses['data']} refuses a driver: {answer.reason}, {answer.detail}"
            )
        before = answer.driver if isinstance(answer, Config) else 0
        self.epoch = max(before + 1, int(time.time() * 1000))

    def worked(self) -> None:
        """Do nothing, since the broker is not supervised here."""
