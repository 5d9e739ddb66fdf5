"""Checkpoints in an object store: whole at every instant, the manifest last, the same files as on a disk."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from rlzmq import Algorithm, CheckpointError, RLModule, RLModuleSpec, latest_checkpoint
from rlzmq.core.checkpoint import (
    find_inside,
    open_checkpoint,
    read_checkpoint,
    read_manifest,
    write_checkpoint,
)
from rlzmq.core.run_dir import RunDir, find_checkpoint
from tests.support.runs import small

STATE = {"a": {"x": np.arange(3.0), "n": 1}, "b/c": {"text": "hello"}}


@pytest.fixture
def bucket() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield f"memory://{name}"
    store = fsspec.filesystem("memory")
    if store.exists(f"/{name}"):
        store.rm(f"/{name}", recursive=True)


def objects(uri: str) -> list[str]:
    root = uri.removeprefix("memory:/")
    return sorted(name.removeprefix(f"{root}/") for name in fsspec.filesystem("memory").find(root))


def test_what_is_written_is_read_again_in_whole_and_in_part(bucket: str) -> None:
    path = write_checkpoint(f"{bucket}/c", STATE, about={"iteration": 3})
    assert str(path) == f"{bucket}/c"
    whole = read_checkpoint(path)
    assert open_checkpoint(path).is_mine
    np.testing.assert_array_equal(whole["a"]["x"], STATE["a"]["x"])
    assert read_checkpoint(str(path), "b") == {"b/c": {"text": "hello"}}
    assert read_manifest(path)["about"] == {"iteration": 3}
    # also through pathlib, which takes one of the two slashes away
    folder, inside = find_inside(Path(f"{bucket}/c") / "b" / "c")
    assert (str(folder), inside) == (f"{bucket}/c", "b/c")


def test_a_checkpoint_is_replaced_by_its_manifest_alone(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each put the place holds a whole checkpoint, the old or the new; after the last nothing of the old is left."""
    path = f"{bucket}/c"
    write_checkpoint(path, {"a": {"n": 1}})
    store, seen = type(fsspec.filesystem("memory")), []
    put = store.pipe_file

    def watched(self: Any, key: str, data: bytes) -> None:
        put(self, key, data)
        seen.append((key.rpartition("/")[2], read_checkpoint(path)["a"]["n"]))

    monkeypatch.setattr(store, "pipe_file", watched)
    write_checkpoint(path, {"a": {"n": 2, "x": np.ones(2)}})
    assert seen == [("state.json", 1), ("state.safetensors", 1), ("manifest.json", 2)]
    files = objects(path)
    assert len(files) == 3
    assert {name.partition("/")[0] for name in files} == {"manifest.json", files[0].partition("/")[0]}


def test_a_write_that_fails_leaves_what_was_there(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{bucket}/c"
    write_checkpoint(path, {"a": {"n": 1}})

    def refuses(self: Any, key: str, data: bytes) -> None:
        raise RuntimeError("quota exceeded")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "pipe_file", refuses)
    with pytest.raises(CheckpointError, match=r"memory://.*quota exceeded"):
        write_checkpoint(path, {"a": {"n": 2}})
    assert read_checkpoint(path)["a"]["n"] == 1


def test_a_reader_of_one_that_is_replaced_meanwhile_gets_the_new_one(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{bucket}/c"
    write_checkpoint(path, {"a": {"n": 1}})
    store, replaced = type(fsspec.filesystem("memory")), []
    info = store.info

    def slow(self: Any, key: str, **settings: Any) -> Any:
        if key.endswith("state.json") and not replaced:
            replaced.append(key)
            write_checkpoint(path, {"a": {"n": 2}})
        return info(self, key, **settings)

    monkeypatch.setattr(store, "info", slow)
    assert read_checkpoint(path)["a"]["n"] == 2
    assert replaced


@pytest.mark.parametrize(
    ("uri", "text"),
    [
        ("s3://bucket/c", "pip install 'rlzmq[cloud]' (Install s3fs"),
        ("nope://c", "nor a store that fsspec knows"),
    ],
)
def test_a_store_without_its_driver_names_the_extra(
    uri: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for driver in ("s3fs", "gcsfs"):  # as where they are not installed
        monkeypatch.setitem(__import__("sys").modules, driver, None)
    with pytest.raises(CheckpointError) as error:
        write_checkpoint(uri, STATE)
    assert text in str(error.value)


def test_paths_of_universal_pathlib_are_taken_too(bucket: str) -> None:
    path = importlib.import_module("upath").UPath(f"{bucket}/c")
    write_checkpoint(path, STATE)
    assert read_checkpoint(path, "b") == {"b/c": {"text": "hello"}}


def test_runs_learners_and_modules_live_in_a_store(bucket: str) -> None:
    config = small(train_batch_size_per_learner=32, checkpoint_every_s=0.0, checkpoint_keep=2)
    with Algorithm.resume(f"{bucket}/run", config=config) as algo:
        for _ in range(4):
            algo.train()
        algo.save_checkpoint()
        learner_path = algo.learner_group.save_to_path(f"{bucket}/learner")
        weights = algo.get_module().get_state()
    assert str(latest_checkpoint(f"{bucket}/run")) == f"{bucket}/run/checkpoints/000004"
    kept = {name.split("/")[1] for name in objects(f"{bucket}/run")}
    assert "000004" in kept
    assert 2 <= len(kept) <= 3, "the newest two (some are left out while one is written), and the best"
    with Algorithm.resume(f"{bucket}/run") as algo:
        assert algo.iteration == 4
    module_path = f"{bucket}/run/checkpoints/000004/learner_group/learner/rl_module/default_policy"
    spec = RLModuleSpec(load_state_path=module_path)
    loaded = config.copy().rl_module(rl_module_spec=spec).build_learner()
    modules = [RLModule.from_checkpoint(module_path), loaded.module["default_policy"]]
    fresh = config.build_learner()
    fresh.restore_from_path(learner_path)
    for module in (*modules, fresh.module["default_policy"]):
        np.testing.assert_equal(module.get_state(), weights)
    run = RunDir(f"{bucket}/run")  # rolled back to the second iteration
    run.write(2, {"a": {"n": 1}}, {})
    assert find_checkpoint(f"{bucket}/run").path == run.checkpoints / "000002"
    assert any(name.startswith("checkpoints/000004.abandoned/") for name in objects(f"{bucket}/run"))
