"""scripts/check_gpu.py: its checks run, on the CPU."""

from __future__ import annotations

import pytest
import torch

from scripts import check_gpu
from tests.learners.all_algorithms import ALGORITHMS


def test_the_checks_pass_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    checks = ["serial", "group", "bc", "update-time"]
    assert check_gpu.main(["--cpu", "--only", *checks]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[1:]] == checks
    assert "clipped by norm, clipped by global_norm, bfloat16, compiled, compiled in bfloat16" in lines[3]


@pytest.mark.slow
def test_all_checks_pass_on_the_cpu() -> None:
    assert set(ALGORITHMS) <= check_gpu.CHECKS.keys()
    assert check_gpu.main(["--cpu"]) == 0


def test_a_failed_check_fails_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(check_gpu.CHECKS, "group", lambda place: str(1 // 0))
    assert check_gpu.main(["--cpu", "--only", "group"]) == 1
    captured = capsys.readouterr()
    assert "group: FAILED" in captured.out
    assert "ZeroDivisionError" in captured.err


def test_without_a_gpu_nothing_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_gpu.main([]) == 0
    assert "no GPU here" in capsys.readouterr().out
