"""Hugging Face config classes of Kimi K3.

The published ``text_config`` says ``model_type: kimi_linear``, a name transformers owns for a
different model and under which it renames weights. So the classes here are called ``kimi_k3`` and
``kimi_k3_text``, and every other published field is kept as it is.
"""

from typing import Any, ClassVar

from transformers import PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

from k3tune.published.architecture import Architecture, parse_config


class K3TextConfig(PreTrainedConfig):
    """The text model's published fields, as attributes."""

    model_type = "kimi_k3_text"
    base_config_key = "text_config"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache"]

    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("model_type", None)
        super().__post_init__(**kwargs)


class K3Config(PreTrainedConfig):
    """The published config: ``text_config`` typed, ``vision_config`` carried along unread."""

    model_type = "kimi_k3"
    sub_configs_defaults: ClassVar[dict[str, SubConfigSpec]] = {
        "text_config": SubConfigSpec(K3TextConfig)
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache"]

    text_config: dict | K3TextConfig | None = None
    vision_config: dict | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = False

    @property
    def architecture(self) -> Architecture:
        """The checked sizes (see :func:`k3tune.published.architecture.parse_config`)."""
        return parse_config(self.get_text_config().to_dict())
