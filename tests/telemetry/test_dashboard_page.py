"""The dashboard's page in headless Chromium: looks, widths, the keyboard, crowds of runners, long curves."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rlzmq.core.addresses import SocketDirectory
from tests.telemetry.dashboards import MadeUpBroker, Served
from tests.telemetry.test_dashboard_server import SCRAPED, make_search
from tests.telemetry.test_runs import ended, make_run, result

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")

SHOTS = os.environ.get("DASHBOARD_SHOTS")  # a directory for the pictures of docs/watch.md
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def complaints() -> list[str]:
    """What pages complain of."""
    return []


@pytest.fixture
def opened(browser: Any, complaints: list[str]) -> Iterator[Any]:
    """Opens a dashboard's page; whatever the page complains of fails the test."""
    contexts = []

    def opened(served: Served, scheme: str = "light", viewport: dict[str, int] = WIDE) -> Any:
        context = browser.new_context(color_scheme=scheme, viewport=viewport, reduced_motion="reduce")
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on(
            "console",
            lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        name, _, value = served.cookie.partition("=")
        context.add_cookies([{"name": name, "value": value, "url": f"http://127.0.0.1:{served.port}"}])
        page.goto(f"http://127.0.0.1:{served.port}/")
        page.wait_for_selector("body[data-loaded]")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A dashboard of two short runs, entered."""
    place = tmp_path_factory.mktemp("page")
    for number, name in enumerate(("first", "second")):
        directory = make_run(place / "runs" / name, [], seed=number)
        for iteration in range(1, 41):
            made = {**SCRAPED, **result(iteration, iteration * 500, 10.0 + iteration * (5 + number))}
            made["policy_lag"] = {"num_env_steps": [300, 150, 40, 10]}
            made["env_runners"] |= {
                "episode_return_min": 8.0,
                "episode_return_max": 30.0 + iteration * 8,
                "num_env_steps_sampled_lifetime_throughput": 1000.0 + 10 * iteration,
            }
            directory.log(made)
        ended(directory)
    with Served(place) as served:
        yield served.enter()


def shoot(shown: Any, name: str, **options: Any) -> None:
    """Keep a picture, if pictures are asked for."""
    if SHOTS:
        path = Path(SHOTS) / f"watch_{name}.png"
        shown.screenshot(path=path, **options)
        with Image.open(path) as image:
            image.convert("RGB").quantize(48).save(path, optimize=True)


def colors(page: Any, selector: str) -> tuple[float, float]:
    """Brightness of an element's text and of the page behind it, 0 to 255."""
    script = """element => [getComputedStyle(element).color, getComputedStyle(document.body).backgroundColor].map(
        text => text.match(/[\\d.]+/g).slice(0, 3).map(Number).reduce((a, b) => a + b) / 3)"""
    text, paper = page.eval_on_selector(selector, script)
    return text, paper


@pytest.mark.parametrize(
    ("scheme", "viewport"), [("light", WIDE), ("dark", WIDE), ("light", PHONE), ("dark", PHONE)]
)
def test_the_page_is_readable_in_light_and_dark_and_on_a_phone(
    served: Served, opened: Any, scheme: str, viewport: dict[str, int]
) -> None:
    page = opened(served, scheme, viewport)
    text, paper = colors(page, "h2")
    assert (text < 60 and paper > 200) if scheme == "light" else (text > 200 and paper < 60)
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    assert page.locator("#tiles dd").first.inner_text() == "250"
    assert page.title().startswith("second: 250")
    canvas = page.locator("#chart-return canvas")
    assert canvas.bounding_box()["width"] <= viewport["width"]
    drawn = """canvas => new Set(new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width,
        canvas.height).data.buffer)).size"""
    assert canvas.evaluate(drawn) > 10
    assert page.locator("#chart-return output").inner_text() == (
        "20,000 env steps: second 250 (8 to 350), first 210 (8 to 350)"
    )
    shoot(page, f"{scheme}-{viewport['width']}", full_page=True)


def test_the_keyboard_chooses_runs_axes_and_moves_along_a_curve(served: Served, opened: Any) -> None:
    page = opened(served)
    readout = page.locator("#chart-return output")
    page.locator("#run").focus()
    page.keyboard.press("ArrowUp")
    sync_api.expect(page).to_have_title("first: 210 · rlzmq")
    page.get_by_label("draw second").focus()
    page.keyboard.press("Space")
    sync_api.expect(readout).to_have_text("20,000 env steps: 210 (8 to 350)")
    page.get_by_role("radio", name="env steps").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    sync_api.expect(readout).to_have_text("40 iterations: 210 (8 to 350)")
    page.locator("#chart-return .plot").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    sync_api.expect(readout).to_have_text("38 iterations: 200 (8 to 334)")
    page.keyboard.press("+")
    plot = page.locator("#chart-return .plot")
    sync_api.expect(plot).to_have_attribute("data-points", re.compile("[12]."))
    page.keyboard.press("0")
    sync_api.expect(plot).to_have_attribute("data-points", "40")


def test_a_crowd_of_two_thousand_runners_is_a_grid_that_the_keyboard_walks(
    opened: Any, tmp_path: Path
) -> None:
    with (
        SocketDirectory() as sockets,
        MadeUpBroker(sockets.path, 2000) as broker,
        Served(tmp_path, f"ipc://{broker.path}") as served,
    ):
        page = opened(served.enter(), viewport=PHONE)
        cells = page.locator("#grid [role=gridcell]")
        sync_api.expect(cells).to_have_count(2000)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        sync_api.expect(page.locator("#grid-legend")).to_contain_text("40 suspect")
        assert page.locator("#grid [tabindex='0']").count() == 1
        page.locator("#grid [tabindex='0']").focus()
        for key in ("End", "ArrowLeft", "Home", "ArrowRight", "ArrowDown", "ArrowUp"):
            page.keyboard.press(key)
        detail = page.locator("#grid-detail")
        sync_api.expect(detail).to_contain_text("runner-1: sampling")
        sync_api.expect(detail).to_contain_text("1 leases")
        broker.status["runners"][1]["is_suspect"] = True
        sync_api.expect(detail).to_contain_text("runner-1: suspect")
        page.set_viewport_size(WIDE)
        shoot(page.locator("section[aria-labelledby=h-grid]"), "grid")
        page.close()


def test_events_unfold_their_tracebacks_and_bars_say_their_numbers(opened: Any, tmp_path: Path) -> None:
    directory = make_run(tmp_path / "runs/a", [])
    for iteration in range(1, 4):
        lag = {"min": 0, "mean": 1.0, "max": 3, "num_env_steps": [300, 150, 40, 10 * iteration]}
        directory.log({**result(iteration, iteration * 500, 7.0), **SCRAPED, "policy_lag": lag})
    try:
        exec(compile('raise ValueError("<b>no</b> way")', "walker.py", "exec"))
    except ValueError as error:
        logging.getLogger("rlzmq.driver").warning("runner-1 died.", extra={"error": error})
    ended(directory)
    with Served(tmp_path) as served:
        page = opened(served.enter())
        sync_api.expect(page.locator("#verdict")).to_contain_text("Bottleneck: env. Make it faster.")
        sync_api.expect(page.locator("#verdict")).to_contain_text(
            "Health: values diverge: They are 1e9. Lower lr."
        )
        sync_api.expect(page.locator("#stages")).to_contain_text("env 75 %")
        sync_api.expect(page.locator("#drops")).to_contain_text("20 of 500 sampled (4 %); 480 trained.")
        bars = page.locator("#lag .columns li")
        sync_api.expect(bars).to_have_count(4)
        sync_api.expect(bars.nth(0)).to_have_attribute("aria-label", "0 versions: 900 env steps (59 %)")
        page.locator("#events summary").focus()
        page.keyboard.press("Enter")
        sync_api.expect(page.locator("#events pre")).to_contain_text("ValueError: <b>no</b> way")
        for name in ("stages", "lag", "events"):
            shoot(page.locator(f"section[aria-labelledby=h-{name}]"), name)
        page.close()


def test_trials_are_parallel_coordinates_with_a_table_that_the_keyboard_walks(
    opened: Any, tmp_path: Path
) -> None:
    make_search(tmp_path / "runs/tune/lr", 20)
    with Served(tmp_path) as served:
        page = opened(served.enter())
        sync_api.expect(page.locator("#coordinates path")).to_have_count(20)
        sync_api.expect(page.locator("#coordinates path.failed")).to_have_count(1)
        sync_api.expect(page.locator("#trial-detail")).to_have_text(
            "20 trials: 19 ended, 1 failed. Best env_runners/episode_return_mean: 95 (PPO_00017)."
        )
        shoot(page.locator("#trials-panel"), "trials")
        page.get_by_role("button", name="PPO_00017").focus()
        sync_api.expect(page.locator("#coordinates path.best.shown")).to_have_count(1)
        page.keyboard.press("Enter")
        sync_api.expect(page).to_have_title("lr/PPO_00017: 95 · rlzmq")
        page.close()


def test_a_page_without_runs_shows_the_first_one_that_comes(opened: Any, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with Served(tmp_path) as served:
        page = opened(served.enter())
        sync_api.expect(page.locator("#tiles")).to_contain_text("none so far")
        sync_api.expect(page.locator(".chart output")).to_have_text(["Waiting for the first run."] * 2)
        shoot(page, "empty")
        directory = make_run(tmp_path / "runs/a", [])
        awaited = ["finished episode", "results"]
        sync_api.expect(page.locator(".chart output")).to_have_text(
            [f"Waiting for the first {what}." for what in awaited]
        )
        sync_api.expect(page.locator(".chart canvas, .hint:visible >> text=Drag")).to_have_count(0)
        directory.log(result(1, 100, 5.0))
        ended(directory)
        sync_api.expect(page).to_have_title("a: 5 · rlzmq")
        page.close()


@pytest.mark.slow
def test_a_million_results_are_drawn_by_their_extremes(opened: Any, tmp_path: Path) -> None:
    directory = make_run(tmp_path / "runs/long", [])
    directory.close()
    with (directory.path / "metrics.jsonl").open("w") as file:
        for iteration in range(1, 1_000_001):
            value = 500.0 if iteration == 654_321 else iteration % 1000 / 10
            file.write(f'{{"training_iteration":{iteration},"num_env_steps_sampled_lifetime":{iteration},'
                       f'"env_runners":{{"episode_return_mean":{value}}}}}\n')  # fmt: skip
    with Served(tmp_path) as served:
        page = opened(served.enter())
        steps = page.locator("#runs tbody tr td").nth(5)
        sync_api.expect(steps).to_have_text("1,000,000", timeout=100_000)
        plot = page.locator("#chart-return .plot")
        sync_api.expect(plot).to_have_attribute(
            "aria-label", re.compile("(1,000,000|999,...) env steps: "), timeout=60_000
        )
        drawn = served.json("/api/curves?runs=r0&width=1000")["curves"][0]["mean"]
        assert max(value for value in drawn if value is not None) == 500
        assert 800 < int(plot.get_attribute("data-points")) < 5000
        shoot(page.locator("section[aria-labelledby=h-return]"), "million")
        page.close()
