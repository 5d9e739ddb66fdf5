"""How many of RLlib's example scripts run with their imports changed.

    python scripts/rllib_examples.py RAY              # a checkout of Ray, its wheel, or a folder with its `rllib`
    python scripts/rllib_examples.py RAY --only connectors tuned_examples/ppo
    python scripts/rllib_examples.py RAY --again      # those that ran before, too

Each script is copied to a private directory with only its imports rewritten (`ray.rllib` → `rlzmq`, `ray.tune` →
`rlzmq.tune`; `import ray`, `ray.init()` and `ray.shutdown()` go), and runs for one iteration of at most 512 steps, with
one env runner process at most. `add_rllib_example_script_args` and `run_rllib_example_script_experiment`, RLlib's own
test harness, are the two functions below. Ray's wheels from 2.53 on leave most of the scripts out; a checkout has all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(tempfile.gettempdir()) / f"rllib-examples-{os.getuid()}"
NUM_STEPS = int(os.environ.get("NUM_STEPS", 512))
NUM_ENV_RUNNERS = int(os.environ.get("NUM_ENV_RUNNERS", 1))

REWRITTEN = (  # in this order
    (r"\bray\.rllib\.utils\.test_utils\b", "scripts.rllib_examples"),
    (r"\bray\.rllib\.((?:tuned_)?examples)\b", r"of_rllib.\1"),
    (r"\bray\.rllib\b", "rlzmq"),
    (r"\bray\.(tune|air|train)\b", r"rlzmq.\1"),
    (r"^(\s*)from ray import", r"\1from rlzmq import"),
    (r"^(\s*)(import ray|ray\.init\(.*\)|ray\.shutdown\(\))$", r"\1pass"),
)
NOT_FOR_US = {  # what a script that is not counted uses
    "the old API stack": r"models import ModelCatalog|ModelV2|_old_api_stack\.|old_api_stack=True",
    "Ray itself": r"\bray\.(remote|get|get_actor|get_gpu_ids|nodes|data|serve|_common)\b|rlzmq import (data|serve)",
    "another script, which it starts or names": r"^raise NotImplementedError|subprocess\.run\(command",
    "DreamerV3": r"DreamerV3",
    "a game from the network": r"footsies",
}
ARGUMENTS = """--stop-iters=1 --stop-reward=1e9 --stop-timesteps=1000000000 --algo=PPO --framework=torch --num-agents=0
    --num-samples=1 --num-cpus=0 --verbose=0 --checkpoint-freq=0 --evaluation-interval=0 --evaluation-duration=10
    --evaluation-num-env-runners=0 --evaluation-duration-unit=episodes --env= --output= --log-level= --wandb-key=
    --wandb-project= --wandb-run-name= --num-env-runners= --num-envs-per-env-runner= --num-learners=
    --num-gpus-per-learner= --max-concurrent-trials= --evaluation-parallel-to-training --no-tune --checkpoint-at-end
    --as-test --old-api-stack"""

MISSING = (  # in the last line of a script that needs a package
    r"(?:No module named|cannot import name '\w+' from) '(?!rlzmq|of_rllib|scripts)([\w.]+)"
    r"|pip install (\S+)|Instead: import (open_spiel)"
)


def add_rllib_example_script_args(
    parser: argparse.ArgumentParser | None = None, **defaults: Any
) -> argparse.ArgumentParser:
    """Return a parser with the arguments that RLlib's scripts share."""
    parser = parser or argparse.ArgumentParser(conflict_handler="resolve")
    for name, is_value, default in (argument.partition("=") for argument in ARGUMENTS.split()):
        if is_value:
            parser.add_argument(name, type=_value, default=_value(default))
        else:
            parser.add_argument(name, action="store_true")
    return parser


def _value(text: str) -> Any:
    numbers = (kind for kind in (int, float) if re.fullmatch(r"\d+" if kind is int else r"[\d.e-]+", text))
    return next(numbers, str)(text) or (0 if text else None)


def check(x: Any, y: Any, *, false: bool = False, **_: Any) -> None:
    """Compare two numbers or arrays."""
    assert np.allclose(x, y) is not false


def should_stop(stop: Any, results: Any, keep_ray_up: bool = False) -> bool:
    """Return True: an iteration is enough."""
    return True


def check_learning_achieved(*_: Any, **__: Any) -> None:
    """Do nothing: an iteration is not enough to learn."""


def run_rllib_example_script_experiment(
    base_config: Any, args: Any = None, *, trainable: Any = None, tune_callbacks: Any = None, **_: Any
) -> Any:
    """Train the config for an iteration: in a Tuner if the script looks at its results, has callbacks or searches."""
    from rlzmq import tune

    config, args = base_config, args or add_rllib_example_script_args().parse_args()
    if args.env and config.env is None:
        config.environment(args.env)
    for name in ("num_env_runners", "num_envs_per_env_runner", "num_learners"):
        if getattr(args, name) is not None:
            setattr(config, name, getattr(args, name))
    if args.evaluation_interval:
        config.evaluation(**{n: v for n, v in vars(args).items() if n.startswith("evaluation_")})
    most = {
        "num_env_runners": NUM_ENV_RUNNERS,
        "train_batch_size_per_learner": NUM_STEPS,
        "minibatch_size": NUM_STEPS,
        "num_epochs": 2,
    }
    for name, limit in most.items():
        if isinstance(value := getattr(config, name, None), int | float):
            setattr(config, name, min(int(value), limit))
    script = Path(sys.argv[0]).read_text()
    looked_at = re.search(
        r"= run_rllib_example|tune\.(grid_search|choice|uniform)|tune_callbacks|trainable=", script
    )
    if args.no_tune or not (looked_at or args.checkpoint_freq or args.checkpoint_at_end):
        with config.build_algo() as algo:
            return algo.train()
    checkpoints = tune.CheckpointConfig(
        checkpoint_frequency=args.checkpoint_freq, checkpoint_at_end=args.checkpoint_at_end
    )
    stop = {"training_iteration": 1}
    results = tune.Tuner(
        trainable or config.algo_class,
        param_space=config,
        run_config=tune.RunConfig(stop=stop, callbacks=tune_callbacks, checkpoint_config=checkpoints),
    ).fit()
    for error in results.errors:
        raise error
    return results


def rewrite(ray: Path) -> Path:
    """Copy the scripts, with their imports rewritten, and their data; return the copy's folder."""
    if ray.suffix == ".whl":
        with zipfile.ZipFile(ray) as wheel:
            wheel.extractall(CACHE, [name for name in wheel.namelist() if name.startswith("ray/rllib/")])
        ray = CACHE
    source = next(path for path in (ray / "rllib", ray / "ray" / "rllib") if path.is_dir())
    copy = CACHE / "of_rllib"
    for path in (*source.glob("examples/**/*.py"), *source.glob("tuned_examples/**/*.py")):
        text = path.read_text()
        for pattern, here in REWRITTEN:
            text = re.sub(pattern, here, text, flags=re.MULTILINE)
        target = copy / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    if not (copy / "tests").is_symlink():
        (copy / "tests").symlink_to(source.resolve() / "tests")
    return copy


def why_not(path: Path, copy: Path) -> str | None:
    """Return why a script does not count; None if it does."""
    text = path.read_text()
    if "# @OldAPIStack" in text:
        return "the old API stack"
    if path.parent.name == "gpus":
        return "a GPU"
    parts = [
        copy.parent / f"{name.replace('.', '/')}.py" for name in re.findall(r"from (of_rllib\.[\w.]+)", text)
    ]
    for part in filter(Path.is_file, parts):
        text += part.read_text()
    text = re.sub(r'"{3}[\s\S]*?"{3}|#.*', "", text)
    return next(
        (reason for reason, pattern in NOT_FOR_US.items() if re.search(pattern, text, re.MULTILINE)), None
    )


def run(path: Path, copy: Path, limit_s: float) -> dict[str, Any]:
    """Run a script; return its last line and whether it succeeded."""
    wanted = re.findall(r"(?:assert|if) args\.(\w+) (?:==|>) \"?(\w+)(?=\"?,|:\n +raise)", path.read_text())
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in wanted if value != "0"]
    flags += ["--num-agents=2"] * (("num_agents", "0") in wanted)
    flags += ["--stop-reward=0"] * ("tune.Tuner(" in path.read_text())  # it ends its own trials
    flags += [f"{name}=0" for name in re.findall(r'"(--stop-reward-[\w-]+)"', path.read_text())]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        path_of_modules = [str(copy.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path_of_modules),
            "HOME": home,
            "TMPDIR": home,
        }
        command = ["nice", "-n", "5", sys.executable, path, *flags]
        with subprocess.Popen(
            command, cwd=home, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as child:
            try:
                output, _ = child.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                child.terminate()  # the runner processes end with it
                output, _ = child.communicate()
                output += f"\nnot done after {limit_s:.0f} s"
    lines = [line for line in output.splitlines() if line.strip()]
    missing = re.search(MISSING, lines[-1] if lines else "")
    return {
        "ran": child.returncode == 0,
        "needs": next(filter(None, missing.groups()), None) if missing and child.returncode else None,
        "seconds": round(time.monotonic() - begin, 1),
        "error": "" if child.returncode == 0 else "\n".join(lines[-40:]),
    }


def main() -> None:
    """Run the scripts, print a line for each and the two counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ray", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the scripts' paths")
    parser.add_argument("--again", action="store_true", help="also those that ran before")
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    copy = rewrite(args.ray)
    notes = CACHE / "results.json"
    known: dict[str, dict[str, Any]] = json.loads(notes.read_text()) if notes.exists() else {}

    def note(path: Path) -> None:
        name = str(path.relative_to(copy))
        if any(part in name for part in args.only) and (args.again or not known.get(name, {}).get("ran")):
            known[name] = run(path, copy, args.limit_s)
            print(
                f"{known[name]['seconds']:6} s  {name}  {known[name]['error'].rpartition(chr(10))[2]}",
                flush=True,
            )
        notes.write_text(json.dumps(known, indent=1))

    folders = re.compile(r"_old_api_stack|_docs|/(classes|utils|tests)/|__init__|cleanup_experiment")
    scripts = [path for path in sorted(copy.glob("**/*.py")) if not folders.search(str(path))]
    reasons = {str(path.relative_to(copy)): why_not(path, copy) for path in scripts}
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(note, [path for path in scripts if not reasons[str(path.relative_to(copy))]]))
    for kind in ("examples", "tuned_examples"):
        lines: dict[str, list[str]] = {"ran": [], "failed": [], "not counted": []}
        for name, reason in reasons.items():
            what = known.get(name, {"ran": False, "needs": "a run", "error": ""})
            if not name.startswith(f"{kind}/"):
                continue
            if reason or what["needs"]:
                lines["not counted"].append(f"{name}  needs {reason or what['needs']}")
            else:
                lines["ran" if what["ran"] else "failed"].append(
                    f"{name}  {what['error'].rpartition(chr(10))[2]}"
                )
        print(f"\n{kind}: {len(lines['ran'])} of {len(lines['ran']) + len(lines['failed'])} run")
        for heading, names in lines.items():
            print(heading, *names, sep="\n    ")


if __name__ == "__main__":
    main()
