"""DefaultModelConfig: the settings of the default models, with checks of names and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np

from rlzmq.config.rllib_only import warn_ignored
from rlzmq.config.search_space import SearchObject
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.synonyms import did_you_mean

__all__ = ["Catalog", "DefaultModelConfig", "model_config_to_dict", "refuse_catalog"]

#: A name in ``torch.nn.init`` (``"xavier_uniform_"``), or a function that fills a tensor in place.
Initializer = str | Callable[..., Any] | None


@dataclasses.dataclass
class DefaultModelConfig:
    """Architecture of the default models.

    Vector observations go through ``fcnet``, images through ``conv``; ``fusionnet`` joins several of them. An
    optional LSTM follows, then one ``head`` per output. Layer sizes are in units, filters in channels and pixels.

    Attributes:
        fcnet_hiddens: Widths of the layers on vector observations.
        fcnet_activation: "tanh", "relu", "swish"/"silu", "gelu", "elu", "leaky_relu", "sigmoid" or
            "linear"/None; the other activations take the same values.
        fcnet_kernel_initializer: A name in ``torch.nn.init`` or a function; None: torch's default.
        fcnet_kernel_initializer_kwargs: Additional arguments for it.
        fcnet_bias_initializer: The same for biases.
        fcnet_bias_initializer_kwargs: Additional arguments for it.
        fcnet_use_layernorm: Whether to normalize each layer's outputs before its activation.
        conv_filters: ``[[channels, kernel, stride], …]`` with "same" padding, kernel and stride as an int
            or [height, width]; a fourth entry "valid" is for no padding. None: chosen by the size of the image
            (84 × 84: those of Mnih et al. 2015) and followed by one dense layer of ``fcnet_hiddens[-1]`` units.
        conv_activation: Activation after each filter.
        conv_kernel_initializer: As for fcnet, likewise the next three.
        conv_kernel_initializer_kwargs: …
        conv_bias_initializer: …
        conv_bias_initializer_kwargs: …
        head_fcnet_hiddens: Widths of the layers between encoder and output in each head.
        head_fcnet_activation: Their activation.
        head_fcnet_kernel_initializer: As for fcnet, likewise the next three.
        head_fcnet_kernel_initializer_kwargs: …
        head_fcnet_bias_initializer: …
        head_fcnet_bias_initializer_kwargs: …
        head_fcnet_use_layernorm: Whether to normalize each head layer's outputs before its activation.
        free_log_std: Whether log standard deviations of Box actions are parameters instead of network outputs.
        log_std_init: Their initial value, if they are parameters.
        log_std_clip_param: Bound of the absolute value of log standard deviations (inf: no bound).
        vf_share_layers: Whether policy and value function share the encoder.
        use_lstm: Whether an LSTM follows the encoder.
        max_seq_len: Length of the training sequences of stateful modules, in steps ("auto": 20).
        lstm_cell_size: Number of units in the LSTM.
        lstm_use_prev_action: Whether the LSTM also gets the previous action. A config's env-to-module pipeline then
            has a PrevActionsPrevRewards piece after the user's pieces.
        lstm_use_prev_reward: Whether the LSTM also gets the previous reward.
        lstm_kernel_initializer: As for fcnet, likewise the next three.
        lstm_kernel_initializer_kwargs: …
        lstm_bias_initializer: …
        lstm_bias_initializer_kwargs: …
        fusionnet_hiddens: Widths of the layers that join several encoders.
        fusionnet_activation: Their activation.
        fusionnet_kernel_initializer: As for fcnet, likewise the next three.
        fusionnet_kernel_initializer_kwargs: …
        fusionnet_bias_initializer: …
        fusionnet_bias_initializer_kwargs: …

    Example:
        >>> DefaultModelConfig(fcnet_hiddens=[64, 64], use_lstm=True).to_dict()["fcnet_hiddens"]
        [64, 64]
    """

    fcnet_hiddens: list[int] = dataclasses.field(default_factory=lambda: [256, 256])
    fcnet_activation: str | None = "tanh"
    fcnet_kernel_initializer: Initializer = None
    fcnet_kernel_initializer_kwargs: dict[str, Any] | None = None
    fcnet_bias_initializer: Initializer = None
    fcnet_bias_initializer_kwargs: dict[str, Any] | None = None
    fcnet_use_layernorm: bool = False

    conv_filters: list[list[Any]] | None = None
    conv_activation: str | None = "relu"
    conv_kernel_initializer: Initializer = None
    conv_kernel_initializer_kwargs: dict[str, Any] | None = None
    conv_bias_initializer: Initializer = None
    conv_bias_initializer_kwargs: dict[str, Any] | None = None

    head_fcnet_hiddens: list[int] = dataclasses.field(default_factory=list)
    head_fcnet_activation: str | None = "relu"
    head_fcnet_kernel_initializer: Initializer = None
    head_fcnet_kernel_initializer_kwargs: dict[str, Any] | None = None
    head_fcnet_bias_initializer: Initializer = None
    head_fcnet_bias_initializer_kwargs: dict[str, Any] | None = None
    head_fcnet_use_layernorm: bool = False

    free_log_std: bool = False
    log_std_init: float = 0.0
    log_std_clip_param: float = 20.0
    vf_share_layers: bool = True

    use_lstm: bool = False
    max_seq_len: int | str = 20
    lstm_cell_size: int = 256
    lstm_use_prev_action: bool = False
    lstm_use_prev_reward: bool = False
    lstm_kernel_initializer: Initializer = None
    lstm_kernel_initializer_kwargs: dict[str, Any] | None = None
    lstm_bias_initializer: Initializer = None
    lstm_bias_initializer_kwargs: dict[str, Any] | None = None

    fusionnet_hiddens: list[int] = dataclasses.field(default_factory=lambda: [256, 256])
    fusionnet_activation: str | None = "tanh"
    fusionnet_kernel_initializer: Initializer = None
    fusionnet_kernel_initializer_kwargs: dict[str, Any] | None = None
    fusionnet_bias_initializer: Initializer = None
    fusionnet_bias_initializer_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("fcnet_hiddens", "head_fcnet_hiddens", "fusionnet_hiddens"):
            widths = getattr(self, name)
            if isinstance(widths, SearchObject):
                continue
            if not isinstance(widths, list | tuple) or not all(_is_count(width) for width in widths):
                raise ConfigurationError(
                    f"model_config[{name!r}]: expected a list of widths, each an int of at least 1, "
                    f"got {widths!r}"
                )
        if self.max_seq_len == "auto":
            self.max_seq_len = 20
        for name in ("lstm_cell_size", "max_seq_len"):
            value = getattr(self, name)
            if not _is_count(value):
                raise ConfigurationError(f"model_config[{name!r}]: expected an int from 1, got {value!r}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # "no" would count as True
            if field.type == "bool" and not isinstance(value, bool | np.bool_ | SearchObject):
                raise ConfigurationError(
                    f"model_config[{field.name!r}]: expected True or False, got {value!r}"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as a plain dict, with initializers by name.

        Raises:
            ConfigurationError: An initializer is a function that is not in ``torch.nn.init``.
        """
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in plain.items():
            if callable(value):
                plain[name] = _initializer_name(name, value)
            elif isinstance(value, list | tuple):
                plain[name] = [list(v) if isinstance(v, list | tuple) else v for v in value]
        return plain

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any], *, where: str = "model_config") -> Self:
        """Return a config with these settings and defaults for all others.

        Raises:
            ConfigurationError: A name is unknown (the text names the closest one), or a value is wrong.
        """
        for old in [name for name in settings if name.startswith("post_fcnet_")]:
            name = old.replace("post_", "head_")
            warn_ignored("rl_module", old, f"set model_config[{name!r}].", taken=True)
            settings = {name: settings[old], **{key: settings[key] for key in settings if key != old}}
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise ConfigurationError(
                f"{where}: the default models have no setting {unknown[0]!r}."
                + did_you_mean(unknown[0], known)
                + " (For settings of your own, write your own module class: RLModuleSpec(module_class=…).)"
            )
        return cls(**settings)


class Catalog:
    """RLlib's default catalogs of networks, all of them: `model_config` describes the default networks."""

    def __init_subclass__(cls) -> None:
        refuse_catalog(cls)


def refuse_catalog(catalog_class: object) -> None:
    """Raise ConfigurationError for a catalog class that is not RLlib's default."""
    if catalog_class not in (None, Catalog):
        raise ConfigurationError(
            f"catalog_class={catalog_class!r}: there are no catalogs here. The default models follow from "
            "model_config; for other networks give your own TorchRLModule as module_class, and make them in its setup()"
        )


def model_config_to_dict(model_config: object) -> dict[str, Any]:
    """Return ``model_config`` as modules see it: a dict unchanged, a DefaultModelConfig as a dict, {} for None.

    Raises:
        ConfigurationError: It is of another type.
    """
    if model_config is None:
        return {}
    if isinstance(model_config, dict):
        return model_config
    if isinstance(model_config, Mapping):
        return dict(model_config)
    if dataclasses.is_dataclass(model_config) and not isinstance(model_config, type):
        return {field.name: getattr(model_config, field.name) for field in dataclasses.fields(model_config)}
    raise ConfigurationError(
        f"model_config: expected a dict or a DefaultModelConfig, got {type(model_config).__name__}"
    )


def _is_count(value: object) -> bool:
    if isinstance(value, SearchObject):
        return True  # its values are checked when a trial's value replaces it
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _initializer_name(setting: str, function: Callable[..., Any]) -> str:
    import torch

    name = getattr(function, "__name__", "")
    if getattr(torch.nn.init, name, None) is not function:
        raise ConfigurationError(
            f"model_config[{setting!r}]: {function!r} cannot be written down; use the name of a function in "
            f"torch.nn.init, e.g. 'xavier_uniform_', with its arguments under {setting + '_kwargs'!r}"
        )
    return name
