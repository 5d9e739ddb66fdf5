"""RecurrentEncoder: an LSTM after another encoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlzmq.config.model_config import DefaultModelConfig
from rlzmq.modules.default_models.mlp import initialize

__all__ = ["RecurrentEncoder"]

# torch.lstm_cell computes a single step of at most this many rows times units. torch's sequence kernel costs three
# times as much at 8 rows of 64 units, and half as much at 256. (Measured on one x86 core.)
_CELL_MAX_UNITS = 4096


class RecurrentEncoder(nn.Module):
    """Maps observations ``[B, T, ...]`` and state to features ``[B, T, output_dim]`` and the next state.

    The state is ``{"h": [B, cell], "c": [B, cell]}``.
    """

    def __init__(self, tokenizer: Any, config: DefaultModelConfig) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.output_dim: int = config.lstm_cell_size
        self.lstm: nn.LSTM = nn.LSTM(tokenizer.output_dim, config.lstm_cell_size, batch_first=True)
        for kind, tag in (("kernel", "weight"), ("bias", "bias")):
            setting = f"lstm_{kind}_initializer"
            for name, parameter in self.lstm.named_parameters():
                if name.startswith(tag):
                    kwargs = getattr(config, setting + "_kwargs")
                    initialize(parameter, getattr(config, setting), kwargs, setting)

    @property
    def max_cell_rows(self) -> int:
        """Maximum number of rows for which torch.lstm_cell computes a single step."""
        return _CELL_MAX_UNITS // self.output_dim

    def initial_state(self) -> dict[str, Tensor]:
        """Return zeros, without batch dimension."""
        return {"h": torch.zeros(self.output_dim), "c": torch.zeros(self.output_dim)}

    def forward(self, obs: Any, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = self.tokenizer(obs)
        if tokens.dim() != 3:
            raise ValueError(
                "an LSTM takes observations with a time dimension, [B, T, ...], got a batch whose encoding "
                f"is of shape {tuple(tokens.shape)}; the piece AddTimeDimToBatchAndZeroPad adds it"
            )
        # An exported graph has any number of rows, so it uses the cell.
        if tokens.shape[1] == 1 and (torch.compiler.is_exporting() or tokens.shape[0] <= self.max_cell_rows):
            weights: dict[str, Any] = self.lstm._parameters
            h, c = torch.lstm_cell(
                tokens.squeeze(1),
                (state["h"], state["c"]),
                weights["weight_ih_l0"],
                weights["weight_hh_l0"],
                weights["bias_ih_l0"],
                weights["bias_hh_l0"],
            )
            return h.unsqueeze(1), {"h": h, "c": c}
        features, (h, c) = self.lstm(tokens, (state["h"].unsqueeze(0), state["c"].unsqueeze(0)))
        # stored step by step, which each head would have to transpose
        return features.contiguous(), {"h": h.squeeze(0), "c": c.squeeze(0)}
