"""Draw README's pictures: a run that loses a runner beside its dashboard, and docs/benchmarks.md's ratios as bars.

The run is real: ``rlzmq train`` in one terminal, ``kill -9`` in another, ``rlzmq dashboard`` in a browser; the picture
plays what they showed.

Usage: ``.venv/bin/python scripts/readme_pictures.py``; the pictures are docs/kill.gif and docs/peers.svg. Needs
Chromium and playwright.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from PIL import Image
from playwright.sync_api import sync_playwright

from rlzmq.core.process import find_stack_channel

DOCS = Path(__file__).parents[1] / "docs"
COMMAND = "rlzmq train ppo --env CartPole-v1 --env-runners 2 --run-dir demo"
KILL_AT, STOP_AT = 200.0, 475.0

_EVERY_S, _LAST_S = 0.25, 4.0  # between pictures; the last one stays longer
_NUM_LINES, _NUM_COLUMNS = 15, 72
_NUM_COLOURS = 48
_ACCENTS = ("#ff7b72", "#6aa9ff", "#f0a94a", "#4fc483")
_COLOURS = {
    "back": "#0d1117", "bar": "#161b22", "text": "#c9d1d9", "dim": "#8b949e", "curve": "#58a6ff", "death": "#ff7b72",
}  # fmt: skip
_DASHBOARD = {"width": 800, "height": 550}  # shown at 425 × 292
# The panels that show a death, and no hints.
_PANELS = """
#tiles, main > section, .hint, fieldset, .skip { display: none !important }
section[aria-labelledby=h-return], section[aria-labelledby=h-grid], section[aria-labelledby=h-events] {
    display: block !important }
main { gap: .5rem; padding: .5rem }
section[aria-labelledby=h-grid] { order: 1 }  /* below the events */
section { padding: .4rem .6rem }
"""
_FRAME = """<meta charset=utf-8><style>
body {{ margin: 0; width: 830px; height: 292px; background: #0d1117; color: #c9d1d9; display: flex }}
pre {{ margin: 0; padding: 6px 8px; width: 389px; font: 8.6px/13.5px "DejaVu Sans Mono", monospace; overflow: hidden }}
pre + pre {{ border-top: 1px solid #8b949e }}
i {{ font-style: normal; color: #ff7b72 }} s {{ text-decoration: none; color: #8b949e }}
img {{ width: 425px; height: 292px }}
</style><div><pre style="height: 222px">{train}</pre><pre style="height: 60px">{kill}</pre></div><img src="{image}">"""


class Look(NamedTuple):
    """What the screens showed at a moment: the seconds, the lines of the run, and the dashboard as PNG."""

    at: float
    lines: list[str]
    dashboard: bytes
    killed: int | None


@contextmanager
def dashboard(directory: Path, page: Any) -> Iterator[None]:
    """Show the dashboard of the run on the page."""
    words = [sys.executable, "-m", "rlzmq", "dashboard", "demo", "--port", "0", "--end-with-stdin"]
    with subprocess.Popen(
        words, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        page.goto(process.stdout.readline().split()[1])
        page.wait_for_selector("body[data-loaded]")
        page.add_style_tag(content=_PANELS)
        yield
        page.goto("about:blank")
        process.stdin.close()


def record(directory: Path, page: Any) -> Iterator[Look]:
    """Train, kill a runner when the mean return is above `KILL_AT`, and yield what is seen."""
    (directory / "demo").mkdir()
    words = [sys.executable, "-m", *COMMAND.split(), "--seed", "0", "--stop", f"return={STOP_AT:g}"]
    said, metrics = directory / "said", directory / "demo/metrics.jsonl"
    killed = None
    with dashboard(directory, page), said.open("w") as output:
        run = subprocess.Popen(
            words, cwd=directory, stdout=output, stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "90"},
        )  # fmt: skip
        begin, ended = time.monotonic(), False
        while not ended:
            ended = run.poll() is not None
            results = metrics.read_text().splitlines()[:-1] if metrics.exists() else []
            if (
                killed is None
                and results
                and json.loads(results[-1])["env_runners"]["episode_return_mean"] > KILL_AT
            ):
                killed = _runner_of(run.pid)
                psutil.Process(killed).kill()
            page.wait_for_timeout(1000 if ended else 1000 * _EVERY_S)
            yield Look(
                time.monotonic() - begin,
                said.read_text().splitlines(),
                page.screenshot(scale="device"),
                killed,
            )


def _runner_of(pid: int) -> int:
    """Return the process of one of the run's env runners."""
    for process in psutil.Process(pid).children(recursive=True):
        channel = find_stack_channel(process.pid)
        if channel and "runner" in channel[0]:
            return process.pid
    raise SystemExit("the run has no runner process")


def moving_picture(looks: list[Look], page: Any) -> bytes:
    """Return the screens side by side as a GIF that plays them again and again."""
    started = next(number for number, look in enumerate(looks) if look.lines)
    looks = looks[max(0, started - 2) :]  # the first seconds show nothing
    frames = []
    for look in looks:
        page.set_content(_FRAME.format(
            train="\n".join([f"$ {COMMAND}", *_newest(look.lines)]),
            kill="<s>$ # another terminal: kill one of the two runners</s>"
            + (f"\n$ <i>kill -9 {look.killed}</i>" if look.killed else ""),
            image=_data_url(look.dashboard),
        ))  # fmt: skip
        page.wait_for_function("document.images[0].complete")
        frames.append(Image.open(io.BytesIO(page.screenshot(scale="device"))).convert("RGB"))
    together = Image.new("RGB", (frames[0].width, frames[0].height * len(frames)))
    for number, frame in enumerate(frames):
        together.paste(frame, (0, frame.height * number))
    for number, colour in enumerate(_ACCENTS):  # else the palette has greys only
        together.paste(colour, (0, 300 * number, 300, 300 * number + 300))
    palette = together.quantize(_NUM_COLOURS, dither=Image.Dither.NONE)
    first, *others = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [look.at for look in looks]
    file = io.BytesIO()
    first.save(
        file, "GIF", save_all=True, append_images=others, loop=0, optimize=False,
        duration=[*(round(1000 * (b - a)) for a, b in pairwise(times)), round(1000 * _LAST_S)],
    )  # fmt: skip
    return file.getvalue()


def _newest(lines: list[str]) -> list[str]:
    """Return the last lines of the terminal as HTML, deaths in red."""
    kept = [line for line in lines if "accounting" in line or not re.match(r"\w+ {2,}", line)]
    shown = [escape(line[:_NUM_COLUMNS]) for line in kept[-_NUM_LINES:]]
    return [f"<i>{line}</i>" if re.search("killed", line) else line for line in shown]


def _data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def bars() -> str:
    """Return docs/benchmarks.md's ratios to other libraries as bars."""
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (RLlib|Stable-Baselines3|Sample Factory|PufferLib) \| ([^|]+) \| ([\d.]+) \(([\d.]+) to ([\d.]+)\)",
        page, re.MULTILINE,
    )  # fmt: skip
    width, left, right, y, height, above = 330, 162, 292, 28.0, 16, ""

    def place(ratio: str | float) -> float:
        return left + (right - left) * math.log(float(ratio) / 0.8) / math.log(10 / 0.8)

    parts = [_text(10, 18, "env steps/s, rlzmq ÷ the other (line: range)", "text")]
    for library, case, ratio, low, high in rows:
        if library != above:
            parts.append(_text(10, y + 15, library, "dim"))
            y, above = y + 20, library
        begin, end = sorted((place(1), place(ratio)))
        colour = _COLOURS["curve" if float(low) > 1 else "death"]
        parts += [
            _text(
                18, y + 11, re.sub(r", \d × \d+ envs| settings| env$", "", case).replace("one", "1"), "text"
            ),
            f'<rect x="{begin:.1f}" y="{y + 3}" width="{max(end - begin, 2):.1f}" height="10" fill="{colour}"/>',
            f'<line x1="{place(low):.1f}" y1="{y + 8}" x2="{place(high):.1f}" y2="{y + 8}" '
            f'stroke="{_COLOURS["text"]}"/>',
            _text(place(high) + 5, y + 11, ratio, "text"),
        ]
        y += height
    for tick in (1, 2, 4, 8):
        x = place(tick)
        parts += [
            f'<line x1="{x:.1f}" y1="26" x2="{x:.1f}" y2="{y + 4}" stroke="{_COLOURS["dim"]}" '
            f'stroke-width="{1.5 if tick == 1 else 0.4}"/>',
            _text(x - 8, y + 17, f"{tick} ×", "dim"),
        ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 26:g}" width="{width}" height="{y + 26:g}" '
        'font-family="system-ui, sans-serif" font-size="11"><title>rlzmq\'s speed next to other libraries</title>\n'
        f'<rect width="{width}" height="{y + 26:g}" rx="8" fill="{_COLOURS["back"]}"/>\n'
        + "\n".join(parts) + "\n</svg>\n"
    )  # fmt: skip


def _text(x: float, y: float, text: str, colour: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{_COLOURS[colour]}">{escape(text)}</text>'


def main() -> None:
    """Record the run and draw both pictures."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as directory:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        context = browser.new_context(
            viewport=_DASHBOARD, device_scale_factor=2 * 425 / 800, color_scheme="dark", bypass_csp=True
        )
        looks = list(record(Path(directory), context.new_page()))
        page = browser.new_context(viewport={"width": 830, "height": 292}, device_scale_factor=2).new_page()
        (DOCS / "kill.gif").write_bytes(moving_picture(looks, page))
        browser.close()
    (DOCS / "peers.svg").write_text(bars(), encoding="utf-8")


if __name__ == "__main__":
    main()
