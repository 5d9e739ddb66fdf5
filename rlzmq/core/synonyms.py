"""Words of Stable-Baselines3, RLlib and CleanRL that are no names here, with what to write instead.

The one table behind the errors about imports, attributes, settings, flags, result keys and algorithms.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

__all__ = [
    "AnswersSynonyms",
    "SignatureOfInit",
    "SynonymsOfClass",
    "accepted_name",
    "did_you_mean",
    "instead_of",
    "instead_of_algorithm",
    "instead_of_command",
    "instead_of_flag",
    "instead_of_key",
    "missing_key",
    "renamed",
]

# What has another name here, wherever that is a valid name: settings, flags, keys of requests. Words with several
# names have the one that the algorithm has.
_RENAMED: dict[str, tuple[str, ...]] = {
    word: tuple(here.split())
    for word, here in {
        "learning_rate": "lr",
        "learning_rate_schedule": "lr",
        "discount": "gamma",
        "discount_factor": "gamma",
        "n_steps": "train_batch_size_per_learner",
        "num_steps": "train_batch_size_per_learner",
        "n_epochs": "num_epochs",
        "update_epochs": "num_epochs",
        "ppo_epoch": "num_epochs",
        "ppo_epochs": "num_epochs",
        "rollout_length": "train_batch_size_per_learner",
        "rollout_steps": "train_batch_size_per_learner",
        "num_sgd_iter": "num_epochs",
        "epochs": "num_epochs",
        "repeat_per_collect": "num_epochs",
        "batch_size": "minibatch_size train_batch_size_per_learner",
        "num_minibatches": "minibatch_size",
        "sgd_minibatch_size": "minibatch_size",
        "ent_coef": "entropy_coeff initial_alpha",
        "alpha": "initial_alpha",
        "entropy_coef": "entropy_coeff",
        "ent_coeff": "entropy_coeff",
        "entropy_coeff_schedule": "entropy_coeff",
        "autotune": "target_entropy",
        "auto_entropy_tuning": "target_entropy",
        "vf_coef": "vf_loss_coeff",
        "value_coef": "vf_loss_coeff",
        "value_loss_coef": "vf_loss_coeff",
        "vf_loss_coef": "vf_loss_coeff",
        "gae_lambda": "lambda_",
        "lam": "lambda_",
        "clip_range": "clip_param",
        "clip_coef": "clip_param",
        "clip_epsilon": "clip_param",
        "eps_clip": "clip_param",
        "clip_range_vf": "vf_clip_param",
        "clip_vloss": "vf_clip_param",
        "max_grad_norm": "grad_clip",
        "norm_adv": "standardize_advantages",
        "normalize_advantage": "standardize_advantages",
        "anneal_lr": "lr",
        "policy_kwargs": "model_config",
        "net_arch": "model_config",
        "hidden_sizes": "model_config",
        "activation": "model_config",
        "activation_fn": "model_config",
        "features_extractor_class": "model_config",
        **dict.fromkeys(("use_lstm", "fcnet_hiddens", "fcnet_activation", "conv_filters"), "model_config"),
        **dict.fromkeys(("model", "network", "layers", "hidden_dim", "hidden_size"), "model_config"),
        "policy_lr": "actor_lr",
        "actor_learning_rate": "actor_lr",
        "critic_learning_rate": "critic_lr",
        "alpha_learning_rate": "alpha_lr",
        "q_lr": "critic_lr lr",
        **dict.fromkeys(
            ("buffer_size", "replay_buffer_class", "replay_buffer_kwargs", "memory_size"),
            "replay_buffer_config",
        ),
        "polyak": "tau",
        "prioritized_replay": "replay_buffer_config",
        "estimation_step": "n_step",
        "multi_step": "n_step",
        "learning_starts": "num_steps_sampled_before_learning_starts",
        "train_freq": "training_intensity",
        "train_frequency": "training_intensity",
        "gradient_steps": "training_intensity",
        "target_update_interval": "target_network_update_freq",
        "target_network_frequency": "target_network_update_freq",
        "action_noise": "exploration_noise",
        "policy_freq": "policy_delay",
        "policy_frequency": "policy_delay",
        "policy_noise": "target_noise",
        "noise_clip": "target_noise_clip",
        "exploration_fraction": "epsilon",
        "eps_train": "epsilon",
        "exploration_initial_eps": "epsilon",
        "exploration_final_eps": "epsilon",
        "start_e": "epsilon",
        "end_e": "epsilon",
        "n_envs": "num_envs_per_env_runner",
        "num_envs": "num_envs_per_env_runner",
        "num_envs_per_worker": "num_envs_per_env_runner",
        "num_workers": "num_env_runners",
        "num_rollout_workers": "num_env_runners",
        "workers": "num_env_runners",
        "n_jobs": "num_env_runners",
        **dict.fromkeys(("jobs", "runners", "nproc", "num_processes", "parallel_envs"), "num_env_runners"),
        "envs": "num_envs_per_env_runner",
        "vectorization_mode": "gym_env_vectorize_mode",
        "remote_worker_envs": "gym_env_vectorize_mode",
        "vec_env": "gym_env_vectorize_mode",
        "observation_filter": "env_to_module_connector",
        "evaluation_num_workers": "evaluation_num_env_runners",
        "evaluation_num_episodes": "evaluation_duration",
        "n_eval_episodes": "evaluation_duration",
        "eval_freq": "evaluation_interval",
        "eval_interval": "evaluation_interval",
        "min_time_s_per_reporting": "min_time_s_per_iteration",
        "checkpoint_frequency": "checkpoint_every_s",
        "save_freq": "checkpoint_every_s",
        "recreate_failed_workers": "restart_failed_env_runners",
        "recreate_failed_env_runners": "restart_failed_env_runners",
        "ignore_worker_failures": "ignore_env_runner_failures",
        "stats_window_size": "metrics_num_episodes_for_smoothing",
        "device": "num_gpus_per_learner",
        "cuda": "num_gpus_per_learner",
        "num_gpus": "num_gpus_per_learner",
        "use_cuda": "num_gpus_per_learner",
        "env_id": "env",
        "env_name": "env",
        "env_kwargs": "env_config",
        "render_mode": "env_config",
        "wrapper_class": "wrappers",
        "seeds": "seed",
        "random_seed": "seed",
        "observation": "obs",
        "state": "state_in",
        "states": "state_in",
    }.items()
}
# Only on the command line: these are no settings in Python. The first of several ways ("A | B") whose flag the command
# has; "--flag? text" is for commands that have the flag.
_FLAGS = {
    **dict.fromkeys(
        (
            *("timesteps", "total_timesteps", "n_timesteps", "n", "max_steps", "stop_timesteps", "episodes"),
            *("steps", "num_steps", "total_steps", "num_episodes", "n_episodes", "n_eval_episodes"),
        ),
        "--episodes NUMBER | --steps NUMBER | --train-batch-size-per-learner? --stop steps=NUMBER",
    ),
    **dict.fromkeys(("stop_reward", "reward_threshold", "as_test"), "--stop return=NUMBER"),
    **dict.fromkeys(("stop_iters", "iterations", "iters", "max_iterations"), "--stop iterations=NUMBER"),
    **dict.fromkeys(
        ("timeout", "max_time", "budget"),
        "--grace SECONDS | --time-budget SECONDS | --stop time=SECONDS",
    ),
    **dict.fromkeys(("env_id", "env_name", "gym_id", "e"), "--env ENV"),
    **dict.fromkeys(
        (
            *(
                "log_dir",
                "logdir",
                "local_dir",
                "log_folder",
                "save_dir",
                "name",
                "exp_name",
                "experiment_name",
            ),
            *("run_dir", "storage_path", "output_dir", "dir", "f", "o", "out", "save", "save_path"),
        ),
        "--run-dir DIRECTORY | --dir DIRECTORY | --output PATH",
    ),
    "output": "--json? --json FILE, or --video FILE | --run-dir DIRECTORY",
    **dict.fromkeys(("tensorboard_log", "tensorboard", "tb", "logger"), "--log tb"),
    **dict.fromkeys(("track", "wandb", "wandb_project_name"), "--log wandb"),
    **dict.fromkeys(
        ("wandb_entity", "wandb_tags", "wandb_mode", "wandb_group", "project", "group", "tags"),
        "--log wandb, and W&B's environment variables: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE, WANDB_TAGS",
    ),
    **dict.fromkeys(
        ("trained_agent", "restore", "load", "checkpoint", "resume_from", "i", "continue"),
        "--resume RUN_OR_CHECKPOINT",
    ),
    "force": "--overwrite",
    **dict.fromkeys(("device", "cuda", "num_gpus", "gpu", "gpus"), "--num-gpus-per-learner 1"),
    **dict.fromkeys(("no_cuda", "cpu"), "--num-gpus-per-learner 0"),
    **dict.fromkeys(("multi_gpu", "distributed", "ddp"), "--num-learners 2 --num-gpus-per-learner 1"),
    **dict.fromkeys(
        ("jobs", "n_jobs"), "--max-concurrent-trials NUMBER | --num-env-runners NUMBER | --env-runners NUMBER"
    ),
    **dict.fromkeys(
        (
            *("num_cpus", "threads", "runners", "num_env_runners", "num_workers", "workers", "nproc"),
            *("ray_num_cpus", "num_processes", "parallel_envs"),
        ),
        "--num-env-runners NUMBER | --env-runners NUMBER",
    ),
    "local_mode": "--num-env-runners 0",
    **dict.fromkeys(
        ("envs", "num_envs", "n_envs", "num_envs_per_env_runner"),
        "--num-envs-per-env-runner NUMBER | --envs-per-env-runner NUMBER",
    ),
    "num_learners": "--learners NUMBER",
    "num_threads": "--torch-num-threads NUMBER",
    **dict.fromkeys(
        ("net_arch", "policy_kwargs", "hidden_sizes", "hidden_size", "hidden_dim", "layers", "network"),
        "--model-config fcnet_hiddens=[64,64]",
    ),
    "policy": "--model-config? nothing: the default networks fit the observation space",
    "optimizer": "nothing: Adam; another one takes a learner_class, in Python",
    **dict.fromkeys(("algo", "run", "algorithm"), "rlzmq train ALGORITHM --env ENV"),
    "num_agents": "an env of several agents, with --policies and --policy-mapping-fn",
    **dict.fromkeys(("use_lstm", "lstm", "recurrent"), "--model-config use_lstm=true"),
    "buffer_size": "--replay-buffer-config capacity=NUMBER",
    "record": "--video film.mp4",
    **dict.fromkeys(
        ("capture_video", "render", "render_mode"),
        "--video film.mp4 | rlzmq evaluate RUN --video film.mp4, after the run",
    ),
    **dict.fromkeys(("save_model", "checkpoint_at_end"), "nothing: checkpoints are written to --run-dir"),
    "save_replay_buffer": "--checkpoint-replay true",
    "framework": "nothing: PyTorch is the only one",
    "input": "rlzmq train bc --input DIRECTORY: online algorithms sample their data",
    **dict.fromkeys(("ray_address", "hosts"), "--on ENGINE"),
    **dict.fromkeys(("address", "bind", "ip"), "--join FILE | --host ADDRESS | --on ENGINE"),
    "http": "--port NUMBER",
    **dict.fromkeys(("progress", "p"), "--port NUMBER | nothing: a terminal shows the progress"),
    "log_interval": "nothing: each iteration is in metrics.jsonl",
    "csv": "nothing: all metrics are in metrics.jsonl of the run directory",
    "uuid": "nothing: each run has its own directory",
    "refresh": "--interval SECONDS",
    "deterministic": "--episodes? nothing: without --explore actions are deterministic | --seed NUMBER",
    "stochastic": "--explore",
    "no_explore": "--episodes? nothing: without --explore actions are deterministic | --explore false",
    "torch_deterministic": "--seed NUMBER",
    **dict.fromkeys(("lr_schedule", "lr_decay", "anneal_lr"), "--lr '[[0, 1e-3], [1000000, 0]]'"),
    "frame_stack": "--wrappers 'FrameStackObservation(stack_size=4)'",
    **dict.fromkeys(("frame_skip", "atari"), "--is-atari true"),
    **dict.fromkeys(
        ("max_episode_steps", "time_limit", "horizon"), "--wrappers 'TimeLimit(max_episode_steps=NUMBER)'"
    ),
    **dict.fromkeys(("reward_scale", "normalize_reward", "norm_reward"), "--wrappers NormalizeReward"),
    **dict.fromkeys(("normalize", "norm_obs", "normalize_obs"), "a connector, in Python: MeanStdFilter"),
    "gym_packages": "--import MODULE",
    **dict.fromkeys(
        ("hyperparams", "hyperparameters", "conf_file", "yaml_file", "params"), "--config FILE.toml, or flags"
    ),
    "num_samples": "--trials NUMBER | rlzmq tune ALGORITHM --env ENV --lr 1e-4..1e-2:log",
    **dict.fromkeys(
        ("optimize", "optimize_hyperparameters"), "rlzmq tune ALGORITHM --env ENV --lr 1e-4..1e-2:log"
    ),
    **dict.fromkeys(
        ("sampler", "pruner", "n_startup_trials", "search_alg", "scheduler"),
        "rlzmq tune SPACE.toml, whose [tune] table has search_alg and scheduler",
    ),
    "eval_freq": "--evaluation-interval ITERATIONS",
    "eval_episodes": "--evaluation-duration EPISODES",
    **dict.fromkeys(
        ("eval", "evaluate"), "--evaluation-interval ITERATIONS, or afterwards rlzmq evaluate RUN"
    ),
    **dict.fromkeys(("save_freq", "checkpoint_freq"), "--checkpoint-every-s SECONDS"),
    **dict.fromkeys(("silent", "q"), "--quiet"),
    **dict.fromkeys(("v", "debug"), "--log-level? --log-level DEBUG | --verbose"),
    "verbose": "--quiet",
    "n_trials": "--trials NUMBER",
    **dict.fromkeys(("onnx", "pt2"), "--format onnx, or pt2"),
    **dict.fromkeys(
        ("upload_model", "hf_entity", "push_to_hub"), "nothing: a run directory can be copied anywhere"
    ),
}
# Keys of results; the answers are paths, as --stop takes them.
_RETURN = "env_runners/episode_return_mean"
_STEPS = "num_env_steps_sampled_lifetime"
_KEYS = {
    **dict.fromkeys(
        (
            "reward",
            "reward_mean",
            "episode_reward",
            "episode_reward_mean",
            "episodic_return",
            "ep_rew_mean",
            "return_mean",
            "score",
            "mean_reward",
        ),
        _RETURN,
    ),
    **dict.fromkeys(("episode_return_mean", "episode_reward_max", "episode_reward_min"), _RETURN),
    **dict.fromkeys(("episode_len_mean", "ep_len_mean", "episodic_length"), "env_runners/episode_len_mean"),
    **dict.fromkeys(("episodes_total", "episodes"), "env_runners/num_episodes_lifetime"),
    **dict.fromkeys(("episodes_this_iter",), "env_runners/num_episodes"),
    **dict.fromkeys(
        (
            "timesteps_total",
            "timesteps",
            "total_timesteps",
            "num_timesteps",
            "global_step",
            "agent_timesteps_total",
            "num_env_steps_sampled",
        ),
        _STEPS,
    ),
    **dict.fromkeys(("iteration", "iter"), "training_iteration"),
    **dict.fromkeys(("time_elapsed", "time_s", "seconds"), "time_total_s"),
    **dict.fromkeys(("info", "learner", "loss"), "learners/default_policy"),
    **dict.fromkeys(("sampler_results", "hist_stats", "rollout"), "env_runners"),
    "num_env_steps_trained": "num_env_steps_trained_lifetime",
    **dict.fromkeys(("custom_metrics", "counters", "policy_reward_mean"), "env_runners"),
    **dict.fromkeys(("value_loss", "policy_loss", "losses"), "learners/default_policy"),
    **dict.fromkeys(("sps", "fps"), "env_runners/num_env_steps_sampled_lifetime_throughput"),
}
_ALGORITHMS = {
    "a2c": "PPO, which with num_epochs=1 is A2C",
    "a3c": "IMPALA, which is asynchronous, too",
    "acer": "IMPALA or APPO",
    "ddpg": "TD3, which is DDPG with two critics, delays and target noise; SAC or TQC",
    "droq": "SAC or TQC",
    "crossq": "SAC or TQC; docs/examples/crossq.py is CrossQ in one file",
    **dict.fromkeys(("trpo", "ppg", "reinforce", "pg", "vpg", "acktr", "ppo2"), "PPO"),
    "gail": "BC or MARWIL, which learn from recorded episodes",
    "ddppo": "PPO with learners(num_learners=…)",
    "recurrentppo": "PPO with rl_module(model_config={'use_lstm': True})",
    "ppo_lstm": "PPO with rl_module(model_config={'use_lstm': True})",
    "maskableppo": "PPO: an env with a Dict observation that has an action mask",
    "rainbow": "DQN with training(num_atoms=51, noisy=True, n_step=3)",
    "c51": "DQN with training(num_atoms=51)",
    "qrdqn": "DQN with training(num_atoms=51)",
    "ddqn": "DQN, which has double_q=True",
    "r2d2": "DQN with rl_module(model_config={'use_lstm': True})",
    "apex": "DQN with env_runners(num_env_runners=…)",
    "crr": "CQL or IQL",
    "awac": "CQL or IQL",
    "her": "SAC or DQN with training(replay_buffer_config={'type': 'HindsightEpisodeReplayBuffer'})",
    "es": "PPO: there are no evolution strategies",
    "ars": "PPO: there are no evolution strategies",
    "dreamer": "PPO or SAC: there is no model-based algorithm",
    "dreamerv3": "PPO or SAC: there is no model-based algorithm",
}

_COMMANDS = {
    **dict.fromkeys(
        ("learn", "fit", "run", "start", "experiment", "train-agent"), "rlzmq train ALGORITHM --env ENV"
    ),
    **dict.fromkeys(("algos", "algorithms", "models"), "rlzmq train, which lists them"),
    **dict.fromkeys(("config", "settings"), "rlzmq train ALGORITHM --help-all"),
    **dict.fromkeys(("resume", "continue"), "rlzmq train ALGORITHM --resume RUN"),
    **dict.fromkeys(("eval", "test", "rollout"), "rlzmq evaluate RUN"),
    **dict.fromkeys(
        ("enjoy", "play", "render", "watch", "video", "record-video"), "rlzmq evaluate RUN --video film.mp4"
    ),
    **dict.fromkeys(("predict", "act", "infer"), "rlzmq serve RUN, or Policy.load(run) in Python"),
    **dict.fromkeys(("optimize", "sweep", "search"), "rlzmq tune ALGORITHM --env ENV --lr 1e-4..1e-2:log"),
    **dict.fromkeys(
        ("tensorboard", "tb"), "rlzmq train … --log tb, then tensorboard --logdir RUN; or rlzmq dashboard"
    ),
    "wandb": "rlzmq train … --log wandb",
    **dict.fromkeys(("list", "ls", "compare", "best", "benchmark"), "rlzmq runs, or rlzmq runs compare"),
    **dict.fromkeys(("status", "info", "show", "view", "ps"), "rlzmq runs, or rlzmq top RUN"),
    "report": "rlzmq plot RUN… -o curve.png",
    **dict.fromkeys(("stop", "kill", "down"), "Ctrl-C in its terminal, or rlzmq launch stop RUN"),
    "logs": "rlzmq launch logs RUN",
    **dict.fromkeys(("env", "envs", "gym"), "rlzmq check-env ENV; gymnasium.pprint_registry() lists ids"),
    **dict.fromkeys(("gpu", "check", "env-info"), "rlzmq doctor"),
    **dict.fromkeys(("export-onnx", "convert"), "rlzmq export RUN"),
    "worker": "rlzmq runner --join FILE",
    **dict.fromkeys(("version", "-V", "-v"), "rlzmq --version"),
    **dict.fromkeys(
        ("init", "up", "submit", "new", "create", "head", "cluster", "attach"),
        "nothing to start first: rlzmq train … --on ENGINE uses several machines",
    ),
    **dict.fromkeys(
        ("push_to_hub", "load_from_hub", "hub", "upload", "download"),
        "nothing: a run directory can be copied anywhere",
    ),
}

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

_INSTEAD = {
    # -- attributes of configs, algorithms and policies -----------------------------------------------
    "learn": _LOOP,
    "fit": _LOOP,
    "train_on_batch": _LOOP,
    "total_timesteps": "algo.train() in a loop until result['num_env_steps_sampled_lifetime'] is large enough",
    "timesteps": "algo.train() in a loop until result['num_env_steps_sampled_lifetime'] is large enough",
    **dict.fromkeys(
        ("predict", "compute_single_action", "act", "get_action", "select_action", "choose_action", "sample"),
        _ACT,
    ),
    "compute_actions": "policy.compute_actions(observations) with policy = Policy.load(run)",
    "from_checkpoint": "Policy.load(path) to act, PPO.from_checkpoint(path) to train",
    "load": "Policy.load(path) to act, PPO.from_checkpoint(path) to train",
    "load_from_checkpoint": "Policy.load(path) to act, PPO.from_checkpoint(path) to train",
    "load_checkpoint": "algo.restore(path), or PPO.from_checkpoint(path)",
    **dict.fromkeys(("save_model", "save", "export_policy_checkpoint"), "algo.save(path)"),
    "rollouts": "env_runners(num_env_runners=…)",
    "exploration": "env_runners(explore=…); DQN has training(epsilon=…)",
    "rollout_workers": "algo.env_runner_group",
    "workers": "algo.env_runner_group",
    "set_env": "config.environment(env), before config.build()",
    "get_env": "config.env",
    "evaluate_policy": "algo.evaluate(), evaluate_checkpoint(run) or `rlzmq evaluate RUN`",
    "policy": "algo.get_module()",
    "get_parameters": "algo.get_module().state_dict()",
    "set_parameters": "algo.get_module().load_state_dict(…), then algo.sync_weights()",
    "parameters": "algo.get_module().parameters()",
    "export_model": "`rlzmq export RUN`, which writes ONNX or torch.export",
    "export_policy_model": "`rlzmq export RUN`, which writes ONNX or torch.export",
    **dict.fromkeys(
        ("replay_buffer", "replay_buffer_class", "replay_buffer_kwargs"),
        "training(replay_buffer_config={'capacity': …}), in DQN, SAC, TD3, TQC",
    ),
    **dict.fromkeys(
        ("save_replay_buffer", "load_replay_buffer"),
        "checkpointing(checkpoint_replay=True): checkpoints have it",
    ),
    "optimize_memory_usage": "nothing: a buffer stores each observation once",
    **dict.fromkeys(
        ("_init_setup_model", "monitor_wrapper", "create_eval_env", "policy_map_capacity", "observation_fn"),
        "nothing: leave it out",
    ),
    **dict.fromkeys(
        (
            "_enable_new_api_stack",
            "_enable_rl_module_api",
            "_enable_learner_api",
            "_disable_preprocessor_api",
        ),
        "nothing: only the new API stack exists",
    ),
    **dict.fromkeys(
        ("logger", "set_logger", "logger_creator", "logger_config"), "`rlzmq train --log tb`, or callbacks(…)"
    ),
    "eval_env": "evaluation(evaluation_config={'env': …})",
    "best_model_save_path": "nothing: algo.keep_checkpoints(directory) keeps the best one, too",
    "deterministic": "evaluation(evaluation_config={'explore': False})",
    "stop": "a condition in the loop, or `rlzmq train --stop`",
    "env": "algo.config.env",
    "observation_space": "algo.get_module().observation_space",
    "device": "config.learners(num_gpus_per_learner=…)",
    **dict.fromkeys(("num_timesteps", "timesteps_total"), "result['num_env_steps_sampled_lifetime']"),
    **dict.fromkeys(
        ("rollout_buffer", "rollout_buffer_class", "collect_rollouts"), "algo.env_runner_group.sample(…)"
    ),
    **dict.fromkeys(("actor", "critic", "q_net"), "algo.get_module()"),
    "forward": _ACT,
    **dict.fromkeys(
        ("model", "state_dict", "get_weights"), "algo.get_module() with algo = PPO.from_checkpoint(path)"
    ),
    "evaluation_workers": "algo.eval_env_runner_group",
    "get_config": "algo.config",
    "reset_config": "config.build(), for another config",
    **dict.fromkeys(("cleanup", "close"), "algo.stop()"),
    **dict.fromkeys(
        ("eval", "test", "evaluate"), "algo.evaluate(), evaluate_checkpoint(run) or `rlzmq evaluate RUN`"
    ),
    "import_model": "PPO.from_checkpoint(path)",
    "get_vec_normalize_env": "nothing: checkpoints have what connectors such as MeanStdFilter count",
    "set_training_mode": "nothing: a policy only acts",
    "get_initial_state": "policy.reset(), which begins with the initial state",
    "policy_frequency": "nothing, or TD3, which has policy_delay",
    **dict.fromkeys(
        ("use_sde", "use_sde_at_warmup", "sde_sample_freq"),
        "nothing: there is no state-dependent exploration",
    ),
    "optimizer": "a learner_class with configure_optimizers_for_module",
    "eps_test": "evaluation(evaluation_config={'explore': False})",
    "num_cpus_per_worker": "nothing: processes have no quota; env_runners(num_env_runners=…) sets how many there are",
    **dict.fromkeys(("step_per_epoch", "step_per_collect", "max_epoch", "n_iterations"), _LOOP),
    "tensorboard_log": "`rlzmq train --log tb`",
    "verbose": "debugging(log_level=…)",
    "callback": "callbacks(MyCallback)",
    "run": _LOOP,
    "train": _LOOP,
    "step": _LOOP,
    # -- names of Stable-Baselines3 and CleanRL --------------------------------------------------------
    **dict.fromkeys(
        (
            "make_vec_env",
            "DummyVecEnv",
            "SubprocVecEnv",
            "make_atari_env",
            "VecEnv",
            "AsyncVectorEnv",
            "SyncVectorEnv",
            "DummyVectorEnv",
            "SubprocVectorEnv",
            "ShmemVectorEnv",
        ),
        _VECTOR,
    ),
    "VecNormalize": "the connector MeanStdFilter, with env_runners(env_to_module_connector=…)",
    "VecFrameStack": "the connector FrameStackingEnvToModule, with env_runners(env_to_module_connector=…)",
    "Monitor": "nothing: results have the episodes' returns and lengths",
    "VecMonitor": "nothing: results have the episodes' returns and lengths",
    **dict.fromkeys(("RecordVideo", "VecVideoRecorder"), "`rlzmq evaluate RUN --video film.mp4`"),
    "VecTransposeImage": "nothing: the default networks take images as they are",
    **dict.fromkeys(("unwrap_wrapper", "is_wrapped"), "env.unwrapped, or env.get_wrapper_attr(name)"),
    "get_system_info": "`rlzmq doctor`",
    **dict.fromkeys(("configure", "Logger", "SummaryWriter", "wandb"), "`rlzmq train --log tb,wandb`"),
    "constant_fn": "the value itself",
    "ts2xy": "`rlzmq plot RUN…`, or the lines of metrics.jsonl",
    "ActionMasker": "an env with a Dict observation that has an action_mask",
    **dict.fromkeys(
        ("Args", "Config", "AlgorithmSpec", "DEFAULT_CONFIG"), "an algorithm's config: PPOConfig"
    ),
    "layer_init": "torch.nn.init",
    **dict.fromkeys(("Runner", "SyncDataCollector", "MultiSyncDataCollector"), "SingleAgentEnvRunner"),
    **dict.fromkeys(("GymEnv", "TransformedEnv"), _VECTOR),
    "ParallelEnv": "PettingZoo's; ParallelPettingZooEnv makes an env of several agents of it",
    **dict.fromkeys(("ProbabilisticActor", "ValueOperator", "TensorDictModule"), _NETWORKS),
    "ClipPPOLoss": "PPOConfig; a learner_class has compute_loss_for_module",
    "TensorDict": "a dict of tensors",
    **dict.fromkeys(
        ("make", "make_env", "Env"), "gymnasium's; config.environment(…) takes its ids and classes"
    ),
    **dict.fromkeys(("Trainer", "OnpolicyTrainer", "OffpolicyTrainer", "Agent"), _LOOP),
    "Collector": "SingleAgentEnvRunner",
    "VectorReplayBuffer": "EpisodeReplayBuffer",
    **dict.fromkeys(
        ("get_schedule_fn", "linear_schedule", "get_linear_fn", "LinearSchedule"),
        "a list as the value: training(lr=[(0, 3e-4), (1_000_000, 0.0)])",
    ),
    **dict.fromkeys(("set_random_seed", "seed_everything"), "debugging(seed=…)"),
    **dict.fromkeys(
        ("StopTrainingOnNoModelImprovement", "StopTrainingOnMaxEpisodes"),
        "a condition in the loop of algo.train()",
    ),
    "StopTrainingOnRewardThreshold": "a test of the return in the loop, or `rlzmq train --stop return=…`",
    **dict.fromkeys(
        ("NormalActionNoise", "OrnsteinUhlenbeckActionNoise"), "TD3Config().training(exploration_noise=…)"
    ),
    **dict.fromkeys(("results_plotter", "plot_results", "load_results"), "`rlzmq plot RUN…`"),
    "safe_mean": "numpy.mean",
    "register": "register_env",
    **dict.fromkeys(
        ("rllib", "air", "agents", "common"), "from rlzmq import PPOConfig: all names are in one module"
    ),
    "check_env": "`rlzmq check-env ENV`",
    **dict.fromkeys(("BaseCallback", "CallbackList"), "Callback"),
    "EvalCallback": "evaluation(evaluation_interval=…), or a Callback",
    "CheckpointCallback": "algo.keep_checkpoints(directory), or a Callback",
    "BaseAlgorithm": "Algorithm",
    **dict.fromkeys(
        ("MlpPolicy", "CnnPolicy", "MultiInputPolicy", "ActorCriticPolicy"),
        "nothing: the default networks fit the observation space; set them with rl_module(model_config=…)",
    ),
    "BaseFeaturesExtractor": _NETWORKS,
    "PrioritizedReplayBuffer": "PrioritizedEpisodeReplayBuffer",
    "WandbCallback": "`rlzmq train --log wandb`",
    "ProgressBarCallback": "nothing: `rlzmq train` shows its progress",
    "HParam": "nothing: a run directory has all settings",
    "HerReplayBuffer": "HindsightEpisodeReplayBuffer",
    "load_from_zoo": "`rlzmq presets`, which lists settings that are known to learn",
    **dict.fromkeys(("init", "is_initialized", "nodes"), "nothing: there is no cluster to start"),
    **dict.fromkeys(
        ("remote", "get", "put", "wait"),
        "ActorSystem, whose handles have the methods of a class in another process",
    ),
    "serve": "`rlzmq serve RUN`",
    "data": _OFFLINE,
    "shutdown": "nothing: there is no cluster; algo.stop() ends a run",
    # -- examples and utilities ---------------------------------------------------------------------
    "add_rllib_example_script_args": _OWN_LOOP,
    "run_rllib_example_script_experiment": _OWN_LOOP,
    "get_algorithm_class": "get_trainable_cls",
    "try_import_tf": "nothing: there is no TensorFlow",
    "convert_to_numpy": "tensor.detach().cpu().numpy()",
    "convert_to_torch_tensor": "torch.as_tensor(array)",
    "one_hot": "torch.nn.functional.one_hot or numpy.eye(n)[index]",
    "softmax": "torch.softmax",
    "ENV_STATE": '"state"',
    "ENCODER_OUT": '"encoder_out"',
    "TARGET_NETWORK_ACTION_DIST_INPUTS": '"target_action_dist_inputs"',
    "same_padding": "torch.nn.Conv2d(padding='same')",
    "valid_padding": "torch.nn.Conv2d(padding=0)",
    "FLOAT_MIN": "torch.finfo(torch.float32).min",
    "FLOAT_MAX": "torch.finfo(torch.float32).max",
    "explained_variance": "1 - residuals.var() / targets.var()",
    "normc_initializer": "torch.nn.init",
    "get_activation_fn": "a class of torch.nn, e.g. torch.nn.ReLU",
    "make_target_network": "copy.deepcopy(network)",
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
    "VectorMultiAgentEnv": "env.envs, which has the MultiAgentEnvs of an env runner",
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
    "WandbLoggerCallback": "RunConfig(log='wandb') or `--log wandb`",
    "MLflowLoggerCallback": "RunConfig(log='mlflow') or `--log mlflow`",
}
# Of these, what an import accepts all the same, with one warning that says what is written above: where each one is.
_HELPERS = "algorithms.rllib_helpers"
_ACCEPTED = {
    "BCCatalog",
    "Catalog",
    "DQNCatalog",
    "DEFAULT_POLICY_ID",
    "DefaultBCTorchRLModule",
    "DefaultCallbacks",
    "ENCODER_OUT",
    "ENV_STATE",
    "EnvType",
    "FLOAT_MAX",
    "FLOAT_MIN",
    "NetworkType",
    "PPOCatalog",
    "PPOTorchRLModule",
    "PolicySpec",
    "SACCatalog",
    "SampleBatch",
    "TARGET_NETWORK_ACTION_DIST_INPUTS",
    "VectorMultiAgentEnv",
    "batch",
    "convert_to_numpy",
    "convert_to_torch_tensor",
    "flatten_space",
    "get_activation_fn",
    "make_target_network",
    "normc_initializer",
    "one_hot",
    "resize",
    "same_padding",
    "softmax",
    "try_import_tf",
    "update_global_seed_if_necessary",
    "valid_padding",
    "wrap_atari_for_new_api_stack",
}
_BY_ENDING = {  # whole families
    "Catalog": _NETWORKS,
    "Extractor": _NETWORKS,
    "CNN": _NETWORKS,
    "EncoderConfig": _NETWORKS,
    "HeadConfig": _NETWORKS,
    "Policy": "Policy.load(run) to act, an algorithm's config to train: PPOConfig",  # Tianshou's PPOPolicy
    "Agent": "an algorithm's config: PPOConfig",
}

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
        return _HELPERS, name
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


def missing_key(key: str) -> str:
    """Return the text of a result's KeyError."""
    path = instead_of_key(key)
    return key if path is None else f"{key}. Instead: result[{']['.join(map(repr, path.split('/')))}]"


_MAX_CHARS = 200


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
    # Comparing takes as long as the name, which may be a peer's, is long.
    close = difflib.get_close_matches(str(name)[:_MAX_CHARS], names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
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
            instead = instead_of(name)
            more = f". Instead: {instead}." if instead else ""
            text = f"type object {cls.__name__!r} has no attribute {name!r}{more}"
            raise AttributeError(text, name=name, obj=cls)


class AnswersSynonyms(metaclass=SynonymsOfClass):
    """Base class of objects that answer other libraries' words: ``algo.learn``."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("__") and any(name in vars(base) for base in type(self).__mro__):
                return object.__getattribute__(self, name)  # a property: its own AttributeError
            instead = instead_of(name)
            more = f". Instead: {instead}." if instead else ""
            text = f"{type(self).__name__!r} object has no attribute {name!r}{more}"
            raise AttributeError(text, name=name, obj=self)
