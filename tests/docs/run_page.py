"""Runs the Python blocks of pages on small settings: each page in order, in one namespace, as a script ``__main__``.
A page may also be a script itself, which gets the arguments that follow it, or a notebook.

Usage: ``python -m tests.docs.run_page MODULE…``; the modules are for the fork server. One page a line comes by stdin,
as a JSON list of its path, the directory to run it in, and a script's arguments; for each one a line goes to stdout: a
JSON text, empty or what was raised. Blocks with ``await`` or ``async for`` at the top are run on an event loop.
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
import warnings
from collections import Counter
from pathlib import Path

_MAX_BATCH = 256
_MOST = {
    "min_time_s_per_iteration": 0.5,
    "min_sample_timesteps_per_iteration": 300,
    "num_steps_sampled_before_learning_starts": 200,
}
_MAX_RESULTS = 2
_MAX_PICTURES = 9


def _make_small() -> None:
    """Limit batches and iterations, epochs to two, results of an endless run to two, pictures of a video to nine."""
    from rlzmq import AlgorithmConfig, AsyncAlgorithm
    from rlzmq.algorithms.checkpoint_evaluation import _VideoRecorder

    add_picture, num_pictures = _VideoRecorder._add, Counter()

    def add_few_pictures(self, **kwargs):
        num_pictures[self.path] += 1
        if num_pictures[self.path] <= _MAX_PICTURES:
            add_picture(self, **kwargs)

    for_build = AlgorithmConfig._for_build
    results = AsyncAlgorithm.results

    def small_for_build(self, env, use_copy):
        config = self.copy(copy_frozen=False) if use_copy else self
        size = min(config.train_batch_size_per_learner, _MAX_BATCH)
        config.training(train_batch_size_per_learner=size, num_epochs=min(config.num_epochs, 2))
        if config.minibatch_size is not None:
            config.training(minibatch_size=min(config.minibatch_size, size))
        for name, most in _MOST.items():
            if config.get(name):
                config.update_from_dict({name: min(config[name], most)})
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
    _VideoRecorder._add = add_few_pictures


def _run(page: str) -> None:
    script = sys.modules["__main__"] = types.ModuleType("__main__")
    _SCRIPTS.append(script)
    text = Path(page).read_text(encoding="utf-8")
    if page.endswith(".py"):
        exec(compile(text, page, "exec", dont_inherit=True), script.__dict__)
        return
    if page.endswith(".ipynb"):
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        asyncio.run(_run_cells(["".join(cell["source"]) for cell in cells], page, script.__dict__))
        return
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        line = text[: match.start()].count("\n") + 1
        tree = ast.parse("\n" * line + match[1], page)
        code = compile(tree, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(eval(code, script.__dict__))
        else:
            exec(code, script.__dict__)


async def _run_cells(cells: list[str], page: str, names: dict) -> None:
    """Run cells as Jupyter does: on a running event loop, and the value of a last expression is shown as HTML."""
    for source in cells:
        tree = ast.parse(source, page)
        last, names["_"] = tree.body[-1], None
        if isinstance(last, ast.Expr):
            shown = ast.copy_location(ast.Assign([ast.Name("_", ast.Store())], last.value), last)
            tree.body[-1] = ast.fix_missing_locations(shown)
        code = compile(tree, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        waited = eval(code, names)
        if waited is not None:
            await waited
        getattr(names["_"], "_repr_html_", str)()


_SCRIPTS: list[types.ModuleType] = []  # classes of a page live as long as the process, as a script's do


def _main() -> None:
    with os.fdopen(os.dup(1), "w") as answers:
        warnings.filterwarnings("error", category=DeprecationWarning, module="rlzmq$")
        os.dup2(2, 1)  # what a page prints is no answer, nor what the fork server's children print

        from rlzmq.actors import forkserver

        forkserver.get_fork_server()
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
