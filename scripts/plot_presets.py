"""Draw the presets' curves as one picture: ``python scripts/plot_presets.py docs/presets.png`` (needs matplotlib)."""

from __future__ import annotations

import math
import sys

import matplotlib.pyplot as plt

from rlzmq.algorithms.registry import ALGORITHMS, presets_of


def main() -> None:
    presets = [p for algorithm in ALGORITHMS for p in presets_of(algorithm).values() if p.curve]
    columns = min(len(presets), 3)
    rows = math.ceil(len(presets) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.2 * columns, 2.2 * rows), squeeze=False)
    for axis in axes.flat[len(presets) :]:
        axis.remove()
    for axis, preset in zip(axes.flat, presets, strict=False):
        steps, returns = zip(*preset.curve, strict=True)
        axis.plot([count / 1000 for count in steps], returns, linewidth=1.5)
        if preset.target is not None:
            axis.axhline(preset.target, color="gray", linewidth=0.8, linestyle="--")
        axis.set_title(f"{preset.algorithm} {preset.name}", fontsize=8)
        axis.set_xlabel("thousand env steps", fontsize=7)
        axis.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(sys.argv[1], dpi=80)


if __name__ == "__main__":
    main()
