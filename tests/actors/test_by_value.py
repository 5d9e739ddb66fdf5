"""What an actor returns never reaches pickle. (That one module imports it: tests/security/test_no_code_loading.py.)"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from actor_classes import Recorder

from rlzmq.actors.system import ActorSystem


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
