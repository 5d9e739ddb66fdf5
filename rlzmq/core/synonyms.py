"""Words of Stable-Baselines3, RLlib, CleanRL, TorchRL and Tianshou that are no names here, with what to write instead.

The one table behind the errors about imports, attributes, settings, flags, result keys and algorithms.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Collection, Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

__all__ = [
    "RLLIB_PACKAGES",
    "AnswersSynonyms",
    "SignatureOfInit",
    "SynonymsOfClass",
    "accepted_name",
    "did_you_mean",
    "did_you_mean_flag",
    "instead_of",
    "instead_of_algorithm",
    "instead_of_command",
    "instead_of_flag",
    "instead_of_key",
    "missing_key",
    "renamed",
]


def _by_word(table: Mapping[str, str]) -> dict[str, str]:
    """Return word -> answer of a table of answers, each with the words of other libraries, separated by spaces."""
    return {word: answer for answer, words in table.items() for word in words.split()}


# What has another name here, wherever that is a valid name: settings, flags, keys of requests. Words with several
# names have the one that the algorithm has.
_RENAMED = {
    word: tuple(here.split())
    for word, here in _by_word(
        {
            "lr": "learning_rate learning_rate_schedule anneal_lr",
            "gamma": "discount discount_factor",
            "train_batch_size_per_learner": (
                "n_steps num_steps rollout_length rollout_steps frames_per_batch step_per_collect"
            ),
            "num_epochs": "n_epochs update_epochs ppo_epoch ppo_epochs num_sgd_iter epochs repeat_per_collect",
            "minibatch_size train_batch_size_per_learner": "batch_size",
            "minibatch_size": "num_minibatches sgd_minibatch_size sub_batch_size",
            "entropy_coeff initial_alpha": "ent_coef",
            "initial_alpha": "alpha",
            "entropy_coeff": "entropy_coef ent_coeff entropy_coeff_schedule",
            "target_entropy": "autotune auto_entropy_tuning",
            "vf_loss_coeff": "vf_coef value_coef value_loss_coef vf_loss_coef critic_coef critic_coeff",
            "lambda_": "gae_lambda lam lmbda",
            "clip_param": "clip_range clip_coef clip_epsilon eps_clip",
            "vf_clip_param": "clip_range_vf clip_vloss value_clip",
            "grad_clip": "max_grad_norm",
            "standardize_advantages": "norm_adv normalize_advantage advantage_normalization",
            "model_config": (
                "policy_kwargs net_arch hidden_sizes activation activation_fn features_extractor_class use_lstm "
                "fcnet_hiddens fcnet_activation conv_filters model network layers hidden_dim hidden_size"
            ),
            "actor_lr": "policy_lr actor_learning_rate",
            "critic_lr": "critic_learning_rate",
            "alpha_lr": "alpha_learning_rate",
            "critic_lr lr": "q_lr",
            "replay_buffer_config": (
                "buffer_size replay_buffer_class replay_buffer_kwargs memory_size prioritized_replay"
            ),
            "tau": "polyak",
            "n_step": "estimation_step multi_step",
            "num_steps_sampled_before_learning_starts": "learning_starts init_random_frames",
            "training_intensity": "train_freq train_frequency gradient_steps update_per_step utd_ratio",
            "target_network_update_freq": "target_update_interval target_network_frequency target_update_freq",
            "exploration_noise": "action_noise",
            "policy_delay": "policy_freq policy_frequency",
            "target_noise": "policy_noise",
            "target_noise_clip": "noise_clip",
            "epsilon": "exploration_fraction eps_train exploration_initial_eps exploration_final_eps start_e end_e",
            "num_envs_per_env_runner": "n_envs num_envs num_envs_per_worker envs training_num env_per_collector",
            "num_env_runners": (
                "num_workers num_rollout_workers workers n_jobs jobs runners nproc num_processes parallel_envs"
            ),
            "gym_env_vectorize_mode": "vectorization_mode remote_worker_envs vec_env",
            "env_to_module_connector": "observation_filter",
            "evaluation_num_env_runners": "evaluation_num_workers test_num",
            "evaluation_duration": "evaluation_num_episodes n_eval_episodes eval_episodes episode_per_test",
            "evaluation_interval": "eval_freq eval_interval",
            "min_time_s_per_iteration": "min_time_s_per_reporting",
            "checkpoint_every_s": "checkpoint_frequency checkpoint_freq save_freq",
            "restart_failed_env_runners": "recreate_failed_workers recreate_failed_env_runners",
            "ignore_env_runner_failures": "ignore_worker_failures",
            "metrics_num_episodes_for_smoothing": "stats_window_size",
            "num_gpus_per_learner": "device cuda num_gpus gpu gpus use_cuda",
            "env": "env_id env_name gym_id",
            "env_config": "env_kwargs render_mode",
            "wrappers": "wrapper_class",
            "seed": "seeds random_seed",
            "obs": "observation",
            "state_in": "state states",
        }
    ).items()
}
# Only on the command line: these are no settings in Python. The first of several ways ("A | B") whose flag the command
# has; "--flag? text" is for commands that have the flag.
_FLAGS = _by_word(
    {
        "--episodes NUMBER | --steps NUMBER | --train-batch-size-per-learner? --stop steps=NUMBER": (
            "timesteps total_timesteps n_timesteps n max_steps stop_timesteps episodes steps num_steps "
            "total_steps num_episodes n_episodes n_eval_episodes"
        ),
        "--stop return=NUMBER": "stop_reward reward_threshold as_test",
        "--stop iterations=NUMBER": "stop_iters iterations iters max_iterations",
        "--grace SECONDS | --time-budget SECONDS | --stop time=SECONDS": "timeout max_time budget",
        "--env ENV": "env_id env_name gym_id e",
        "--run-dir DIRECTORY | --dir DIRECTORY | --output PATH": (
            "log_dir logdir local_dir log_folder save_dir name exp_name experiment_name run_dir storage_path "
            "output_dir dir f o out save save_path"
        ),
        "--json? --json FILE, or --video FILE | --run-dir DIRECTORY": "output",
        "--log tb": "tensorboard_log tensorboard tb logger",
        "--log wandb": "track wandb wandb_project_name",
        "--log wandb, and W&B's environment variables: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE, WANDB_TAGS": (
            "wandb_entity wandb_tags wandb_mode wandb_group project group tags"
        ),
        "--resume RUN_OR_CHECKPOINT": "trained_agent restore load checkpoint resume_from i continue",
        "--overwrite": "force",
        "--num-gpus-per-learner 1": "device cuda num_gpus gpu gpus",
        "--num-gpus-per-learner 0": "no_cuda cpu",
        "--num-learners 2 --num-gpus-per-learner 1": "multi_gpu distributed ddp",
        "--max-concurrent-trials NUMBER | --num-env-runners NUMBER | --env-runners NUMBER": "jobs n_jobs",
        "--num-env-runners NUMBER | --env-runners NUMBER": (
            "num_cpus threads runners num_runners count num_env_runners num_workers workers nproc ray_num_cpus "
            "num_processes parallel_envs"
        ),
        "--num-env-runners 0": "local_mode",
        "--num-envs-per-env-runner NUMBER | --envs-per-env-runner NUMBER": (
            "envs num_envs n_envs num_envs_per_env_runner"
        ),
        "--learners NUMBER": "num_learners",
        "--torch-num-threads NUMBER": "num_threads",
        "--model-config fcnet_hiddens=[64,64]": (
            "net_arch policy_kwargs hidden_sizes hidden_size hidden_dim layers network"
        ),
        "--model-config? nothing: the default networks fit the observation space": "policy",
        "nothing: Adam; another one takes a learner_class, in Python": "optimizer",
        "rlzmq train ALGORITHM --env ENV": "algo run algorithm",
        "an env of several agents, with --policies and --policy-mapping-fn": "num_agents",
        "--model-config use_lstm=true": "use_lstm lstm recurrent",
        "--replay-buffer-config capacity=NUMBER": "buffer_size",
        "--video film.mp4": "record",
        "--video film.mp4 | rlzmq evaluate RUN --video film.mp4, after the run": (
            "capture_video render render_mode"
        ),
        "nothing: checkpoints are written to --run-dir": "save_model checkpoint_at_end",
        "--checkpoint-replay true": "save_replay_buffer",
        "nothing: PyTorch is the only one": "framework",
        "rlzmq train bc --input DIRECTORY: online algorithms sample their data": "input",
        "--on ENGINE": "ray_address hosts",
        "--join FILE | --host ADDRESS | --on ENGINE": "address bind ip",
        "--port NUMBER | nothing: a terminal shows the progress": "progress p",
        "nothing: each iteration is in metrics.jsonl": "log_interval",
        "--episodes? nothing: without --explore actions are deterministic | --seed NUMBER": "deterministic",
        "--explore": "stochastic",
        "--episodes? nothing: without --explore actions are deterministic | --explore false": "no_explore",
        "--seed NUMBER": "torch_deterministic",
        "--lr '[[0, 1e-3], [1000000, 0]]'": "lr_schedule lr_decay anneal_lr",
        "--wrappers 'FrameStackObservation(stack_size=4)'": "frame_stack",
        "--is-atari true": "frame_skip atari",
        "--wrappers 'TimeLimit(max_episode_steps=NUMBER)'": "max_episode_steps time_limit horizon",
        "--wrappers NormalizeReward": "reward_scale normalize_reward norm_reward",
        "a connector, in Python: MeanStdFilter": "normalize norm_obs normalize_obs",
        "--import MODULE": "gym_packages",
        "--config FILE.toml, or flags": "hyperparams hyperparameters conf_file yaml_file params",
        "--trials NUMBER | rlzmq tune ALGORITHM --env ENV --lr 1e-4..1e-2:log": "num_samples",
        "rlzmq tune ALGORITHM --env ENV --lr 1e-4..1e-2:log": "optimize optimize_hyperparameters",
        "rlzmq tune SPACE.toml, whose [tune] table has search_alg and scheduler": (
            "sampler pruner n_startup_trials search_alg scheduler"
        ),
        "--evaluation-interval ITERATIONS": "eval_freq",
        "--evaluation-duration EPISODES": "eval_episodes",
        "--evaluation-interval ITERATIONS, or afterwards rlzmq evaluate RUN": "eval evaluate",
        "--checkpoint-every-s SECONDS": "save_freq checkpoint_freq",
        "--quiet": "silent q verbose",
        "--log-level? --log-level DEBUG | --verbose": "v debug",
        "--trials NUMBER": "n_trials",
        "--format onnx, or pt2": "onnx pt2",
        "nothing: a run directory can be copied anywhere": "upload_model hf_entity push_to_hub",
    }
)
# Keys of results; the answers are paths, as --stop takes them.
_RETURN = "env_runners/episode_return_mean"
_STEPS = "num_env_steps_sampled_lifetime"
_KEYS = _by_word(
    {
        _RETURN: (
            "reward reward_mean episode_reward episode_reward_mean episodic_return ep_rew_mean return_mean "
            "score mean_reward episode_return_mean episode_reward_max episode_reward_min"
        ),
        "env_runners/episode_len_mean": "episode_len_mean ep_len_mean episodic_length",
        "env_runners/num_episodes_lifetime": "episodes_total episodes",
        "env_runners/num_episodes": "episodes_this_iter",
        _STEPS: (
            "timesteps_total timesteps total_timesteps num_timesteps global_step agent_timesteps_total "
            "num_env_steps_sampled"
        ),
        "training_iteration": "iteration iter",
        "time_total_s": "time_elapsed time_s seconds",
        "learners/default_policy": "info learner loss value_loss policy_loss losses",
        "env_runners": "sampler_results hist_stats rollout custom_metrics counters",
        "env_runners/module_episode_return_mean": "policy_reward_mean module_episode_returns_mean",
        "env_runners/agent_episode_return_mean": "agent_episode_returns_mean",
        "num_env_steps_trained_lifetime": "num_env_steps_trained",
        "env_runners/num_env_steps_sampled_lifetime_throughput": "sps fps",
    }
)
_ALGORITHMS = _by_word(
    {
        "PPO, which with num_epochs=1 is A2C": "a2c",
        "IMPALA, which is asynchronous, too": "a3c",
        "TD3, which is DDPG with two critics, delays and target noise; SAC or TQC": "ddpg",
        "SAC or TQC": "droq",
        "SAC or TQC; docs/examples/crossq.py is CrossQ in one file": "crossq",
        "PPO": "trpo ppg reinforce pg vpg acktr ppo2",
        "BC or MARWIL, which learn from recorded episodes": "gail",
        "PPO with learners(num_learners=…)": "ddppo",
        "PPO with rl_module(model_config={'use_lstm': True})": "recurrentppo ppo_lstm",
        "PPO: an env with a Dict observation that has an action mask": "maskableppo",
        "DQN with training(num_atoms=51, noisy=True, n_step=3)": "rainbow",
        "DQN with training(num_atoms=51)": "c51 qrdqn",
        "DQN, which has double_q=True": "ddqn",
        "DQN with rl_module(model_config={'use_lstm': True})": "r2d2",
        "DQN with env_runners(num_env_runners=…)": "apex",
        "CQL or IQL": "crr awac",
        "SAC or DQN with training(replay_buffer_config={'type': 'HindsightEpisodeReplayBuffer'})": "her",
        "PPO: there are no evolution strategies": "es ars",
        "PPO or SAC: there is no model-based algorithm": "dreamer dreamerv3",
    }
)

_COMMANDS = _by_word(
    {
        "rlzmq train ALGORITHM --env ENV": "learn fit run start experiment train-agent",
        "rlzmq train, which lists them": "algos algorithms models",
        "rlzmq train ALGORITHM --help-all": "config settings",
        "rlzmq train ALGORITHM --resume RUN": "resume continue",
        "rlzmq evaluate RUN": "eval test rollout",
        "rlzmq evaluate RUN --video film.mp4": "enjoy play render watch video record-video",
        "rlzmq serve RUN, or Policy.load(run) in Python": "predict act infer",
        "rlzmq tune ALGORITHM --env ENV --lr 1e-4..1e-2:log": "optimize sweep search",
        "rlzmq train … --log tb, then tensorboard --logdir RUN; or rlzmq dashboard": "tensorboard tb",
        "rlzmq train … --log wandb": "wandb",
        "rlzmq runs, or rlzmq runs compare": "list ls compare best benchmark",
        "rlzmq runs, or rlzmq top RUN": "status info show view ps",
        "rlzmq plot RUN… -o curve.png": "report",
        "Ctrl-C in its terminal, or rlzmq launch stop RUN": "stop kill down",
        "rlzmq launch logs RUN": "logs",
        "rlzmq check-env ENV; gymnasium.pprint_registry() lists ids": "env envs gym",
        "rlzmq doctor": "gpu check env-info",
        "rlzmq export RUN": "export-onnx convert",
        "rlzmq runner --join FILE": "worker",
        "rlzmq --version": "version -V -v",
        "nothing to start first: rlzmq train … --on ENGINE uses several machines": (
            "init up submit new create head cluster attach"
        ),
        "nothing: a run directory can be copied anywhere": "push_to_hub load_from_hub hub upload download",
    }
)

_NETWORKS = "networks are torch.nn.Modules that a TorchRLModule builds in setup()"
_MARKS = "leave it out: in RLlib it only marks a method for its readers"
_OWN_LOOP = "config.build() and algo.train() in a loop, tune.Tuner, or the command `rlzmq train`"
_OFFLINE = "offline_data(input_=…) reads shards, which rlzmq.replay.write_shard and `rlzmq record` write"
_ACTING = "an application that steps by itself acts with rlzmq.Policy, or asks `rlzmq serve`"
_OWN_SPEC = "config.get_rl_module_spec().module_class"
_NESTED = "nested updates (meta-learning) are not supported"

_ACT = (
    "policy.compute_action(observation) with policy = Policy.load(run), or algo.compute_action(observation)"
)
_LOOP = "algo.train() in a loop, each call is one iteration; algo = config.build()"
_VECTOR = "env_runners(num_env_runners=…, num_envs_per_env_runner=…), which makes the envs"

_INSTEAD = _by_word(
    {
        _LOOP: (
            "learn fit train_on_batch step_per_epoch max_epoch n_iterations run train step episode_per_collect "
            "Trainer OnpolicyTrainer OffpolicyTrainer Agent"
        ),
        "algo.train() in a loop until result['num_env_steps_sampled_lifetime'] is large enough": (
            "total_timesteps timesteps total_frames"
        ),
        _ACT: "predict compute_single_action act get_action select_action choose_action sample forward",
        "policy.compute_actions(observations) with policy = Policy.load(run)": "compute_actions",
        "Policy.load(path) to act, PPO.from_checkpoint(path) to train": (
            "from_checkpoint load load_from_checkpoint"
        ),
        "algo.restore(path), or PPO.from_checkpoint(path)": "load_checkpoint import_model",
        "algo.save(path)": "save_model save export_policy_checkpoint",
        "env_runners(num_env_runners=…)": "rollouts",
        "env_runners(explore=…); DQN has training(epsilon=…)": "exploration",
        "algo.env_runner_group": "rollout_workers workers",
        "config.environment(env), before config.build()": "set_env",
        "config.env": "get_env",
        "algo.evaluate(), evaluate_checkpoint(run) or `rlzmq evaluate RUN`": "evaluate_policy eval test evaluate",
        "algo.get_module()": "policy actor critic q_net",
        "algo.get_module().state_dict()": "get_parameters",
        "algo.get_module().load_state_dict(…), then algo.sync_weights()": "set_parameters",
        "algo.get_module().parameters()": "parameters",
        "`rlzmq export RUN`, which writes ONNX or torch.export": "export_model export_policy_model",
        "training(replay_buffer_config={'capacity': …}), in DQN, SAC, TD3, TQC": (
            "replay_buffer replay_buffer_class replay_buffer_kwargs"
        ),
        "checkpointing(checkpoint_replay=True): checkpoints have it": "save_replay_buffer load_replay_buffer",
        "nothing: a buffer stores each observation once": "optimize_memory_usage",
        "nothing: leave it out": (
            "_init_setup_model monitor_wrapper create_eval_env policy_map_capacity observation_fn Verbosity "
            "set_training_mode"
        ),
        "nothing: only the new API stack exists": (
            "_enable_new_api_stack _enable_rl_module_api _enable_learner_api _disable_preprocessor_api"
        ),
        "`rlzmq train --log tb`, or callbacks(…)": (
            "logger set_logger logger_creator tensorboard_log UnifiedLogger"
        ),
        "evaluation(evaluation_config={'env': …})": "eval_env",
        "nothing: algo.keep_checkpoints(directory) keeps the best one, too": "best_model_save_path",
        "evaluation(evaluation_config={'explore': False})": "deterministic eps_test",
        "a condition in the loop, or `rlzmq train --stop`": "stop",
        "algo.config.env": "env",
        "algo.get_module().observation_space": "observation_space",
        "config.learners(num_gpus_per_learner=…)": "device",
        "result['num_env_steps_sampled_lifetime']": "num_timesteps timesteps_total",
        "algo.env_runner_group.sample(…)": "rollout_buffer rollout_buffer_class collect_rollouts",
        "algo.get_module() with algo = PPO.from_checkpoint(path)": "model state_dict get_weights",
        "algo.eval_env_runner_group": "evaluation_workers",
        "algo.config, or config.build() for another one": "get_config reset_config",
        "algo.stop()": "cleanup close",
        "nothing: checkpoints have what connectors such as MeanStdFilter count": "get_vec_normalize_env",
        "policy.reset(), which begins with the initial state": "get_initial_state",
        "nothing, or TD3, which has policy_delay": "policy_frequency",
        "nothing: there is no state-dependent exploration": "use_sde use_sde_at_warmup sde_sample_freq",
        "a learner_class with configure_optimizers_for_module": "optimizer",
        "nothing: processes have no quota; env_runners(num_env_runners=…) sets how many there are": (
            "num_cpus_per_worker"
        ),
        "debugging(log_level=…)": "verbose",
        "callbacks(MyCallback)": "callback",
        _VECTOR: "make_vec_env DummyVecEnv SubprocVecEnv make_atari_env VecEnv AsyncVectorEnv SyncVectorEnv",
        "the connector MeanStdFilter, with env_runners(env_to_module_connector=…)": "VecNormalize",
        "the connector FrameStackingEnvToModule, with env_runners(env_to_module_connector=…)": "VecFrameStack",
        "nothing: results have the episodes' returns and lengths": "Monitor VecMonitor",
        "`rlzmq evaluate RUN --video film.mp4`": "RecordVideo VecVideoRecorder",
        "nothing: the default networks take images as they are": "VecTransposeImage",
        "`rlzmq train --log tb,wandb`": "configure Logger SummaryWriter wandb WandbCallback",
        "`rlzmq plot RUN…`, or the lines of metrics.jsonl": "results_plotter plot_results load_results ts2xy",
        "an env with a Dict observation that has an action_mask": "ActionMasker",
        "an algorithm's config: PPOConfig": "Args Config AlgorithmSpec DEFAULT_CONFIG",
        "torch.nn.init": "layer_init normc_initializer",
        "SingleAgentEnvRunner": "Runner SyncDataCollector MultiSyncDataCollector Collector RolloutWorker",
        "environment(wrappers=['TimeLimit(max_episode_steps=…)'])": "max_frames_per_traj max_episode_steps",
        "environment(wrappers=['NormalizeReward'])": "reward_normalization normalize_reward",
        "PettingZoo's; ParallelPettingZooEnv makes an env of several agents of it": "ParallelEnv",
        _NETWORKS: (
            "ProbabilisticActor ValueOperator TensorDictModule BaseFeaturesExtractor Encoder TorchModel "
            "ModelConfig"
        ),
        "PPOConfig; a learner_class has compute_loss_for_module": "ClipPPOLoss",
        "a dict of tensors": "TensorDict",
        "EpisodeReplayBuffer": "VectorReplayBuffer",
        "your own TorchRLModule, whose _forward(batch) returns {'actions': …}": (
            "RandomRLModule StatefulRandomRLModule"
        ),
        "gymnasium's; config.environment(…) takes its ids and classes": "make make_env Env",
        "a list as the value: training(lr=[(0, 3e-4), (1_000_000, 0.0)])": (
            "get_schedule_fn linear_schedule get_linear_fn LinearSchedule Scheduler"
        ),
        "debugging(seed=…)": "set_random_seed seed_everything update_global_seed_if_necessary",
        "a condition in the loop of algo.train()": "StopTrainingOnNoModelImprovement StopTrainingOnMaxEpisodes",
        "a test of the return in the loop, or `rlzmq train --stop return=…`": "StopTrainingOnRewardThreshold",
        "TD3Config().training(exploration_noise=…)": "NormalActionNoise OrnsteinUhlenbeckActionNoise",
        "register_env": "register",
        "from rlzmq import PPOConfig": "rllib agents common",
        "`rlzmq check-env ENV`": "check_env",
        "Callback": "BaseCallback CallbackList",
        "evaluation(evaluation_interval=…), or a Callback": "EvalCallback",
        "algo.keep_checkpoints(directory), or a Callback": "CheckpointCallback",
        "Algorithm": "BaseAlgorithm",
        "nothing: the default networks fit the observation space; set them with rl_module(model_config=…)": (
            "MlpPolicy CnnPolicy MultiInputPolicy ActorCriticPolicy"
        ),
        "PrioritizedEpisodeReplayBuffer": "PrioritizedReplayBuffer",
        "nothing: `rlzmq train` shows its progress": "ProgressBarCallback",
        "HindsightEpisodeReplayBuffer": "HerReplayBuffer",
        "`rlzmq presets`, which lists settings that are known to learn": "load_from_zoo",
        "nothing: there is no cluster to start": "init is_initialized nodes ray",
        "ActorSystem, whose handles have the methods of a class in another process": "remote get put wait",
        "`rlzmq serve RUN`": "serve",
        _OFFLINE: "data OfflineData OfflinePreLearner",
        "nothing: there is no cluster; algo.stop() ends a run": "shutdown",
        _OWN_LOOP: "add_rllib_example_script_args run_rllib_example_script_experiment",
        "get_trainable_cls": "get_algorithm_class",
        "nothing: PyTorch is the only framework": "try_import_tf try_import_jax",
        "tensor.detach().cpu().numpy()": "convert_to_numpy",
        "torch.as_tensor(array)": "convert_to_torch_tensor",
        "torch.nn.functional.one_hot or numpy.eye(n)[index]": "one_hot",
        "torch.softmax": "softmax",
        '"state"': "ENV_STATE",
        '"__env__"': "INPUT_ENV_SPACES",
        "gymnasium.spaces.Sequence": "Repeated",
        "gymnasium.spaces.Box, and a division by the sum in the env": "Simplex",
        "value if isinstance(value, list) else [value]": "force_list",
        "result['timers'], whose keys name the stages": "SAMPLE_TIMER",
        "OptunaSearch, or another one of rlzmq.tune.search": "HyperOptSearch",
        '"encoder_out"': "ENCODER_OUT",
        '"target_action_dist_inputs"': "TARGET_NETWORK_ACTION_DIST_INPUTS",
        "torch.nn.Conv2d(padding='same'), or padding=0": "same_padding valid_padding",
        "torch.finfo(torch.float32), which has min and max": "FLOAT_MIN FLOAT_MAX",
        "1 - residuals.var() / targets.var()": "explained_variance",
        "a class of torch.nn, e.g. torch.nn.ReLU": "get_activation_fn",
        "copy.deepcopy(network)": "make_target_network",
        "numpy.stack, or array[index], for each leaf of a nested space": "batch unbatch",
        "gymnasium.spaces.utils.flatten_space, or the FlattenObservations connector": "flatten_space",
        "the Dict or Tuple space itself, which has a mapping's or a sequence's methods": (
            "get_base_struct_from_space"
        ),
        "numpy.testing.assert_allclose": "check",
        "an assert on result.metrics of a tune.Result, or `rlzmq train --stop`": "check_learning_achieved",
        "print(result): results print themselves in short": "pretty_print",
        "warnings.warn": "log_once deprecation_warning Deprecated",
        "cv2.resize, or the wrappers of gymnasium": "resize",
        "str": "PolicyID EpisodeID",
        "gymnasium.Env | MultiAgentEnv": "EnvType",
        "dict[str, Any], or of tensors": "ParamDict MultiAgentDict",
        "torch.nn.Module": "NetworkType",
        "DEFAULT_MODULE_ID": "DEFAULT_POLICY_ID",
        "RLlibCallback": "DefaultCallbacks",
        "RLModuleSpec": "PolicySpec",
        "Columns for names of columns; batches are dicts of columns, data are episodes (EpisodeBatch)": (
            "SampleBatch"
        ),
        "a dict of columns by module id; data are episodes (EpisodeBatch)": "MultiAgentBatch",
        "EnvRunnerGroup": "WorkerSet",
        "TorchRLModule": "ModelV2 TorchModelV2",
        f"{_NETWORKS}; rl_module(model_config=DefaultModelConfig(…)) sets those of the default modules": (
            "ModelCatalog"
        ),
        "TorchMultiDistribution": "TorchMultiActionDistribution",
        "environment(…, is_atari=True), with FrameStackingEnvToModule or `--preset`": (
            "wrap_atari_for_new_api_stack"
        ),
        "MultiAgentEnv.with_agent_groups": "GroupAgentsWrapper",
        "env.envs, which has the MultiAgentEnvs of an env runner": "VectorMultiAgentEnv BaseEnv",
        "your own MultiAgentEnv around the game": "OpenSpielEnv",
        "environment('dm_control/cheetah-run-v0'), with rlzmq[dm-control]": "DMCEnv",
        _ACTING: "ExternalEnv RLlink EnvRunnerServerForExternalInference",
        "DefaultPPOTorchRLModule": "PPOTorchRLModule DefaultBCTorchRLModule BCTorchRLModule IMPALATorchRLModule",
        _OWN_SPEC: "DefaultDQNTorchRLModule DefaultSACTorchRLModule DefaultAPPOTorchRLModule",
        _MARKS: (
            "OverrideToImplementCustomLogic OverrideToImplementCustomLogic_CallToSuperRecommended PublicAPI "
            "DeveloperAPI OldAPIStack"
        ),
        "Learner.update(episodes=…) or update(batch=…)": "TrainingData",
        _NESTED: (
            "TorchMetaLearner TorchDifferentiableLearner DifferentiableLearnerConfig "
            "DifferentiableAlgorithmConfig"
        ),
        "RunConfig(log='wandb') or log='mlflow'": "WandbLoggerCallback MLflowLoggerCallback",
    }
)
# Of these, what an import accepts all the same, with one warning that says what is written above: where each one is.
_ACCEPTED = _by_word(
    {
        "algorithms.rllib_helpers": """BCCatalog Catalog DEFAULT_POLICY_ID DQNCatalog DefaultBCTorchRLModule
            DefaultCallbacks ENCODER_OUT ENV_STATE EnvType FLOAT_MAX FLOAT_MIN NetworkType PPOCatalog
            PPOTorchRLModule PolicySpec SACCatalog SampleBatch TARGET_NETWORK_ACTION_DIST_INPUTS VectorMultiAgentEnv
            batch convert_to_numpy convert_to_torch_tensor flatten_space get_activation_fn make_target_network
            normc_initializer one_hot resize same_padding softmax try_import_tf update_global_seed_if_necessary
            valid_padding wrap_atari_for_new_api_stack"""
    }
)
# First part of a module path of RLlib's or Ray's → the module with those of its names that rlzmq itself does not have.
RLLIB_PACKAGES = _by_word(
    {
        "rlzmq": "algorithms callbacks connectors core env evaluation execution models offline policy utils",
        "rlzmq.envs.examples": "examples",
        "rlzmq.tune": "air train tune",
    }
)
_BY_ENDING = _by_word(
    {
        _NETWORKS: "Catalog Extractor CNN EncoderConfig HeadConfig",
        "Policy.load(run) to act, an algorithm's config to train: PPOConfig": "Policy",
        "an algorithm's config: PPOConfig": "Agent",
    }
)

_IMPORTS_BY_ENDING = {  # of names to import that are not ours
    "Callback": "Callback",
    "RolloutBuffer": "nothing: what is sampled is trained on and forgotten",
    "Buffer": "EpisodeReplayBuffer, with training(replay_buffer_config=…)",
}


def renamed(word: str, valid: Container[Any]) -> str | None:
    """Return the valid name for a word of another library's; None if it is not in the table."""
    here = _RENAMED.get(word.lstrip("-").replace("-", "_").lower(), ())
    return next((name for name in here if name in valid), None)


def instead_of(name: str, exports: Container[str] = ()) -> str | None:
    """Return what to write instead of a name to import, an attribute or an algorithm; None if nothing is known."""
    if name in _INSTEAD:
        return _INSTEAD[name]
    if instead := instead_of_algorithm(name):
        return instead
    algorithm = name.removesuffix("Config").removesuffix("Trainer")
    if algorithm != name and algorithm in exports:
        return f"{algorithm}Config"
    shorter = name.replace("TorchLearner", "Learner")
    if shorter != name and shorter in exports:
        return shorter
    if name == "Policy":  # ours
        return None
    endings = {**_BY_ENDING, **(_IMPORTS_BY_ENDING if exports else {})}
    by_ending = next((text for ending, text in endings.items() if name.endswith(ending)), None)
    return by_ending or (_in_other_modules(name) if exports else None)


def _in_other_modules(name: str) -> str | None:
    """Return the import of a name of Gymnasium's, or of rlzmq.tune's."""
    for module in ("gymnasium", "gymnasium.spaces", "gymnasium.wrappers", "gymnasium.vector", "rlzmq.tune"):
        if not name.startswith("_") and name in vars(importlib.import_module(module)):
            wraps = f"; or environment(wrappers=['{name}(…)'])" if module == "gymnasium.wrappers" else ""
            return f"from {module} import {name}{wraps}"
    return None


def accepted_name(name: str, exports: Mapping[str, str]) -> tuple[str, str] | None:
    """Return (module, name in it) of a name of RLlib's that an import accepts, with a warning; None if it does not.

    Args:
        name: The name.
        exports: Public name -> its module.
    """
    if name in _ACCEPTED:
        return _ACCEPTED[name], name
    learner = name.replace("TorchLearner", "Learner")
    return (exports[learner], learner) if learner != name and learner in exports else None


def instead_of_algorithm(name: str) -> str | None:
    """Return the nearest algorithm here, for another (``"TD3Config"``, ``"td3"``); None if none is known."""
    return _ALGORITHMS.get(name.removesuffix("Config").removesuffix("Trainer").lower())


def instead_of_command(word: str) -> str | None:
    """Return the command line that does what a command of another library's does; None if nothing is known."""
    return _COMMANDS.get(word)


def instead_of_flag(word: str, flags: Container[str]) -> str | None:
    """Return what to write on the command line instead of a flag; None if nothing is known.

    Args:
        word: The flag, as it was written.
        flags: The command's flags.
    """
    name = word.lstrip("-").replace("-", "_").lower()
    ways = _FLAGS.get(name, "").split(" | ")
    ways += [f"--{here.rstrip('_').replace('_', '-')}" for here in _RENAMED.get(name, ())]
    for way in filter(None, ways):
        condition, _, text = way.rpartition("? ")
        needed = condition or way.partition(" ")[0].rstrip(",")
        if not needed.startswith("--") or needed in flags:
            return text
    nothing = _INSTEAD.get(name, "")
    return nothing if nothing.startswith("nothing") else None


def instead_of_key(key: object) -> str | None:
    """Return the slash path of what another library's results have under `key`; None if nothing is known."""
    return _KEYS.get(str(key).rpartition("/")[2])


def missing_key(key: str, known: Iterable[str]) -> str:
    """Return the text of a result's KeyError; `known` are the keys that it has."""
    path = instead_of_key(key)
    if path is None:
        return f"{key}.{did_you_mean(key, known)}"
    return f"{key}. Instead: result[{']['.join(map(repr, path.split('/')))}]"


_MAX_CHARS = 200


def did_you_mean_flag(word: str, flags: Collection[str]) -> str:
    """Return ``" Did you mean '--lr'?"`` of a misspelt flag, or of another library's misspelt word; "" if none is near.

    Args:
        word: The flag, as it was written.
        flags: The command's flags.
    """
    ways = {name: instead_of_flag(name, flags) for name in (*_RENAMED, *_FLAGS)}
    known = {name: way for name, way in ways.items() if way is not None and way.startswith("--")}
    known.update({flag.lstrip("-").replace("-", "_"): flag for flag in flags})
    near = _nearest(word.lstrip("-").replace("-", "_"), known)
    return f" Did you mean {near!r}?" if near else ""


def _nearest(name: str, answers: Mapping[str, str]) -> str | None:
    """Return the answer for the word that resembles a name most; None if none does."""
    # Comparing takes as long as the name, which may be a peer's, is long.
    close = difflib.get_close_matches(name[:_MAX_CHARS], answers, n=1, cutoff=0.6)
    return answers[close[0]] if close else None


def did_you_mean(name: object, valid: Iterable[object], *, num_listed: int = 12) -> str:
    """Return the last sentence of an error message: what to write instead.

    Args:
        name: The name that the user wrote.
        valid: The accepted names.
        num_listed: Largest number of valid names that is listed if none is close.

    Returns:
        ``" Instead: 'x'."`` of a word that other libraries have for it, or ``" Did you mean 'x'?"``, or
        ``" Valid: …."``; ``""`` if there are none or too many to list.
    """
    names = sorted({str(item) for item in valid})
    if here := renamed(str(name)[:_MAX_CHARS], names):
        return f" Instead: {here!r}."
    others = {word: here for word in _RENAMED if (here := renamed(word, names))}
    if near := _nearest(str(name), {**others, **{own: own for own in names}}):
        return f" Did you mean {near!r}?"
    return f" Valid: {', '.join(names)}." if 0 < len(names) <= num_listed else ""


class SignatureOfInit(type):
    """Metaclass base whose classes show the arguments of their ``__init__`` in ``help()`` and editors.

    Without it, `inspect.signature` of a class returns that of its metaclass's ``__call__``.
    """

    @property
    def __signature__(cls) -> inspect.Signature:
        """Signature of ``__init__`` without self."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class SynonymsOfClass(SignatureOfInit):
    """Metaclass whose classes answer other libraries' words: ``PPO.load``."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            raise _no_attribute(f"type object {cls.__name__!r}", name, cls)


class AnswersSynonyms(metaclass=SynonymsOfClass):
    """Base class of objects that answer other libraries' words: ``algo.learn``."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("__") and any(name in vars(base) for base in type(self).__mro__):
                return object.__getattribute__(self, name)  # a property: its own AttributeError
            raise _no_attribute(f"{type(self).__name__!r} object", name, self)


def _no_attribute(what: str, name: str, of: object) -> AttributeError:
    instead = instead_of(name)
    more = f". Instead: {instead}." if instead else ""
    return AttributeError(f"{what} has no attribute {name!r}{more}", name=name, obj=of)
