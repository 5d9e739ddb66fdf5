"""RunState: gets and sets the state of a run as a tree of components."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rlzmq.algorithms.evaluation import Evaluation
from rlzmq.algorithms.run_modules import RunModules
from rlzmq.algorithms.state_tree import select, to_parts, to_tree, wants
from rlzmq.algorithms.training_loop import Iterations
from rlzmq.driver.session import Session

__all__ = ["RunState"]


class RunState:
    """Collects the components of a checkpoint and restores them.

    Args:
        session, evaluation, modules, iterations: The owners of the components.
    """

    def __init__(
        self, session: Session, evaluation: Evaluation, modules: RunModules, iterations: Iterations
    ) -> None:
        self._session = session
        self._evaluation = evaluation
        self._modules = modules
        self._iterations = iterations

    async def get(
        self,
        components: str | Collection[str] | None = None,
        not_components: str | Collection[str] | None = None,
    ) -> dict[str, Any]:
        """See AsyncAlgorithm.get_state."""

        def is_wanted(name: str) -> bool:
            return wants(name, components, not_components)

        await self._iterations.settle()
        parts = await self._session.get_state(
            with_runners=is_wanted("env_runners"), with_replay=is_wanted("learner_group")
        )
        if is_wanted("eval_env_runners") or is_wanted("evaluation"):
            parts |= await self._evaluation.get_state()
        parts["algorithm"] = self._iterations.get_state()
        parts["modules"] = self._modules.get_state()
        return select(to_tree(parts), components, not_components)

    async def set(self, state: Mapping[str, Any]) -> bool:
        """Set the state (see AsyncAlgorithm.set_state); return whether it is the state of a whole run."""
        parts = to_parts(state)
        await self._iterations.settle()
        if "modules" in parts:
            await self._modules.set_state(parts["modules"])
        else:
            self._modules.check(parts.get("learner_group/learner", {}).get("rl_module", {}))
        await self._session.set_state(parts)
        self._iterations.set_state(parts.get("algorithm", {}))
        await self._evaluation.set_state(parts)
        return "algorithm" in parts
