"""The dashboard's server: who may ask, what it answers and computes, and what it shows of runs, over real HTTP."""

from __future__ import annotations

import json
import math
import re
import stat
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import promql_parser
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlzmq import ConfigurationError
from rlzmq.cli.main import main
from rlzmq.core.addresses import SocketDirectory
from rlzmq.telemetry.dashboard.panels import curves_for_width
from rlzmq.telemetry.dashboard.watched import MetricsTail, find_broker
from tests.support.runs import Command
from tests.telemetry.dashboards import MadeUpBroker, Served, until
from tests.telemetry.test_runs import ended, make_run, result


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A dashboard of two runs that have ended, entered."""
    place = tmp_path_factory.mktemp("dashboard")
    ended(make_run(place / "runs/a", [1.0, 3.0, 2.0], seed=1))
    ended(make_run(place / "runs/b", [5.0], seed=2, lr=0.25))
    with Served(place, "--token-file", "token") as served:
        yield served.enter()


def test_only_the_link_lets_a_browser_in_and_only_once(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with Served(tmp_path) as served:
        for path in ("/", "/api/runs", "/api/stream", "/dashboard.js", "/enter", "/enter?token=x"):
            status, headers, body = served.ask(path)
            assert (status, "set-cookie" in headers) == (401, False)
            assert "needs the link" in body
        path = served.link.partition(str(served.port))[2]
        status, headers, _ = served.ask(path)
        assert status == 200
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(headers["set-cookie"].split("; "))
        assert served.link.rpartition("=")[2] not in headers["set-cookie"]
        served.cookie = headers["set-cookie"].partition(";")[0]
        assert served.json("/api/runs") == []
        served.output = ""
        assert served.ask(path, Cookie="")[0] == 401  # a used link, e.g. from the browser's history
        served.wait_for("\n")
        again = re.fullmatch(r"dashboard +http://127\.0\.0\.1:\d+(/enter\?token=\S+)\n", served.output)
        assert again is not None
        assert served.ask(again[1], Cookie="")[0] == 200
        assert served.ask("/", Cookie=served.cookie + "x")[0] == 401


def test_other_names_methods_and_sites_are_refused(served: Served) -> None:
    assert served.ask("/")[0] == 200
    assert served.ask("/", Host=f"localhost:{served.port}")[0] == 200
    for host in ("evil.example", f"evil.example:{served.port}", f"127.0.0.1.evil.example:{served.port}", ""):
        assert served.ask("/", Host=host)[0] == 400
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert served.ask("/", method)[0] == 405
    for site in ("cross-site", "same-site"):
        for mode, destination in (("cors", "empty"), ("no-cors", "script"), ("navigate", "iframe")):
            headers = {"Sec_Fetch_Site": site, "Sec_Fetch_Mode": mode, "Sec_Fetch_Dest": destination}
            assert served.ask("/api/runs", **headers)[0] == 403
    assert served.ask("/api/runs", Sec_Fetch_Site="same-origin")[0] == 200


def test_every_answer_has_the_headers_and_nothing_is_inline(served: Served) -> None:
    for path, cookie in (
        ("/", served.cookie),
        ("/api/runs", served.cookie),
        ("/nothing", served.cookie),
        ("/", ""),
    ):
        _, headers, _ = served.ask(path, Cookie=cookie)
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers
    _, headers, page = served.ask("/")
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"<script(?![^>]*src=)|<style|style=|\son\w+=|https?:", page)
    for name in re.findall(r'(?:src|href)="([\w.]+)"', page):
        assert served.ask(f"/{name}")[0] == 200
    for path in ("/../server.py", "/server.py", "/static/index.html", "/%2e%2e/server.py", "/LICENSE"):
        assert served.ask(path)[0] == 404


def test_programs_have_a_token_in_a_file_that_only_its_owner_reads(served: Served, tmp_path: Path) -> None:
    place = Path(f"/proc/{served.process.pid}/cwd").resolve()
    token = (place / "token").read_text().strip()
    assert stat.S_IMODE((place / "token").stat().st_mode) == 0o600
    assert served.ask("/api/runs", Cookie="", Authorization=f"Bearer {token}")[0] == 200
    for wrong in (f"Bearer {token}x", f"Basic {token}", "Bearer", token):
        assert served.ask("/api/runs", Cookie="", Authorization=wrong)[0] == 401
    (tmp_path / "open").write_text(token)
    (tmp_path / "open").chmod(0o644)
    (tmp_path / "short").write_text("abc")
    (tmp_path / "short").chmod(0o600)
    for name in ("open", "short"):
        assert main(["dashboard", str(tmp_path), "--token-file", str(tmp_path / name)]) == 78
    assert main(["dashboard", str(tmp_path), "--host", "0.0.0.0"]) == 78


def test_runs_and_their_curves_are_told(served: Served) -> None:
    first, second = served.json("/api/runs")
    assert (first["label"], first["algorithm"], first["env"], first["seed"]) == ("a", "PPO", "CartPole-v1", 1)
    assert (first["state"], first["steps"], first["return"], first["best"]) == ("ended", 300, 2.0, 3.0)
    assert second["label"] == "b"
    told = served.json(f"/api/curves?runs={first['id']},{second['id']}&x=steps&width=500")
    assert told["x"] == [100, 200, 300]
    assert [curve["mean"] for curve in told["curves"]] == [[1, 3, 2], [5, None, None]]
    assert served.json(f"/api/curves?runs={first['id']}&x=time&begin=1&end=1.5")["x"] == [0.5, 1, 1.5]
    assert served.json("/api/curves?runs=nothing") == {"x": [], "runs": [], "curves": []}
    for wrong in ("x=epochs", "y=loss", "width=many", "begin=x"):
        assert served.ask(f"/api/curves?runs={first['id']}&{wrong}")[0] == 400


def test_new_runs_and_results_arrive_on_the_stream(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "runs/a", [1.0])
    with Served(tmp_path) as served:
        events = served.enter().events()
        rows = until(events, "runs", lambda rows: rows and rows[0]["rows"])
        assert rows[0]["state"] == "running"
        directory.log(result(2, 200, 7.5))
        until(events, "runs", lambda rows: rows[0]["return"] == 7.5)
        until(events, "curves", lambda counts: counts["r0"] > 1)
        make_run(tmp_path / "runs/b", [3.0]).close()
        assert [row["label"] for row in until(events, "runs", lambda rows: len(rows) == 2)] == ["a", "b"]
        directory.close()
        until(events, "runs", lambda rows: rows[0]["state"] == "ended")
        served.process.terminate()
        served.process.wait(10)  # though a stream is open


def test_a_broker_alone_is_asked_only_while_somebody_looks(tmp_path: Path) -> None:
    with SocketDirectory() as sockets, MadeUpBroker(sockets.path, 3) as broker:
        with Served(tmp_path, f"ipc://{broker.path}") as served:
            assert served.enter().json("/api/runs")[0]["label"] == f"ipc://{broker.path}"
            grid = until(served.events(), "grid", lambda grid: grid["names"])
            assert grid["names"] == ["runner-0", "runner-1", "runner-2"]
            assert grid["states"] == "iss"
            events = served.events()
            del broker.status["runners"][1]
            grid = until(events, "grid", lambda grid: "g" in grid["states"])
            assert (grid["names"], grid["states"]) == (["runner-0", "runner-2", "runner-1"], "isg")
            events.close()
        assert broker.num_asked > 0


SCRAPED = {
    "env_runners": {"episode_return_mean": 7.0, "episode_return_min": 1.0, "episode_return_max": 9.0,
                    "num_episodes_lifetime": 40, "num_env_steps_sampled_lifetime_throughput": 900.0},
    "policy_lag": {"min": 0, "mean": 1.0, "max": 2},
    "fault_tolerance": {"num_healthy_workers": 2, "num_remote_worker_restarts": 3, "num_learner_restarts": 1},
    "accounting": {"sampled": 500, "trained": 480, "dropped": {"stale": 12, "surplus": 8}, "pending": 0},
    "health": {"values diverge": {"cause": "They are 1e9", "remedy": "Lower lr"}},
    "bottleneck": {"stage": "env", "advice": "Make it faster.",
                   "shares": {"env_runners": {"env": 0.75, "wait": 0.25}, "learners": {"forward": 0.1, "wait": 0.9}}},
}  # fmt: skip


def test_prometheus_and_grafana_find_every_metric_that_the_shipped_dashboard_draws(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="reads the text as Prometheus does")
    directory = make_run(tmp_path / "runs/a", [])
    directory.log({**result(1, 500, 7.0), **SCRAPED})
    ended(directory)
    with (
        SocketDirectory() as sockets,
        MadeUpBroker(sockets.path, 60),
        Served(tmp_path, "runs", str(sockets.path), "--token-file", "token") as served,
    ):
        assert served.ask("/metrics")[0] == 401
        token = (tmp_path / "token").read_text().strip()
        served.enter()
        until(served.events(), "runs", lambda rows: rows[0]["rows"])
        status, headers, text = served.ask("/metrics", Cookie="", Authorization=f"Bearer {token}")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    samples = {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    label = str(sockets.path)
    expected = {
        ("rlzmq_episode_return_mean", "a"): 7, ("rlzmq_iterations_total", "a"): 1, ("rlzmq_run_is_running", "a"): 0,
        ("rlzmq_env_steps_total", "a", "trained"): 480, ("rlzmq_dropped_env_steps_total", "stale", "a"): 12,
        ("rlzmq_restarted_runners_total", "a"): 3, ("rlzmq_stage_share", "env_runners", "a", "env"): 0.75,
        ("rlzmq_runners", label, "suspect"): 1, ("rlzmq_runners", label, "gone"): 0,
    }  # fmt: skip
    assert {name: samples.get(name) for name in expected} == expected


def test_every_panel_of_the_grafana_file_shows_something_of_a_real_run(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="reads the text as Prometheus does")
    command = (
        "train ppo --env CartPole-v1 --preset none --env-runners 1 --learners 1 --batch-size-per-learner 200 "
        "--minibatch-size 100 --num-epochs 1 --run-dir runs/a --stop time=600"
    )
    with Command(tmp_path, *command.split()) as run:
        run.wait_for("iter 2 ")
        with Served(tmp_path, "runs", "--token-file", "token") as served:
            token = (tmp_path / "token").read_text().strip()
            served.enter()
            until(served.events(), "grid", lambda grid: grid["names"])
            _, _, text = served.ask("/metrics", Cookie="", Authorization=f"Bearer {token}")
        run.process.terminate()
        assert run.end() == 75, run.output
    families = list(parser.text_string_to_metric_families(text))
    samples = [sample for family in families for sample in family.samples]
    counters = {f"{family.name}_total" for family in families if family.type == "counter"}
    panels = json.loads((Path(__file__).parents[2] / "docs/grafana.json").read_text())["panels"]
    assert len(panels) == 10
    for panel in panels:
        assert panel["targets"]
        for target in panel["targets"]:
            promql_parser.parse(target["expr"])
            names = set(re.findall(r"rlzmq_\w+", target["expr"]))
            found = [sample for sample in samples if sample.name in names]
            assert names == {sample.name for sample in found}, panel["title"]
            assert set(re.findall(r"rate\((\w+)", target["expr"])) <= counters
            labels = re.findall(r"{{(\w+)}}", target.get("legendFormat", ""))
            labels += re.findall(r"\w+", "".join(re.findall(r"by \(([\w, ]+)\)", target["expr"])))
            assert all(set(labels) <= sample.labels.keys() for sample in found), panel["title"]


def make_search(path: Path, num_trials: int) -> None:
    """The files of a search over two settings, as rlzmq.tune writes them; the last trial failed."""
    path.mkdir(parents=True)
    space = {"lr": {"__search__": {"loguniform": [1e-5, 1e-2]}},
             "model_config": {"fcnet_hiddens": {"__search__": {"choice": [[[32], [64, 64]]]}}}}  # fmt: skip
    fields = {"metric": {"value": "env_runners/episode_return_mean"}, "mode": {"value": "max"}}
    (path / "tuner.json").write_text(
        json.dumps(
            {
                "param_space": {"value": {"__algorithm_config__": {"values": space}}},
                "tune_config": {"fields": fields},
            }
        )
    )
    for index in range(num_trials):
        trial = path / f"PPO_{index:05d}"
        trial.mkdir()
        params = {"env": "CartPole-v1", "seed": index, "gamma": 0.99, "lr": 10 ** (-5 + 3 * (index * 7 % 20) / 20),
                  "model_config": {"fcnet_hiddens": [32] if index % 2 else [64, 64]}}  # fmt: skip
        (trial / "params.json").write_text(json.dumps(params))
        if index == num_trials - 1:
            (trial / "error.txt").write_text("Traceback …\nValueError: too much\n")
            continue
        lines = [
            {**result(number, number * 100, (index * 7 % 20) * number), "done": number == 5}
            for number in range(1, 6)
        ]
        (trial / "result.json").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_searchs_trials_have_axes_values_and_their_own_curves(tmp_path: Path) -> None:
    make_search(tmp_path / "runs/tune/lr", 4)
    with Served(tmp_path) as served:
        events = served.enter().events("r3")
        newest: dict[str, Any] = {}  # trials' files are read while the first panels are sent
        while not (
            newest.get("events") and newest["trials"] and newest["trials"][0]["trials"][1]["metric"] == 35
        ):
            newest.update([next(events)])
        (search,), (event,) = newest["trials"], newest["events"]
        assert event["text"] == "ValueError: too much"
        assert [row["label"] for row in served.json("/api/runs")] == [
            f"lr/PPO_{index:05d}" for index in range(4)
        ]
        assert served.json("/api/curves?runs=r1")["curves"][0]["mean"] == [7, 14, 21, 28, 35]
    assert (search["name"], search["metric"], search["mode"]) == (
        "lr",
        "env_runners/episode_return_mean",
        "max",
    )
    assert search["axes"] == [
        {"path": "lr", "is_log": True},
        {"path": "model_config/fcnet_hiddens", "is_log": False},
    ]
    assert search["trials"][1] == {
        "name": "PPO_00001", "state": "ended", "iteration": 5, "values": [pytest.approx(10 ** (-5 + 21 / 20)), "[32]"],
        "metric": 35,
    }  # fmt: skip
    assert (search["trials"][3]["state"], search["trials"][3]["metric"]) == ("failed", None)


def test_places_that_are_none_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", str(tmp_path / "nowhere")]) == 78
    assert "nowhere does not exist" in capsys.readouterr().err
    run = ended(make_run(tmp_path / "a", [1.0]))
    with pytest.raises(ConfigurationError, match="no broker of this run is here"):
        find_broker(str(run))


def enter_page_of(command: Command) -> Served:
    """Enter the page whose link the command prints."""
    command.wait_for("enter?token=")
    command.wait_for("\n")
    line = next(line for line in command.output.splitlines() if "enter?token=" in line)
    link = line.split()[1]
    with urllib.request.urlopen(link, timeout=30) as answer:
        cookie = answer.headers["set-cookie"].partition(";")[0]
    page = Served.__new__(Served)
    page.port, page.cookie = int(link.split(":")[2].partition("/")[0]), cookie
    return page


def test_train_shows_its_run_with_its_runners_and_takes_the_page_with_it(tmp_path: Path) -> None:
    arguments = ["--env", "CartPole-v1", "--num-env-runners", "1", "--preset", "none", "--run-dir", "run"]
    sizes = ["--train-batch-size-per-learner", "400", "--minibatch-size", "100", "--num-epochs", "1"]
    with Command(tmp_path, "train", "ppo", *arguments, *sizes, "--dashboard") as train:
        page = enter_page_of(train)
        events = page.events()
        grid = until(events, "grid", lambda grid: grid["names"])
        assert len(grid["names"]) == 1
        assert until(events, "runs", lambda rows: rows[0]["rows"] > 1)[0]["state"] == "running"
        assert main(["top", str(tmp_path / "run"), "--count", "1"]) == 0
        train.process.send_signal(2)
        assert train.end() == 130
        assert "watch       rlzmq dashboard run" in train.output
        with pytest.raises(ConnectionRefusedError):
            page.ask("/")


# -- columns and curves --------------------------------------------------------------------------------


def line(iteration: int, value: float | None) -> str:
    result = {"training_iteration": iteration, "num_env_steps_sampled_lifetime": iteration * 10}
    return json.dumps({**result, "env_runners": {"episode_return_mean": value}}) + "\n"


def read(tail: MetricsTail) -> list[list[float]]:
    while tail.read():
        pass
    columns = tail.columns()
    return [columns[name].tolist() for name in ("iterations", "steps", "mean")]


def test_a_file_is_read_on_as_it_grows_and_a_torn_line_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert not tail.read()
    whole = line(1, 1.0) + line(2, 2.0)
    path.write_text(whole[:-20])
    assert read(tail) == [[1], [10], [1]]
    with path.open("a") as file:
        file.write(whole[-20:] + "not json\n[]\n" + line(3, None))
    iterations, _, returns = read(tail)
    assert iterations == [1, 2, 3]
    assert returns[:2] == [1, 2]
    assert math.isnan(returns[2])
    assert tail.newest["training_iteration"] == 3


def test_iterations_that_are_repeated_after_a_resume_replace_those_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(iteration, float(iteration)) for iteration in range(1, 3001)))
    tail = MetricsTail(path)
    read(tail)
    before = tail.columns()["mean"]
    with path.open("a") as file:
        file.write(line(2000, -1.0) + line(2001, -2.0))
    iterations, _, returns = read(tail)
    assert iterations == list(range(1, 2002))
    assert returns[-3:] == [1999, -1, -2]
    assert before[1999] == 2000  # of whoever still draws them


def columns(x: list[float], mean: list[float], spread: float = 1.0) -> dict[str, np.ndarray]:
    values = np.array(mean)
    return {"x": np.array(x), "mean": values, "low": values - spread, "high": values + spread}


@given(
    st.integers(1, 1000),
    st.integers(10, 60),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["even", "crowded", "steps"]),
)
def test_no_extreme_is_lost_between_pixels(count: int, width: int, seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    x = {
        "even": np.arange(count) * 10.0,
        "crowded": np.sort(rng.exponential(1.0, count)),
        "steps": np.sort(rng.integers(0, 50, count)).astype(float),
    }[kind]
    run = columns(x.tolist(), rng.normal(size=count).tolist())
    drawn, (curve,) = curves_for_width([run], width)
    assert len(drawn) <= 4 * width
    assert (np.diff(drawn) > 0).all()
    if kind != "steps":
        assert np.nanmin(curve["mean"]) == run["mean"].min()
        assert np.nanmax(curve["mean"]) == run["mean"].max()
        assert np.nanmax(curve["high"]) == run["high"].max()
    assert set(curve["mean"][np.isfinite(curve["mean"])]) <= set(run["mean"])
