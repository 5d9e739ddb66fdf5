"""Checkpoints: round trips, torn and altered files, atomic replacement; the same in an object store."""

from __future__ import annotations

import importlib
import json
import math
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from rlzmq import Algorithm, CheckpointError, RLModule, RLModuleSpec, latest_checkpoint
from rlzmq.core import checkpoint as ckpt
from rlzmq.core.checkpoint import (
    find_inside,
    open_checkpoint,
    read_checkpoint,
    read_manifest,
    write_checkpoint,
)
from rlzmq.core.run_dir import RunDir, find_checkpoint
from tests.support.runs import small

STATE = {
    "weights": {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.int64(3), "scalar": np.array(2.5)},
    "plain": [1, 2.5, None, True, "x", (1, ("y", b"\x00\xff")), {3: "int key"}],
    "nan": math.nan,
    "inf": -math.inf,
}


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", {"one": STATE, "group/two": {"k": np.zeros(0, np.uint8)}})
    got = read_checkpoint(path)
    assert set(got) == {"one", "group/two"}
    one = got["one"]
    np.testing.assert_array_equal(one["weights"]["a"], STATE["weights"]["a"])
    assert one["weights"]["a"].dtype == np.float32
    assert one["weights"]["scalar"].shape == ()
    assert one["weights"]["n"] == 3
    assert one["plain"] == STATE["plain"]
    assert math.isnan(one["nan"])
    assert one["inf"] == -math.inf
    assert got["group/two"]["k"].shape == (0,)


def test_one_component_alone(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", {"a": {"x": 1}, "g/b": {"y": 2}, "g/c": {"z": 3}})
    assert read_checkpoint(path, "g") == {"g/b": {"y": 2}, "g/c": {"z": 3}}
    with pytest.raises(CheckpointError, match="no component 'nope'"):
        read_checkpoint(path, "nope")


def test_every_flipped_or_missing_byte_is_noticed(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", {"one": STATE})
    files = [p for p in sorted(path.rglob("*")) if p.is_file()]
    assert len(files) == 3
    for file in files:
        whole = file.read_bytes()
        for broken in (whole[:-1], b"", whole[: len(whole) // 2]):
            file.write_bytes(broken)
            with pytest.raises(CheckpointError):
                read_checkpoint(path)
        flipped = bytearray(whole)
        flipped[len(flipped) // 2] ^= 1
        file.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"altered|torn"):
            read_checkpoint(path)
        file.unlink()
        with pytest.raises(CheckpointError):
            read_checkpoint(path)
        file.write_bytes(whole)
    read_checkpoint(path)


def test_a_replacement_cut_short_between_two_renames_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ckpt, "_exchange", lambda a, b: False)  # a file system that cannot exchange names
    path = write_checkpoint(tmp_path / "c", {"one": {"x": 1}})
    write_checkpoint(path, {"one": {"x": 2}})
    assert read_checkpoint(path) == {"one": {"x": 2}}
    path.rename(tmp_path / ".c.0123abcd.old")
    assert read_checkpoint(path) == {"one": {"x": 2}}


def test_another_version_is_refused_with_both_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", {"one": {}})
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["version"] = 99
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"version 99; this release reads version 4"):
        read_checkpoint(path)


@pytest.mark.parametrize("name", ["c", None])
def test_objects_are_refused_by_place(name: str | None, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(TypeError, match=r"expected .* got builtins\.object"):
        write_checkpoint(name and tmp_path / name, {"one": {"a": [0, object()]}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("exists", [False, True])
def test_all_is_on_disk_before_it_is_in_place_and_its_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    """A power failure leaves the old checkpoint or the new one: each file whole, each directory, then the rename."""
    target = tmp_path / "series" / "c"
    if exists:
        write_checkpoint(target, {"old": {"x": 1}})
    target.parent.mkdir(exist_ok=True)
    synced: dict[str, int] = {}
    before_rename: dict[str, int] = {}

    def sync(fd: int) -> None:
        place = os.readlink(f"/proc/self/fd/{fd}")
        synced[place] = os.fstat(fd).st_size

    def watch(move: Any) -> Any:
        def moved(source: Path, to: Path) -> Any:
            if not before_rename:
                before_rename.update(synced)
                synced.clear()
                for place in (source, *Path(source).rglob("*")):
                    size = place.stat().st_size if place.is_file() else None
                    assert str(place) in before_rename, f"{place} is not synced"
                    assert size in (None, before_rename[str(place)]), (
                        f"{place} was synced before all was written"
                    )
            return move(source, to)

        return moved

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", watch(os.rename))
    monkeypatch.setattr(ckpt, "_exchange", watch(ckpt._exchange))
    write_checkpoint(target, {"one": STATE, "group/two": {"k": 1}})
    assert len([place for place in before_rename if place.endswith((".json", ".safetensors"))]) == 4
    assert str(target.parent) in synced, "the directory that now holds its name"
    assert set(read_checkpoint(target)) == {"one", "group/two"}


PARTS = {"a": {"x": np.arange(3.0), "n": 1}, "b/c": {"text": "hello"}}


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
    path = write_checkpoint(f"{bucket}/c", PARTS, about={"iteration": 3})
    assert str(path) == f"{bucket}/c"
    whole = read_checkpoint(path)
    assert open_checkpoint(path).is_mine
    np.testing.assert_array_equal(whole["a"]["x"], PARTS["a"]["x"])
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
        write_checkpoint(uri, PARTS)
    assert text in str(error.value)


def test_paths_of_universal_pathlib_are_taken_too(bucket: str) -> None:
    path = importlib.import_module("upath").UPath(f"{bucket}/c")
    write_checkpoint(path, PARTS)
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
