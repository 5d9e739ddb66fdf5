"""Names in states and results, with RLlib's spelling: components of checkpoints, keys of the results of `train`.

docs/metrics.md explains the keys.
"""

# -- components of a checkpoint -----------------------------------------------------------------

COMPONENT_ENV_RUNNER = "env_runner"
COMPONENT_ENV_TO_MODULE_CONNECTOR = "env_to_module_connector"
COMPONENT_EVAL_ENV_RUNNER = "eval_env_runner"
COMPONENT_LEARNER = "learner"
COMPONENT_LEARNER_GROUP = "learner_group"
COMPONENT_MODULE_TO_ENV_CONNECTOR = "module_to_env_connector"
COMPONENT_OPTIMIZER = "optimizer"
COMPONENT_RL_MODULE = "rl_module"
LEARNER_PATH = f"{COMPONENT_LEARNER_GROUP}/{COMPONENT_LEARNER}"

# -- parts of a result --------------------------------------------------------------------------

ALL_MODULES = "__all_modules__"
BATCH_SOURCE = "batch_source"
ENV_RUNNER_RESULTS = "env_runners"
EVALUATION_RESULTS = "evaluation"
FAULT_TOLERANCE_STATS = "fault_tolerance"
LEARNER_RESULTS = "learners"
REPLAY_BUFFER_RESULTS = "replay_buffer"
TIMERS = "timers"
TIME_TOTAL_S = "time_total_s"
TRAINING_ITERATION = "training_iteration"

# -- episodes -----------------------------------------------------------------------------------

EPISODE_DURATION_SEC_MEAN = "episode_duration_sec_mean"
EPISODE_LEN_MAX = "episode_len_max"
EPISODE_LEN_MEAN = "episode_len_mean"
EPISODE_LEN_MIN = "episode_len_min"
EPISODE_RETURN_MAX = "episode_return_max"
EPISODE_RETURN_MEAN = "episode_return_mean"
EPISODE_RETURN_MIN = "episode_return_min"
NUM_EPISODES = "num_episodes"
NUM_EPISODES_LIFETIME = "num_episodes_lifetime"

# -- counters -----------------------------------------------------------------------------------

DIFF_NUM_GRAD_UPDATES_VS_SAMPLER_POLICY = "diff_num_grad_updates_vs_sampler_policy"
MODULE_TRAIN_BATCH_SIZE_MEAN = "module_train_batch_size_mean"
NUM_AGENT_STEPS_SAMPLED = "num_agent_steps_sampled"
NUM_AGENT_STEPS_SAMPLED_LIFETIME = "num_agent_steps_sampled_lifetime"
NUM_ENV_STEPS_SAMPLED = "num_env_steps_sampled"
NUM_ENV_STEPS_SAMPLED_LIFETIME = "num_env_steps_sampled_lifetime"
NUM_ENV_STEPS_TRAINED = "num_env_steps_trained"
NUM_ENV_STEPS_TRAINED_LIFETIME = "num_env_steps_trained_lifetime"
NUM_MODULE_STEPS_SAMPLED = "num_module_steps_sampled"
NUM_MODULE_STEPS_SAMPLED_LIFETIME = "num_module_steps_sampled_lifetime"
NUM_MODULE_STEPS_TRAINED = "num_module_steps_trained"
NUM_MODULE_STEPS_TRAINED_LIFETIME = "num_module_steps_trained_lifetime"
NUM_TRAINABLE_PARAMETERS = "num_trainable_parameters"
WEIGHTS_SEQ_NO = "weights_seq_no"

# -- timers -------------------------------------------------------------------------------------

ENV_RESET_TIMER = "env_reset_timer"
ENV_RUNNER_SAMPLING_TIMER = "env_runner_sampling_timer"
ENV_STEP_TIMER = "env_step_timer"
ENV_TO_MODULE_CONNECTOR = "env_to_module_connector"
LEARNER_CONNECTOR = "learner_connector"
LEARNER_UPDATE_TIMER = "learner_update_timer"
MODULE_TO_ENV_CONNECTOR = "module_to_env_connector"
RLMODULE_INFERENCE_TIMER = "rlmodule_inference_timer"
SYNCH_WORKER_WEIGHTS_TIMER = "synch_weights"
TRAINING_ITERATION_TIMER = "training_iteration"
TRAINING_STEP_TIMER = "training_step"
