"""Names of RLlib that have no counterpart here, with what to write instead, for the errors of failed imports."""

from __future__ import annotations

from collections.abc import Container

__all__ = ["instead_of"]

_NETWORKS = "networks are torch.nn.Modules that a TorchRLModule builds in setup()"
_MARKS = "leave it out: in RLlib it only marks a method for its readers"
_OWN_LOOP = "config.build() and algo.train() in a loop, tune.Tuner, or the command `rlzmq train`"
_OFFLINE = "offline_data(input_=…) reads shards, which rlzmq.replay.write_shard and `rlzmq record` write"
_ACTING = "an application that steps by itself acts with rlzmq.Policy, or asks `rlzmq serve`"
_OWN_SPEC = "config.get_rl_module_spec().module_class"
_NESTED = "nested updates (meta-learning) are not supported"

_INSTEAD = {
    # -- examples and utilities ---------------------------------------------------------------------
    "add_rllib_example_script_args": _OWN_LOOP,
    "run_rllib_example_script_experiment": _OWN_LOOP,
    "get_algorithm_class": "get_trainable_cls",
    "try_import_tf": "nothing: there is no TensorFlow",
    "convert_to_numpy": "tensor.detach().cpu().numpy()",
    "convert_to_torch_tensor": "torch.as_tensor(array)",
    "one_hot": "torch.nn.functional.one_hot or numpy.eye(n)[index]",
    "softmax": "torch.softmax",
    "FLOAT_MIN": "torch.finfo(torch.float32).min",
    "FLOAT_MAX": "torch.finfo(torch.float32).max",
    "explained_variance": "1 - residuals.var() / targets.var()",
    "normc_initializer": "torch.nn.init",
    "get_activation_fn": "a class of torch.nn, e.g. torch.nn.ReLU",
    "make_target_network": "copy.deepcopy(network)",
    "DEFAULT_OPTIMIZER": '"default_optimizer"',
    "batch": "numpy.stack, for each leaf of a nested space",
    "unbatch": "array[index], for each leaf of a nested space",
    "flatten_space": "gymnasium.spaces.utils.flatten_space, or the FlattenObservations connector",
    "get_base_struct_from_space": "the Dict or Tuple space itself, which has a mapping's or a sequence's methods",
    "check": "numpy.testing.assert_allclose",
    "check_learning_achieved": "an assert on result.metrics of a tune.Result, or `rlzmq train --stop`",
    "pretty_print": "print(result): results print themselves in short",
    "log_once": "warnings.warn",
    "deprecation_warning": "warnings.warn",
    "update_global_seed_if_necessary": "debugging(seed=…)",
    "try_import_open_spiel": "import open_spiel",
    "try_import_pyspiel": "import pyspiel",
    "try_import_jax": "nothing: there is no JAX",
    "resize": "cv2.resize, or the wrappers of gymnasium",
    "TIME_TOTAL_S": '"time_total_s"',
    "ray": "nothing: there is no cluster to start",
    # -- types --------------------------------------------------------------------------------------
    "PolicyID": "str",
    "EpisodeID": "str",
    "EnvType": "gymnasium.Env | MultiAgentEnv",
    "ParamDict": "dict[Any, torch.Tensor]",
    "MultiAgentDict": "dict[str, Any]",
    "NetworkType": "torch.nn.Module",
    # -- the old stack ------------------------------------------------------------------------------
    "DEFAULT_POLICY_ID": "DEFAULT_MODULE_ID",
    "DefaultCallbacks": "RLlibCallback",
    "PolicySpec": "RLModuleSpec",
    "SampleBatch": "Columns for names of columns; batches are dicts of columns, data are episodes (EpisodeBatch)",
    "MultiAgentBatch": "a dict of columns by module id; data are episodes (EpisodeBatch)",
    "RolloutWorker": "SingleAgentEnvRunner",
    "WorkerSet": "EnvRunnerGroup",
    "ModelV2": "TorchRLModule",
    "TorchModelV2": "TorchRLModule",
    "ModelCatalog": f"{_NETWORKS}; rl_module(model_config=DefaultModelConfig(…)) sets those of the default modules",
    "TorchMultiActionDistribution": "TorchMultiDistribution",
    # -- environments -------------------------------------------------------------------------------
    "wrap_atari_for_new_api_stack": "environment(…, is_atari=True), with FrameStackingEnvToModule or `--preset`",
    "GroupAgentsWrapper": "MultiAgentEnv.with_agent_groups",
    "VectorMultiAgentEnv": "env_runners(num_envs_per_env_runner=…), which steps several MultiAgentEnvs",
    "OpenSpielEnv": "your own MultiAgentEnv around the game",
    "DMCEnv": "environment('dm_control/cheetah-run-v0'), with rlzmq[dm-control]",
    "ExternalEnv": _ACTING,
    "RLlink": _ACTING,
    "EnvRunnerServerForExternalInference": _ACTING,
    # -- modules and learners -----------------------------------------------------------------------
    "PPOTorchRLModule": "DefaultPPOTorchRLModule",
    **dict.fromkeys(
        ("DefaultBCTorchRLModule", "BCTorchRLModule", "IMPALATorchRLModule"), "DefaultPPOTorchRLModule"
    ),
    **dict.fromkeys(
        ("DefaultDQNTorchRLModule", "DefaultSACTorchRLModule", "DefaultAPPOTorchRLModule"), _OWN_SPEC
    ),
    "Encoder": _NETWORKS,
    "TorchModel": _NETWORKS,
    "ModelConfig": _NETWORKS,
    "ENCODER_OUT": _NETWORKS,
    "OverrideToImplementCustomLogic": _MARKS,
    "OverrideToImplementCustomLogic_CallToSuperRecommended": _MARKS,
    "PublicAPI": _MARKS,
    "DeveloperAPI": _MARKS,
    "OldAPIStack": _MARKS,
    "TrainingData": "Learner.update(episodes=…) or update(batch=…)",
    "TorchMetaLearner": _NESTED,
    "TorchDifferentiableLearner": _NESTED,
    "DifferentiableLearnerConfig": _NESTED,
    "DifferentiableAlgorithmConfig": _NESTED,
    # -- data, trackers -----------------------------------------------------------------------------
    "OfflineData": _OFFLINE,
    "OfflinePreLearner": _OFFLINE,
    "LoggerCallback": "tune.Callback, or a Callback with on_train_result",
    "WandbLoggerCallback": "RunConfig(log='wandb') or `--log wandb`",
    "MLflowLoggerCallback": "RunConfig(log='mlflow') or `--log mlflow`",
}
_BY_ENDING = {  # whole families
    "Catalog": _NETWORKS,
    "EncoderConfig": _NETWORKS,
    "HeadConfig": _NETWORKS,
}


def instead_of(name: str, exports: Container[str]) -> str | None:
    """Return what to write instead of a name of RLlib's; None if nothing is known about it."""
    if name in _INSTEAD:
        return _INSTEAD[name]
    shorter = name.replace("TorchLearner", "Learner")
    if shorter != name and shorter in exports:
        return shorter
    return next((text for ending, text in _BY_ENDING.items() if name.endswith(ending)), None)
