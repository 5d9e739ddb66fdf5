"""A policy server over HTTP: it answers as the policy acts, and refuses what does not fit."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gymnasium as gym
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlzmq import (
    CheckpointError,
    ConfigurationError,
    MeanStdFilter,
    Policy,
    PolicyServer,
    PPOConfig,
    PrevActionsPrevRewards,
)
from tests.deploy.serving import Http, cartpole, write_checkpoint
from tests.support.runs import ShortEnv, two_agents

OBS = [0.1, -0.2, 0.03, 0.4]


class NestedEnv(ShortEnv):
    """A Dict observation and a Tuple action."""

    observation_space = gym.spaces.Dict(
        {
            "place": gym.spaces.Discrete(3, start=1),
            "keys": gym.spaces.MultiBinary(2),
            "parts": gym.spaces.Tuple(
                [gym.spaces.Box(-np.inf, np.inf, (2,), np.float64), gym.spaces.MultiDiscrete([2, 3])]
            ),
            "image": gym.spaces.Box(0, 255, (2, 2), np.uint8),
        }
    )
    action_space = gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Box(-1.0, 1.0, (2,), np.float32)])
    length = 1

    def observation(self) -> Any:
        return self.observation_space.sample()


NESTED = {"place": 1, "keys": [0, 1], "parts": [[0.5, -1], [1, 2]], "image": [[0, 255], [3, 4]]}


def filtered() -> PPOConfig:
    return cartpole().env_runners(env_to_module_connector=MeanStdFilter)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(filtered(), tmp_path_factory.mktemp("plain") / "000007")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[PolicyServer]:
    with serve(checkpoint, config=filtered()) as server:
        yield server


@pytest.fixture
def client(server: PolicyServer) -> Iterator[Http]:
    with client_of(server) as client:
        yield client


def serve(path: Path, **options: Any) -> PolicyServer:
    return PolicyServer(path, http="127.0.0.1:0", **options)


def client_of(server: PolicyServer) -> Http:
    assert server.http_url is not None
    return Http(server.http_url, server.token)


def test_one_observation_and_many_get_the_policys_actions(
    server: PolicyServer, client: Http, checkpoint: Path
) -> None:
    policy = Policy.load(checkpoint, config=filtered())
    observations = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
    expected = policy.compute_actions(observations).tolist()
    assert set(expected) == {0, 1}
    code, answer = client.act(observations=observations.tolist())
    assert (code, answer) == (
        200,
        {"actions": expected, "module": "default_policy", "checkpoint": "000007"},
    )
    for observation, action in zip(observations[:20].tolist(), expected, strict=False):
        assert client.act(obs=observation)[1]["action"] == action
    assert server.checkpoint == checkpoint


def test_exploration_draws_from_the_distribution(client: Http) -> None:
    answers = [
        client.act(observations=[OBS] * 200, explore=explore)[1]["actions"] for explore in (True, False)
    ]
    assert [len(set(actions)) for actions in answers] == [2, 1]


def test_what_a_policy_remembers_travels_with_the_requests(tmp_path: Path) -> None:
    config = cartpole(use_lstm=True, lstm_cell_size=8).env_runners(
        env_to_module_connector=lambda: [PrevActionsPrevRewards(n_prev_rewards=1, n_prev_actions=1)]
    )
    path = write_checkpoint(config, tmp_path / "lstm")
    players = [Policy.load(path, config=config) for _ in range(2)]
    rng = np.random.default_rng(1)
    with serve(path, config=config) as server, client_of(server) as client:
        alone: Any = None
        together: Any = None
        seen = set()
        for step in range(12):
            observations = 3 * rng.normal(size=(2, 4)).astype(np.float32)
            rewards = rng.normal(size=2).astype(np.float32) if step else np.zeros(2, np.float32)
            expected = [
                int(player.compute_action(observation, reward=reward))
                for player, observation, reward in zip(players, observations, rewards, strict=True)
            ]
            given = {} if alone is None else {"state_in": alone}
            code, answer = client.act(obs=observations[0].tolist(), reward=float(rewards[0]), **given)
            assert (code, answer["action"]) == (200, expected[0])
            alone = answer["state_out"]
            given = {} if together is None else {"state_in": together}
            code, answer = client.act(observations=observations.tolist(), rewards=rewards.tolist(), **given)
            assert (code, answer["actions"]) == (200, expected)
            together = answer["state_out"]
            assert together.keys() == alone.keys()
            memory = next(name for name in alone if name.startswith("module"))
            np.testing.assert_allclose(together[memory][0], alone[memory], atol=1e-5)
            seen |= set(expected)
        assert seen == {0, 1}
        code, answer = client.act(obs=OBS, state_in={**alone, memory: [1.0]})
        assert code == 400
        assert f"state_in.{memory}: expected shape (1, " in answer["error"]
        del alone[memory]
        code, answer = client.act(obs=OBS, state_in=alone)
        assert code == 400
        assert "state_in: expected an object with the keys [" in answer["error"]


def test_several_modules_are_chosen_by_module_or_agent(tmp_path: Path) -> None:
    config = two_agents(model_config={"fcnet_hiddens": [16]}, seed=3)
    path = write_checkpoint(config, tmp_path / "two")
    observations = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    expected = [
        Policy.load(path, module_id=f"p{agent}", agent_id=agent, config=config)
        .compute_actions(observations)
        .tolist()
        for agent in (0, 1)
    ]
    assert expected[0] != expected[1]
    with serve(path, config=config) as server, client_of(server) as client:
        for agent in (0, 1):
            for chosen in ({"module": f"p{agent}"}, {"agent": agent}, {"agent": str(agent)}):
                code, answer = client.act(observations=observations.tolist(), **chosen)
                assert (code, answer["actions"], answer["module"]) == (200, expected[agent], f"p{agent}")
        code, answer = client.act(obs=OBS)
        assert code == 400
        assert answer["error"].startswith("choose one of the modules ['p0', 'p1'] with module")
        code, answer = client.act(obs=OBS, module="p")
        assert code == 404
        assert answer["error"].startswith("no module 'p'. Did you mean 'p")
        assert client.act(obs=OBS, module="p0", agent="1")[0] == 404
        assert client.act(obs=OBS, agent="7")[0] == 404
        assert [each["module"] for each in client.ask("GET", "/v1/policies")[1]["policies"]] == ["p0", "p1"]
    with serve(path, config=config, module_id="p1") as server, client_of(server) as client:
        assert client.act(observations=observations.tolist())[1]["actions"] == expected[1]
        assert client.act(obs=OBS, module="p0")[0] == 404


@pytest.fixture(scope="module")
def nested(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicyServer]:
    config = PPOConfig().environment(NestedEnv).debugging(seed=3)
    config.rl_module(model_config={"fcnet_hiddens": [16]})
    with serve(
        write_checkpoint(config, tmp_path_factory.mktemp("nested") / "000001"), config=config
    ) as server:
        yield server


def test_nested_observations_and_actions_are_objects_and_lists(nested: PolicyServer) -> None:
    with client_of(nested) as client:
        code, answer = client.act(obs=NESTED)
        assert code == 200
        choice, move = answer["action"]
        assert choice in (0, 1)
        assert len(move) == 2
        assert client.act(observations=[NESTED, NESTED])[1]["actions"] == [
            [choice, choice],
            [pytest.approx(move), pytest.approx(move)],
        ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"place": 0}, "obs.place: a value is outside of Discrete(3, start=1)"),
        ({"place": 1.5}, "obs.place: expected whole numbers of dtype int64, got float64"),
        ({"keys": [0, 2]}, "obs.keys: a value is outside of MultiBinary(2)"),
        ({"parts": [[0.5, -1]]}, "obs.parts: expected a list of 2 parts, got a list of 1"),
        ({"parts": [[0.5, 1], [1, 3]]}, "obs.parts.1: a value is outside of MultiDiscrete([2 3])"),
        ({"image": [[0, 256], [3, 4]]}, "obs.image: expected numbers from 0 to 255 (dtype uint8)"),
        ({"more": 1}, "obs: expected an object with the keys ['image', 'keys', 'parts', 'place']"),
    ],
)
def test_an_observation_outside_of_its_space_is_named(
    nested: PolicyServer, change: dict[str, Any], message: str
) -> None:
    with client_of(nested) as client:
        code, answer = client.act(obs={**NESTED, **change})
        assert (code, answer["error"][: len(message)]) == (400, message)
        assert client.act(obs=NESTED)[0] == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not JSON"),
        (b"[1]", "expected a JSON object with the key obs or observations"),
        (b"{}", "expected either obs, one observation, or observations, a list of them"),
        (b'{"obs": [1,2,3,4], "explor": true}', "unknown key 'explor'. Did you mean 'explore'"),
        (b'{"obs": [1,2,3,4], "state_in": {"h": [1]}}', "state_in: expected an object with the keys []"),
        (b'{"obs": [1,2,3,NaN]}', "expected finite numbers, got NaN"),
        (b'{"obs": [1,2,3,1e39]}', "obs: expected finite numbers of dtype float32"),
        (b'{"obs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "the JSON is nested too deep"),
        (b'{"obs": [1,2,3]}', "obs: expected shape (4,), got (3,); the space is Box("),
        (b'{"observations": [[1,2,3,4],[1,2,3]]}', "observations: expected numbers"),
    ],
)
def test_a_malformed_request_is_answered_with_what_is_expected(
    client: Http, body: bytes, message: str
) -> None:
    code, answer = client.ask("POST", "/v1/act", body)
    assert (code, answer["error"][: len(message)]) == (400, message)
    assert client.act(obs=OBS)[0] == 200


def test_only_the_health_needs_no_token(server: PolicyServer) -> None:
    assert server.http_url is not None
    paths = [
        ("POST", "/v1/act"),
        ("GET", "/v1/policies"),
        ("GET", "/metrics"),
        ("GET", "/no"),
        ("GET", "/healthz/"),
    ]
    with Http(server.http_url, "wrong") as stranger:
        for method, path in paths:
            code, answer = stranger.ask(method, path)
            assert code == 401, path
            assert "Authorization: Bearer TOKEN" in answer["error"]
        assert stranger.ask("GET", "/healthz") == (200, {"status": "ok"})
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(server.http_url).port, timeout=30)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    assert (response.status, response.headers["www-authenticate"]) == (401, "Bearer")
    connection.close()


def test_another_host_name_is_refused_as_dns_rebinding_uses_it(client: Http, checkpoint: Path) -> None:
    for name in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::2]:80"):
        code, answer = client.ask("GET", "/healthz", host=name)
        assert code == 403, name
        assert "expected ['127.0.0.1', '::1', 'localhost']" in answer["error"]
    for name in ("localhost:1", "LOCALHOST", "[::1]:8000", "127.0.0.1"):
        assert client.ask("GET", "/healthz", host=name)[0] == 200
    with (
        serve(checkpoint, config=filtered(), allowed_hosts=["policies.example"]) as server,
        client_of(server) as other,
    ):
        assert other.ask("GET", "/healthz", host="policies.example")[0] == 200


def test_a_body_above_the_limit_is_refused_before_it_is_read(checkpoint: Path) -> None:
    with serve(checkpoint, config=filtered(), max_body_bytes=1000) as server, client_of(server) as client:
        assert server.http_url is not None
        assert client.act(obs=OBS)[0] == 200
        code, answer = client.ask("POST", "/v1/act", b" " * 1001)
        assert (code, answer) == (413, {"error": "the body is larger than 1000 bytes"})
        address = urlsplit(server.http_url)
        head = f"POST /v1/act HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server.token}\r\n"
        for rest in (
            "Content-Length: 99999999999\r\n\r\n",  # nothing of it is sent
            "Transfer-Encoding: chunked\r\n\r\n" + ("1f4\r\n" + " " * 500 + "\r\n") * 3,
        ):
            with socket.create_connection((address.hostname, address.port), timeout=30) as raw:
                raw.sendall((head + rest).encode())
                assert raw.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_metrics_count_requests_errors_batches_and_the_checkpoint(checkpoint: Path) -> None:
    with serve(checkpoint, config=filtered()) as server, client_of(server) as client:
        client.act(observations=[OBS] * 3)
        client.act(obs=OBS)
        client.act(obs=[])
        client.act(obs=OBS, module="x")
        families = text_string_to_metric_families(client.ask("GET", "/metrics")[1]["text"])
        values = {
            (
                sample.name,
                *(sample.labels.get(key, "") for key in ("code", "le", "result", "checkpoint")),
            ): sample.value
            for family in families
            for sample in family.samples
        }
    assert values["rlzmq_serve_requests_total", "200", "", "", ""] == 2
    assert values["rlzmq_serve_requests_total", "400", "", "", ""] == 1
    assert values["rlzmq_serve_batch_size_sum", "", "", "", ""] == 4
    assert values["rlzmq_serve_latency_seconds_count", "", "", "", ""] == 4
    assert values["rlzmq_serve_checkpoint_info", "", "", "", "000007"] == 1


def test_newer_checkpoints_are_taken_without_a_failed_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    write_checkpoint(cartpole(), run / "checkpoints" / "000001", seed=1)
    failures: list[Any] = []
    seen: list[str] = []
    is_over = threading.Event()

    def ask(server: PolicyServer) -> None:
        with client_of(server) as client:
            while not is_over.is_set():
                code, answer = client.act(obs=OBS)
                if code != 200:
                    failures.append(answer)
                seen.append(answer.get("checkpoint", ""))

    with serve(run, reload_interval_s=0.05) as server:
        threads = [threading.Thread(target=ask, args=(server,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        try:
            for number in range(2, 5):
                name = f"{number:06d}"
                write_checkpoint(cartpole(), run / "checkpoints" / name, seed=number)
                while name not in seen[-8:]:
                    is_over.wait(0.01)
            # Broken, of another size, of another env: the server keeps what it has.
            broken = run / "checkpoints" / "000005"
            broken.mkdir()
            (broken / "manifest.json").write_text("{")
            other = PPOConfig().environment("Acrobot-v1").rl_module(model_config={"fcnet_hiddens": [16]})
            write_checkpoint(other, run / "checkpoints" / "000006")
            assert server.reload() is False
            write_checkpoint(cartpole(), run / "checkpoints" / "000007", seed=7)
            while "000007" not in seen[-8:]:
                is_over.wait(0.01)
            assert server.reload() is False
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
    assert failures == []
    assert set(seen) == {"000001", "000002", "000003", "000004", "000007"}
    skipped = [
        record.message for record in caplog.records if record.message.startswith("skipped the checkpoint")
    ]
    assert any("000005" in text and "torn" in text for text in skipped)
    assert any("000006" in text and "has other spaces" in text for text in skipped)


def test_what_cannot_be_served_is_said_at_the_start(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        serve(tmp_path)
    path = write_checkpoint(cartpole(), tmp_path / "000001")
    with pytest.raises(ConfigurationError, match=r"refusing to serve HTTP on 192\.0\.2\.1:80"):
        PolicyServer(path, http="192.0.2.1:80")
    with pytest.raises(ConfigurationError, match=r"cannot listen on 192.0.2.1:80"):
        PolicyServer(path, http="192.0.2.1:80", insecure=True)
    with pytest.raises(ConfigurationError, match="expected HOST:PORT"):
        PolicyServer(path, http="127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigurationError, match=r"cannot listen on .* Address already in use"):
            PolicyServer(path, http=f"127.0.0.1:{taken.getsockname()[1]}")
