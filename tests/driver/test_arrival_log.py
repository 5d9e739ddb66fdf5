"""Runs that were recorded, and their learner's side repeated bit for bit."""

from __future__ import annotations

import itertools
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from recovery_runs import kill

from rlzmq import Algorithm, APPOConfig, ConfigurationError, IMPALAConfig, PPOConfig, PPOLearner
from rlzmq.algorithms.recorded_run import Mismatch, RecordedRun, RepeatedUpdate, load_update
from rlzmq.cli.main import main
from rlzmq.connectors.env_to_module import MeanStdFilter
from rlzmq.core.errors import CheckpointError
from rlzmq.envs.multi_agent_env import make_multi_agent
from rlzmq.roles import arrival_log
from rlzmq.roles.arrival_log import WeightsDigest, digest_weights, first_difference, read_arrivals
from tests.driver.test_recovery_places import cloning_config
from tests.driver.test_replay_runs import replay_config
from tests.support.runs import small as small_run

PPO = {"minibatch_size": 40, "num_epochs": 2}


def small(config_class: Any, directory: Path, **training: Any) -> Any:
    sizes = {
        "num_env_runners": 2,
        "num_envs_per_env_runner": 4,
        "rollout_fragment_length": 10,
        "num_learners": 1,
    }
    return small_run(
        config_class,
        train_batch_size_per_learner=240,
        min_time_s_per_iteration=0,
        record_dir=str(directory / "arrivals"),
        **sizes,
        **training,
    )


def recurrent(directory: Path) -> Any:
    return (
        small(PPOConfig, directory, **PPO)
        .env_runners(env_to_module_connector=lambda env, spaces, device: MeanStdFilter())
        .rl_module(
            model_config={"fcnet_hiddens": [8], "use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 5}
        )
    )


def several_agents(directory: Path) -> Any:
    return (
        small(PPOConfig, directory, **PPO)
        .environment(make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
        .multi_agent(
            policies={"a", "b"}, policy_mapping_fn=lambda agent_id, episode, **kw: "ab"[agent_id % 2]
        )
    )


def weights_of(algo: Any) -> WeightsDigest:
    return digest_weights(algo.get_state("learner_group")["learner_group"]["learner"]["rl_module"])


def replayed(path: Path, *, config: Any = None, **options: Any) -> list[RepeatedUpdate]:
    return list(RecordedRun(path, config=config).updates(**options))


def on_a_source(directory: Path, kind: str) -> Any:
    config = cloning_config(directory / "shards", 1) if kind == "files" else replay_config(2, 1)
    if kind != "files":
        config.training(replay_buffer_config={"type": kind})
    return config.debugging(record_dir=str(directory / "arrivals"))


CASES: dict[str, Any] = {
    "appo": lambda path: small(APPOConfig, path, staleness=2),
    "ppo-lstm-filter": recurrent,
    "ppo-several-agents": several_agents,
    "replay": lambda path: on_a_source(path, "PrioritizedEpisodeReplayBuffer"),
    "files": lambda path: on_a_source(path, "files"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_recorded_run_is_repeated_bit_for_bit(case: str, tmp_path: Path) -> None:
    """Also the part of it that was resumed from a checkpoint, which does not hold a buffer's episodes."""
    config = CASES[case](tmp_path)
    with Algorithm.resume(tmp_path, config=config) as algo:
        for _ in range(3):
            algo.train()
        algo.save_checkpoint()
    with Algorithm.resume(tmp_path, config=config) as algo:
        for _ in range(2):
            algo.train()
        last = weights_of(algo)
    recorded = RecordedRun(tmp_path, config=config)
    assert recorded.notes == []
    done = list(recorded.updates())
    assert [update.version for update in done] == list(range(1, len(done) + 1))
    assert len(done) >= 5
    assert all(update.is_compared for update in done)
    assert len(recorded.began_at) == 2
    if case in ("appo", "replay"):
        assert max(len(update.batches) for update in done) > 1, "the buffer gave no batch twice"
    # What is left for a debugger is the last update, and makes the same weights.
    learner, update = load_update(recorded.save(tmp_path / "left"), config=config)
    assert first_difference(last, digest_weights(learner.get_state("rl_module")["rl_module"]))
    learner.update(**update)
    assert first_difference(last, digest_weights(learner.get_state("rl_module")["rl_module"])) is None
    if case == "files":
        for path in (tmp_path / "shards").iterdir():
            path.unlink()
        with pytest.raises(ConfigurationError, match="shards"):
            list(RecordedRun(tmp_path, config=config).updates())


async def test_a_killed_broker_and_a_killed_learner_leave_one_lineage(tmp_path: Path) -> None:
    config = small(IMPALAConfig, tmp_path, staleness=1).fault_tolerance(learner_snapshot_every_s=None)
    async with config.build_async() as algo:
        for _ in range(2):
            await algo.train()
        await kill(algo.session.pipeline._broker.handle)
        for _ in range(2):
            await algo.train()
        state = (await algo.get_state("learner_group"))["learner_group"]["learner"]  # to go back to
        for _ in range(2):
            await algo.train()
        await kill(algo.learner_group.handles[0])
        for _ in range(3):
            result = await algo.train()
        last = (await algo.get_state("learner_group"))["learner_group"]["learner"]
    assert result["fault_tolerance"]["num_broker_restarts"] == 1
    assert result["fault_tolerance"]["num_learner_rollbacks"] == 1
    recorded = RecordedRun(tmp_path)
    went_back = state["weights_seq_no"]
    assert any(f"went back to weights version {went_back}:" in note for note in recorded.notes)
    assert recorded.versions == list(range(1, last["weights_seq_no"] + 1))
    done = list(recorded.updates())
    assert [update.version for update in done] == recorded.versions
    assert all(update.is_compared for update in done)
    assert len(recorded.began_at) == 2, "one for each learner process"


@pytest.mark.parametrize("fault", ["record.begun@learner-0:kill:6", "arrivals.trained:kill:3"])
async def test_a_learner_killed_in_an_update_or_while_it_writes(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLZMQ_FAULT", fault)
    monkeypatch.setenv("RLZMQ_FAULT_LOG", str(tmp_path / "fired"))
    async with small(PPOConfig, tmp_path, **PPO).build_async() as algo:
        for _ in range(5):
            result = await algo.train()
    assert (tmp_path / "fired").exists()
    monkeypatch.delenv("RLZMQ_FAULT")
    version = result["learners"]["default_policy"]["weights_seq_no"]
    recorded = RecordedRun(tmp_path)
    assert recorded.versions == list(range(1, version + 1))
    assert all(update.is_compared for update in recorded.updates())
    assert any("cut off at byte" in note for note in recorded.notes) == fault.startswith("record.begun")


def test_a_resumed_run_goes_on_in_the_same_log_and_is_replayed_from_its_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    config = small(PPOConfig, run, **PPO)
    with Algorithm.resume(run, config=config) as algo:
        for iteration in range(5):
            algo.train()
            if iteration == 2:
                algo.save_checkpoint()
        first = weights_of(algo)
    assert [u.version for u in replayed(run)] == [1, 2, 3, 4, 5]
    recorded = RecordedRun(run)
    assert [u.version for u in recorded.updates(5)] == [5]
    assert "the checkpoint" in recorded.began_at[0]
    assert "after update 3" in recorded.began_at[0]
    with Algorithm.resume(run, config=config) as algo:
        for _ in range(3):
            algo.train()
        second = weights_of(algo)
        algo.save_checkpoint()
    recorded = RecordedRun(run)
    assert recorded.notes == ["the run went back to weights version 3: updates 4 to 5 are void"]
    assert [u.version for u in recorded.updates()] == [1, 2, 3, 4, 5, 6]
    assert first_difference(first, second) is not None
    assert main(["replay", str(run), "--updates", "2..4"]) == 0
    out = capsys.readouterr().out
    assert "note        the run went back to weights version 3" in out
    assert "the weights after 3 of them equal the recorded ones, bit for bit" in out
    # A checkpoint of the lineage that was given up is not begun with.
    shutil.copytree(run / "checkpoints" / "000006", run / "checkpoints" / "000005")
    shutil.rmtree(run / "checkpoints" / "000003")
    recorded = RecordedRun(run)
    assert [u.version for u in recorded.updates(2, 3)] == [2, 3]
    assert "000001.arrivals" in recorded.began_at[0]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four updates, for tests that only read it."""
    run = tmp_path_factory.mktemp("recorded") / "run"
    with small(PPOConfig, run, **PPO).build() as algo:
        for _ in range(4):
            algo.train()
    return run


def test_a_replay_stops_where_a_metric_crosses_a_bound_and_leaves_the_update(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    steps = [u.results["__all_modules__"]["num_gradient_updates_lifetime"] for u in replayed(run)]
    assert main(["replay", str(run), "--until", f"num_gradient_updates_lifetime>={steps[2]}"]) == 0
    out = capsys.readouterr().out
    assert "stopped     at update 3: __all_modules__/num_gradient_updates_lifetime" in out
    assert "the weights after 3 of them equal" in out
    (line,) = [line.strip() for line in out.splitlines() if "load_update" in line]
    names: dict[str, Any] = {}
    exec(line, names)  # what users are told to type
    learner = names["learner"]
    assert learner.weights_seq_no == 2
    results = learner.update(**names["update"])
    assert results["__all_modules__"]["num_gradient_updates_lifetime"] == steps[2]
    assert main(["replay", str(run), "--until", "policy_loss>1e9"]) == 0
    assert "stopped" not in capsys.readouterr().out
    mode = (run / "arrivals" / "000001.arrivals").stat().st_mode
    assert mode & 0o77 == 0
    assert (run / "arrivals").stat().st_mode & 0o77 == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--until", "policy_los>1"], "Did you mean 'policy_loss'?"),
        (["--until", "policy_loss>much"], "expected METRIC"),
        (["--updates", "3..2"], "expected A..B with A <= B"),
        (["--updates", "7.."], "expected updates between 1 and 4"),
    ],
)
def test_what_cannot_be_replayed_is_said(
    arguments: list[str], said: str, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(recorded), *arguments]) == 78
    assert said in capsys.readouterr().err


def test_a_directory_without_a_log_says_how_to_record_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tmp_path)]) == 78
    assert "rlzmq train --record" in capsys.readouterr().err
    (tmp_path / "000001.arrivals").write_bytes(b"something else of some length")
    with pytest.raises(ConfigurationError, match="not an arrival log of this release"):
        RecordedRun(tmp_path)
    with pytest.raises(CheckpointError):
        load_update(tmp_path)


def test_a_torn_log_is_replayed_up_to_where_it_is_whole(recorded: Path, tmp_path: Path) -> None:
    whole = (recorded / "arrivals" / "000001.arrivals").read_bytes()
    ends = _record_ends(whole)
    assert len(ends) == 9, "the head, and two for each update"
    log = tmp_path / "000001.arrivals"
    for length in [*range(0, ends[0], 97), *(end + extra for end in ends for extra in (-1, 0, 1, 9))]:
        log.write_bytes(whole[:length])
        num_whole = sum(end <= length for end in ends)
        file = next(iter(read_arrivals(tmp_path)), None)
        assert (file is None) == (num_whole < 2), "there is no step in it"
        if file is not None:
            assert file.torn_at == (None if length in ends or length >= len(whole) else ends[num_whole - 1])
    last = ends[-1]
    cut = next(end for end in reversed(ends) if end < last)
    log.write_bytes(whole[: cut + 5])
    torn = RecordedRun(tmp_path)
    assert f"cut off at byte {cut}" in torn.notes[0]
    assert [update.is_compared for update in torn.updates()] == [True, True, True, False]
    altered = bytearray(whole)
    altered[ends[3] + 20] ^= 1
    log.write_bytes(altered)
    (file,) = read_arrivals(tmp_path)
    assert file.torn_at == ends[3]


def _record_ends(content: bytes) -> list[int]:
    position, ends = len(b"rlzmq arrivals 2\n"), []
    while position < len(content):
        position += 13 + struct.unpack_from("<Q", content, position + 5)[0]
        ends.append(position)
    return ends


_CALLS = itertools.count(1)


class DependsOnThePast(PPOLearner):
    """In its third update a loss that is another one each time."""

    def compute_loss_for_module(self, **kwargs: Any) -> Any:
        loss = super().compute_loss_for_module(**kwargs)
        return loss * (1.0 + next(_CALLS) * 1e-3) if self.weights_seq_no == 2 else loss


class Raises(PPOLearner):
    def compute_loss_for_module(self, **kwargs: Any) -> Any:
        if self.weights_seq_no == 2:
            raise RuntimeError("the loss's own")
        return super().compute_loss_for_module(**kwargs)


def test_weights_that_differ_are_reported_with_update_parameter_and_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(PPOConfig, tmp_path, **PPO).learners(num_learners=0, learner_class=DependsOnThePast)
    with config.build() as algo:
        for _ in range(4):
            algo.train()
    recorded = RecordedRun(tmp_path, config=config)
    with pytest.raises(Mismatch, match=r"update 3: .* default_policy/\S+ differs") as caught:
        list(recorded.updates())
    assert 0 < float(str(caught.value).partition("by about ")[2].split()[0]) < 1
    with monkeypatch.context() as of_somebody:
        of_somebody.setenv("XDG_STATE_HOME", str(tmp_path / "somebody"))
        assert main(["replay", str(tmp_path)]) == 78, "the config names code"
        assert "--trust" in capsys.readouterr().err
    assert main(["replay", str(tmp_path)]) == 1
    assert "DIFFERS     update 3" in capsys.readouterr().out
    learner, _ = load_update(tmp_path / "replay" / "000003")
    assert learner.weights_seq_no == 2


def test_an_update_that_raises_is_recorded_and_raises_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(PPOConfig, tmp_path, **PPO).learners(num_learners=0, learner_class=Raises)
    with config.build() as algo:
        algo.train()
        algo.train()
        with pytest.raises(RuntimeError, match="the loss's own"):
            algo.train()
    assert main(["replay", str(tmp_path)]) == 70
    captured = capsys.readouterr()
    assert "raises      update 3" in captured.out
    assert "the loss's own" in captured.err
    learner, update = load_update(tmp_path / "replay" / "000003", config=config)
    assert learner.weights_seq_no == 2
    assert sum(batch.num_env_steps for batch in update["episodes"]) >= 240
    learner.source = learner.make_source()
    with pytest.raises(RuntimeError, match="the loss's own"):
        learner.update(**update)


def test_a_full_disk_ends_the_log_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, num_left = arrival_log.write_record, 6

    def fill(*args: Any) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise OSError(28, "No space left on device")
        write(*args)

    monkeypatch.setattr(arrival_log, "write_record", fill)
    with small(PPOConfig, tmp_path, **PPO).learners(num_learners=0).build() as algo:
        for _ in range(4):
            result = algo.train()
    assert result["training_iteration"] == 4
    assert len([r for r in caplog.records if "No space left" in r.getMessage()]) == 1
    assert replayed(tmp_path)[-1].version < 4


def test_two_runs_do_not_share_a_log(tmp_path: Path) -> None:
    log = arrival_log.ArrivalLog(tmp_path / "arrivals", "run", None)
    with pytest.raises(ConfigurationError, match=r"record_dir=.* is in use by another run"):
        arrival_log.ArrivalLog(tmp_path / "arrivals", "other", None)
    log.close()
    arrival_log.ArrivalLog(tmp_path / "arrivals", "other", None).close()


def test_settings_that_cannot_be_recorded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"num_learners=2.*set num_learners to 0 or 1"):
        small(PPOConfig, tmp_path, **PPO).learners(num_learners=2).validate()
    with pytest.raises(ConfigurationError, match="reproducible from its seed"):
        small(PPOConfig, tmp_path, **PPO).learners(num_learners=0).env_runners(num_env_runners=0).validate()
