"""Parts of a run's state: modules out of its checkpoints, components by name, whose checkpoint it is, kept ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlzmq import (
    PPO,
    Algorithm,
    AsyncAlgorithm,
    CheckpointError,
    MeanStdFilter,
    MultiRLModule,
    PPOConfig,
    RLModule,
    TorchRLModule,
    latest_checkpoint,
)
from rlzmq.core import faults
from rlzmq.modules.default_models.actor_critic import DefaultActorCriticModule
from tests.support.runs import small as small_run
from tests.support.runs import two_agents, weights_of

MODULES = "learner_group/learner/rl_module"


def small(**debugging: Any) -> Any:
    return small_run(train_batch_size_per_learner=100, lr=1e-3, **debugging)


def same(one: Any, other: Any) -> bool:
    np.testing.assert_equal(one, other)
    return True


@pytest.fixture(scope="module")
def one_module(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, np.ndarray]]:
    """A checkpoint of one module, and its weights."""
    with small().build() as algo:
        algo.train()
        return algo.save_to_path(tmp_path_factory.mktemp("one") / "c"), weights_of(algo)


@pytest.fixture(scope="module")
def two_modules(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[str, np.ndarray]]]:
    """A checkpoint of two modules, and their weights."""
    with two_agents(train_batch_size_per_learner=100, lr=1e-3).build() as algo:
        algo.train()
        path = algo.save_to_path(tmp_path_factory.mktemp("two") / "c")
        return path, {module_id: weights_of(algo, module_id) for module_id in ("p0", "p1")}


# -- modules ----------------------------------------------------------------------------------------


def test_a_module_comes_out_of_an_algorithms_checkpoint(one_module: Any, two_modules: Any) -> None:
    path, weights = one_module
    for place in (path, f"{path}/{MODULES}/default_policy"):
        module = RLModule.from_checkpoint(place)
        assert type(module) is DefaultActorCriticModule
        assert same(module.get_state(), weights)
    for place in (path, f"{path}/learner_group", f"{path}/learner_group/learner", f"{path}/{MODULES}"):
        assert same(MultiRLModule.from_checkpoint(place).get_state(), {"default_policy": weights})
    path, both = two_modules
    assert same(MultiRLModule.from_checkpoint(path).get_state(), both)
    assert same(RLModule.from_checkpoint(f"{path}/{MODULES}/p1").get_state(), both["p1"])
    with pytest.raises(CheckpointError, match=r"no module 'p7'.*p0"):
        RLModule.from_checkpoint(f"{path}/{MODULES}/p7")
    with pytest.raises(CheckpointError, match="no modules at 'env_runner'"):
        RLModule.from_checkpoint(f"{path}/env_runner")


def test_the_learner_group_loads_modules(one_module: Any, two_modules: Any) -> None:
    path, both = two_modules
    with two_agents(train_batch_size_per_learner=100, lr=1e-3).debugging(seed=9).build() as algo:
        before = weights_of(algo, "p0")
        algo.learner_group.load_module_state(multi_rl_module_ckpt_dir=path, modules_to_load=["p1"])
        assert same(weights_of(algo, "p1"), both["p1"])
        assert same(weights_of(algo, "p0"), before)
        algo.learner_group.load_module_state(
            multi_rl_module_ckpt_dir=path, rl_module_ckpt_dirs={"p1": one_module[0]}
        )
        assert same(weights_of(algo, "p0"), both["p0"])
        assert same(weights_of(algo, "p1"), one_module[1])
        algo.train()
        with pytest.raises(CheckpointError, match=r"no module 'p2'"):
            algo.learner_group.load_module_state(multi_rl_module_ckpt_dir=path, modules_to_load=["p2"])
        with pytest.raises(KeyError, match="p2"):
            algo.learner_group.load_module_state(rl_module_ckpt_dirs={"p2": one_module[0]})


# -- components -------------------------------------------------------------------------------------


def test_one_component_is_restored_and_all_else_stays(one_module: Any, two_modules: Any) -> None:
    path, both = two_modules
    single, weights = one_module
    with two_agents(train_batch_size_per_learner=100, lr=1e-3).debugging(seed=9).build() as algo:
        algo.train()
        algo.restore_from_path(path, component=f"{MODULES}/p1")  # the same one there
        assert same(weights_of(algo, "p1"), both["p1"])
        algo.restore_from_path(f"{path}/{MODULES}/p1", component=f"{MODULES}/p0")  # another one
        assert same(weights_of(algo, "p0"), both["p1"])
        algo.restore_from_path(single, component=f"{MODULES}/p0")  # the only one
        assert same(weights_of(algo, "p0"), weights)
        own = algo.get_module("p0").save_to_path(Path(path).parent / "module")
        algo.restore_from_path(own, component=f"{MODULES}/p1")
        assert same(weights_of(algo, "p1"), weights)
        assert same(algo.env_runner.module["p1"].get_state(inference_only=True)["pi.layers.0.weight"],
                    weights["pi.layers.0.weight"])  # fmt: skip
        assert algo.iteration == 1
        algo.restore_from_path(path, component=MODULES)
        assert same({module_id: weights_of(algo, module_id) for module_id in both}, both)
        with pytest.raises(KeyError, match=r"no module 'p2'.*p0"):
            algo.restore_from_path(single, component=f"{MODULES}/p2")
        with pytest.raises(CheckpointError, match="no component 'learner_group/teacher'"):
            algo.restore_from_path(path, component="learner_group/teacher")
        assert algo.train()["training_iteration"] == 2


def test_the_state_is_a_tree_of_which_one_may_ask_for_parts() -> None:
    config = small().env_runners(env_to_module_connector=lambda env, spaces, device: MeanStdFilter())
    with config.evaluation(evaluation_interval=1, evaluation_duration=1).build() as algo:
        algo.train()
        whole = algo.get_state()
        weights = whole["learner_group"]["learner"]["rl_module"]["default_policy"]
        part = algo.get_state(components=f"{MODULES}/default_policy")
        assert same(part, {"learner_group": {"learner": {"rl_module": {"default_policy": weights}}}})
        assert algo.get_state(["env_runner", "accounting"]).keys() == {"env_runner", "accounting"}
        assert algo.get_state("learner_group/replay-0") == {}
        without = algo.get_state(
            not_components=["env_runner", "eval_env_runner", "learner_group/learner/optimizer"]
        )
        assert set(whole) - set(without) == {"env_runner", "eval_env_runner"}
        assert set(whole["learner_group"]["learner"]) - set(without["learner_group"]["learner"]) == {
            "optimizer"
        }
        with pytest.raises(ValueError, match=r"'learner'.*Did you mean 'learner_group'"):
            algo.get_state("learner")
        with pytest.raises(ValueError, match="no component 'leaner_group'"):
            algo.set_state({"leaner_group": {}})


# -- whose checkpoint it is -------------------------------------------------------------------------


class OwnStep(PPO):
    """A PPO whose training step is its own."""

    def training_step(self) -> None:
        self.learner_group.update(episodes=self.env_runner_group.sample(num_timesteps=100))
        self.sync_weights()


class OwnConfig(PPOConfig):
    """A config with a default of its own."""

    def get_default_learner_class(self) -> Any:
        return super().get_default_learner_class()


async def test_another_class_does_not_go_on_silently(tmp_path: Path) -> None:
    with OwnStep(small()) as algo:
        path = algo.save_to_path(tmp_path / "checkpoints" / "000000")
    for face in (Algorithm.from_checkpoint, Algorithm.resume):
        with pytest.raises(CheckpointError, match=r"OwnStep\.from_checkpoint.*config="):
            face(path if face == Algorithm.from_checkpoint else tmp_path)
    with pytest.raises(CheckpointError, match=r"saved by OwnStep"):
        await AsyncAlgorithm.from_checkpoint(path)
    with OwnStep.from_checkpoint(path) as algo:
        assert type(algo) is OwnStep
    chosen = PPOConfig(algo_class=OwnStep).update_from_dict(small().given())
    with Algorithm.from_checkpoint(path, config=chosen) as algo:
        assert type(algo) is OwnStep
    with PPO.from_checkpoint(path) as algo:  # said so
        assert type(algo) is PPO
    async with small().build_async() as running:
        path = await running.save_to_path(tmp_path / "async")
    with Algorithm.from_checkpoint(path) as algo:
        assert type(algo) is PPO


def test_a_config_class_of_ones_own_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = OwnConfig().update_from_dict(small().given())
    with config.build() as algo:
        path = algo.save_to_path(tmp_path / "c")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "somebody"))
    with pytest.raises(CheckpointError, match=r"config=(.|\n)*trust=\['test_"):
        Algorithm.from_checkpoint(path)
    for options in ({"config": config}, {"trust": [__name__]}):
        with Algorithm.from_checkpoint(path, **options) as algo:
            assert type(algo.config) is OwnConfig

    class Local(PPOConfig):
        pass

    with Local().update_from_dict(small().given()).build() as algo:
        path = algo.save_to_path(tmp_path / "local")
    with pytest.raises(CheckpointError, match=r"Local(.|\n)*config="):
        Algorithm.from_checkpoint(path)


def test_a_run_that_goes_on_keeps_its_seed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="config="):
        Algorithm.resume(tmp_path)
    config = small().debugging(seed=None)
    with config.build() as algo:
        algo.save_to_path(tmp_path / "checkpoints" / "000000")
        seed = algo.config.seed
    with Algorithm.from_checkpoint(tmp_path, config=config) as algo:
        assert algo.config.seed == seed
    with PPO.resume(tmp_path, config=config) as algo:
        assert algo.config.seed == seed
    with PPO.resume(tmp_path, config=small()) as algo:
        assert algo.config.seed == 1


# -- places -----------------------------------------------------------------------------------------


def test_an_address_of_a_file_is_a_place_of_this_machine(one_module: Any, tmp_path: Path) -> None:
    with small().build() as algo:
        with pytest.raises(CheckpointError, match="not a directory of this machine"):
            algo.save_to_path("file://elsewhere/x")
        written = algo.save_to_path(f"file://{tmp_path}/a%20b")
    assert written == str(tmp_path / "a b")
    with Algorithm.from_checkpoint(f"file://{tmp_path}/a%20b") as algo:
        assert algo.iteration == 0
    assert isinstance(RLModule.from_checkpoint(Path(f"file://{one_module[0]}")), TorchRLModule)


def test_a_checkpoint_without_a_path_says_where_it_is_and_leaves_nothing_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with small().build() as algo:
        path = algo.save_to_path()
        assert f"checkpoint  {path} " in caplog.text
        assert Path(path).parent.parent == tmp_path
        before = list(tmp_path.iterdir())

        def full(*args: Any, **kwargs: Any) -> None:
            raise CheckpointError("no space left")

        monkeypatch.setattr("rlzmq.algorithms.checkpoints.write_checkpoint", full)
        with pytest.raises(CheckpointError, match="no space left"):
            algo.save_to_path()
        assert list(tmp_path.iterdir()) == before


# -- checkpoints that a run writes by itself -----------------------------------------------------------


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_the_state_written_is_that_of_its_iteration(tmp_path: Path) -> None:
    with Algorithm.resume(tmp_path, config=small(checkpoint_every_s=0.0)) as algo:
        algo.train()
        at_one = algo.get_module().get_state()
        algo._async._keeper.wait()
        algo.train()  # changes weights in place
    with Algorithm.from_checkpoint(tmp_path / "checkpoints" / "000001") as restored:
        np.testing.assert_equal(restored.get_module().get_state(), at_one)


def test_a_failed_write_is_counted_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RLZMQ_FAULT", "checkpoint.boundary:enospc:60")
    faults.arm("driver")
    try:
        with Algorithm.resume(tmp_path, config=small(checkpoint_every_s=0.0)) as algo:
            for _ in range(3):
                result = algo.train()
                algo._async._keeper.wait()
            result = algo.train()
    finally:
        monkeypatch.delenv("RLZMQ_FAULT")
        faults.arm("driver")
    assert result["fault_tolerance"]["num_failed_checkpoints"] == 1
    assert "No space left" in caplog.text
    assert "000001" in names(tmp_path)
    assert "000002" not in names(tmp_path)
    assert latest_checkpoint(tmp_path) is not None
