"""Runs the Python blocks of one page in order, in one namespace, as the script ``__main__``, on small settings.

Usage: ``python run_page.py PAGE``. Blocks with ``await`` or ``async for`` at the top are run on an event loop.
"""

import ast as _ast
import asyncio as _asyncio
import inspect as _inspect
import re as _re
import sys as _sys
from pathlib import Path as _Path

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
    text = _Path(page).read_text(encoding="utf-8")
    for match in _re.finditer(r"^```python\n(.*?)^```", text, _re.DOTALL | _re.MULTILINE):
        line = text[: match.start()].count("\n") + 1
        tree = _ast.parse("\n" * line + match[1], page)
        code = compile(tree, page, "exec", flags=_ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        if code.co_flags & _inspect.CO_COROUTINE:
            _asyncio.run(eval(code, globals()))
        else:
            exec(code, globals())


_make_small()
_run(_sys.argv[1])
