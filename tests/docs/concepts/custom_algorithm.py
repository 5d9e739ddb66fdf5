"""An algorithm of one's own: config, module, learner and training step in RLlib's form, and PPO's step by hand."""

import torch

from rlzmq import (
    ALL_MODULES,
    ENV_RUNNER_RESULTS,
    ENV_RUNNER_SAMPLING_TIMER,
    LEARNER_RESULTS,
    LEARNER_UPDATE_TIMER,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_MODULE_STEPS_TRAINED_LIFETIME,
    PPO,
    SYNCH_WORKER_WEIGHTS_TIMER,
    TIMERS,
    Algorithm,
    AlgorithmConfig,
    Columns,
    ComputeReturnsToGo,
    Learner,
    NotProvided,
    PPOConfig,
    RLModuleSpec,
    TorchLearner,
    TorchRLModule,
    override,
    synchronous_parallel_sample,
)
from rlzmq.envs.examples import MultiAgentCartPole


class VPGTorchRLModule(TorchRLModule):
    def setup(self):
        self._policy_net = torch.nn.Sequential(
            torch.nn.Linear(self.observation_space.shape[0], self.model_config["hidden_dim"]),
            torch.nn.ReLU(),
            torch.nn.Linear(self.model_config["hidden_dim"], self.action_space.n),
        )

    def _forward(self, batch, **kwargs):
        return {Columns.ACTION_DIST_INPUTS: self._policy_net(batch[Columns.OBS])}


class VPGTorchLearner(TorchLearner):
    @override(TorchLearner)
    def build(self):
        super().build()
        if self.config.add_default_connectors_to_learner_pipeline:
            self._learner_connector.prepend(ComputeReturnsToGo(gamma=self.config.gamma))

    @override(TorchLearner)
    def configure_optimizers(self):
        params = [p for module in self.module.values() for p in module.parameters()]
        self.register_optimizer(
            optimizer_name="shared_optimizer",
            optimizer=torch.optim.Adam(params=params),
            params=params,
            lr_or_lr_schedule=self.config.lr,
        )

    @override(TorchLearner)
    def compute_loss_for_module(self, *, module_id, config, batch, fwd_out):
        action_dist_class = self.module[module_id].get_train_action_dist_cls()
        action_dist = action_dist_class.from_logits(fwd_out[Columns.ACTION_DIST_INPUTS])
        log_probs = action_dist.logp(batch[Columns.ACTIONS])
        for act, ret_to_go in zip(batch[Columns.ACTIONS], batch[Columns.RETURNS_TO_GO], strict=True):
            self.metrics.log_value(
                key=(module_id, f"action_{act}_return_to_go_mean"), value=ret_to_go, reduce="mean"
            )
        return -torch.mean(log_probs * batch[Columns.RETURNS_TO_GO])

    @override(Learner)
    def after_gradient_based_update(self, *, timesteps):
        if self.config.report_mean_weights:
            for module_id in self.module.keys():  # noqa: SIM118
                parameters = self.get_parameters(self.module[module_id])
                mean = float(torch.stack([w.mean() for w in parameters]).mean())
                self.metrics.log_value((module_id, "mean_weight"), mean, window=1)


class VPGConfig(AlgorithmConfig):
    report_mean_weights: bool = True

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class or VPG)
        self.num_episodes_per_train_batch = 4
        self.batch_mode = "complete_episodes"
        self.num_env_runners = 1

    @override(AlgorithmConfig)
    def training(self, *, num_episodes_per_train_batch=NotProvided, **kwargs):
        super().training(**kwargs)
        if num_episodes_per_train_batch is not NotProvided:
            self.num_episodes_per_train_batch = num_episodes_per_train_batch
        return self

    @override(AlgorithmConfig)
    def get_default_rl_module_spec(self):
        assert self.framework_str == "torch"
        return RLModuleSpec(module_class=VPGTorchRLModule, model_config={"hidden_dim": 16})

    @override(AlgorithmConfig)
    def get_default_learner_class(self):
        return VPGTorchLearner


class VPG(Algorithm):
    @classmethod
    @override(Algorithm)
    def get_default_config(cls):
        return VPGConfig()

    @override(Algorithm)
    def training_step(self):
        with self.metrics.log_time((TIMERS, ENV_RUNNER_SAMPLING_TIMER)):
            episodes, env_runner_results = self._sample_episodes()
        self.metrics.aggregate(env_runner_results, key=ENV_RUNNER_RESULTS)
        self.metrics.log_value(
            "episode_timesteps_sampled_mean_win100", sum(map(len, episodes)), reduce="mean", window=100
        )
        self.metrics.log_value("episode_timesteps_sampled_ema", sum(map(len, episodes)), ema_coeff=0.1)

        with self.metrics.log_time((TIMERS, LEARNER_UPDATE_TIMER)):
            learner_results = self.learner_group.update(
                episodes=episodes,
                timesteps={
                    NUM_ENV_STEPS_SAMPLED_LIFETIME: self.metrics.peek(
                        (ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME)
                    )
                },
            )
        self.metrics.aggregate(learner_results, key=LEARNER_RESULTS)

        with self.metrics.log_time((TIMERS, SYNCH_WORKER_WEIGHTS_TIMER)):
            self.env_runner_group.sync_weights(
                from_worker_or_learner_group=self.learner_group, inference_only=True
            )

    def _sample_episodes(self):
        num_episodes_per_env_runner = self.config.num_episodes_per_train_batch // (
            self.config.num_env_runners or 1
        )
        sampled_data = self.env_runner_group.foreach_env_runner(
            lambda env_runner: (
                env_runner.sample(num_episodes=num_episodes_per_env_runner),
                env_runner.get_metrics(),
            ),
            local_env_runner=self.env_runner_group.num_remote_workers() <= 0,
        )
        episodes = [episode for of_runner, _ in sampled_data for episode in of_runner]
        return episodes, [metrics for _, metrics in sampled_data]


config = (
    VPGConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=2)
    .learners(num_learners=1)
    .training(num_episodes_per_train_batch=4, lr=0.001)
)
algo = config.build_algo()
for iteration in (1, 2):
    result = algo.train()
    env_runners, learner = result["env_runners"], result["learners"]["default_policy"]
    assert env_runners["num_episodes"] == 4
    assert env_runners["num_episodes_lifetime"] == 4 * iteration
    assert result["num_env_steps_sampled_lifetime"] == env_runners["num_env_steps_sampled_lifetime"] > 0
    assert result["num_env_steps_trained_lifetime"] == result["num_env_steps_sampled_lifetime"]
    assert result["accounting"]["sampled"] == result["accounting"]["trained"]
    assert env_runners["num_env_steps_sampled"] == result["learners"][ALL_MODULES]["num_env_steps_trained"]
    assert {"mean_weight", "action_0_return_to_go_mean", "total_loss"} <= learner.keys()
    assert result["timers"]["synch_weights"] > 0.0
    assert result["episode_timesteps_sampled_mean_win100"] >= 4
algo.stop()


class PPOByHand(PPO):
    @override(PPO)
    def training_step(self):
        episodes, env_runner_results = synchronous_parallel_sample(
            worker_set=self.env_runner_group,
            max_env_steps=self.config.total_train_batch_size,
            sample_timeout_s=self.config.sample_timeout_s,
            _uses_new_env_runners=True,
            _return_metrics=True,
        )
        self.metrics.aggregate(env_runner_results, key=ENV_RUNNER_RESULTS)
        key = (LEARNER_RESULTS, ALL_MODULES, NUM_MODULE_STEPS_TRAINED_LIFETIME)
        learner_results = self.learner_group.update(
            episodes=list(episodes),
            timesteps={
                NUM_ENV_STEPS_SAMPLED_LIFETIME: self.metrics.peek(
                    (ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME)
                ),
                NUM_MODULE_STEPS_TRAINED_LIFETIME: self.metrics.peek(key, default=0),
            },
            num_epochs=self.config.num_epochs,
            minibatch_size=self.config.minibatch_size,
            shuffle_batch_per_epoch=self.config.shuffle_batch_per_epoch,
        )
        self.metrics.aggregate(learner_results, key=LEARNER_RESULTS)
        modules_to_update = set(learner_results[0].keys()) - {ALL_MODULES}
        self.env_runner_group.sync_weights(
            from_worker_or_learner_group=self.learner_group, policies=modules_to_update, inference_only=True
        )
        self.env_runner_group.sync_env_runner_states(
            config=self.config,
            env_steps_sampled=self.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME)),
        )


config = (
    PPOConfig(algo_class=PPOByHand)
    .environment(MultiAgentCartPole, env_config={"num_agents": 2})
    .env_runners(num_env_runners=2)
    .multi_agent(policies={"p0", "p1"}, policy_mapping_fn=lambda agent_id, episode, **kw: f"p{agent_id}")
)
algo = config.build()
for iteration in (1, 2):
    result = algo.train()
    assert result["env_runners"]["num_agent_steps_sampled_lifetime"].keys() == {"0", "1"}
    assert result["learners"]["p1"]["num_module_steps_trained_lifetime"] > 0
    assert result["num_env_steps_sampled_lifetime"] >= 256 * iteration
weights = algo.learner_group.get_weights()["p0"]
for of_runner in algo.env_runner_group.foreach_env_runner(lambda runner: runner.module["p0"].get_state()):
    assert all((array == weights[name]).all() for name, array in of_runner.items())

lists = synchronous_parallel_sample(
    worker_set=algo.env_runner_group, _uses_new_env_runners=True, concat=False
)
assert len(lists) == 2
algo.stop()
