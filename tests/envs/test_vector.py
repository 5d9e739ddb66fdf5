"""Vector envs: equal to Gymnasium's, NEXT_STEP autoreset only, failures recovered, spaces checked."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rlzmq.core.addresses import SocketDirectory
from rlzmq.core.errors import ConfigurationError, EnvError, UnsupportedSpaceError
from rlzmq.envs.examples import MultiAgentCartPole, RandomEnv
from rlzmq.envs.multi_agent_env import make_multi_agent_vec
from rlzmq.envs.registry import EnvContext
from rlzmq.envs.sync_vector import LeanSyncVectorEnv
from rlzmq.envs.vector import make_vec, sparse_infos
from tests.support.runs import ShortEnv
from tests.support.warm_process import run_warm


def same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    a, b = np.asarray(a), np.asarray(b)
    return bool(a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b))


class InfoEnv(RandomEnv):
    """Gives infos now and then, of several kinds."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = super().step(action)
        info = {"n": self._num_steps, "nested": {"x": 1.5}, "text": "t"} if self._num_steps % 3 == 0 else {}
        return observation, reward, terminated, truncated, info

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return super().reset(**kwargs)[0], {"reset": True}


OBS_SPACES = [
    spaces.Box(-1, 1, (3,), np.float32),
    spaces.Box(0, 255, (5, 4, 2), np.uint8),
    spaces.Box(-1, 1, (), np.float32),
    spaces.Discrete(5, start=2),
    spaces.MultiDiscrete([3, 4]),
    spaces.Dict(b=spaces.Box(-1, 1, (2,)), a=spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(4)))),
]
ACTION_SPACES = [
    spaces.Discrete(4),
    spaces.Box(-2, 2, (2,), np.float32),
    spaces.MultiDiscrete([2, 3]),
    spaces.Dict(x=spaces.Discrete(2), y=spaces.Tuple((spaces.Box(0, 1, (2,)),))),
    spaces.MultiBinary(3),
    spaces.Discrete(3, start=-1),
]


@pytest.mark.parametrize(
    ("observation_space", "action_space"), list(zip(OBS_SPACES, ACTION_SPACES, strict=True))
)
def test_lean_sync_env_equals_gymnasiums_to_the_bit(
    observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> None:
    settings = {"observation_space": observation_space, "action_space": action_space}

    def creator() -> gym.Env[Any, Any]:
        import copy

        return InfoEnv(copy.deepcopy(settings) | {"p_terminated": 0.2, "max_episode_steps": 7})

    theirs = gym.vector.SyncVectorEnv([creator] * 3)
    ours = LeanSyncVectorEnv([creator] * 3)
    assert same(theirs.reset(seed=11), ours.reset(seed=11))
    theirs.action_space.seed(0)
    for _ in range(60):
        actions = theirs.action_space.sample()
        assert same(theirs.step(actions), ours.step(actions))
    assert same(theirs.reset(seed=[1, 2, 3]), ours.reset(seed=[1, 2, 3]))
    actions = theirs.action_space.sample()
    assert same(theirs.step(actions), ours.step(actions))


class EndsItsProcess(ShortEnv):
    def step(self, action: Any) -> Any:
        return os._exit(3) if action else super().step(action)


def test_infos_of_a_vector_env_become_the_environments_own() -> None:
    array, mask = np.zeros((2, 3)), np.array([True, False])
    infos = sparse_infos({"a": array, "_a": mask, "_b": [1, 2], "__b": ~mask, "c": "both"}, 2)
    array[:] = 1
    assert infos[0].pop("a").tolist() == [0, 0, 0]
    assert infos == {0: {"c": "both"}, 1: {"_b": 2, "c": "both"}}


def test_async_env_equals_sync_and_leaves_no_process() -> None:
    sync, asynchronous = (make_vec("CartPole-v1", num_envs=2, mode=mode) for mode in ("sync", "async"))
    try:
        assert same(sync.reset(seed=1), asynchronous.reset(seed=1))
        for step in range(40):
            actions = np.array([step % 2, 1 - step % 2])
            assert same(sync.step(actions), asynchronous.step(actions))
    finally:
        asynchronous.close()
    assert not any(process.is_alive() for process in asynchronous.processes)  # type: ignore[attr-defined]


def test_code_of_an_env_in_its_own_process_keeps_its_file_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    table, name = cloudpickle.CloudPickler.dispatch_table, "<dynamic-code>"  # as cloudpickle 3.1.3 has it
    monkeypatch.setitem(table, CodeType, lambda code, of=table[CodeType]: of(code.replace(co_filename=name)))

    class TellsItsFile(ShortEnv):
        def reset(self, **kwargs: Any) -> Any:
            return super().reset(**kwargs)[0], {"file": sys._getframe().f_code.co_filename}

    env: Any = make_vec(lambda config: TellsItsFile(), num_envs=1, mode="async")
    assert env.reset()[1]["file"] == [__file__]
    env.close()


def test_the_end_of_an_env_s_process_is_an_error_with_its_exit_code() -> None:
    env: Any = make_vec(lambda config: EndsItsProcess(), num_envs=2, mode="async")
    env.reset(seed=1)
    with pytest.raises(EnvError, match="process of environment 1 of 2 exited with code 3"):
        env.step(np.array([0, 1]))
    env.close()
    assert not any(process.is_alive() for process in env.processes)


SCRIPT = """
import os, signal
from rlzmq.envs.vector import make_vec, sparse_infos
from tests.support.runs import ShortEnv

env = make_vec("CartPole-v1", num_envs=1, mode="async")
env.reset(seed=1)
print(*(process.pid for process in env.processes), flush=True)
if {is_killed}:
    os.kill(os.getpid(), signal.SIGKILL)
env.close()
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_async_envs_put_nothing_into_a_temporary_directory_of_any_length(
    tmp_path: Path, is_killed: bool
) -> None:
    long, runtime = tmp_path / ("x" * 100), Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    long.mkdir()
    place = {"TMPDIR": str(long), "XDG_RUNTIME_DIR": str(runtime)}
    result = run_warm("-c", SCRIPT.format(is_killed=is_killed), env={**os.environ, **place}, timeout=100)
    try:
        assert result.returncode == (-signal.SIGKILL if is_killed else 0), result.stderr
        assert list(long.iterdir()) == []
        left = list(runtime.iterdir())
        assert len(left) == is_killed
        for path in left:
            os.utime(path, (0, 0))
        SocketDirectory(runtime).close()  # as the next run does
        assert list(runtime.iterdir()) == []
    finally:
        shutil.rmtree(runtime)


PRELOADED = """
import multiprocessing
from rlzmq.envs.vector import make_vec, sparse_infos

own_list = {own_list}
if own_list:
    multiprocessing.set_forkserver_preload(own_list)
make_vec("CartPole-v1", num_envs=3, mode="async").close()
"""


@pytest.mark.parametrize(("own_list", "times"), [([], 1), (["json"], 3)])
def test_the_processes_of_envs_import_gymnasium_once_unless_the_user_says_what_they_share(
    own_list: list[str], times: int
) -> None:
    env = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}  # of the fork server and the environments
    done = run_warm("-c", PRELOADED.format(own_list=own_list), env=env, timeout=100)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"\| +gymnasium$", done.stderr, re.MULTILINE)) == times


def test_sub_envs_know_their_vector_index() -> None:
    seen = []

    def creator(context: EnvContext) -> gym.Env[Any, Any]:
        seen.append((context.worker_index, context.vector_index, dict(context)))
        return RandomEnv(context)

    make_vec(creator, num_envs=2, context=EnvContext({"p_terminated": 0.5}, worker_index=3))
    assert seen == [(3, 0, {"p_terminated": 0.5}), (3, 1, {"p_terminated": 0.5})]


def test_wrong_actions_and_modes_are_refused() -> None:
    env = make_vec("CartPole-v1", num_envs=2)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="expected 2 actions, got 3"):
        env.step(np.array([0, 0, 0]))
    with pytest.raises(ConfigurationError, match="Did you mean 'sync'"):
        make_vec("CartPole-v1", mode="synch")
    with pytest.raises(ConfigurationError, match="no native vector env"):
        make_vec("Pendulum-v1", mode="vector_entry_point")
    with pytest.raises(ConfigurationError, match="int >= 1"):
        make_vec("CartPole-v1", num_envs=0)


class NativeEnv(gym.vector.VectorEnv[Any, Any, Any]):
    def __init__(self, num_envs: int = 1, autoreset_mode: Any = AutoresetMode.SAME_STEP) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": autoreset_mode}
        self.single_observation_space = spaces.Box(-1, 1, (2,))
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)


class StubbornEnv(NativeEnv):
    def __init__(self, num_envs: int = 1) -> None:
        super().__init__(num_envs)


def test_native_env_is_asked_for_next_step_autoreset_or_refused() -> None:
    gym.register("test/Native-v0", vector_entry_point=NativeEnv)
    gym.register("test/Stubborn-v0", vector_entry_point=StubbornEnv)
    try:
        env = make_vec("test/Native-v0", num_envs=3, mode="vector_entry_point")
        assert env.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
        with pytest.raises(ConfigurationError, match=r"NEXT_STEP mode.*is SAME_STEP"):
            make_vec("test/Stubborn-v0", num_envs=3, mode="vector_entry_point")
        with pytest.raises(ConfigurationError, match="is SAME_STEP"):
            make_vec(StubbornEnv, num_envs=3)
    finally:
        del gym.registry["test/Native-v0"], gym.registry["test/Stubborn-v0"]


def test_unsupported_spaces_are_named_with_the_way_out() -> None:
    text = spaces.Dict(pos=spaces.Box(-1, 1, (2,)), note=spaces.Tuple((spaces.Text(5),)))
    with pytest.raises(UnsupportedSpaceError, match=r"is Text.*TransformObservation"):
        make_vec(RandomEnv, context=EnvContext({"observation_space": text}))
    graph = spaces.Graph(spaces.Box(-1, 1, (2,)), None)
    with pytest.raises(UnsupportedSpaceError, match=r"action_space of .* is Graph"):
        make_vec(RandomEnv, context=EnvContext({"action_space": graph}))


def test_envs_of_different_spaces_and_non_envs_are_refused() -> None:
    def growing(context: EnvContext) -> gym.Env[Any, Any]:
        return RandomEnv({"observation_space": spaces.Box(-1, 1, (context.vector_index + 1,))})

    with pytest.raises(ConfigurationError, match="differ in their spaces"):
        make_vec(growing, num_envs=2)
    with pytest.raises(ConfigurationError, match=r"expected a gymnasium\.Env"):
        make_vec(lambda: object())
    with pytest.raises(ConfigurationError, match="vector_entry_point"):
        make_vec(lambda: gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync"))


@pytest.mark.parametrize(
    ("mode", "worker_index", "told"),
    [
        ("sync", 1, [1, 2, 3]),
        ("sync", 2, []),
        ("async", 0, [1, 2]),
        ("multi-agent", 1, [1, 2]),
    ],
)
def test_making_many_environments_tells_how_far_it_is(
    mode: str,
    worker_index: int,
    told: list[int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlzmq.core.errors._FIRST_S", 0.0)
    monkeypatch.setattr("rlzmq.core.errors._EVERY_S", 0.0)
    num_envs, context = (4 if mode == "sync" else 3), EnvContext(worker_index=worker_index)
    if mode == "multi-agent":
        env: Any = make_multi_agent_vec(MultiAgentCartPole, num_envs=num_envs, context=context)
    else:
        env = make_vec("CartPole-v1", num_envs=num_envs, mode=mode, context=context)
    env.close()
    assert len(caplog.messages) == len(told)
    for number, text in zip(told, caplog.messages, strict=True):
        assert f"made {number} of {num_envs} environments" in text
