"""``rlzmq presets``: list the presets, or show the settings, source, runs and curve of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import tyro

from rlzmq.cli.parsing import parse
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.synonyms import did_you_mean

if TYPE_CHECKING:
    from rlzmq.algorithms.registry import Preset

__all__ = ["PresetsOptions", "run"]

_BARS = "▁▂▃▄▅▆▇█"


@dataclass
class PresetsOptions:
    """Options of ``rlzmq presets``."""

    algorithm: tyro.conf.Positional[str] = ""
    """List the presets of this algorithm only (default: of all)."""
    name: tyro.conf.Positional[str] = ""
    """Show this preset, e.g. cartpole (default: list them)."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq presets``; return the exit code."""
    from rlzmq.algorithms.registry import ALGORITHMS, find_preset, presets_of

    options = parse(
        PresetsOptions,
        arguments,
        usage="rlzmq presets [ALGORITHM] [NAME]",
        description="List the settings that are known to learn an environment, or show one preset.",
    )
    if options.algorithm and options.algorithm.lower() not in ALGORITHMS:
        raise ConfigurationError(
            f"No algorithm {options.algorithm!r}.{did_you_mean(options.algorithm, ALGORITHMS)}"
        )
    if options.name:
        _show(find_preset(options.algorithm.lower(), options.name))
        return 0
    names = [options.algorithm.lower()] if options.algorithm else list(ALGORITHMS)
    presets = [preset for name in names for preset in presets_of(name).values()]
    for preset in presets:
        curve = f"  {sparkline(preset)}" if preset.curve else ""
        print(f"{preset.algorithm:<7} {preset.name:<24} {_result(preset)}{curve}\n        {preset.source}")
    print("\nrlzmq presets ppo cartpole shows one; rlzmq train ppo --preset NAME trains with it.")
    return 0


def _show(preset: Preset) -> None:
    from rlzmq.algorithms.registry import get_config_class

    config = get_config_class(preset.algorithm)()
    preset.apply(config, preset.env)
    print(f"{preset.algorithm} {preset.name}: {preset.env}")
    print(f"source  {preset.source}")
    print(f"result  {_result(preset)}")
    for seed, steps in preset.seeds.items():
        print(f"        seed {seed}: {steps:,} env steps")
    if preset.curve:
        print(f"curve   {sparkline(preset)}")
        print("        " + ", ".join(f"{steps:,}: {value:g}" for steps, value in preset.curve))
    env = " --env ENV" if preset.is_pattern else "" if config.is_online else " --input DIRECTORY"
    print(f"\n$ rlzmq train {preset.algorithm} --preset {preset.name!r}{env}\n")
    print(config.to_toml(), end="")


def _result(preset: Preset) -> str:
    """Describe what the preset's runs reached."""
    if preset.target is None:
        return "not tried to a target"
    middle = median(preset.seeds.values())
    return f"return {preset.target:g} after {middle:,.0f} env steps ({len(preset.seeds)} seeds)"


def sparkline(preset: Preset) -> str:
    """Return the preset's curve as one line of blocks, from its least to its largest return."""
    values = [value for _, value in preset.curve]
    low, high = min(values), max(values)
    top = len(_BARS) - 1
    return "".join(_BARS[round(top * (value - low) / max(high - low, 1e-9))] for value in values)
