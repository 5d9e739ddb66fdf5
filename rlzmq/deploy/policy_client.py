"""PolicyClient: requests actions from a policy server over ZeroMQ."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, Self

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rlzmq.actors.loop_thread import get_loop_thread
from rlzmq.algorithms.policy_inputs import as_batch_of, as_value_of
from rlzmq.core.errors import (
    AuthenticationError,
    ClosedError,
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    ProtocolError,
    RemoteError,
)
from rlzmq.core.suggest import did_you_mean
from rlzmq.core.tree import tree_flatten, tree_leaves, tree_map
from rlzmq.deploy.batcher import OverloadedError
from rlzmq.deploy.policy_graph import zeros_of
from rlzmq.deploy.policy_messages import (
    CLIENT_ROLE,
    ENDING,
    Act,
    Actions,
    Describe,
    Description,
    Failure,
    PolicyMessage,
    decode_message,
    encode_message,
)
from rlzmq.deploy.wire_interface import MAX_MESSAGE_BYTES
from rlzmq.driver.synchronous import Forwarded, Synchronous, blocking
from rlzmq.net.context import Context
from rlzmq.net.events import SocketEvent
from rlzmq.net.join_file import JoinFile
from rlzmq.net.options import SocketOptions
from rlzmq.net.socket import DrainSocket, Frame
from rlzmq.wire.values import unpack_value

__all__ = ["AsyncPolicyClient", "PolicyClient", "ServedActions"]

_ZAP_REFUSED = 400  # status of a refused key
# Handshakes that fail without a status: the server has another key, or is being restarted.
_MAX_REFUSALS = 3

_Arrays = tuple[npt.NDArray[Any], ...]


class ServedActions(NamedTuple):
    """The answer of a policy server."""

    actions: Any
    """The env's actions: one action, or a tree of arrays ``[N, ...]``."""
    state_out: dict[str, Any]
    """The policy's memory of the episodes, by name: `state_in` of their next step; {} for a policy without memory."""
    checkpoint: str
    """Name of the checkpoint that computed the actions."""


class _Served(NamedTuple):
    """A policy, as described by the server."""

    module_id: str
    agent_id: str
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    states: list[str]
    reads_rewards: bool


class AsyncPolicyClient:
    """Requests actions from a policy server. An async context manager. Requests may be made concurrently.

    Example::

        async with AsyncPolicyClient("serve.toml") as client:
            action, state, _ = await client.compute_action(observation)

    Args:
        join_file: The file that the server wrote, or its content.
        timeout_s: Seconds after which a request without an answer fails.
    """

    def __init__(self, join_file: str | Path | JoinFile, *, timeout_s: float = 30.0) -> None:
        self._join = join_file if isinstance(join_file, JoinFile) else JoinFile.read(join_file)
        if self._join.role != CLIENT_ROLE or "policy" not in self._join.addresses:
            raise ConfigurationError(
                f"the join file is for a {self._join.role} of a run; expected the join file that rlzmq serve wrote."
            )
        self._timeout_s = timeout_s
        self._waiting: dict[int, asyncio.Future[tuple[PolicyMessage, _Arrays]]] = {}
        self._next_id = 0
        self._num_refusals = 0
        self._is_connected = False
        self._context: Context | None = None
        self._policies: list[_Served] = []

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Observation space of the first served policy."""
        return self._described()[0].observation_space

    @property
    def action_space(self) -> gym.Space[Any]:
        """Action space of the first served policy."""
        return self._described()[0].action_space

    async def start(self) -> Self:
        """Connect, and fetch the description of the served policies.

        Raises:
            AuthenticationError: The server refuses the key, or has an unexpected key itself.
            DeadlineError: No server answered.
        """
        self._context = Context()
        self._socket = DrainSocket(
            self._context,
            "DEALER",
            self._on_message,
            options=SocketOptions(
                max_message_bytes=MAX_MESSAGE_BYTES,
                receive_high_water_mark=0,
                max_queued_bytes=4 * MAX_MESSAGE_BYTES,
                reconnect_interval_max_ms=500,
            ),
            curve=self._join.curve(),
            on_event=self._on_event,
            name="policy client",
        )
        try:
            self._socket.connect(self._join.addresses["policy"])
            await self._describe()
        except BaseException:
            await self.stop()
            raise
        return self

    async def stop(self) -> None:
        """Close the connection; waiting requests fail. Idempotent."""
        if self._context is not None:
            context, self._context = self._context, None
            self._fail_all(ClosedError("the policy client was stopped"))
            self._socket.close(0)
            await asyncio.to_thread(context.close)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def compute_actions(
        self,
        observations: Any,
        *,
        state_in: Mapping[str, Any] | None = None,
        rewards: Any = None,
        explore: bool = False,
        module_id: str | None = None,
        agent_id: Any = None,
    ) -> ServedActions:
        """Return the actions for N observations, each from a different episode.

        Args:
            observations: Tree of arrays ``[N, ...]``, or a list of N observations.
            state_in: `ServedActions.state_out` of the previous step; None at the beginning of the episodes.
            rewards: ``[N]``, of the previous actions; None: 0. Only some connector pieces read them.
            explore: Whether to draw from the exploration distribution instead of acting greedily.
            module_id, agent_id: Which policy, if several are served.

        Raises:
            ValueError: The observations or the state do not fit, or several policies are served and none was chosen.
            KeyError: There is no such module or agent.
            OverloadedError: Too many requests are waiting at the server.
            PeerLostError: The server has ended, or the connection broke; try again.
            DeadlineError: No answer arrived in time.
            RemoteError: The policy raised an error.
        """
        policy = await self._chosen(module_id, agent_id)
        arrays = tree_leaves(as_batch_of(policy.observation_space, observations))
        num_rows = len(arrays[0])
        if rewards is not None:
            arrays.append(np.asarray(rewards, np.float32).reshape(num_rows))
        if state_in is not None:
            if sorted(state_in) != sorted(policy.states):
                raise ValueError(f"state_in: expected the keys {policy.states}, got {sorted(state_in)}.")
            arrays += [np.asarray(state_in[name]) for name in policy.states]
        answer, outputs = await self._ask(
            Act(
                policy.module_id,
                policy.agent_id,
                bool(explore),
                rewards is not None,
                state_in is not None,
            ),
            arrays,
        )
        spec = tree_flatten(zeros_of(policy.action_space, 1))[1]
        if not isinstance(answer, Actions) or len(outputs) != spec.num_leaves + len(policy.states):
            raise ProtocolError(f"the policy server answered with {type(answer).__name__}")
        actions = spec.unflatten(outputs[: spec.num_leaves])
        state = dict(zip(policy.states, outputs[spec.num_leaves :], strict=True))
        return ServedActions(actions, state, answer.checkpoint)

    async def compute_action(
        self,
        observation: Any,
        *,
        state_in: Mapping[str, Any] | None = None,
        reward: float = 0.0,
        explore: bool = False,
        module_id: str | None = None,
        agent_id: Any = None,
    ) -> ServedActions:
        """Return the action for one observation. Like `compute_actions`, without the batch axis."""
        policy = await self._chosen(module_id, agent_id)
        batch = tree_map(lambda leaf: leaf[None], as_value_of(policy.observation_space, observation))
        found = await self.compute_actions(
            batch,
            state_in=None if state_in is None else {name: value[None] for name, value in state_in.items()},
            rewards=[reward] if policy.reads_rewards else None,
            explore=explore,
            module_id=module_id,
            agent_id=agent_id,
        )
        state = {name: value[0] for name, value in found.state_out.items()}
        return ServedActions(tree_map(lambda leaf: leaf[0], found.actions), state, found.checkpoint)

    # -- policies -------------------------------------------------------------------------------

    def _described(self) -> list[_Served]:
        if not self._policies:
            raise ClosedError("the policy client was not started")
        return self._policies

    async def _describe(self) -> None:
        answer, arrays = await self._ask(Describe(), [])
        if not isinstance(answer, Description):
            raise ProtocolError(f"the policy server answered with {type(answer).__name__}")
        self._policies = [_Served(**about) for about in unpack_value(arrays)]

    async def _chosen(self, module_id: str | None, agent_id: Any) -> _Served:
        """Return the policy of a module or agent; if it is unknown, fetch the server's description again."""
        module, agent = module_id or "", "" if agent_id is None else str(agent_id)
        for is_new in (False, True):
            if is_new:
                await self._describe()
            found = [
                policy
                for policy in self._described()
                if module in ("", policy.module_id) and agent in ("", policy.agent_id)
            ]
            if len(found) == 1 or (found and (module or agent)):
                return found[0]
        names = sorted({policy.module_id for policy in self._policies})
        if found:
            raise ValueError(f"choose one of the modules {names} with module_id, or an agent with agent_id.")
        raise KeyError(f"no module {module!r} with agent {agent!r}.{did_you_mean(module, names)}")

    # -- requests -------------------------------------------------------------------------------

    async def _ask(
        self, message: PolicyMessage, arrays: list[npt.NDArray[Any]]
    ) -> tuple[PolicyMessage, _Arrays]:
        if self._context is None:
            raise ClosedError("the policy client was not started, or was stopped")
        self._next_id += 1
        request_id = self._next_id
        future = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        try:
            if not self._socket.send(encode_message(request_id, message, arrays)):
                raise OverloadedError("too many requests wait to be sent to the policy server")
            async with asyncio.timeout(self._timeout_s):
                answer, outputs = await future
        except TimeoutError:
            raise DeadlineError(
                f"the policy server at {self._join.addresses['policy']} did not answer within {self._timeout_s:g} s"
            ) from None
        finally:
            del self._waiting[request_id]
        if isinstance(answer, Failure):
            _raise(answer)
        return answer, outputs

    def _on_message(self, frames: list[Frame]) -> None:
        try:
            request_id, message, arrays = decode_message(frames)
        except ProtocolError as error:
            self._fail_all(error)
            return
        future = self._waiting.get(request_id)
        if future is not None and not future.done():
            future.set_result((message, arrays))

    def _on_event(self, event: SocketEvent) -> None:
        address = self._join.addresses["policy"]
        if event.kind == "connected":
            self._is_connected = True
        elif event.kind == "disconnected" and self._is_connected:
            self._is_connected = False
            self._fail_all(PeerLostError(f"the connection to the policy server at {address} broke"))
        elif event.kind == "handshake_failed":
            self._num_refusals += 1
            if event.code == _ZAP_REFUSED or self._num_refusals >= _MAX_REFUSALS:
                self._fail_all(
                    AuthenticationError(
                        f"the policy server at {address} refuses the key, or has another one: is the join file the "
                        "one that it wrote?"
                    )
                )

    def _fail_all(self, error: Exception) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


class PolicyClient(Synchronous[AsyncPolicyClient]):
    """`AsyncPolicyClient` for synchronous callers, connected from its creation until `stop`. A context manager.

    Example::

        with PolicyClient("serve.toml") as client:
            action, state, _ = client.compute_action(observation)

    Args:
        join_file: The file that the server wrote, or its content.
        timeout_s: Seconds after which a request without an answer fails.

    Raises:
        AuthenticationError, DeadlineError: See `AsyncPolicyClient.start`.
    """

    observation_space: Forwarded[gym.Space[Any]] = Forwarded[gym.Space[Any]](
        AsyncPolicyClient, "observation_space"
    )
    action_space: Forwarded[gym.Space[Any]] = Forwarded[gym.Space[Any]](AsyncPolicyClient, "action_space")
    compute_action: Final = blocking(AsyncPolicyClient.compute_action)
    compute_actions: Final = blocking(AsyncPolicyClient.compute_actions)
    stop: Final = blocking(AsyncPolicyClient.stop)

    def __init__(self, join_file: str | Path | JoinFile, *, timeout_s: float = 30.0) -> None:
        self._async = AsyncPolicyClient(join_file, timeout_s=timeout_s)
        self._run = get_loop_thread().run
        self._run(self._async.start())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def _raise(failure: Failure) -> NoReturn:
    if failure.code == 400:
        raise ValueError(failure.detail)
    if failure.code == 404:
        raise KeyError(failure.detail)
    if failure.code == 503:
        raise OverloadedError(failure.detail)
    if failure.code == ENDING:
        raise PeerLostError(f"the policy server takes no new requests: {failure.detail}")
    raise RemoteError(failure.detail)
