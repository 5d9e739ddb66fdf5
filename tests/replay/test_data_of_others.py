"""Recorded data of others: RLlib's rows of episodes, rows of steps, Minari's datasets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest

from rlzmq import BCConfig, ConfigurationError, CQLConfig, IQLConfig, MARWILConfig
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.replay import export_to_minari, import_from_minari, open_shards, write_shard

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

LENGTHS = (5, 7, 6)


def packed(value: Any) -> Any:
    """Encode arrays and numbers of numpy as msgpack-numpy does."""
    if isinstance(value, np.ndarray):
        kind, shape = value.dtype.str, list(value.shape)
        return {b"nd": True, b"type": kind, b"kind": b"", b"shape": shape, b"data": value.tobytes()}
    if isinstance(value, np.generic):
        return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}
    raise TypeError(type(value))


def steps(action: Callable[[np.random.Generator], Any]) -> list[dict[str, Any]]:
    """Return rows of steps: three episodes, of which the second is truncated."""
    rng = np.random.default_rng(0)
    rows = []
    for e, length in enumerate(LENGTHS):
        obs = rng.uniform(-1, 1, (length + 1, 3)).astype(np.float32)
        for t in range(length):
            is_over = t == length - 1
            row = {"eps_id": f"e{e}", "t": t, "obs": obs[t], "new_obs": obs[t + 1], "actions": action(rng)}
            row |= {"rewards": float(t), "terminateds": is_over and e != 1, "truncateds": is_over and e == 1}
            rows.append(row | {"action_logp": np.float32(-0.5)})
    return rows


def write_steps(path: Path, rows: list[dict[str, Any]], without: tuple[str, ...] = ()) -> Path:
    names = [name for name in rows[0] if name not in without]
    plain = {name: [np.asarray(row[name]).tolist() for row in rows] for name in names}
    pq.write_table(pa.table(plain), path)
    return path


def write_episodes(path: Path, rows: list[dict[str, Any]], lookback: int = 0) -> Path:
    """Write the steps as RLlib writes episodes; every second one in lists instead of arrays."""
    items = []
    for e in range(len(LENGTHS)):
        mine = [row for row in rows if row["eps_id"] == f"e{e}"]
        columns = {name: [row[name] for row in mine] for name in ("obs", "actions", "rewards", "action_logp")}
        columns["obs"].append(mine[-1]["new_obs"])

        def buffer(values: list[Any], is_list: bool = bool(e % 2)) -> dict[str, Any]:
            data = values if is_list else np.asarray(values)
            return {"data": data, "lookback": lookback, "finalized": not is_list, "space": None}

        state = {
            name: buffer(columns[column])
            for name, column in (("observations", "obs"), ("actions", "actions"), ("rewards", "rewards"))
        }
        state |= {"id_": f"e{e}", "t_started": lookback, "t": len(mine), "infos": buffer([{}], True)}
        state |= {
            "is_terminated": bool(mine[-1]["terminateds"]),
            "is_truncated": bool(mine[-1]["truncateds"]),
        }
        state["extra_model_outputs"] = {"action_logp": buffer(columns["action_logp"])}
        items.append(msgpack.packb(state, default=packed))
    pq.write_table(pa.table({"item": items}), path)
    return path


def test_both_forms_hold_the_same_episodes(tmp_path: Path) -> None:
    rows = steps(lambda rng: int(rng.integers(2)))
    shuffled = [rows[i] for i in np.random.default_rng(1).permutation(len(rows))]
    for path in (write_episodes(tmp_path / "a.parquet", rows), write_steps(tmp_path / "b.parquet", shuffled)):
        (batch,) = open_shards(path).shards
        episodes = {episode.id_: episode for episode in batch}
        assert {name: len(episode) for name, episode in episodes.items()} == {"e0": 5, "e1": 7, "e2": 6}
        for name, episode in episodes.items():
            mine = [row for row in rows if row["eps_id"] == name]
            np.testing.assert_array_equal(
                episode.get_observations(slice(0, -1)), [row["obs"] for row in mine]
            )
            np.testing.assert_array_equal(episode.get_observations(-1), mine[-1]["new_obs"])
            assert list(episode.get_actions()) == [row["actions"] for row in mine]
            assert list(episode.get_rewards()) == [row["rewards"] for row in mine]
            assert set(episode.get_extra_model_outputs("action_logp")) == {-0.5}
            assert (episode.is_terminated, episode.is_truncated) == (name != "e1", name == "e1")
    (batch,) = open_shards(write_episodes(tmp_path / "a.parquet", rows, lookback=2)).shards
    assert [(episode.t_started, len(episode)) for episode in batch] == [(2, 3), (2, 5), (2, 4)]


def test_columns_that_are_missing_are_inferred(tmp_path: Path) -> None:
    rows = steps(lambda rng: int(rng.integers(2)))
    path = write_steps(tmp_path / "a.parquet", rows, without=("eps_id", "t", "new_obs"))
    (batch,) = open_shards(path).shards
    # The last step of the truncated one has no next observation.
    assert [len(episode) for episode in batch] == [5, 6, 6]


def transitions(path: Path) -> set[tuple[float, float]]:
    """Return the first numbers of the observations before and after each step; 0.0 after a terminal one."""
    return {
        (float(episode.get_observations(t)[0]), float(episode.get_observations(t + 1)[0]) * (not is_terminal))
        for batch in open_shards(path).shards
        for episode in batch
        for t in range(len(episode))
        for is_terminal in [episode.is_terminated and t == len(episode) - 1]
    }


def wanted(rows: list[dict[str, Any]]) -> set[tuple[float, float]]:
    return {(float(row["obs"][0]), float(row["new_obs"][0]) * (not row["terminateds"])) for row in rows}


@pytest.mark.parametrize("without", [("t",), ("new_obs",)])
def test_no_step_leads_over_missing_rows(tmp_path: Path, without: tuple[str, ...]) -> None:
    rows = steps(lambda rng: int(rng.integers(2)))
    rows[0]["obs"][2] = rows[2]["obs"][1] = rows[1]["new_obs"][1] = np.nan
    left = [row for i, row in enumerate(rows) if i not in (3, 8, 9)]
    path = write_steps(tmp_path / "a.parquet", left, without=without)
    if without == ("new_obs",):  # of the steps before the gaps, and at the end of the truncated episode
        left = [row for i, row in enumerate(rows) if i not in (2, 3, 7, 8, 9, 11)]
        (batch,) = open_shards(path).shards
        assert batch.t_started.tolist() == [0, 4, 0, 5, 0]
    assert transitions(path) == wanted(left)


def test_episodes_that_share_an_id_end_at_their_flags(tmp_path: Path) -> None:
    rows = [row | {"eps_id": "e"} for row in steps(lambda rng: int(rng.integers(2)))]
    assert transitions(write_steps(tmp_path / "a.parquet", rows, without=("t",))) == wanted(rows)
    with pytest.raises(ConfigurationError, match=r"'t': expected one row per step .* several of 0"):
        open_shards(write_steps(tmp_path / "b.parquet", rows))


def test_nulls_are_not_a_number(tmp_path: Path) -> None:
    rows = steps(lambda rng: int(rng.integers(2)))
    plain = {name: [np.asarray(row[name]).tolist() for row in rows] for name in ("obs", "actions", "rewards")}
    plain["obs"][3][1] = plain["rewards"][6] = None
    pq.write_table(pa.table(plain), tmp_path / "a.parquet")
    (batch,) = open_shards(tmp_path).shards
    assert np.argwhere(np.isnan(batch.columns["obs"])).tolist() == [[3, 1]]
    assert np.flatnonzero(np.isnan(batch.columns["rewards"])).tolist() == [6]
    plain["obs"][3] = [0.0]
    pq.write_table(pa.table(plain), tmp_path / "a.parquet")
    with pytest.raises(ConfigurationError, match="column 'obs'"):
        open_shards(tmp_path)


def test_what_is_no_recorded_data_is_skipped_with_the_reason(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other.parquet")
    evil = msgpack.packb({b"nd": True, b"type": "|O", b"kind": b"O", b"shape": [1], b"data": b"x"})
    pq.write_table(pa.table({"item": [evil]}), tmp_path / "objects.parquet")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigurationError) as raised:
        open_shards(tmp_path)
    text = str(raised.value)
    assert "expected the column 'item', or obs, actions, rewards; got x" in text
    assert "Python objects" in text
    assert "torn.parquet" in text


@pytest.mark.parametrize(
    ("kind", "write"),
    [
        (BCConfig, write_episodes),
        (MARWILConfig, write_steps),
        (CQLConfig, write_steps),
        (IQLConfig, write_episodes),
    ],
)
def test_offline_algorithms_train_on_both_forms(tmp_path: Path, kind: Any, write: Any) -> None:
    continuous = kind in (CQLConfig, IQLConfig)
    rows = steps(
        (lambda rng: rng.uniform(-1, 1, 2).astype(np.float32))
        if continuous
        else lambda rng: int(rng.integers(2))
    )
    path = write(tmp_path / "data.parquet", rows)
    actions = gym.spaces.Box(-1.0, 1.0, (2,)) if continuous else gym.spaces.Discrete(2)
    config = kind().environment(observation_space=gym.spaces.Box(-1.0, 1.0, (3,)), action_space=actions)
    config.offline_data(input_=str(path), dataset_num_iters_per_learner=1).rl_module(
        model_config={"fcnet_hiddens": [8]}
    )
    with config.training(train_batch_size_per_learner=8).build() as algo:
        assert algo.train()["num_env_steps_trained_lifetime"] >= 8


OBSERVATIONS = gym.spaces.Dict(
    {"x": gym.spaces.Box(-9.0, 9.0, (2,), np.float32), "n": gym.spaces.Discrete(4)}
)
ACTIONS = gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 8.0], np.float32))


def episode(index: int, length: int) -> SingleAgentEpisode:
    rng = np.random.default_rng(index)
    return SingleAgentEpisode(
        id_=f"e{index}",
        observations=[
            {"x": rng.normal(size=2).astype(np.float32), "n": np.int64(rng.integers(4))}
            for _ in range(length + 1)
        ],
        actions=[rng.uniform(-1, 1, 2).astype(np.float32) for _ in range(length)],
        rewards=list(rng.normal(size=length)),
        observation_space=OBSERVATIONS,
        action_space=ACTIONS,
        terminated=index % 2 == 0,
        truncated=index % 2 == 1,
        len_lookback_buffer=0,
    )


@pytest.mark.filterwarnings("ignore::UserWarning:minari")  # facts about a published dataset
def test_episodes_survive_the_way_to_minari_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    written = [episode(index, 3 + index) for index in range(4)]
    for one in written:
        write_shard(tmp_path / "a", [one], normalize_actions=True)
    dataset = export_to_minari(
        tmp_path / "a", "test/way-v0", algorithm_name="ppo", author="me", code_permalink="here"
    )
    assert dataset.total_episodes == 4
    first = dataset[0]
    low, high = ACTIONS.low, ACTIONS.high
    assert np.allclose(
        first.actions, low + (np.asarray(written[0].get_actions()) + 1) * (high - low) / 2, atol=1e-6
    )
    assert first.terminations.tolist() == [False, False, True]
    assert dataset[1].truncations.tolist() == [False, False, False, True]
    assert import_from_minari("test/way-v0", tmp_path / "b", max_env_steps=5) == 4
    opened = open_shards(tmp_path / "b")
    assert len(opened.shards) > 1
    assert opened.shards[0].action_space == ACTIONS
    assert opened.shards[0].meta["normalize_actions"] is True
    read = [back for shard in opened.shards for back in shard]
    for one, back in zip(written, read, strict=True):
        assert (one.is_terminated, one.is_truncated) == (back.is_terminated, back.is_truncated)
        assert np.allclose(back.get_actions(), one.get_actions(), atol=1e-6)
        assert np.allclose(back.get_rewards(), one.get_rewards(), atol=1e-6)
        assert np.array_equal(back.get_observations()["n"], [obs["n"] for obs in one.get_observations()])
        assert np.array_equal(back.get_observations()["x"], [obs["x"] for obs in one.get_observations()])
    assert import_from_minari(dataset, tmp_path / "c", normalize_actions=False) == 4
    (shard,) = open_shards(tmp_path / "c").shards
    assert np.array_equal(shard[0].get_actions(), first.actions)


@pytest.mark.filterwarnings("ignore::UserWarning:minari")
def test_whole_and_constant_actions_survive_the_way_to_minari_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    box = gym.spaces.Box
    actions = gym.spaces.Dict(
        {"n": box(-3, 3, (2,), np.int64), "x": box(np.float32([1, 0]), np.float32([1, 4]))}
    )
    one = SingleAgentEpisode(observation_space=box(-1, 1, (1,)), action_space=actions)
    one.add_env_reset(np.zeros(1, np.float32))
    action = {"n": np.array([0, 5]), "x": np.array([-1, 1.5], np.float32)}
    one.add_env_step(np.zeros(1, np.float32), action, 1.0, terminated=True)
    write_shard(tmp_path / "a", [one], normalize_actions=True)
    dataset = export_to_minari(
        tmp_path / "a", "test/whole-v0", algorithm_name="ppo", author="me", code_permalink="here"
    )
    for_env = dataset[0].actions
    assert (for_env["n"].tolist(), for_env["x"].tolist()) == ([[-3, 2]], [[1.0, 4.0]])  # clipped
    import_from_minari("test/whole-v0", tmp_path / "b")
    back = open_shards(tmp_path / "b").shards[0][0].get_actions(0)
    assert (back["n"].tolist(), back["x"].tolist()) == ([0, 5], [-1.0, 1.0])


def test_shards_without_spaces_cannot_be_exported(tmp_path: Path) -> None:
    pytest.importorskip("minari")
    one = SingleAgentEpisode(
        observations=[0.0, 1.0], actions=[0], rewards=[1.0], terminated=True, len_lookback_buffer=0
    )
    write_shard(tmp_path, [one])
    with pytest.raises(ConfigurationError, match="written without spaces"):
        export_to_minari(tmp_path, "test/none-v0")


def test_actions_of_unknown_range_and_of_another_environment_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("minari")
    write_shard(tmp_path / "a", [episode(0, 2)])
    with pytest.raises(ConfigurationError, match=r"bounds of Box.*normalize_actions=True"):
        export_to_minari(tmp_path / "a", "test/range-v0")
    write_shard(tmp_path / "b", [episode(0, 2)], normalize_actions=True)
    for env in ("CartPole-v1", gym.spec("CartPole-v1"), gym.make("CartPole-v1")):
        with pytest.raises(ConfigurationError, match=r"got .*CartPole.* with Discrete\(2\)"):
            export_to_minari(tmp_path / "b", "test/other-v0", env=env)
