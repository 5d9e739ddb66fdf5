"""The harness of the benchmarks: contenders take turns, results are kept, every case can be asked what it does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest

from scripts.bench import run as bench
from scripts.bench._core import Comparison, Conditions, Contender, Side, compare
from tests.support import bench_case
from tests.support.bench_case import failing, noting

NOW = Conditions(busy=1.0)


def test_sides_take_turns_in_one_process_each_and_change_their_order(tmp_path: Path) -> None:
    path = tmp_path / "turns"
    sides = {name: Side(noting, {"path": str(path), "name": name}) for name in ("a", "b")}
    found = compare(Comparison("turns", sides, turns=3, turn_s=0.0), {}, NOW)
    lines = path.read_text().splitlines()
    order = [line.split()[0] for line in lines[::2]]
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"]  # the first turn of each warms up
    assert lines[1::2] == [f"{name} ends" for name in order]
    pids = {name: {one.value for one in turns} for name, turns in found.items()}
    assert all(len(own) == 1 for own in pids.values())
    assert pids["a"] != pids["b"]
    assert not any(psutil.pid_exists(int(pid)) for own in pids.values() for pid in own)


def test_fresh_sides_get_a_new_process_for_each_turn(tmp_path: Path) -> None:
    sides = {"a": Side(noting, {"path": str(tmp_path / "turns"), "name": "a"})}
    found = compare(Comparison("turns", sides, turns=2, is_fresh=True), {}, NOW)
    assert len({one.value for one in found["a"]}) == 2


def test_a_side_that_fails_is_named_with_its_error() -> None:
    contender = Contender("mine", Side(failing), Path(sys.executable))
    with pytest.raises(SystemExit, match=r"(?s)no such environment.*mine ended"):
        contender.wait_until_ready()
    contender.close()


def test_results_are_printed_with_ratios_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "load", lambda name: bench_case)
    monkeypatch.setattr(bench, "case_names", lambda: ["counting"])
    results, picture = tmp_path / "results.json", tmp_path / "results.png"
    arguments = ["counting", "--json", str(results), "--plot", str(picture), "--peers", "--busy", "1"]
    bench.main(arguments)
    printed = capsys.readouterr().out
    assert "fast ÷ slow: " in printed
    assert "goal ≥ 2" in printed
    assert "against a peer: nothing to compare with" in printed  # no peer was asked for
    kept = json.loads(results.read_text())["counting: counting"]
    assert kept["ratios"][0]["ratio"][0] > 2
    assert len(kept["turns"]["fast"]) == 2
    assert picture.stat().st_size


def test_every_case_is_listed_and_says_what_it_compares(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--list"])
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert listed == set(bench.case_names())
    assert {"sampling", "off_policy", "ppo", "appo", "start", "ranks"} <= listed
    for name in listed:
        bench.main([name, "--help"])
        assert str(bench.load(name).__doc__).strip() in capsys.readouterr().out


@pytest.mark.parametrize("name", bench.case_names())
def test_a_case_compares_or_reports(name: str) -> None:
    module = bench.load(name)
    assert hasattr(module, "comparisons") != hasattr(module, "report")
