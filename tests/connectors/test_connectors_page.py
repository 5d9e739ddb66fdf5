"""The code of docs/connectors.md runs and does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).parents[2] / "docs" / "connectors.md"


def test_the_pages_code_runs_and_does_what_it_says() -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    try:
        for episode in names["episodes"]:
            actions = np.asarray(episode.get_actions())
            assert not actions[4::5].any()
            assert set(episode.get_rewards()) == {1.0}
        assert np.isfinite(names["results"]["default_policy"]["policy_loss"])
        assert "after 1. NoisyObservations:" in names["text"]
        assert "obs: tensor [1, 4] float32" in names["text"]
    finally:
        names["env_runner"].stop()
