"""Action distributions: the same numbers as torch.distributions, deterministic draws, masks, nesting."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributions as td

from rlzmq.core.errors import ConfigurationError, UnsupportedSpaceError
from rlzmq.core.tree import tree_map
from rlzmq.modules.distributions import (
    TorchCategorical,
    TorchDiagGaussian,
    TorchMultiCategorical,
    TorchSquashedGaussian,
    action_dist_cls_for,
    num_dist_inputs,
    sample_categorical,
)
from tests.support.losses import assert_close

NEG_INF = float("-inf")
LOWEST = torch.finfo(torch.float32).min


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=generator(seed))


@pytest.mark.parametrize("shape", [(5, 3), (2, 4, 6), (300, 2), (40, 1)])
def test_categorical_matches_torch_distributions(shape: tuple[int, ...]) -> None:
    mine, theirs = TorchCategorical.from_logits(inputs(*shape)), td.Categorical(logits=inputs(*shape))
    other, their_other = inputs(*shape, seed=1), td.Categorical(logits=inputs(*shape, seed=1))
    value = theirs.sample()
    assert_close(mine.logp(value), theirs.log_prob(value))
    assert_close(mine.entropy(), theirs.entropy())
    assert_close(mine.kl(TorchCategorical.from_logits(other)), td.kl_divergence(theirs, their_other))
    assert torch.equal(mine.to_deterministic().sample(), inputs(*shape).argmax(-1))


@pytest.mark.parametrize("shape", [(5, 4), (3, 7, 2)])
def test_gaussian_matches_torch_distributions(shape: tuple[int, ...]) -> None:
    x, y = inputs(*shape, scale=1.0), inputs(*shape, seed=1, scale=1.0)
    mine, other = TorchDiagGaussian.from_logits(x), TorchDiagGaussian.from_logits(y)
    theirs, their_other = (
        td.Independent(td.Normal(z.chunk(2, -1)[0], z.chunk(2, -1)[1].exp()), 1) for z in (x, y)
    )
    value = theirs.sample()
    assert_close(mine.logp(value), theirs.log_prob(value))
    assert_close(mine.entropy(), theirs.entropy())
    assert_close(mine.kl(other), td.kl_divergence(theirs, their_other))
    assert torch.equal(mine.to_deterministic().sample(), x.chunk(2, -1)[0])


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-3.0, 0.5), ((-1.0, 0.0), (2.0, 5.0))])
def test_squashed_gaussian_matches_torch_distributions(low: object, high: object) -> None:
    x = inputs(200, 4, scale=0.5)
    cls = TorchSquashedGaussian.get_partial_dist_cls(low=low, high=high)
    lo, hi = (torch.as_tensor(b) for b in (low, high))
    loc, log_std = x.chunk(2, -1)
    theirs = td.Independent(
        td.TransformedDistribution(
            td.Normal(loc, log_std.exp()),
            [td.TanhTransform(), td.AffineTransform((lo + hi) / 2, (hi - lo) / 2)],
        ),
        1,
    )
    mine = cls.from_logits(x)
    value, logp = mine.sample_and_logp(generator=generator())
    assert bool(((value >= lo) & (value <= hi)).all())
    inside = ((value - lo) / (hi - lo) - 0.5).abs().amax(-1) < 0.49
    assert_close(logp[inside], theirs.log_prob(value)[inside], rtol=1e-3, atol=1e-3)
    assert_close(mine.logp(value)[inside], logp[inside], rtol=1e-3, atol=1e-3)
    assert_close(mine.to_deterministic().sample(), lo + (torch.tanh(loc) + 1) * (hi - lo) / 2)
    plain = [TorchDiagGaussian.from_logits(z) for z in (x, inputs(200, 4, seed=1, scale=0.5))]
    squashed = cls.from_logits(inputs(200, 4, seed=1, scale=0.5))
    assert_close(mine.kl(squashed), plain[0].kl(plain[1]))
    with pytest.raises(ValueError, match="no closed form"):
        mine.entropy()


def test_squashed_gaussian_stays_finite_far_out_and_at_the_border() -> None:
    x = torch.tensor([[40.0, 2.0], [-200.0, -20.0], [0.0, -90.0], [0.0, 90.0]], requires_grad=True)
    dist = TorchSquashedGaussian.from_logits(x)
    value, logp = dist.rsample_and_logp(generator=generator())
    assert bool(torch.isfinite(logp).all())
    (value.sum() + logp.sum()).backward()
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())
    border = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    assert bool(torch.isfinite(TorchSquashedGaussian.from_logits(x.detach()).logp(border)).all())


@pytest.mark.parametrize("lens", [(3, 3), (2, 5, 1)])
def test_multi_categorical_is_the_sum_of_its_parts(lens: tuple[int, ...]) -> None:
    cls = TorchMultiCategorical.get_partial_dist_cls(input_lens=lens)
    x, y = inputs(6, sum(lens)), inputs(6, sum(lens), seed=1)
    mine, other = cls.from_logits(x), cls.from_logits(y)
    parts = [td.Categorical(logits=z) for z in x.split(lens, -1)]
    others = [td.Categorical(logits=z) for z in y.split(lens, -1)]
    value = mine.sample(generator=generator())
    assert value.shape == (6, len(lens))
    assert all(bool((value[:, i] < n).all()) for i, n in enumerate(lens))
    expected = sum(part.log_prob(value[:, i]) for i, part in enumerate(parts))
    assert_close(mine.logp(value), expected)
    assert_close(mine.entropy(), sum(part.entropy() for part in parts))
    pairs = zip(parts, others, strict=True)
    assert_close(mine.kl(other), sum(td.kl_divergence(p, q) for p, q in pairs))
    assert bool(torch.isfinite(mine.entropy()).all())
    assert torch.equal(
        mine.to_deterministic().sample(), torch.stack([z.argmax(-1) for z in x.split(lens, -1)], -1)
    )


SPACES = [
    gym.spaces.Discrete(4),
    gym.spaces.Discrete(3, start=-1),
    gym.spaces.MultiDiscrete([3, 2, 4]),
    gym.spaces.MultiDiscrete([3, 2], start=[5, -2]),
    gym.spaces.MultiBinary(5),
    gym.spaces.MultiBinary([2, 2]),
    gym.spaces.Box(-np.inf, np.inf, (3,)),
    gym.spaces.Box(-np.inf, np.inf, ()),
    gym.spaces.Dict(
        {
            "z": gym.spaces.Discrete(3),
            "a": gym.spaces.Box(-np.inf, np.inf, (2,)),
            "t": gym.spaces.Tuple([gym.spaces.MultiDiscrete([2, 3]), gym.spaces.Discrete(2)]),
        }
    ),
    gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Box(-np.inf, np.inf, (1,))]),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize("lead", [(7,), (2, 3)])
def test_actions_of_a_space_are_in_it_and_have_the_batch_shape(
    space: gym.Space[object], lead: tuple[int, ...]
) -> None:
    cls = action_dist_cls_for(space)
    x, y = inputs(*lead, num_dist_inputs(space), scale=0.5), inputs(*lead, num_dist_inputs(space), seed=1)
    dist = cls.from_logits(x)
    value, logp = dist.sample_and_logp(generator=generator())
    assert logp.shape == lead
    assert_close(dist.logp(value), logp)
    assert dist.entropy().shape == lead
    assert dist.kl(cls.from_logits(y)).shape == lead
    assert bool((dist.kl(cls.from_logits(y)) > 0).all())
    assert_close(dist.kl(cls.from_logits(x)), torch.zeros(lead))
    greedy = dist.to_deterministic().sample()
    first = (0,) * len(lead)
    for tree in (value, greedy, dist.sample(generator=generator(1))):
        action = tree_map(lambda leaf: leaf[first].numpy(), tree)
        assert space.contains(action), (space, action)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_draws_follow_from_the_generator_alone(space: gym.Space[object]) -> None:
    cls = action_dist_cls_for(space)
    x = inputs(9, num_dist_inputs(space))
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = cls.from_logits(x).sample_and_logp(generator=generator(7))
    second = cls.from_logits(x).sample_and_logp(generator=generator(7))
    alone = cls.from_logits(x).sample(generator=generator(7))
    assert_close(first, second, rtol=0, atol=0)
    assert_close(first[0], alone, rtol=0, atol=0)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_several_draws_per_row_come_before_the_batch(space: gym.Space[object]) -> None:
    dist = action_dist_cls_for(space).from_logits(inputs(3, num_dist_inputs(space)))
    draws = dist.sample(sample_shape=(2, 5), generator=generator())
    one = dist.sample(generator=generator())
    for many, single in zip(optree.tree_leaves(draws), optree.tree_leaves(one), strict=True):
        assert many.shape == (2, 5, *single.shape)
        assert many.dtype == single.dtype
    logp = dist.logp(draws)
    assert logp.shape == (2, 5, 3)
    assert_close(logp[1, 2], dist.logp(optree.tree_map(lambda leaf: leaf[1, 2], draws)))


def test_integer_boxes_are_chosen_from_zero_up() -> None:
    space = gym.spaces.Box(np.array([2, -1]), np.array([5, 0]), dtype=np.int32)
    assert num_dist_inputs(space) == 6
    value = action_dist_cls_for(space).from_logits(torch.zeros(200, 6)).sample(generator=generator())
    assert value.amin(0).tolist() == [0, 0]
    assert value.amax(0).tolist() == [3, 1]


@pytest.mark.parametrize(("rows", "choices"), [(20_000, 2), (20_000, 7), (1, 5), (3, 2)])
def test_categorical_draws_follow_the_probabilities(rows: int, choices: int) -> None:
    logits = inputs(choices, scale=1.0).expand(rows, choices)
    log_probs, rng = torch.log_softmax(logits, -1), generator(3)
    repeats = max(1, 6_000 // rows)
    drawn = torch.cat([sample_categorical(log_probs, rng) for _ in range(repeats)]).reshape(-1)
    counts = torch.bincount(drawn, minlength=choices).double()
    expected = log_probs[0].double().exp() * drawn.numel()
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert chi_squared < choices - 1 + 5 * math.sqrt(2 * choices)  # five sigmas


@given(
    rows=st.integers(1, 60),
    mask=st.lists(st.booleans(), min_size=2, max_size=9).filter(any),
    hidden=st.sampled_from([NEG_INF, LOWEST]),
    seed=st.integers(0, 2**31),
)
def test_masked_actions_are_never_drawn(rows: int, mask: list[bool], hidden: float, seed: int) -> None:
    allowed = torch.tensor(mask)
    logits = inputs(rows, len(mask), seed=seed, scale=10.0).masked_fill(~allowed, hidden).requires_grad_()
    dist = TorchCategorical.from_logits(logits)
    value, logp = dist.sample_and_logp(generator=generator(seed))
    assert bool(allowed[value].all())
    assert bool(allowed[dist.to_deterministic().sample()].all())
    assert bool(torch.isfinite(logp).all())
    other = TorchCategorical.from_logits((logits * 0.5).detach())
    entropy, kl = dist.entropy(), dist.kl(other)
    assert bool(torch.isfinite(entropy).all())
    assert bool((entropy > -1e-5).all())
    assert bool(torch.isfinite(kl).all())
    (logp.sum() + entropy.sum() + kl.sum()).backward()
    assert logits.grad is not None
    assert bool(torch.isfinite(logits.grad).all())


def test_a_draw_at_either_end_of_the_unit_interval_respects_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((200, 4), NEG_INF)
    logits[:, 1:3] = torch.randn(200, 2, generator=generator())
    log_probs = torch.log_softmax(logits, -1)
    for uniform in (0.0, 1.0 - 2.0**-24):
        monkeypatch.setattr(torch, "rand", lambda shape, u=uniform, **_: torch.full(shape, u))
        drawn = sample_categorical(log_probs)
        assert bool(((drawn == 1) | (drawn == 2)).all())


def test_reparameterised_draws_carry_gradients_and_plain_ones_do_not() -> None:
    x = inputs(4, 6).requires_grad_()
    for cls in (TorchDiagGaussian, TorchSquashedGaussian):
        assert cls.from_logits(x).rsample().requires_grad
        value, logp = cls.from_logits(x).sample_and_logp()
        assert not value.requires_grad
        assert logp.requires_grad
        assert not cls.from_logits(x).sample().requires_grad
    with pytest.raises(NotImplementedError, match="use sample"):
        TorchCategorical.from_logits(x).rsample()


def test_unsupported_action_spaces_are_named_with_a_way_out() -> None:
    with pytest.raises(UnsupportedSpaceError, match="get_exploration_action_dist_cls"):
        action_dist_cls_for(gym.spaces.Text(5), where="module 'p1'")
    with pytest.raises(UnsupportedSpaceError, match="one logit per value"):
        action_dist_cls_for(gym.spaces.Box(0, 2**40, (1,), np.int64))
    with pytest.raises(ConfigurationError, match="module 'p1' has no action space"):
        action_dist_cls_for(None, where="module 'p1'")
