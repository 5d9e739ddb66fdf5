"""The last words of a process reach its supervisor, whatever else is written to its stderr."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from rlzmq.actors.process_state import ActorLostError
from rlzmq.actors.system import ActorSystem
from rlzmq.core.process import LastWords, end_process
from rlzmq.driver.supervision import first_line, lost_error

# Writes when its parent has ended: the parent's pipe to it is closed.
ECHO = "import sys; sys.stdin.read(); print('OOM hangs: the child\\'s line', file=sys.stderr, flush=True)"


class Dying:
    """Ends its process in several ways."""

    def end(self, text: str) -> None:
        subprocess.Popen([sys.executable, "-c", ECHO], stdin=subprocess.PIPE)
        print("OOM hangs: this is not why", file=sys.stderr)
        end_process(72, LastWords("", text, "  a frame\n"))

    async def break_loop(self) -> None:
        asyncio.get_running_loop().call_soon(_exit, "broken loop")

    def exit_silently(self) -> None:
        os._exit(9)


def _exit(text: str) -> None:
    raise SystemExit(text)


async def test_the_words_of_a_process_are_told_from_its_childrens(system: ActorSystem) -> None:
    actor = await system.spawn(Dying, name="d")
    with pytest.raises(ActorLostError) as caught:
        await actor.end("env runner 1 hangs: for this reason\nand more")
    error = caught.value
    why = f"actor 'd' (Dying, pid {actor.pid}) exited with code 72 during a call of end()"
    said = "\nIts last words:\n    a frame\n  env runner 1 hangs: for this reason\n  and more"
    assert str(error) == why + said
    assert first_line(error) == f"{why}: env runner 1 hangs: for this reason."
    lost = lost_error(actor)
    assert str(lost) == f"d (pid {actor.pid}) exited with code 72.{said}"


async def test_an_error_at_the_root_of_a_process_is_its_last_words(system: ActorSystem) -> None:
    actor = await system.spawn(Dying)
    await actor.break_loop()
    words = (await actor.exited).last_words
    assert words is not None
    assert words.summary == "SystemExit: broken loop"
    why = r"code 70 during .*\nIts last words:\n +File .*test_last_words.py.*in _exit\n.*\n  SystemExit: broken loop$"
    with pytest.raises(ActorLostError, match=rf"(?s){why}"):
        await actor.exit_silently()
