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

    def fix_noise(self, generator: torch.Generator | None, num_rows: int = 1) -> None:
        """Use the same noise from a generator in all forward passes, another one for each row; None: end this."""
        self._fixed = None if generator is None else self._draw(generator, num_rows)

    def _draw(self, generator: torch.Generator | None, num_rows: int = 1) -> tuple[Tensor, Tensor]:
        device = self.weight.device
        ins, outs = (
            torch.randn(num_rows, size, generator=generator).to(device)
            for size in (self.in_features, self.out_features)
        )
        return tuple(noise.sign() * noise.abs().sqrt() for noise in (ins, outs))  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        noise = self._draw(None) if self._fixed is None and self.training else self._fixed
        if noise is None:
            return super().forward(x)
        ins, outs = noise
        if len(ins) == 1:
            weight = self.weight + self.weight_sigma * torch.outer(outs[0], ins[0])
            return nn.functional.linear(x, weight, self.bias + self.bias_sigma * outs[0])
        while ins.dim() < x.dim():  # rows of sequences
            ins, outs = ins.unsqueeze(1), outs.unsqueeze(1)
        # Each row has its own noise of the weights, outs ⊗ ins.
        return super().forward(x) + outs * nn.functional.linear(x * ins, self.weight_sigma, self.bias_sigma)
