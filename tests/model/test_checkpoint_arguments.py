"""What ``load_base`` is asked for is checked before anything is read."""

import json
import re

import pytest
import torch

from checkpoints import build_checkpoint, make_config
from k3tune.errors import CheckpointError, ConfigError
from k3tune.model.checkpoint import load_base, load_weights, model_config
from k3tune.model.modeling import K3ForCausalLM
from k3tune_kernels import dispatch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture
def own_folder(tmp_path):
    return build_checkpoint(tmp_path)


def _refused(folder, *parts, error=ConfigError, **arguments):
    """Load and require each of ``parts`` in the message, in this order."""
    with pytest.raises(error) as caught:
        load_base(folder, **arguments)
    message = str(caught.value)
    assert re.search(".*".join(map(re.escape, map(str, parts))), message), message


def _edit_config(folder, edit):
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.int8, torch.float8_e4m3fn, "bfloat16", None, torch.Tensor],
    ids=str,
)
def test_experts_decode_to_three_dtypes_and_others_are_refused(folder, dtype):
    expected = "expected torch.bfloat16, torch.float32, torch.float64: experts decode to these only"
    _refused(folder, f"dtype is {dtype!r}"[:60], expected, dtype=dtype)
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="experts decode to these only"):
        load_weights(model, folder, dtype=dtype)


@pytest.mark.parametrize(
    ("device", "parts"),
    [
        ("meta", ("device is meta", "holds data", "K3ForCausalLM(config)")),
        ("nowhere", ("device is 'nowhere'", "torch can use here", "name another")),
        ("cuda:1000", ("device is 'cuda:1000'", "torch can use here", "name another")),
        ("hpu", ("device is 'hpu'", "torch can use here")),
        (1.5, ("device is 1.5", "torch can use here")),
    ],
)
def test_a_device_that_holds_no_weights_here_is_refused(folder, device, parts):
    _refused(folder, *parts, device=device)


def test_a_default_device_without_data_is_refused(folder):
    with torch.device("meta"):
        _refused(folder, "device is meta")


@pytest.mark.parametrize("kernels", ["tritom", "", None, ["auto"]], ids=str)
def test_an_unknown_backend_is_refused_with_the_known_ones(folder, kernels):
    _refused(folder, f"kernels is {kernels!r}", ", ".join(dispatch.BACKENDS), kernels=kernels)


def test_a_backend_the_machine_lacks_is_refused_before_the_checkpoint_is_opened(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arguments = {"kernels": "triton", "device": "cpu"}
    _refused(tmp_path / "none", "kernels is 'triton'", "use 'auto' or 'reference'", **arguments)


@pytest.mark.parametrize(
    ("experts", "parts"),
    [
        pytest.param([], ("experts is empty",), id="empty"),
        pytest.param([1, 6], ("names 6", "from 0 to 5", "6 experts"), id="too_high"),
        pytest.param([-1], ("names -1", "from 0 to 5"), id="negative"),
        pytest.param([2, 4, 2], ("names 2 twice", "leave one out"), id="twice"),
        pytest.param([0.5], ("[0.5]", "expected a sequence of expert ids"), id="fraction"),
        pytest.param("01", ("'01'", "expected a sequence of expert ids"), id="text"),
        pytest.param(3, ("experts is 3", "expected a sequence"), id="number"),
        pytest.param([False, True], ("holds False", "a mask is not taken"), id="bools"),
        pytest.param(torch.tensor([True, False]), ("mask is not taken",), id="mask"),
    ],
)
def test_unusable_experts_are_refused(folder, experts, parts):
    _refused(folder, *parts, experts=experts)


@pytest.mark.parametrize(
    "experts",
    [(e for e in (5, 0)), iter([5, 0]), torch.tensor([5, 0])],
    ids=["generator", "iterator", "tensor"],
)
def test_any_row_of_ids_chooses_experts_once(folder, experts):
    assert load_base(folder, experts=experts).load_report.experts == (5, 0)


def test_weights_take_a_generator_of_experts(folder):
    with torch.device("meta"):
        model = K3ForCausalLM(model_config(make_config()), experts=[5, 0])
    report = load_weights(model, folder, experts=(expert for expert in (5, 0)))
    assert report.experts == (5, 0)


def test_a_text_config_alone_loads_the_same_model(folder, own_folder):
    _edit_config(own_folder, lambda c: [c.update(c.pop("text_config")), c.pop("vision_config")])
    flat, nested = load_base(own_folder), load_base(folder)
    assert flat.config.architecture == nested.config.architecture
    ids = torch.arange(10)[None]
    assert torch.equal(flat(ids).logits, nested(ids).logits)


@pytest.mark.parametrize("where", ["top", "text"])
@pytest.mark.parametrize(
    "field",
    [{"dtype": "4"}, {"pad_token_id": "4"}, {"id2label": 4}, {"eos_token_id": [{}]}],
    ids=str,
)
def test_a_field_transformers_cannot_use_is_refused_in_a_sentence(own_folder, where, field):
    _edit_config(own_folder, lambda c: (c if where == "top" else c["text_config"]).update(field))
    _refused(own_folder, "config", "use config.json as")


@pytest.mark.parametrize("path", ["a" * 5000, "a\0b", "\ud800", "~" * 300 + "/x"], ids=ascii)
def test_a_path_no_system_takes_is_one_short_sentence(path):
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        load_base(path)
    message = str(caught.value)
    message.encode()
    assert message.isprintable() and len(message) < 600, message
