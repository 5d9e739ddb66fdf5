"""Checkpoints: round trips, torn and altered files, atomic replacement."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlzmq.core import checkpoint as ckpt
from rlzmq.core.errors import CheckpointError

STATE = {
    "weights": {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.int64(3), "scalar": np.array(2.5)},
    "plain": [1, 2.5, None, True, "x", (1, ("y", b"\x00\xff")), {3: "int key"}],
    "nan": math.nan,
    "inf": -math.inf,
}


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    path = ckpt.write_checkpoint(tmp_path / "c", {"one": STATE, "group/two": {"k": np.zeros(0, np.uint8)}})
    got = ckpt.read_checkpoint(path)
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
    path = ckpt.write_checkpoint(tmp_path / "c", {"a": {"x": 1}, "g/b": {"y": 2}, "g/c": {"z": 3}})
    assert ckpt.read_checkpoint(path, "g") == {"g/b": {"y": 2}, "g/c": {"z": 3}}
    with pytest.raises(CheckpointError, match="no component 'nope'"):
        ckpt.read_checkpoint(path, "nope")


def test_every_flipped_or_missing_byte_is_noticed(tmp_path: Path) -> None:
    path = ckpt.write_checkpoint(tmp_path / "c", {"one": STATE})
    files = [p for p in sorted(path.rglob("*")) if p.is_file()]
    assert len(files) == 3
    for file in files:
        whole = file.read_bytes()
        for broken in (whole[:-1], b"", whole[: len(whole) // 2]):
            file.write_bytes(broken)
            with pytest.raises(CheckpointError):
                ckpt.read_checkpoint(path)
        flipped = bytearray(whole)
        flipped[len(flipped) // 2] ^= 1
        file.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"altered|torn"):
            ckpt.read_checkpoint(path)
        file.unlink()
        with pytest.raises(CheckpointError):
            ckpt.read_checkpoint(path)
        file.write_bytes(whole)
    ckpt.read_checkpoint(path)


def test_a_replacement_cut_short_between_two_renames_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ckpt, "_exchange", lambda a, b: False)  # a file system that cannot exchange names
    path = ckpt.write_checkpoint(tmp_path / "c", {"one": {"x": 1}})
    ckpt.write_checkpoint(path, {"one": {"x": 2}})
    assert ckpt.read_checkpoint(path) == {"one": {"x": 2}}
    path.rename(tmp_path / ".c.0123abcd.old")
    assert ckpt.read_checkpoint(path) == {"one": {"x": 2}}


def test_another_version_is_refused_with_both_named(tmp_path: Path) -> None:
    path = ckpt.write_checkpoint(tmp_path / "c", {"one": {}})
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["version"] = 99
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"version 99; this release reads version 4"):
        ckpt.read_checkpoint(path)


def test_writing_again_replaces(tmp_path: Path) -> None:
    path = ckpt.write_checkpoint(tmp_path / "c", {"one": {"x": 1}, "gone": {}})
    ckpt.write_checkpoint(path, {"one": {"x": 2}})
    assert ckpt.read_checkpoint(path) == {"one": {"x": 2}}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("name", ["c", None])
def test_objects_are_refused_by_place(name: str | None, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(TypeError, match=r"expected .* got builtins\.object"):
        ckpt.write_checkpoint(name and tmp_path / name, {"one": {"a": [0, object()]}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("exists", [False, True])
def test_all_is_on_disk_before_it_is_in_place_and_its_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    """A power failure leaves the old checkpoint or the new one: each file whole, each directory, then the rename."""
    target = tmp_path / "series" / "c"
    if exists:
        ckpt.write_checkpoint(target, {"old": {"x": 1}})
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
    ckpt.write_checkpoint(target, {"one": STATE, "group/two": {"k": 1}})
    assert len([place for place in before_rename if place.endswith((".json", ".safetensors"))]) == 4
    assert str(target.parent) in synced, "the directory that now holds its name"
    assert set(ckpt.read_checkpoint(target)) == {"one", "group/two"}
