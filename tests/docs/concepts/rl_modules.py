"""RL modules: one of one's own with three forward methods, and a MultiRLModule with a shared encoder."""

import gymnasium as gym
import torch

from rlzmq import (
    Columns,
    MultiRLModule,
    MultiRLModuleSpec,
    PPOConfig,
    RLModuleSpec,
    TorchCategorical,
    TorchRLModule,
    ValueFunctionAPI,
)
from rlzmq.envs.examples import MultiAgentCartPole

env = gym.make("CartPole-v1")


class MyTorchPolicy(TorchRLModule, ValueFunctionAPI):
    def setup(self):
        super().setup()
        input_dim = self.observation_space.shape[0]
        hidden_dim = self.model_config["fcnet_hiddens"][0]
        output_dim = self.action_space.n
        assert self.inference_only in (True, False)
        self.action_dist_cls = TorchCategorical
        self._pi_head = torch.nn.Sequential(
            torch.nn.Linear(input_dim, hidden_dim), torch.nn.ReLU(), torch.nn.Linear(hidden_dim, output_dim)
        )
        self._values = torch.nn.Linear(input_dim, 1)

    def _forward_inference(self, batch, **kwargs):
        with torch.no_grad():
            return {Columns.ACTIONS: torch.argmax(self._pi_head(batch[Columns.OBS]), dim=-1)}

    def _forward_exploration(self, batch, **kwargs):
        logits = self._pi_head(batch[Columns.OBS])
        actions = TorchCategorical.from_logits(logits).sample()
        return {Columns.ACTIONS: actions, Columns.ACTION_DIST_INPUTS: logits}

    def _forward_train(self, batch, **kwargs):
        return {Columns.ACTION_DIST_INPUTS: self._pi_head(batch[Columns.OBS])}

    def compute_values(self, batch, embeddings=None):
        return self._values(batch[Columns.OBS]).squeeze(-1)


config = (
    PPOConfig()
    .environment(MultiAgentCartPole, env_config={"num_agents": 2})
    .env_runners(num_env_runners=0)
    .multi_agent(policies={"p0", "p1"}, policy_mapping_fn=lambda agent_id, episode, **kw: f"p{agent_id}")
    .rl_module(
        rl_module_spec=MultiRLModuleSpec(
            rl_module_specs={
                "p0": RLModuleSpec(module_class=MyTorchPolicy, model_config={"fcnet_hiddens": [32, 32]}),
                "p1": RLModuleSpec(module_class=MyTorchPolicy, model_config={"fcnet_hiddens": [128, 128]}),
            }
        )
    )
)
ppo = config.build()
assert isinstance(ppo.get_module("p0"), MyTorchPolicy)
ppo.train()
ppo.stop()

assert ValueFunctionAPI in PPOConfig().get_default_learner_class().rl_module_required_apis()


# a MultiRLModule of one's own: two heads on one encoder
class Encoder(TorchRLModule):
    def setup(self):
        self.net = torch.nn.Linear(self.observation_space.shape[0], self.model_config["embedding_dim"])

    def _forward(self, batch, **kwargs):
        return {"encoder_embeddings": self.net(batch[Columns.OBS])}


class Head(TorchRLModule):
    def setup(self):
        self.net = torch.nn.Linear(self.model_config["embedding_dim"], self.action_space.n)

    def _forward(self, batch, **kwargs):
        return {Columns.ACTION_DIST_INPUTS: self.net(batch["encoder_embeddings"])}


class SharedEncoder(MultiRLModule):
    def setup(self):
        super().setup()
        self.encoder = self._rl_modules["encoder"]

    def _forward(self, batch, forward_type="", **kwargs):
        outputs = {}
        for policy_id, policy_batch in batch.items():
            policy_batch = dict(policy_batch)
            policy_batch.update(self.encoder._forward(policy_batch))
            outputs[policy_id] = self._rl_modules[policy_id]._forward(policy_batch)
        return outputs

    def _forward_inference(self, batch, **kwargs):
        return self._forward(batch, "_forward_inference", **kwargs)

    def _forward_exploration(self, batch, **kwargs):
        return self._forward(batch, "_forward_exploration", **kwargs)

    def _forward_train(self, batch, **kwargs):
        return self._forward(batch, "_forward_train", **kwargs)


space = {"observation_space": env.observation_space, "action_space": env.action_space}
spec = MultiRLModuleSpec(
    multi_rl_module_class=SharedEncoder,
    rl_module_specs={
        "encoder": RLModuleSpec(module_class=Encoder, model_config={"embedding_dim": 8}, **space),
        "p0": RLModuleSpec(module_class=Head, model_config={"embedding_dim": 8}, **space),
        "p1": RLModuleSpec(module_class=Head, model_config={"embedding_dim": 8}, **space),
    },
)
multi = spec.build()
outputs = multi.forward_train({"p0": {"obs": torch.zeros(3, 4)}, "p1": {"obs": torch.zeros(2, 4)}})
assert outputs["p1"]["action_dist_inputs"].shape == (2, 2)
