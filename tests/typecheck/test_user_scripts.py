"""What type checkers, editors and help() know of the package. mypy checks the scripts of this folder together with the
package (pyproject.toml); pyright does here."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import rlzmq
from rlzmq import ConnectorV2
from rlzmq.algorithms.registry import ALGORITHMS, get_config_class
from rlzmq.core.callbacks import HOOKS, Hooks
from tests.typecheck import right_script

HERE = Path(__file__).parent


def test_pyright_finds_the_wrong_lines_and_no_others() -> None:
    options = ["--outputjson", "--pythonpath", sys.executable, "-p", str(HERE)]
    command = [sys.executable, "-m", "pyright", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    report = json.loads(done.stdout)
    assert report["generalDiagnostics"] == []
    assert report["summary"]["filesAnalyzed"] == 2


def test_the_right_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    right_script.main()
    assert capsys.readouterr().out.startswith("1 -")


@pytest.mark.slow  # half a minute alone, minutes beside other tests
@pytest.mark.timeout(900)
def test_nearly_all_public_names_have_complete_types() -> None:
    options = ["--verifytypes", "rlzmq", "--ignoreexternal", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([sys.executable, "-m", "pyright", *options], capture_output=True, text=True)
    report = json.loads(done.stdout)["typeCompleteness"]
    assert len(report["symbols"]) > 5000, (
        f"pyright did not find rlzmq where {sys.executable} does: {done.stdout}"
    )
    incomplete = [
        symbol["name"]
        for symbol in report["symbols"]
        if symbol["isExported"] and (symbol["isTypeAmbiguous"] or not symbol["isTypeKnown"])
    ]
    assert report["completenessScore"] >= 0.99, incomplete


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_training_has_the_inherited_settings_by_name(name: str) -> None:
    config_class = get_config_class(name)
    known = typing.get_type_hints(config_class.training, include_extras=True)
    above = typing.get_type_hints(config_class.__base__.training, include_extras=True)
    above.pop("lr")  # where each optimizer has its own, None may be given
    assert {setting: known.get(setting) for setting in above} == above
    assert set(known) == {field.name for field in config_class._fields.values() if field.group == "training"}
    assert set(known) == inspect.signature(config_class.training).parameters.keys() - {"self"}


def test_the_hooks_are_known_by_name() -> None:
    assert tuple(Hooks.__annotations__) == HOOKS


CLASSES = {
    name: value
    for name in rlzmq.__all__
    if inspect.isclass(value := getattr(rlzmq, name))
    and "__init__" in {attribute for base in value.__mro__[:-1] for attribute in vars(base)}
    and not issubclass(value, BaseException)
}


@pytest.mark.parametrize("name", CLASSES)
def test_the_signature_of_a_public_class_is_that_of_its_constructor(name: str) -> None:
    kind = CLASSES[name]
    expected = list(inspect.signature(kind.__init__).parameters.values())[1:]
    assert list(inspect.signature(kind).parameters.values()) == expected
    assert [str(parameter) for parameter in expected] != ["*args", "**kwargs"]


def test_a_piece_is_called_with_its_own_arguments() -> None:
    class Piece(ConnectorV2):
        def __init__(self, *, scale: float = 1.0) -> None:
            super().__init__()
            self.scale = scale

        def __call__(self, *, rl_module, batch, episodes, **kwargs):  # type: ignore[no-untyped-def]
            return batch

    assert str(inspect.signature(Piece)) == "(*, scale: 'float' = 1.0) -> 'None'"
    assert list(inspect.signature(Piece()).parameters) == ["rl_module", "batch", "episodes", "kwargs"]
