"""Train the envs of docs/gallery.md, and write the page with a curve, a film and the command of each.

Usage: ``python scripts/gallery.py --runs DIR [NAME…]``; a run that is in DIR already is not trained again. Needs
``pip install '.[video,mujoco,minigrid]'``. Without ``--runs`` the page is written from the pictures that are there.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

import numpy as np

DOCS = Path(__file__).resolve().parents[1] / "docs"
PICTURES = DOCS / "gallery"
_MAX_FRAMES, _WIDTH, _NUM_COLOURS = 64, 200, 48  # about 100 kB a film
_FILM_MS = 5000

PAGE = """\
# Gallery

See what you can train in minutes: each command gives the curve below it, in one process.

```
pip install '.[mujoco,minigrid,video]'        # for some of them
rlzmq evaluate runs/cartpole --video film.gif # films your own run
```
"""


class Entry(NamedTuple):
    """An env of the gallery.

    Args:
        name: Of its run and its pictures.
        title: Heading.
        train: What follows ``rlzmq train``.
        says: A sentence on what is learned; "" if the title says it.
        num_films: Number of episodes in the film.
    """

    name: str
    title: str
    train: str
    says: str = ""
    num_films: int = 1

    @property
    def command(self) -> str:
        """What to type."""
        return f"rlzmq train {self.train} --env-runners 0 --seed 1 --run-dir runs/{self.name}"

    @property
    def lines(self) -> str:
        """The command in lines of at most 80 columns; an option stays beside its value."""
        parts = [part.replace(" ", "\0") for part in self.command.split(" --")]
        lines = textwrap.wrap(" --".join(parts), 72, break_on_hyphens=False)
        return " \\\n    ".join(lines).replace("\0", " ")


_TABULAR = "--lr 0.001 --train-batch-size 1024 --num-epochs 10"

ENTRIES = (
    Entry("cartpole", "CartPole-v1, PPO", "ppo --env CartPole-v1 --stop steps=60000"),
    Entry("acrobot", "Acrobot-v1, PPO", "ppo --env Acrobot-v1 --stop steps=60000"),
    Entry("mountaincar", "MountainCar-v0, PPO", "ppo --env MountainCar-v0 --stop steps=150000"),
    Entry("pendulum", "Pendulum-v1, SAC", "sac --env Pendulum-v1 --stop steps=6000"),
    Entry("pendulum-td3", "Pendulum-v1, TD3", "td3 --env Pendulum-v1 --stop steps=12000"),
    Entry(
        "inverted-double-pendulum",
        "InvertedDoublePendulum-v5, PPO",
        "ppo --env InvertedDoublePendulum-v5 --stop steps=300000",
        "An env of MuJoCo.",
    ),
    Entry(
        "frozenlake",
        "FrozenLake-v1, PPO",
        f"ppo --env FrozenLake-v1 --env-config is_slippery=false {_TABULAR} --stop steps=20000",
    ),
    Entry(
        "blackjack", "Blackjack-v1, PPO", f"ppo --env Blackjack-v1 {_TABULAR} --stop steps=40000",
        "The dealer has an edge: about −0.05 is the best possible.", 8,
    ),
    Entry("minigrid-empty", "MiniGrid-Empty-8x8-v0, PPO", "ppo --env MiniGrid-Empty-8x8-v0 --stop steps=25000"),
    Entry(
        "minigrid-doorkey", "MiniGrid-DoorKey-5x5-v0, PPO",
        "ppo --env MiniGrid-DoorKey-5x5-v0 --stop steps=40000",
        "Fetch the key, open the door, walk to the goal.",
    ),
    Entry(
        "memory", "CartPole without velocities, PPO with an LSTM",
        "ppo --preset stateless-cartpole --stop steps=80000",
    ),
    Entry(
        "two-agents", "Two agents, a policy each, PPO", "ppo --preset multi-agent-cartpole --stop steps=80000",
        "The curve is the sum of both agents' returns.",
    ),
    Entry(
        "tictactoe",
        "Tic-tac-toe against an untrained player, PPO",
        "ppo --preset tictactoe --stop steps=50000",
        "A game of PettingZoo.",
        4,
    ),
)  # fmt: skip


def rlzmq(command: str, directory: Path) -> None:
    """Run a command of the package; it sees its run below `directory`."""
    print(command, flush=True)
    words = [sys.executable, "-m", *shlex.split(command)]
    subprocess.run(words, check=True, cwd=directory, env={"OMP_NUM_THREADS": "1", **os.environ})


def draw_curve(entry: Entry, run: Path) -> None:
    """Write the picture of a run's curve."""
    from rlzmq import Run
    from rlzmq.core.score_statistics import svg_curve

    steps, returns = Run.open(run).curve()
    svg = svg_curve(steps, returns, "env steps", "mean return").replace("currentColor", "#888")
    (PICTURES / f"{entry.name}.svg").write_text(svg + "\n", encoding="utf-8")


def film(entry: Entry, run: Path) -> None:
    """Write a small film of an episode."""
    import imageio.v3 as imageio
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "film.mp4"
        rlzmq(
            f"rlzmq evaluate {run} --episodes {entry.num_films} --video {large} --video-episodes {entry.num_films}",
            run,
        )
        frames = np.stack(list(imageio.imiter(large)))
    chosen = np.unique(np.linspace(0, len(frames) - 1, _MAX_FRAMES).round().astype(int))
    height = round(frames.shape[1] * _WIDTH / frames.shape[2])
    images = [
        Image.fromarray(frames[number])
        .resize((_WIDTH, height))
        .quantize(_NUM_COLOURS, dither=Image.Dither.NONE)
        for number in chosen
    ]
    path = PICTURES / f"{entry.name}.gif"
    duration_ms = int(np.clip(_FILM_MS / len(images), 60, 500))
    images[0].save(path, save_all=True, append_images=images[1:], duration=duration_ms, loop=0, optimize=True)


def page() -> str:
    """Return docs/gallery.md."""
    parts = [PAGE]
    for entry in ENTRIES:
        if (PICTURES / f"{entry.name}.svg").exists():
            pictures = [f"![film](gallery/{entry.name}.gif)"]
            pictures += [f"![curve](gallery/{entry.name}.svg)"]
            says = f"{entry.says}\n\n" if entry.says else ""
            parts.append(f"## {entry.title}\n\n{says}```\n{entry.lines}\n```\n\n{' '.join(pictures)}\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="*", help=f"of {', '.join(e.name for e in ENTRIES)} (default: all)")
    parser.add_argument("--runs", type=Path, help="directory in which the commands run, or ran")
    options = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    for entry in ENTRIES:
        if options.runs is not None and entry.name in (options.name or [entry.name]):
            options.runs.mkdir(parents=True, exist_ok=True)
            run = (options.runs / "runs" / entry.name).absolute()
            if not run.exists():
                rlzmq(entry.command, options.runs)
            draw_curve(entry, run)
            film(entry, run)
    (DOCS / "gallery.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
