"""Draw README's pictures: a run that loses a runner, as an animated SVG, and docs/benchmarks.md's ratios as bars.

The run is real: ``rlzmq train`` in one terminal, ``kill -9`` in another; the picture plays its output and its curve at
the pace at which they came.

Usage: ``.venv/bin/python scripts/readme_pictures.py``; the pictures are docs/kill.svg and docs/peers.svg.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

import psutil

from rlzmq.core.process import find_stack_channel

DOCS = Path(__file__).parents[1] / "docs"
COMMAND = "rlzmq train ppo --env CartPole-v1 --env-runners 2 --run-dir demo"
KILL_AT, STOP_AT = 200.0, 475.0

_WIDTH, _HEIGHT = 860, 330
_TERMINAL_WIDTH, _LINE, _NUM_LINES = 500, 16, 12
_PAUSE_S = 4.0  # at the end, before the picture begins again
_COLOURS = {
    "back": "#0d1117", "bar": "#161b22", "text": "#c9d1d9", "dim": "#8b949e", "curve": "#58a6ff", "death": "#ff7b72",
}  # fmt: skip


class Recording(NamedTuple):
    """A run: its lines and its results, each with the seconds since its first line, and its runner's death."""

    lines: list[tuple[float, str]]
    results: list[tuple[float, float]]
    pid: int
    died_at: float
    end: float


def record(directory: Path) -> Recording:
    """Train, kill a runner when the mean return is above `KILL_AT`, and return what was seen."""
    words = [sys.executable, "-m", *COMMAND.split(), "--seed", "0", "--stop", f"return={STOP_AT:g}"]
    run = subprocess.Popen(
        words, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "90"},
    )  # fmt: skip
    metrics, size = directory / "demo/metrics.jsonl", 0
    lines: list[tuple[float, str]] = []
    results: list[tuple[float, float]] = []
    pid, died_at = 0, 0.0
    assert run.stdout is not None
    os.set_blocking(run.stdout.fileno(), False)
    while True:
        ended = run.poll() is not None
        now = time.monotonic()
        lines += [(now, line.rstrip()) for line in iter(run.stdout.readline, "")]
        text = metrics.read_text() if metrics.exists() else ""
        for line in text[size : text.rfind("\n") + 1].splitlines():
            results.append((now, json.loads(line)["env_runners"]["episode_return_mean"]))
        size = text.rfind("\n") + 1
        if not pid and results and results[-1][1] > KILL_AT:
            pid, died_at = _runner_of(run.pid), now
            psutil.Process(pid).kill()
        if ended:
            break
        time.sleep(0.01)
    begin = lines[0][0]
    return Recording(
        [(at - begin, line) for at, line in lines],
        [(at - begin, value) for at, value in results],
        pid, died_at - begin, lines[-1][0] - begin,
    )  # fmt: skip


def _runner_of(pid: int) -> int:
    """Return the process of one of the run's env runners."""
    for process in psutil.Process(pid).children(recursive=True):
        channel = find_stack_channel(process.pid)
        if channel and "runner" in channel[0]:
            return process.pid
    raise SystemExit("the run has no runner process")


def moving_picture(run: Recording) -> str:
    """Return the recording as an SVG that plays it again and again."""
    whole = run.end + _PAUSE_S
    parts = [_text(12, 24, f"$ {COMMAND}", "text")]
    kept = [(at, line) for at, line in run.lines if "accounting" in line or not re.match(r"\w+ {2,}", line)]
    log = []
    for number, (_, line) in enumerate(kept):
        fill = "death" if re.search(r"lost|died|killed|SIGKILL", line) else "text"
        log.append(_text(12, 44 + _LINE * number, line[:76], fill, cut=76))
    scroll = [(at, -_LINE * max(0, number + 1 - _NUM_LINES)) for number, (at, _) in enumerate(kept)]
    reveal = [(at, number + 1) for number, (at, _) in enumerate(kept)]
    parts += [
        '<clipPath id="log"><rect x="0" y="32" width="500" height="196"/></clipPath><g clip-path="url(#log)"><g>',
        _steps("transform", [(0.0, "0 0"), *[(at, f"0 {y}") for at, y in scroll]], whole),
        '<clipPath id="said"><rect x="0" y="0" width="500" height="0">',
        _steps("height", [(0.0, "32"), *[(at, f"{34 + _LINE * number}") for at, number in reveal]], whole),
        '</rect></clipPath><g clip-path="url(#said)">', *log, "</g></g></g>",
        f'<rect x="0" y="236" width="{_TERMINAL_WIDTH}" height="1" fill="{_COLOURS["dim"]}"/>',
        _text(12, 258, "$ # another terminal: end one of the two runners", "dim"),
        "<g>", _steps("visibility", [(0.0, "hidden"), (run.died_at, "visible")], whole),
        _text(12, 276, f"$ kill -9 {run.pid}", "death"), "</g>",
        *_curve(run, whole),
    ]  # fmt: skip
    return _svg(_WIDTH, _HEIGHT, "\n".join(parts), "rlzmq train loses one of two runners and trains on")


def _curve(run: Recording, whole: float) -> Iterator[str]:
    """Draw mean return over seconds; a frame that widens with time uncovers it."""
    left, right, top, bottom = _TERMINAL_WIDTH + 50, _WIDTH - 20, 40, _HEIGHT - 40

    def place(at: float, value: float) -> tuple[float, float]:
        return left + (right - left) * at / run.end, bottom - (bottom - top) * value / 500

    yield _text(left, 24, "mean return of the last 100 episodes", "text")
    for value in (0, 100, 200, 300, 400, 500):
        _, y = place(0, value)
        yield f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{_COLOURS["bar"]}"/>'
        yield _text(left - 32, y + 4, str(value), "dim")
    for second in range(0, int(run.end) + 1):
        yield _text(place(second, 0)[0] - 4, bottom + 18, str(second), "dim")
    yield _text(right - 40, bottom + 34, "seconds", "dim")
    x, _ = place(run.died_at, 0)
    yield f'<clipPath id="time"><rect x="{left}" y="0" width="0" height="{_HEIGHT}">'
    yield (
        f'<animate attributeName="width" dur="{whole:.2f}s" repeatCount="indefinite" values="0;{right - left};'
        f'{right - left}" keyTimes="0;{run.end / whole:.4f};1"/></rect></clipPath><g clip-path="url(#time)">'
    )
    points = " ".join("{:.1f},{:.1f}".format(*place(at, value)) for at, value in run.results)
    yield f'<polyline points="{points}" fill="none" stroke="{_COLOURS["curve"]}" stroke-width="2.5"/>'
    yield f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="{_COLOURS["death"]}" '
    yield f'stroke-dasharray="4 3"/>{_text(x + 5, bottom - 8, "a runner is killed", "death")}</g>'


def _steps(attribute: str, values: list[tuple[float, str]], whole: float) -> str:
    """Return an animation of an attribute, which jumps from value to value at these seconds."""
    values = [(at, value) for i, (at, value) in enumerate(values) if i == 0 or value != values[i - 1][1]]
    texts, times = ";".join(value for _, value in values), ";".join(f"{at / whole:.4f}" for at, _ in values)
    kind = ("animateTransform", ' type="translate"') if attribute == "transform" else ("animate", "")
    return (
        f'<{kind[0]} attributeName="{attribute}"{kind[1]} calcMode="discrete" dur="{whole:.2f}s" '
        f'repeatCount="indefinite" values="{texts}" keyTimes="{times}"/>'
    )


def bars() -> str:
    """Return docs/benchmarks.md's ratios to other libraries as bars."""
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    rows = [
        (f"{peer}: {case}", float(ratio), float(low), float(high))
        for peer, case, ratio, low, high in re.findall(
            r"^\| (RLlib|Stable-Baselines3|Sample Factory|PufferLib) \| ([^|]+) \| ([\d.]+) \(([\d.]+) to ([\d.]+)\)",
            page, re.MULTILINE,
        )
    ]  # fmt: skip
    left, right, top, height = 330, _WIDTH - 60, 46, 24

    def place(ratio: float) -> float:
        return left + (right - left) * math.log(ratio / 0.8) / math.log(10 / 0.8)

    bottom = top + height * len(rows)
    parts = [
        _text(12, 24, "env steps per second, rlzmq ÷ the other library (line: range of five runs)", "text")
    ]
    for ratio in (1, 2, 4, 8):
        x = place(ratio)
        parts += [
            f'<line x1="{x:.1f}" y1="{top - 6}" x2="{x:.1f}" y2="{bottom}" stroke="{_COLOURS["dim"]}" '
            f'stroke-width="{2 if ratio == 1 else 0.4}"/>',
            _text(x - 6, bottom + 18, f"{ratio} ×", "dim"),
        ]
    for number, (name, ratio, low, high) in enumerate(rows):
        y = top + height * number
        colour = _COLOURS["curve" if low > 1 else "death"]
        begin, end = sorted((place(1), place(ratio)))
        middle = y + height / 2 - 2
        parts += [
            _text(12, middle + 4, name, "text"),
            f'<rect x="{begin:.1f}" y="{y + 3}" width="{max(end - begin, 2):.1f}" height="{height - 10}" '
            f'fill="{colour}"/>',
            f'<line x1="{place(low):.1f}" y1="{middle}" x2="{place(high):.1f}" y2="{middle}" '
            f'stroke="{_COLOURS["text"]}"/>',
            _text(place(max(high, ratio)) + 6, middle + 4, f"{ratio:.2f}", "text"),
        ]
    return _svg(_WIDTH, bottom + 30, "\n".join(parts), "rlzmq's speed compared with other libraries")


def _text(x: float, y: float, text: str, colour: str, cut: int = 90) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{_COLOURS[colour]}" xml:space="preserve">{escape(text[:cut])}</text>'


def _svg(width: int, height: int, content: str, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="10.5"><title>{title}</title>\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="{_COLOURS["back"]}"/>\n{content}\n</svg>\n'
    )


def main() -> None:
    """Record the run and draw both pictures."""
    with tempfile.TemporaryDirectory() as directory:
        run = record(Path(directory))
    (DOCS / "kill.svg").write_text(moving_picture(run), encoding="utf-8")
    (DOCS / "peers.svg").write_text(bars(), encoding="utf-8")


if __name__ == "__main__":
    main()
