"""A policy server over the wire: clients with the key get the policy's actions, others nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import zmq

from rlzmq import (
    AsyncPolicyClient,
    AsyncPolicyServer,
    AuthenticationError,
    ClosedError,
    ConfigurationError,
    DeadlineError,
    FrameStackingEnvToModule,
    MeanStdFilter,
    PeerLostError,
    Policy,
    PolicyClient,
    PolicyServer,
    PPOConfig,
    RemoteError,
)
from rlzmq.deploy.policy_messages import Act, Describe, Failure, decode_message, encode_message
from rlzmq.envs.examples import MultiAgentCartPole
from rlzmq.net.join_file import JoinFile
from rlzmq.net.keys import KeyPair
from rlzmq.wire.codec import encode
from rlzmq.wire.packed_frames import PART, PartialMessages, parts_of
from tests.deploy.serving import cartpole, write_checkpoint
from tests.deploy.test_serve_command import gated, served
from tests.deploy.test_serve_http import NestedEnv


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(cartpole(), tmp_path_factory.mktemp("plain") / "000007")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[PolicyServer]:
    with PolicyServer(checkpoint, http=None, listen="tcp://127.0.0.1:0") as server:
        yield server


def join_of(server: PolicyServer | AsyncPolicyServer) -> JoinFile:
    assert server.join is not None
    return server.join


@pytest.mark.parametrize("listen", ["ipc", "tcp://127.0.0.1:0"])
def test_actions_over_ipc_and_over_tcp_with_keys(listen: str, checkpoint: Path, tmp_path: Path) -> None:
    policy = Policy.load(checkpoint)
    # Its frame is not copied.
    observations = np.random.default_rng(0).normal(size=(3000, 4)).astype(np.float32)
    expected = policy.compute_actions(observations)
    with PolicyServer(checkpoint, http=None, listen=listen) as server:
        file = tmp_path / "serve.toml"
        join_of(server).write(file)
        assert file.stat().st_mode & 0o777 == 0o600
        assert bool(join_of(server).server_public_key) == (listen != "ipc")
        with PolicyClient(file) as client:
            assert (client.observation_space, client.action_space) == (
                policy.observation_space,
                policy.action_space,
            )
            found = client.compute_actions(observations)
            np.testing.assert_array_equal(found.actions, expected)
            assert (found.state_out, found.checkpoint) == ({}, "000007")
            for observation, action in zip(observations[:10], expected, strict=False):
                assert client.compute_action(observation).actions == action
                assert client.compute_actions([observation.tolist()]).actions == [action]
            drawn = client.compute_actions(np.zeros((200, 4)), explore=True).actions
            assert set(drawn.tolist()) == {0, 1}


def test_frames_and_filters_of_an_episode_travel_as_state(tmp_path: Path) -> None:
    config = cartpole(use_lstm=True, lstm_cell_size=8).env_runners(
        env_to_module_connector=lambda: [MeanStdFilter(), FrameStackingEnvToModule(num_frames=3)]
    )
    path = write_checkpoint(config, tmp_path / "frames")
    player = Policy.load(path, config=config)
    rng = np.random.default_rng(1)
    with PolicyServer(path, config=config, http=None) as server, PolicyClient(join_of(server)) as client:
        state: Any = None
        for _ in range(20):
            observation = 3 * rng.normal(size=4).astype(np.float32)
            action, state, _ = client.compute_action(observation, state_in=state)
            assert action == player.compute_action(observation)
        assert "frames" in state
        with pytest.raises(ValueError, match="state_in: expected the keys"):
            client.compute_action(observation, state_in={"frames": state["frames"]})
        with pytest.raises(ValueError, match=r"state.frames: expected shape \(1, "):
            client.compute_action(observation, state_in={**state, "frames": np.zeros(3, np.float32)})


def test_nested_spaces(tmp_path: Path) -> None:
    config = PPOConfig().environment(NestedEnv).debugging(seed=3)
    config.rl_module(model_config={"fcnet_hiddens": [16]})
    path = write_checkpoint(config, tmp_path / "nested")
    policy = Policy.load(path, config=config)
    with PolicyServer(path, config=config, http=None) as server, PolicyClient(join_of(server)) as client:
        items = [NestedEnv.observation_space.sample() for _ in range(5)]
        found, expected = client.compute_actions(items).actions, policy.compute_actions(items)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_allclose(found[1], expected[1], atol=1e-6)
        with pytest.raises(ValueError, match=r"obs.place: a value is outside of Discrete\(3, start=1\)"):
            client.compute_action({**items[0], "place": 0})


def test_two_modules_and_one_that_comes_later(tmp_path: Path) -> None:
    def config_of(*names: str) -> PPOConfig:
        config = PPOConfig().environment(MultiAgentCartPole, env_config={"num_agents": len(names)})
        config.multi_agent(
            policies=set(names), policy_mapping_fn=lambda agent_id, episode, **_: names[agent_id]
        )
        return config.rl_module(model_config={"fcnet_hiddens": [16]})

    path = write_checkpoint(config_of("p0", "p1"), tmp_path / "000001")
    observations = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
    config = config_of("p0", "p1")
    with PolicyServer(path, config=config, http=None) as server, PolicyClient(join_of(server)) as client:
        for agent in (0, 1):
            policy = Policy.load(path, config=config, module_id=f"p{agent}", agent_id=agent)
            expected = policy.compute_actions(observations)
            for chosen in ({"module_id": f"p{agent}"}, {"agent_id": agent}):
                np.testing.assert_array_equal(
                    client.compute_actions(observations, **chosen).actions, expected
                )
        with pytest.raises(ValueError, match=r"choose one of the modules \['p0', 'p1'\] with module_id"):
            client.compute_actions(observations)
        with pytest.raises(KeyError, match="no module 'p9'"):
            client.compute_actions(observations, module_id="p9")
        with pytest.raises(KeyError, match="no module 'p0' with agent '1'"):
            client.compute_actions(observations, module_id="p0", agent_id=1)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (facts of other objects and processes, without events)
        await asyncio.sleep(0.005)


async def test_sixty_four_clients_each_get_their_own_actions_while_checkpoints_change(tmp_path: Path) -> None:
    run = tmp_path / "run"
    paths = [write_checkpoint(cartpole(), run / "checkpoints" / "000001", seed=1)]
    is_over = asyncio.Event()
    seen: set[str] = set()

    async def play(number: int) -> None:
        rng = np.random.default_rng(number)
        async with AsyncPolicyClient(join_of(server)) as client:
            while not is_over.is_set():
                observations = rng.normal(size=(1 + number % 5, 4)).astype(np.float32)
                actions, _, name = await client.compute_actions(observations)
                expected = policies[name].compute_actions(observations)
                np.testing.assert_array_equal(actions, expected)
                seen.add(name)

    policies = {"000001": Policy.load(paths[0])}
    async with AsyncPolicyServer(run, http=None, reload_interval_s=0) as server, asyncio.TaskGroup() as group:
        for number in range(64):
            group.create_task(play(number))
        for number in range(2, 5):
            name = f"{number:06d}"
            path = await asyncio.to_thread(write_checkpoint, cartpole(), run / "checkpoints" / name, number)
            policies[name] = Policy.load(path)
            assert await server.reload()
            await until(lambda name=name: name in seen)
        is_over.set()
    assert seen == set(policies)


def test_a_wrong_key_is_refused(server: PolicyServer, tmp_path: Path) -> None:
    good = join_of(server)
    for wrong in (
        replace(good, client_secret_key=KeyPair.generate().secret),
        replace(good, server_public_key=KeyPair.generate().public),
    ):
        with pytest.raises(AuthenticationError, match="refuses the key, or has another one"):
            PolicyClient(wrong)
    with pytest.raises(ConfigurationError, match=r"refusing to connect .* without keys"):
        PolicyClient(replace(good, server_public_key="", client_secret_key=""))
    with pytest.raises(ConfigurationError, match="the join file is for a runner of a run"):
        PolicyClient(replace(good, role="runner"))
    with PolicyClient(good) as client:
        assert client.compute_action(np.zeros(4)).checkpoint == "000007"


@contextlib.contextmanager
def raw_client(join: JoinFile) -> Iterator[zmq.Socket[bytes]]:
    """A client that may send anything."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RCVTIMEO, 20_000)
    curve = join.curve()
    assert curve is not None
    curve.apply(socket)
    socket.connect(join.addresses["policy"])
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def answer_of(socket: zmq.Socket[bytes]) -> tuple[int, Any]:
    received: Any = socket.recv_multipart()
    partial = PartialMessages(1 << 20, 1 << 20)
    while received is None or received[0][:2] == PART:
        received = partial.add(b"", socket.recv_multipart() if received is None else received)
    request_id, message, _ = decode_message(received)
    return request_id, message


def send(socket: zmq.Socket[bytes], frames: Sequence[Any]) -> None:
    """Send as it is sent over TCP."""
    for part in [frames] if len(frames) == 1 else parts_of(frames, 1):
        socket.send_multipart(part)


def test_requests_that_do_not_fit_are_answered_and_garbage_is_not(server: PolicyServer) -> None:
    obs = np.zeros((2, 4), np.float32)
    with raw_client(join_of(server)) as socket:
        for frames in (
            [b""],
            [b"x" * 100],
            [b"\x02\x92"],
            encode(1, {}),
            encode(146, {"request_id": 1}),
            encode_message(1, Failure(200, "")),
            [*encode_message(1, Describe()), b"more"],
        ):
            send(socket, frames)
        cases = [
            (10, Act("", "", False, False, False), [], 400, "expected 1 arrays, got 0"),
            (11, Act("", "", False, False, False), [obs, obs], 400, "expected 1 arrays, got 2"),
            (12, Act("", "", False, True, False), [obs], 400, "expected 2 arrays, got 1"),
            (13, Act("", "", False, False, False), [np.float32(1)], 400, "without a batch axis"),
            (14, Act("", "", False, False, False), [obs[:0]], 400, "expected as many rows"),
            (15, Act("", "", False, False, False), [obs[:, :3]], 400, "obs: expected shape (4,), got (3,)"),
            (16, Act("", "", False, False, False), [obs + np.nan], 400, "obs: expected finite numbers"),
            (17, Act("", "", False, False, False), [obs.astype(complex)], 400, "got complex128"),
            (18, Act("", "", False, False, False), [np.full((2, 4), "1")], 400, "got <U1"),
            (19, Act("no", "", False, False, False), [obs], 404, "no module 'no'"),
        ]
        for request_id, message, arrays, code, text in cases:
            send(socket, encode_message(request_id, message, [np.asarray(array) for array in arrays]))
            answered, answer = answer_of(socket)
            assert (answered, answer.code) == (request_id, code), answer
            assert text in answer.detail
        send(socket, encode_message(20, Act("", "", False, True, True), [obs, obs[:, 0]]))
        assert answer_of(socket)[0] == 20  # rewards that no piece reads are left out


def test_a_client_that_reads_nothing_is_ignored_and_others_are_served(
    server: PolicyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlzmq.deploy import wire_interface

    monkeypatch.setattr(wire_interface, "_MAX_UNREAD_BYTES", 1 << 20)
    wire = server._async._wire
    assert wire is not None
    obs = np.zeros((20_000, 4), np.float32)  # answers of 160 kB
    with raw_client(join_of(server)) as socket, PolicyClient(join_of(server)) as client:
        socket.set(zmq.RCVHWM, 1)
        number = 0
        while not any(unread.num_bytes > 1 << 20 for unread in wire._unread.values()):
            number += 1
            send(socket, encode_message(number, Act("", "", False, False, False), [obs]))
            client.compute_action(np.zeros(4))
        client.compute_action(np.zeros(4))


def test_a_server_that_is_not_there_or_ends(checkpoint: Path) -> None:
    with PolicyServer(checkpoint, http=None, listen="tcp://127.0.0.1:0") as server:
        join = join_of(server)
        client = PolicyClient(join)
        assert client.compute_action(np.zeros(4)).actions in (0, 1)
    with pytest.raises(DeadlineError, match=r"did not answer within 0\.3 s"):
        PolicyClient(join, timeout_s=0.3)
    client.stop()
    client.stop()
    with pytest.raises(ClosedError, match="was stopped"):
        client.compute_action(np.zeros(4))


async def test_the_end_answers_what_has_arrived_and_refuses_what_comes_later(tmp_path: Path) -> None:
    path = write_checkpoint(gated(tmp_path), tmp_path / "000001")
    server = await AsyncPolicyServer(path, http=None).start()
    waiting, late = np.array([1.0, 0, 0, 0]), np.zeros(4)
    async with AsyncPolicyClient(join_of(server)) as client:
        asked = [asyncio.create_task(client.compute_action(waiting)) for _ in range(5)]
        await until((tmp_path / "begun").exists)
        await client._describe()  # the requests before it have arrived when it is answered
        stopping = asyncio.create_task(server.stop())
        wire = server._wire
        assert wire is not None
        await until(lambda: wire._is_ending)
        with pytest.raises(PeerLostError, match="takes no new requests"):
            await client.compute_action(late)
        (tmp_path / "go").touch()
        assert [action for action, *_ in await asyncio.gather(*asked)] == [0] * 5
        await stopping
        with pytest.raises((PeerLostError, DeadlineError, TimeoutError)):
            await asyncio.wait_for(client.compute_action(late), 1.0)
    await server.stop()


async def test_an_error_of_the_policy_and_a_server_that_dies(tmp_path: Path) -> None:
    write_checkpoint(gated(tmp_path), tmp_path / "000001")
    with served("000001", directory=tmp_path) as server:
        async with AsyncPolicyClient(tmp_path / "000001" / "serve.toml") as client:
            with pytest.raises(RemoteError, match="the policy raised RuntimeError"):
                await client.compute_action(np.array([2.0, 0, 0, 0]))
            asked = asyncio.create_task(client.compute_action(np.array([1.0, 0, 0, 0])))
            await until((tmp_path / "begun").exists)
            server.process.kill()
            with pytest.raises(PeerLostError, match="broke"):
                await asked


def test_tcp_keys_outlive_the_server_so_that_clients_find_the_next_one(tmp_path: Path) -> None:
    write_checkpoint(cartpole(), tmp_path / "000001")
    listen = "tcp://127.0.0.1:0"
    joins = []
    for _ in range(2):
        with served("000001", "--listen", listen, directory=tmp_path) as server:
            joins.append(JoinFile.read(tmp_path / "000001" / "serve.toml"))
            listen = joins[0].addresses["policy"]
            with PolicyClient(joins[0]) as client:
                assert client.compute_action(np.zeros(4)).actions in (0, 1)
        server.process.wait()
    assert joins[0].server_public_key == joins[1].server_public_key
    assert (tmp_path / "000001" / "serve.server.toml").stat().st_mode & 0o777 == 0o600


def test_spaces_of_one_observation(server: PolicyServer) -> None:
    with PolicyClient(join_of(server)) as client:
        assert isinstance(client.action_space, gym.spaces.Discrete)
        with pytest.raises(ValueError, match=r"observation: expected shape \(4,\), got \(3,\)"):
            client.compute_action(np.zeros(3))
        with pytest.raises(ValueError, match=r"observations: expected shape"):
            client.compute_actions(np.zeros((2, 3)))
