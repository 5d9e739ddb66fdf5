"""Names of the columns that episodes, batches and modules exchange."""

from __future__ import annotations

__all__ = [
    "DEFAULT_AGENT_ID",
    "DEFAULT_MODULE_ID",
    "Columns",
    "default_agent_to_module_mapping_fn",
]

DEFAULT_AGENT_ID = "default_agent"
DEFAULT_MODULE_ID = "default_policy"


def default_agent_to_module_mapping_fn(agent_id: object, episode: object, **kwargs: object) -> str:
    """Map every agent to the default module."""
    return DEFAULT_MODULE_ID


class Columns:
    """Column names, spelled as in RLlib. Plain strings: ``Columns.OBS == "obs"``.

    Columns added by modules or connectors need no entry here; any string works.
    """

    OBS = "obs"
    INFOS = "infos"
    ACTIONS = "actions"
    ACTIONS_FOR_ENV = "actions_for_env"
    REWARDS = "rewards"
    TERMINATEDS = "terminateds"
    TRUNCATEDS = "truncateds"
    NEXT_OBS = "new_obs"
    EPS_ID = "eps_id"
    AGENT_ID = "agent_id"
    MODULE_ID = "module_id"
    SEQ_LENS = "seq_lens"
    T = "t"
    STATE_IN = "state_in"
    NEXT_STATE_IN = "next_state_in"
    STATE_OUT = "state_out"
    NEXT_STATE_OUT = "next_state_out"
    EMBEDDINGS = "embeddings"
    ACTION_DIST_INPUTS = "action_dist_inputs"
    ACTION_PROB = "action_prob"
    ACTION_LOGP = "action_logp"
    VF_PREDS = "vf_preds"
    VALUES_BOOTSTRAPPED = "values_bootstrapped"
    ADVANTAGES = "advantages"
    VALUE_TARGETS = "value_targets"
    INTRINSIC_REWARDS = "intrinsic_rewards"
    LOSS_MASK = "loss_mask"
    RETURNS_TO_GO = "returns_to_go"
    WEIGHTS_VERSION = "weights_seq_no"
