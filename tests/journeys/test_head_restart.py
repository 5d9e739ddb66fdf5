"""A run whose head is killed: the same command starts it again, and its runners and learners come back."""

from __future__ import annotations

import signal

from tests.journeys.terminal import Terminal, until

_HEAD = (
    "rlzmq train ppo --env CartPole-v1 --preset none --env-runners 0 --envs-per-env-runner 2 "
    "--batch-size-per-learner 60 --minibatch-size 60 --num-epochs 1 --checkpoint-every-s 0.1 "
    "--num-learners 1 --num-remote-learners 1 --run-dir runs/a --resume auto "
    "--listen tcp://127.0.0.1:0 --join-file join.toml"
)


def test_a_killed_head_starts_again_and_its_runners_and_learners_rejoin(terminal: Terminal) -> None:
    head = terminal.start(_HEAD)
    head.wait_for("waiting for learners")
    for name in ("", ".learner"):
        copied = terminal.cwd / f"copied{name}.toml"
        copied.write_bytes((terminal.cwd / f"join{name}.toml").read_bytes())
        copied.chmod(0o600)
    learner = terminal.start("rlzmq learner --join copied.learner.toml")
    runner = terminal.start("rlzmq runner --join copied.toml")
    checkpoints = terminal.cwd / "runs/a/checkpoints"
    until(lambda: list(checkpoints.glob("[0-9]*/manifest.json")), "a checkpoint", lambda: head.out + head.err)
    head.signal(signal.SIGKILL)
    head.end()
    assert learner.end().code == 69
    head = terminal.start(_HEAD)  # it takes the ports and keys of the one that was killed
    head.wait_for("resumed (.|\\n)*waiting for learners")
    learner = terminal.start("rlzmq learner --join copied.learner.toml")
    runner.wait_for("the run was started again(.|\\n)* joined ")
    learner.wait_for("is rank 0 of 1")
    head.wait_for("iter ")
    head.signal(signal.SIGTERM)
    assert head.end().code == 75
    for peer in (runner, learner):
        done = peer.end()
        assert done.code == 0, done
    assert not list(terminal.cwd.glob("join*.toml")), "the keys are useless now"
