"""A spec is checked when it is made, in sentences, and survives JSON."""

import pytest

from k3tune.errors import ConfigError
from k3tune.lora import LoraSpec


def test_json_round_trip():
    spec = LoraSpec(
        ["attention", r"experts\.w2"],
        rank=4,
        alpha=3.5,
        form="shared_outer",
        rank_pattern={"o_proj": 8},
        alpha_pattern={"layers.1.*": 1},
        layers=[3, 1],
        use_rslora=True,
        init="gaussian",
        seed=7,
    )
    # JSON has no tuples
    assert spec.targets == ("attention", r"experts\.w2") and spec.layers == (1, 3)
    assert LoraSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"targets": "attention"}, "targets is 'attention', expected a list"),
        ({"targets": []}, "targets is empty, expected at least one of attention, latent"),
        ({"targets": [3]}, "targets names 3, expected module-name patterns"),
        ({"targets": ["q_proj("]}, "'q_proj\\(', which is no regular expression"),
        ({"targets": ["latent", "latent"]}, "expected each target once"),
        ({"rank": 0}, "rank is 0, expected an integer of at least 1"),
        ({"rank": 8.5}, "rank is 8.5, expected an integer"),
        ({"rank": True}, "rank is True, expected an integer"),
        ({"alpha": 0}, "alpha is 0, expected a number above 0"),
        ({"alpha": float("nan")}, "alpha is nan, expected a number above 0"),
        ({"form": "stacked"}, "form is 'stacked', expected one of per_expert, shared_outer"),
        ({"init": "pissa"}, "init is 'pissa', expected one of kaiming, gaussian"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is .*, expected a mapping"),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\['q_proj'\] is 0, expected an integer"),
        ({"alpha_pattern": {"*": 1}}, "alpha_pattern names '\\*', which is no regular"),
        ({"alpha_pattern": {"q": "2"}}, r"alpha_pattern\['q'\] is '2', expected a number"),
        ({"layers": 3}, "layers is 3, expected a list of zero-based layers"),
        ({"layers": []}, "layers is \\[\\], expected zero-based layers"),
        ({"layers": [-1]}, "layers is \\[-1\\], expected zero-based layers"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes', expected true or false"),
        ({"seed": 1.5}, "seed is 1.5, expected an integer"),
        ({"dropout": 1}, "dropout is 1, expected a number from 0 to below 1"),
        ({"targets": ["experts"], "dropout": 0.1}, "dropout is 0.1 .*experts' op .*no dropout"),
    ],
)
def test_what_is_not_usable_is_said(fields, message):
    with pytest.raises(ConfigError, match=message):
        LoraSpec(**{"targets": ("attention",), **fields})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected a LoraSpec as a JSON object, found a list"),
        ("{", "expected a LoraSpec as a JSON object, found Expecting"),
        ('{"targets": ["latent"], "lora_rank": 3}', "no field 'lora_rank', expected fields of"),
        ('{"rank": 3}', "needs targets"),
    ],
)
def test_json_that_is_no_spec(text, message):
    with pytest.raises(ConfigError, match=message):
        LoraSpec.from_json(text)
