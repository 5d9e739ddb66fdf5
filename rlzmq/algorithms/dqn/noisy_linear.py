"""NoisyLinear: a linear layer with learned parameter noise, for exploration (arXiv:1706.10295)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["NoisyLinear"]


class NoisyLinear(nn.Linear):
    """A linear layer whose weights are mean + σ · noise, with factorized Gaussian noise (equations 10 and 11).

    In training mode every forward pass samples new noise from torch's global generator. In evaluation mode there is no
    noise, unless `fix_noise` has set some.

    Args:
        inputs, outputs: Number of features per row.
        sigma0: Initial σ, in units of 1 / √inputs.
    """

    def __init__(self, inputs: int, outputs: int, sigma0: float) -> None:
        super().__init__(inputs, outputs)
        bound = 1.0 / math.sqrt(inputs)
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)
            self.bias.uniform_(-bound, bound)
        self.weight_sigma: nn.Parameter = nn.Parameter(torch.full_like(self.weight, sigma0 * bound))
        self.bias_sigma: nn.Parameter = nn.Parameter(torch.full_like(self.bias, sigma0 * bound))
        self._fixed: tuple[Tensor, Tensor] | None = None

    def fix_noise(self, generator: torch.Generator | None) -> None:
        """Use the same noise from a generator in all forward passes; None: end this."""
        self._fixed = None if generator is None else self._draw(generator)

    def _draw(self, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        device = self.weight.device
        ins, outs = (
            torch.randn(size, generator=generator).to(device)
            for size in (self.in_features, self.out_features)
        )
        return tuple(noise.sign() * noise.abs().sqrt() for noise in (ins, outs))  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        noise = self._draw(None) if self._fixed is None and self.training else self._fixed
        if noise is None:
            return super().forward(x)
        ins, outs = noise
        weight = self.weight + self.weight_sigma * torch.outer(outs, ins)
        return nn.functional.linear(x, weight, self.bias + self.bias_sigma * outs)
