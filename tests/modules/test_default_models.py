"""Default models: every supported pair of spaces, image sizes, memory, masks, value branches."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from rlzmq.config.model_config import DefaultModelConfig
from rlzmq.core.errors import ConfigurationError, UnsupportedSpaceError
from rlzmq.core.tree import tree_leaves, tree_map
from rlzmq.episodes.columns import Columns
from rlzmq.modules.default_models.actor_critic import DefaultActorCriticModule, acting_chain
from rlzmq.modules.default_models.encoders import MLP
from rlzmq.modules.default_models.image_encoders import build_encoder, default_conv_filters
from rlzmq.modules.spec import RLModuleSpec
from tests.support.losses import assert_close

SMALL = {"fcnet_hiddens": [8, 8], "fusionnet_hiddens": [8], "lstm_cell_size": 6}
VECTOR = gym.spaces.Box(-1.0, 1.0, (4,))
TWO = gym.spaces.Discrete(2)

OBSERVATIONS: dict[str, gym.Space[Any]] = {
    "box1": VECTOR,
    "box0": gym.spaces.Box(-1.0, 1.0, ()),
    "box2": gym.spaces.Box(-1.0, 1.0, (3, 5)),
    "bytes2_small": gym.spaces.Box(0, 255, (4, 4), np.uint8),
    "grey": gym.spaces.Box(0, 255, (20, 17), np.uint8),
    "image": gym.spaces.Box(0, 255, (12, 10, 3), np.uint8),
    "image_float": gym.spaces.Box(0.0, 1.0, (9, 9, 2)),
    "frames_first": gym.spaces.Box(0, 255, (4, 20, 24), np.uint8),
    "discrete": gym.spaces.Discrete(5),
    "discrete_start": gym.spaces.Discrete(3, start=-1),
    "multi_discrete": gym.spaces.MultiDiscrete([3, 2, 4]),
    "multi_binary": gym.spaces.MultiBinary(5),
    "multi_binary2": gym.spaces.MultiBinary([2, 3]),
    "dict": gym.spaces.Dict({"b": VECTOR, "a": gym.spaces.Discrete(3)}),
    "tuple": gym.spaces.Tuple([gym.spaces.MultiBinary(2), gym.spaces.Box(0, 1, (2, 2))]),
    "nested_with_image": gym.spaces.Dict(
        {
            "camera": gym.spaces.Box(0, 255, (10, 10, 3), np.uint8),
            "rest": gym.spaces.Tuple([VECTOR, gym.spaces.Dict({"k": gym.spaces.Discrete(4)})]),
        }
    ),
    "two_images": gym.spaces.Tuple([gym.spaces.Box(0, 255, (8, 8, 1), np.uint8)] * 2),
}
ACTIONS: list[gym.Space[Any]] = [
    gym.spaces.Discrete(3),
    gym.spaces.MultiDiscrete([2, 3]),
    gym.spaces.Box(-1.0, 1.0, (2,)),
    gym.spaces.Dict({"x": gym.spaces.Box(-1.0, 1.0, (2,)), "n": gym.spaces.Tuple([TWO, TWO])}),
]


def batch_of(space: gym.Space[Any], *lead: int) -> Any:
    if len(lead) > 1:
        parts = [batch_of(space, *lead[1:]) for _ in range(lead[0])]
        return tree_map(lambda *leaves: torch.stack(leaves), *parts)
    items = [space.sample() for _ in range(lead[0])]
    return tree_map(lambda *leaves: torch.from_numpy(np.stack(leaves)), *items)


def take(tree: Any, index: Any) -> Any:
    return tree_map(lambda leaf: leaf[index], tree)


def expand(state: Any, num_rows: int) -> Any:
    return tree_map(lambda leaf: leaf.expand(num_rows, *leaf.shape).contiguous(), state)


def build(
    obs: gym.Space[Any], act: gym.Space[Any] = TWO, *, inference_only: bool = False, **config: Any
) -> Any:
    return RLModuleSpec(
        observation_space=obs,
        action_space=act,
        inference_only=inference_only,
        model_config={**SMALL, **config},
    ).build(seed=0)


@pytest.mark.parametrize("name", OBSERVATIONS)
@pytest.mark.parametrize("use_lstm", [False, True])
def test_every_observation_space_has_a_model_that_sees_every_part(name: str, use_lstm: bool) -> None:
    space = OBSERVATIONS[name]
    space.seed(0)
    module = build(space, use_lstm=use_lstm)
    lead = (2, 3) if use_lstm else (5,)
    batch = {Columns.OBS: batch_of(space, *lead)}
    if use_lstm:
        batch[Columns.STATE_IN] = {"h": torch.zeros(2, 6), "c": torch.zeros(2, 6)}
    out = module.forward_train(batch)
    assert out[Columns.ACTION_DIST_INPUTS].shape == (*lead, 2)
    values = module.compute_values(batch)
    assert values.shape == lead
    assert_close(module.compute_values(batch, embeddings=out[Columns.EMBEDDINGS]), values)
    (values.sum() + out[Columns.ACTION_DIST_INPUTS][..., 0].sum()).backward()
    assert all(p.grad is not None for p in module.parameters())
    acting = module.forward_exploration(batch)
    assert_close(
        acting[Columns.ACTION_DIST_INPUTS], out[Columns.ACTION_DIST_INPUTS].detach(), rtol=1e-4, atol=1e-6
    )
    assert Columns.EMBEDDINGS not in acting


@pytest.mark.parametrize("name", [n for n in OBSERVATIONS if n not in ("box0",)])
def test_rows_do_not_mix_and_a_time_dimension_is_only_more_rows(name: str) -> None:
    space = OBSERVATIONS[name]
    space.seed(1)
    encoder = build_encoder(space, DefaultModelConfig.from_dict(SMALL)).eval()
    obs = batch_of(space, 3, 2)
    with torch.no_grad():
        whole = encoder(obs)
        for b in range(3):
            assert_close(encoder(take(obs, b)), whole[b], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [(1, 1), (2, 9), (13, 64), (63, 65), (210, 160)])
def test_images_of_any_size_shrink_to_a_small_map(size: tuple[int, int]) -> None:
    filters = default_conv_filters(*size)
    assert 2 <= len(filters) <= 5
    space = gym.spaces.Box(0, 255, (*size, 3), np.uint8)
    encoder = build_encoder(space, DefaultModelConfig(fcnet_hiddens=[8]))
    convolved = encoder.dense.input_dim  # type: ignore[union-attr]
    assert convolved <= 64 * 7 * 7
    assert encoder(torch.zeros(2, *size, 3, dtype=torch.uint8)).shape == (2, 8)


@pytest.mark.parametrize("shape", [(84, 84, 4), (4, 84, 84)])
def test_frames_of_84_by_84_get_the_filters_of_the_nature_paper(shape: tuple[int, ...]) -> None:
    encoder: Any = build_encoder(
        gym.spaces.Box(0, 255, shape, np.uint8), DefaultModelConfig(fcnet_hiddens=[512])
    )
    channels = min(shape)
    found = [
        (conv.out_channels, conv.in_channels, conv.kernel_size[0], conv.stride[0]) for conv in encoder.convs
    ]
    assert found == [(32, channels, 8, 4), (64, 32, 4, 2), (64, 64, 3, 1)]
    assert (encoder.dense.input_dim, encoder.output_dim) == (64 * 7 * 7, 512)
    assert encoder(torch.zeros(2, *shape, dtype=torch.uint8)).shape == (2, 512)


def test_integer_pixels_are_scaled_by_the_upper_bound() -> None:
    config = DefaultModelConfig(conv_filters=[[4, 3, 1], [4, [3, 2], [2, 1]]])
    encoder = build_encoder(gym.spaces.Box(0, 255, (6, 5, 3), np.uint8), config)
    floats = build_encoder(gym.spaces.Box(0.0, 1.0, (6, 5, 3)), config)
    floats.load_state_dict(encoder.state_dict())
    image = torch.randint(0, 256, (2, 6, 5, 3), dtype=torch.uint8)
    assert_close(encoder(image), floats(image / 255.0))
    assert encoder(image).shape == (2, 4 * 3 * 5)  # given filters: no dense layer after them


@pytest.mark.parametrize("entry", [[8, 3], [8, 0, 1], "conv", [8, 3, 1, "full"]])
def test_malformed_conv_filters_are_refused(entry: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"conv_filters'\]\[1\]: expected"):
        build(OBSERVATIONS["image"], conv_filters=[[8, 3, 1], entry])


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("num_rows", [3, 1000])
def test_memory_step_by_step_equals_the_whole_sequence(share: bool, num_rows: int) -> None:
    module = build(VECTOR, use_lstm=True, vf_share_layers=share)
    state = expand(module.get_initial_state(), num_rows)
    obs = torch.randn(num_rows, 5, 4)
    whole = module.forward_train({Columns.OBS: obs, Columns.STATE_IN: state})
    for t in range(5):
        out = module.forward_exploration({Columns.OBS: obs[:, t : t + 1], Columns.STATE_IN: state})
        assert_close(
            out[Columns.ACTION_DIST_INPUTS][:, 0],
            whole[Columns.ACTION_DIST_INPUTS][:, t].detach(),
            rtol=1e-4,
            atol=1e-5,
        )
        state = out[Columns.STATE_OUT]
    assert_close(state, tree_map(torch.Tensor.detach, whole[Columns.STATE_OUT]), rtol=1e-4, atol=1e-5)


# -- value branch and inference-only copies --------------------------------------------------------


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("use_lstm", [True, False])
def test_an_inference_only_copy_acts_the_same(share: bool, use_lstm: bool) -> None:
    full = build(VECTOR, vf_share_layers=share, use_lstm=use_lstm)
    acting = build(VECTOR, vf_share_layers=share, use_lstm=use_lstm, inference_only=True)
    assert not hasattr(acting, "vf")
    assert hasattr(acting, "vf_encoder") == (use_lstm or share)  # None if shared; memory is kept up
    acting.set_state(full.get_state(inference_only=True))
    batch: dict[str, Any] = {Columns.OBS: torch.randn(2, 1, 4) if use_lstm else torch.randn(2, 4)}
    if use_lstm:
        batch[Columns.STATE_IN] = expand(full.get_initial_state(), 2)
    assert acting.is_stateful() == use_lstm
    assert_close(acting.forward_exploration(batch), full.forward_exploration(batch))
    with pytest.raises(RuntimeError, match="has no value function"):
        acting.compute_values(batch)


def test_full_and_inference_only_modules_start_with_the_same_policy() -> None:
    full, acting = (
        build(VECTOR, vf_share_layers=False),
        build(VECTOR, vf_share_layers=False, inference_only=True),
    )
    np.testing.assert_equal(full.get_state(inference_only=True), acting.get_state())


def test_a_separate_value_branch_shares_no_parameter() -> None:
    module = build(VECTOR, vf_share_layers=False)
    module.compute_values({Columns.OBS: torch.randn(3, 4)}).sum().backward()
    with_gradient = {name.split(".")[0] for name, p in module.named_parameters() if p.grad is not None}
    assert with_gradient == {"vf", "vf_encoder"}


def test_the_first_policy_is_about_uniform() -> None:
    logits = build(VECTOR).forward_inference({Columns.OBS: torch.randn(50, 4)})[Columns.ACTION_DIST_INPUTS]
    assert float(logits.abs().max()) < 0.05


# -- log standard deviations ----------------------------------------------------------------------


def test_log_std_is_clamped_in_every_box_part_and_nowhere_else() -> None:
    space = gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Box(-1, 1, (1,))])
    module = build(VECTOR, space, log_std_clip_param=0.5, head_fcnet_kernel_initializer="zeros_")
    with torch.no_grad():
        module.pi.layers[-1].bias.copy_(torch.tensor([9.0, -9.0, 9.0, 9.0]))
    out = module.forward_inference({Columns.OBS: torch.zeros(1, 4)})
    assert out[Columns.ACTION_DIST_INPUTS].tolist() == [[9.0, -9.0, 9.0, 0.5]]
    assert not any("_low" in name or "_high" in name for name in module.state_dict())
    with pytest.raises(ConfigurationError, match="log_std_clip_param"):
        build(VECTOR, space, log_std_clip_param=-1.0)


def test_free_log_std_is_a_parameter() -> None:
    space = gym.spaces.Box(-1, 1, (2,))
    module = build(VECTOR, space, free_log_std=True)
    out = module.forward_train({Columns.OBS: torch.randn(3, 4)})[Columns.ACTION_DIST_INPUTS]
    assert out.shape == (3, 4)
    assert torch.equal(out[:, 2:], torch.zeros(3, 2))
    out[:, 2:].sum().backward()
    assert module.pi.log_std.grad.tolist() == [3.0, 3.0]
    assert build(VECTOR, space, free_log_std=True, log_std_init=-2.0).pi.log_std.tolist() == [-2.0, -2.0]
    with pytest.raises(ConfigurationError, match=r"free_log_std.*Box of floats, got Discrete"):
        build(VECTOR, TWO, free_log_std=True)


# -- action masks ---------------------------------------------------------------------------------

MASK = gym.spaces.MultiBinary(3)
THREE = gym.spaces.Discrete(3)


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Dict({"observations": VECTOR, "action_mask": MASK}),
        gym.spaces.Dict({"observation": VECTOR, "action_mask": gym.spaces.Box(0, 1, (3,), np.int8)}),
        gym.spaces.Dict({"a": VECTOR, "b": TWO, "action_mask": gym.spaces.Box(0.0, 1.0, (3,))}),
        gym.spaces.Dict(
            {
                "_orig_obs": gym.spaces.Dict({"a": VECTOR, "b": TWO, "action_mask": MASK}),
                "prev_n_rewards": gym.spaces.Box(-1.0, 1.0, (1,)),
            }
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("use_lstm", [False, True])
def test_masked_actions_are_never_taken(space: gym.spaces.Dict, use_lstm: bool) -> None:
    space.seed(0)
    module = build(space, THREE, use_lstm=use_lstm)
    lead = (8, 1) if use_lstm else (8,)
    obs = batch_of(space, *lead)
    inner = obs.get("_orig_obs", obs)
    mask = torch.tensor([1, 0, 1]).expand(*lead, 3)
    inner["action_mask"] = mask.to(inner["action_mask"].dtype)
    batch = {Columns.OBS: obs}
    if use_lstm:
        batch[Columns.STATE_IN] = expand(module.get_initial_state(), 8)
    logits = module.forward_exploration(batch)[Columns.ACTION_DIST_INPUTS]
    dist = module.get_exploration_action_dist_cls().from_logits(logits)
    rng = torch.Generator().manual_seed(0)
    assert not any(bool((dist.sample(generator=rng) == 1).any()) for _ in range(50))
    assert module.compute_values(batch).shape == lead
    train = module.forward_train(batch)[Columns.ACTION_DIST_INPUTS]
    module.get_train_action_dist_cls().from_logits(train).entropy().sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in module.parameters() if p.grad is not None)


def test_a_mask_for_several_choices() -> None:
    space = gym.spaces.Dict({"observations": VECTOR, "action_mask": gym.spaces.MultiBinary(5)})
    module = build(space, gym.spaces.MultiDiscrete([2, 3]))
    obs = {"observations": torch.randn(40, 4), "action_mask": torch.tensor([0, 1, 1, 1, 0]).expand(40, 5)}
    logits = module.forward_exploration({Columns.OBS: obs})[Columns.ACTION_DIST_INPUTS]
    actions = module.get_exploration_action_dist_cls().from_logits(logits).sample()
    assert set(actions[:, 0].tolist()) == {1}
    assert set(actions[:, 1].tolist()) <= {0, 1}


def test_a_mask_of_the_wrong_size_or_alone_is_refused() -> None:
    space = gym.spaces.Dict({"observations": VECTOR, "action_mask": gym.spaces.MultiBinary(4)})
    with pytest.raises(ConfigurationError, match=r"4 numbers, .*Discrete.3. has 3 choices"):
        build(space, THREE)
    with pytest.raises(ConfigurationError, match="an action mask and nothing else"):
        build(gym.spaces.Dict({"action_mask": MASK}), THREE)


# -- errors and odds --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "named"),
    [
        (gym.spaces.Text(4), "the observation space is Text"),
        (gym.spaces.Tuple([gym.spaces.Sequence(VECTOR)]), r"part \[0\] of the observation space is Sequence"),
        (gym.spaces.Box(0, 1, (2, 3, 4, 5)), "Box of 4 dimensions"),
    ],
)
def test_unsupported_observations_are_named_with_a_way_out(space: gym.Space[Any], named: str) -> None:
    with pytest.raises(UnsupportedSpaceError, match=named) as caught:
        build(space)
    assert "SingleAgentObservationPreprocessor" in str(caught.value)
    assert "RLModuleSpec(module_class" in str(caught.value)


@pytest.mark.parametrize(
    ("space", "obs", "text"),
    [
        (VECTOR, torch.zeros(5, 3), r"obs is of shape \(5, 3\), expected \[batch, 4\]"),
        (OBSERVATIONS["dict"], {"b": torch.zeros(2, 4)}, r"obs\['a'\] is missing.*Discrete\(3\)"),
        (OBSERVATIONS["dict"], torch.zeros(2, 4), r"obs\['a'\] is missing"),
    ],
)
def test_observations_that_do_not_fit_are_errors_at_the_call(space: Any, obs: Any, text: str) -> None:
    module = build(space)
    for forward in (module.forward_exploration, module.forward_train):
        with pytest.raises(ValueError, match=r"\(DefaultActorCriticModule\): " + text):
            forward({Columns.OBS: obs})


def test_a_stateful_module_says_what_the_batch_lacks() -> None:
    module = build(VECTOR, use_lstm=True)
    with pytest.raises(ValueError, match=r"no column 'state_in', only \['obs'\]"):
        module.forward_exploration({Columns.OBS: torch.zeros(2, 1, 4)})
    with pytest.raises(ValueError, match="no column 'obs'"):
        module.forward_train({})
    state = expand(module.get_initial_state(), 2)
    with pytest.raises(ValueError, match="AddTimeDimToBatchAndZeroPad"):
        module.forward_exploration({Columns.OBS: torch.zeros(2, 4), Columns.STATE_IN: state})


def test_previous_actions_need_the_piece_that_provides_them() -> None:
    with pytest.raises(ConfigurationError, match=r"lstm_use_prev_action.*PrevActionsPrevRewards"):
        build(VECTOR, use_lstm=True, lstm_use_prev_action=True)
    space = gym.spaces.Dict(
        {
            "_orig_obs": VECTOR,
            "prev_n_actions": gym.spaces.Box(0.0, 1.0, (2,)),
            "prev_n_rewards": gym.spaces.Box(-1.0, 1.0, (1,)),
        }
    )
    module = build(space, use_lstm=True, lstm_use_prev_action=True, lstm_use_prev_reward=True)
    batch = {Columns.OBS: batch_of(space, 2, 3), Columns.STATE_IN: expand(module.get_initial_state(), 2)}
    assert module.forward_train(batch)[Columns.ACTION_DIST_INPUTS].shape == (2, 3, 2)


def test_initialisers_and_layer_norm_are_applied() -> None:
    module = build(
        VECTOR,
        fcnet_kernel_initializer="constant_",
        fcnet_kernel_initializer_kwargs={"val": 0.25},
        fcnet_use_layernorm=True,
        head_fcnet_bias_initializer=nn.init.ones_,
        use_lstm=True,
        lstm_bias_initializer="zeros_",
    )
    encoder = module.encoder.tokenizer
    assert bool((encoder.layers[0].weight == 0.25).all())
    assert [type(layer).__name__ for layer in encoder.layers] == ["Linear", "LayerNorm"] * 2
    assert bool((module.vf.layers[-1].bias == 1).all())
    assert bool((module.encoder.lstm.bias_hh_l0 == 0).all())
    with pytest.raises(ConfigurationError, match="Did you mean 'xavier_uniform_'"):
        build(VECTOR, fcnet_kernel_initializer="xavier_uniformly")
    with pytest.raises(ConfigurationError, match="Did you mean 'tanh'"):
        build(VECTOR, fcnet_activation="tahn")


@pytest.mark.parametrize("activation", ["tanh", "relu", "silu", "gelu", "elu", "leaky_relu", "sigmoid", None])
def test_activations_in_place_give_the_right_values_and_gradients(activation: str | None) -> None:
    mlp = MLP(3, [5, 4], activation, config=DefaultModelConfig(), prefix="fcnet", output_dim=2)
    functions = {None: nn.Identity(), "silu": nn.SiLU(), "gelu": nn.GELU(), "elu": nn.ELU()}
    functions |= {"tanh": nn.Tanh(), "relu": nn.ReLU(), "leaky_relu": nn.LeakyReLU(), "sigmoid": nn.Sigmoid()}
    first, second, last = mlp.layers
    reference = nn.Sequential(first, functions[activation], second, functions[activation], last)
    x, y = (torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    assert_close(mlp(x), reference(y))
    mlp(x).square().sum().backward()
    gradients = [p.grad.clone() for p in mlp.parameters()]
    mlp.zero_grad()
    reference(y).square().sum().backward()
    assert_close(tuple(p.grad for p in mlp.parameters()), tuple(gradients))
    assert_close(x.grad, y.grad)


class FixedLogits(DefaultActorCriticModule):
    def setup(self) -> None:
        super().setup()
        self.pi.layers[-1] = nn.Linear(8, 2)
        with torch.no_grad():
            self.pi.layers[-1].weight.zero_()
            self.pi.layers[-1].bias.fill_(5.0)


def test_a_layer_put_in_anothers_place_is_the_one_that_acts_and_trains() -> None:
    module = FixedLogits(VECTOR, TWO, model_config={"fcnet_hiddens": [8]})
    outputs = module.forward_train({Columns.OBS: torch.randn(3, 4)})
    assert (outputs[Columns.ACTION_DIST_INPUTS] == 5.0).all()
    outputs[Columns.ACTION_DIST_INPUTS].sum().backward()
    assert module.pi.layers[-1].bias.grad.tolist() == [3.0, 3.0]
    twin = copy.deepcopy(module)
    twin.pi.layers[-1] = nn.Linear(8, 2)
    assert (twin.forward_inference({Columns.OBS: torch.randn(3, 4)})[Columns.ACTION_DIST_INPUTS] != 5.0).all()


def test_a_runners_quick_path_sees_a_layer_that_was_replaced() -> None:
    module = build(VECTOR, fcnet_hiddens=[4])
    module.pi.layers[0] = nn.Linear(4, 2)
    chain = acting_chain(module)
    obs = torch.randn(3, 4)
    assert chain is not None
    with torch.no_grad():
        assert torch.equal(chain(obs, None)[0], module.pi(module.encoder(obs)))
    module.pi.layers[0] = nn.Sequential(nn.Linear(4, 2))
    assert acting_chain(module) is None


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_runners_quick_path_with_memory_gives_the_modules_bits(share: bool, num_rows: int) -> None:
    settings: dict[str, Any] = {"fcnet_hiddens": [8, 8], "use_lstm": True, "lstm_cell_size": 64}
    module = build(VECTOR, vf_share_layers=share, **settings).eval()
    chain = acting_chain(module)
    assert chain is not None
    obs = torch.randn(5, num_rows, 4)
    state = quick_state = expand(module.get_initial_state(), num_rows)
    with torch.inference_mode():
        for now in obs:
            batch = {Columns.OBS: now.unsqueeze(1), Columns.STATE_IN: state}
            outputs = module.forward_exploration(batch)
            logits, quick_state = chain(now, quick_state)
            state = outputs[Columns.STATE_OUT]
            assert torch.equal(logits, outputs[Columns.ACTION_DIST_INPUTS].squeeze(1))
            for own, expected in zip(tree_leaves(quick_state), tree_leaves(state), strict=True):
                assert torch.equal(own, expected)
    assert chain.takes(torch.zeros(64, 4))
    assert not chain.takes(torch.zeros(65, 4)), "the module takes the sequence kernel"
    assert not chain.takes(torch.zeros(8, 4, dtype=torch.uint8))
    module.encoder.lstm.register_forward_hook(lambda *_: None)
    assert acting_chain(module) is None
    assert acting_chain(build(VECTOR, fcnet_use_layernorm=True, **settings)) is None
