"""A broker that somebody else runs (``rlzmq broker``), as the driver's pipeline sees it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from rlzmq.core.errors import AuthenticationError, ClosedError, ConfigurationError
from rlzmq.net.join_file import JoinFile
from rlzmq.roles.remote_peer import Conversation
from rlzmq.wire.messages import Config, ConfigRequest, Refused

__all__ = ["FoundBroker"]

_WAIT_S = 30.0  # for one that is only being started


class FoundBroker:
    """Stands for a `BrokerKeeper`: whoever started that broker also restarts it, peers reconnect.

    Args:
        path: Its ``*.driver.toml``; the runners' and learners' files lie next to it.

    Attributes:
        addresses, failed, num_restarts, handle: As of `BrokerKeeper`.
        run_id: The broker's.
        epoch: Of this driver: above that of any before it. Milliseconds of wall time, unless that was set back.

    Raises:
        ConfigurationError: A file is missing, readable by others, or for another role.
    """

    def __init__(self, path: str) -> None:
        driver = Path(path)
        if not driver.name.endswith(".driver.toml"):
            raise ConfigurationError(f"config.broker={path!r}: expected the *.driver.toml that it wrote")
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
        self.run_id = self._joins["driver"].run_id
        self.addresses = dict(self._joins["driver"].addresses)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_restarts = 0
        self.handle: Any = None
        self.epoch = 0

    def keys(self, role: str) -> tuple[str, str]:
        """(server's public key, own secret key) of a local peer of this role."""
        join = self._joins[role]
        return join.server_public_key, join.client_secret_key

    async def start(self) -> None:
        """See that it runs and takes the driver's key; whom it serves already does not notice.

        Raises:
            PeerLostError: Nothing answers within half a minute, or another version does.
            AuthenticationError: It has other keys: the files are an earlier broker's.
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
        """An update went through it."""

    async def stop(self) -> None:
        """It runs on, for the next driver."""
        if not self.failed.done():
            self.failed.set_exception(ClosedError("the run was stopped"))
        self.failed.exception()  # seen
