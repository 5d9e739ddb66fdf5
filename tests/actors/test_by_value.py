"""Pickle lives in one module, and nothing from a socket ever reaches it."""

from __future__ import annotations

import ast
import functools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from actor_classes import Recorder

import rlzmq
from rlzmq.actors.system import ActorSystem

PACKAGE = Path(rlzmq.__file__).parent
FORBIDDEN = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
ONLY = {"actors/by_value.py"}
FORBIDDEN_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj", "all_gather_object", "broadcast_object_list"}


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def test_only_one_module_pickles() -> None:
    guilty = set()
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            if FORBIDDEN & set(names):
                guilty.add(str(path.relative_to(PACKAGE)))
    assert guilty == ONLY


def test_nothing_evaluates_text_or_sends_objects() -> None:
    guilty = set()
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Call):
                function = node.func
                name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
                is_method = isinstance(function, ast.Attribute) and name in ("eval", "exec")
                if name in FORBIDDEN_CALLS and not is_method:  # module.eval() is torch's
                    guilty.add(f"{path.relative_to(PACKAGE)}:{node.lineno} {name}")
    assert guilty == set()


async def test_a_driver_never_unpickles(monkeypatch: pytest.MonkeyPatch) -> None:
    def trap(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was unpickled in the driver")

    async with ActorSystem() as system:
        monkeypatch.setattr(pickle, "loads", trap)
        monkeypatch.setattr(pickle, "load", trap)
        monkeypatch.setattr(pickle, "Unpickler", trap)
        actor = await system.spawn(Recorder)
        array = np.arange(5000)
        np.testing.assert_array_equal(await actor.echo(array), array)
        assert await actor.apply(lambda actor: actor.total) == 0
        with pytest.raises(ValueError, match="OwnError"):
            await actor.raise_error("own")
        monkeypatch.undo()
