"""The reference is written from the code: every public name, every setting and every command is in it."""

import importlib.util
from pathlib import Path

import pytest

import rlzmq
from rlzmq.algorithms.registry import ALGORITHMS, get_config_class
from rlzmq.cli.main import COMMANDS
from rlzmq.config.settings import settings_of

pytest.importorskip("sphinx", reason="the docs group is not installed")
_SPEC = importlib.util.spec_from_file_location(
    "generated_pages", Path(__file__).parents[2] / "docs" / "generated_pages.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
generated_pages = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(generated_pages)


def test_every_public_name_is_in_the_reference() -> None:
    text = "\n".join(generated_pages.name_pages().values()) + "\n"
    missing = [name for name in rlzmq.__all__ if f" rlzmq.{name}\n" not in text]
    assert missing == ["__version__"]


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_every_setting_is_in_its_table_with_its_text(algorithm: str) -> None:
    page = generated_pages.settings_pages()[f"reference/settings/{algorithm}.md"]
    rows = {line.split("`")[1]: line.split(" | ") for line in page.splitlines() if line.startswith("| `")}
    fields = {name: field for name, field in settings_of(get_config_class(algorithm)).items() if field.group}
    assert set(rows) == set(fields)
    assert [name for name, cells in rows.items() if not cells[-1].strip(" |")] == []


def test_what_to_do_instead_of_a_setting_of_rllib_is_on_the_page_of_its_algorithm() -> None:
    pages = generated_pages.settings_pages()
    row = "| training: `broadcast_interval` | all | new weights are sent after every update; training(staleness=…) "
    assert [name for name in sorted(ALGORITHMS) if row in pages[f"reference/settings/{name}.md"]] == [
        "appo",
        "impala",
    ]
    assert "| training: `hiddens` | all | set the heads' layers with " in pages["reference/settings/dqn.md"]


def test_every_command_is_in_the_reference_with_its_help() -> None:
    pages = generated_pages.command_pages()
    assert set(pages) == {f"reference/commands/{command}.md" for command in COMMANDS}
    assert [page for page, text in pages.items() if "usage: rlzmq" not in text] == []
    assert "--train-batch-size-per-learner" in pages["reference/commands/train.md"]


def test_links_between_files_lead_to_pages() -> None:
    text = "[a](../rlzmq/algorithms/iql/README.md#choices) [b](../SECURITY.md) [c](metrics.md) [d](https://x.org)"
    assert generated_pages.rewritten(text, "docs/replay.md", "replay.md") == (
        "[a](algorithms/iql.md#choices) [b](project/security.md) [c](metrics.md) [d](https://x.org)"
    )
    text = "[a](../sac/README.md) [b](../../../docs/metrics.md)"
    assert generated_pages.rewritten(text, "rlzmq/algorithms/cql/README.md", "algorithms/cql.md") == (
        "[a](sac.md) [b](../metrics.md)"
    )
