"""The standard fields of ``adapter_config.json``."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any


def config_document(
    fields: Mapping[str, Any],
    *,
    base_name: str | None,
    use_rslora: bool,
    dropout: float = 0.0,
    init: bool | str = True,
) -> dict[str, Any]:
    """A PEFT config as k3tune writes it.

    Args:
        fields: from :func:`k3tune.lora.targets.config_fields`.
        base_name: of the base.
        use_rslora, dropout, init: PEFT's ``use_rslora``, ``lora_dropout``, ``init_lora_weights``.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "revision": None,
        "peft_version": version("peft"),
        **fields,
        "lora_dropout": dropout,
        "use_rslora": use_rslora,
        "init_lora_weights": init,
        "bias": "none",
        "use_dora": False,
        "fan_in_fan_out": False,
        "exclude_modules": None,
        "target_parameters": None,
        "layers_pattern": "layers" if fields.get("layers_to_transform") else None,
        "modules_to_save": None,
        "inference_mode": True,
    }
