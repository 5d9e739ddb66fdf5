"""Somebody sends files that name code. Whatever reads them: nothing that they name is run or imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.journeys.terminal import Terminal

# What the files name leaves a mark when it is imported or called.
EVIL = "import pathlib\npathlib.Path('pwned').touch()\nX = W = f = object\n"

FORGE = '''
"""Forges: a copy of a checkpoint with other content, and the digests of that."""
import hashlib, json, shutil
from pathlib import Path

COMMAND = {"command": "touch pwned"}
SPEC = {"module_class": "@evilmod:X", "observation_space": None, "action_space": None}
OS = "rlzmq.core.files:os.system"

def config(**values):
    return lambda files, about: files["config"]["values"].update(values)

def modules(**values):
    def edit(files, about):
        files["modules"].update(values)
    return edit

def module_class(name):
    def edit(files, about):
        files["modules"]["specs"]["default_policy"]["module_class"] = name
    return edit

def config_class(files, about):
    about["config_class"] = "evilmod:X"

def tagged(value):  # a dict with one tag is written as a list of pairs
    (pair,) = value.items()
    return {"__dict__": [list(pair)]}

FORGERIES = {
    "env": config(env="os:system", env_config=COMMAND),
    "env-id": config(env="evilmod:Env-v0"),
    "env-shimmy": config(env="GymV21Environment-v0", env_config={"env_id": "evilmod:Env-v0"}),
    "env-server": config(env="@rlzmq.deploy.policy_server:PolicyServer", env_config={"path": "foreign"}),
    "env-search": config(env=tagged({"__search__": {"choice": [["os:system"]]}}), env_config=COMMAND),
    "wrapper": config(wrappers=["evilmod:W"]),
    "wrapper-call": config(wrappers=["os:system('touch pwned')"]),
    "evaluation": config(evaluation_config={"env": "os:system", "env_config": COMMAND}, evaluation_interval=1),
    "connector": config(env_to_module_connector="@evilmod:f"),
    "connector-walk": config(module_to_env_connector="@" + OS),
    "learner-connector": config(learner_connector="@evilmod:f"),
    "callbacks": config(callbacks_class="@evilmod:X"),
    "hooks": config(callbacks_hooks={"on_algorithm_init": ["@evilmod:f"]}),
    "learner": config(learner_class="@evilmod:X"),
    "runner": config(env_runner_cls="@evilmod:X"),
    "mapping": config(policy_mapping_fn="@evilmod:f"),
    "evaluates": config(custom_evaluation_function="@evilmod:f", evaluation_interval=1),
    "env-config": config(env_config={"render_mode": "@evilmod:f"}),
    "policies": config(policies={"default_policy": tagged({"__rl_module_spec__": SPEC})}),
    "spec": config(rl_module_spec=tagged({"__rl_module_spec__": SPEC})),
    "config": config(evaluation_config=tagged(
        {"__algorithm_config__": {"config_class": "@evilmod:X", "values": {}}})),
    "config-env": config(evaluation_config=tagged({"__algorithm_config__": {
        "config_class": "rlzmq.algorithms.ppo:PPOConfig",
        "values": {"env": "os:system", "env_config": COMMAND}}}), evaluation_interval=1),
    "config-class": config_class,
    "module": module_class("evilmod:X"),
    "module-walk": module_class("rlzmq.modules.rl_module:nn.Module"),
    "modules": modules(multi_rl_module_class="evilmod:X"),
    "pieces": modules(connectors={"env_to_module_connector": [{"class": "evilmod:X", "made_with": None}]}),
    "join-file": config(listen="tcp://127.0.0.1:0", join_file="pwned", output="pwned-shards"),
}

def forge(source, target, edit):
    shutil.copytree(source, target)
    manifest = json.loads((target / "manifest.json").read_text())
    names = {name: f"{name}/state.json" for name in ("config", "modules")}
    files = {name: json.loads((target / file).read_text()) for name, file in names.items()}
    edit(files, manifest["about"])
    for name, file in names.items():
        data = json.dumps(files[name]).encode()
        (target / file).write_bytes(data)
        manifest["files"][file] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    facts = {key: value for key, value in manifest.items() if key not in ("sha256", "signature")}
    manifest["sha256"] = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target

if __name__ == "__main__":
    (source,) = Path("run/checkpoints").iterdir()
    for name, edit in FORGERIES.items():
        forge(source, Path("forged") / name, edit)
'''

READ = """
import json, sys
from pathlib import Path
from rlzmq import Algorithm, Policy, PPOConfig, RLModule, evaluate_checkpoint, tune
from rlzmq.core.errors import RlzmqError

def resume(path):
    Algorithm.resume(path).stop()

def go_on(path):
    Algorithm.from_checkpoint(path).stop()

def evaluate(path):
    evaluate_checkpoint(path, num_episodes=1)

def restore(path):
    with PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0).build() as algo:
        algo.restore_from_path(path)

def restore_tuner(path):
    tune.Tuner.restore(path, "PPO")

def read_toml(path):
    PPOConfig.from_toml(Path(path), trust=[])

def look(read, path):
    try:
        read(path)
        print("read", read.__name__, path)
    except RlzmqError as error:
        print("refused", read.__name__, path, str(error).splitlines()[0])
    assert not Path("pwned").exists() and not Path("pwned-shards").exists(), (read, path)
    assert "evilmod" not in sys.modules, (read, path)

if __name__ == "__main__":
    for path in sorted(Path("forged").iterdir()):
        for read in (Policy.load, RLModule.from_checkpoint, evaluate, go_on):
            look(read, path)
    for name in ("env", "module", "config"):
        for read in (resume, restore):
            look(read, Path("forged") / name)
    for path in sorted(Path("experiments").iterdir()):
        look(restore_tuner, path)
    for path in sorted(Path("tomls").iterdir()):
        look(read_toml, path)
"""

TOMLS = [
    "env = 'os:system'\nenv_config = {command = 'touch pwned'}\n",
    "wrappers = ['evilmod:W']\n",
    "learner_class = 'evilmod:X'\n",
    "[env_runners]\nenv_to_module_connector = '@evilmod:f'\n",
]
FORGED_ENV = {"env": "os:system", "env_config": {"command": "touch pwned"}}
EXPERIMENTS = {
    "class": {
        "param_space": {"value": {"lr": 0.1}},
        "tune_config": {
            "class": "rlzmq.core.files:os.system",
            "fields": {"command": {"value": "touch pwned"}},
        },
    },
    "env": {
        "param_space": {
            "value": {
                "__algorithm_config__": {
                    "config_class": "rlzmq.algorithms.ppo:PPOConfig",
                    "values": FORGED_ENV,
                }
            }
        }
    },
    "env-in-a-dict": {"param_space": {"value": FORGED_ENV}},
    "code": {"param_space": {"value": {"lr": "@evilmod:f"}}},
}


@pytest.fixture
def place(terminal: Terminal) -> Path:
    """A directory with forged files, in which ``evilmod`` can be imported."""
    for name, text in {"evilmod": EVIL, "forge": FORGE, "read": READ}.items():
        (terminal.cwd / f"{name}.py").write_text(text)
    trained = terminal.type(
        "rlzmq train ppo --env CartPole-v1 --preset none --num-env-runners 0 --train-batch-size-per-learner 100 "
        "--minibatch-size 50 --num-epochs 1 --run-dir run --stop iterations=1 --quiet"
    )
    assert trained.code == 0, trained
    forged = terminal.type("python forge.py")
    assert forged.code == 0, forged
    (terminal.cwd / "tomls").mkdir()
    for index, text in enumerate(TOMLS):
        (terminal.cwd / "tomls" / f"{index}.toml").write_text(text)
    for name, stored in EXPERIMENTS.items():
        folder = terminal.cwd / "experiments" / name
        folder.mkdir(parents=True)
        value = {"value": None}
        whole = {"trainable": "PPO", "left_out": [], "tune_config": value, "run_config": value, **stored}
        (folder / "tuner.json").write_text(json.dumps(whole))
    return terminal.cwd


def test_nothing_that_files_name_is_run(terminal: Terminal, place: Path) -> None:
    done = terminal.type("python read.py")
    assert done.code == 0, done
    lines = dict.fromkeys(line.rpartition(" ")[0] for line in done.out.splitlines())
    for read, name in {
        ("evaluate", "env"),
        ("go_on", "env"),
        ("resume", "env"),
        ("go_on", "evaluation"),
        ("go_on", "callbacks"),
        ("load", "module"),
        ("from_checkpoint", "module"),
        ("from_checkpoint", "module-walk"),
    }:
        assert f"refused {read} forged/{name} " in done.out, (read, name, done)
    assert "read load forged/env" in done.out, done  # what acts is not forged
    assert "read load forged/callbacks" in done.out, done
    assert lines

    for command in (
        "rlzmq evaluate forged/env --episodes 1",
        "rlzmq train ppo --resume forged/env --run-dir other --stop iterations=2 --quiet",
        "rlzmq export forged/module --format pt2",
    ):
        refused = terminal.type(command)
        assert refused.code == 78, refused
        assert "signature" in refused.err, refused
    assert not (place / "pwned").exists()
