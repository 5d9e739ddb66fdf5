"""Runs the Python blocks of pages on small settings: each page in order, in one namespace, as a script ``__main__``.
A page may also be a script itself, which gets the arguments that follow it.

Usage: ``python run_page.py MODULE…``; the modules are for the fork server. One page a line comes by stdin, as a JSON
list of its path, the directory to run it in, and a script's arguments; for each one a line goes to stdout: a JSON
text, empty or what was raised. Blocks with ``await`` or ``async for`` at the top are run on an event loop.
"""

import ast
import asyncio
import inspect
import json
import os
import re
import sys
import traceback
import types
from pathlib import Path

_MAX_BATCH = 256
_MAX_RESULTS = 2


def _make_small() -> None:
    """Batches of at most 256 steps and two epochs, and no more than two results of an endless run."""
    from rlzmq import AlgorithmConfig, AsyncAlgorithm

    for_build = AlgorithmConfig._for_build
    results = AsyncAlgorithm.results

    def small_for_build(self, env, use_copy):
        config = self.copy(copy_frozen=False) if use_copy else self
        size = min(config.train_batch_size_per_learner, _MAX_BATCH)
        config.training(train_batch_size_per_learner=size, num_epochs=min(config.num_epochs, 2))
        if config.minibatch_size is not None:
            config.training(minibatch_size=min(config.minibatch_size, size))
        return for_build(config, env, False)

    async def few_results(self):
        count = 0
        async for result in results(self):
            yield result
            count += 1
            if count == _MAX_RESULTS:
                return

    AlgorithmConfig._for_build = small_for_build
    AsyncAlgorithm.results = few_results


def _run(page: str) -> None:
    script = sys.modules["__main__"] = types.ModuleType("__main__")
    _SCRIPTS.append(script)
    text = Path(page).read_text(encoding="utf-8")
    if page.endswith(".py"):
        exec(compile(text, page, "exec", dont_inherit=True), script.__dict__)
        return
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        line = text[: match.start()].count("\n") + 1
        tree = ast.parse("\n" * line + match[1], page)
        code = compile(tree, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(eval(code, script.__dict__))
        else:
            exec(code, script.__dict__)


_SCRIPTS: list[types.ModuleType] = []  # classes of a page live as long as the process, as a script's do


def _main() -> None:
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what a page prints is no answer, nor what the fork server's children print

        from rlzmq.actors import forkserver

        forkserver.prestart(sys.argv[1:])
        _make_small()
        for order in sys.stdin:
            page, directory, *arguments = json.loads(order)
            sys.argv = [page, *arguments]
            os.chdir(directory)
            try:
                _run(page)
                raised = ""
            except BaseException:
                raised = traceback.format_exc()
            print(json.dumps(raised), file=answers, flush=True)


_main()
