"""Configs that are not usable are refused: what was expected, what was found, what to do."""

import time

import pytest

from checkpoints import make_config
from k3tune.errors import ConfigError
from k3tune.published.architecture import parse_config, read_config

HUGE = 10**400


def _refused(config, *parts):
    begin = time.process_time()
    with pytest.raises(ConfigError) as caught:
        parse_config(config)
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    assert len(message) < 700 and message.isprintable(), message
    assert time.process_time() - begin < 1


def _changed(name, value):
    config = make_config()
    fields = config["text_config"]
    if name in fields["linear_attn_config"]:
        fields = fields["linear_attn_config"]
    fields[name] = value
    return config


@pytest.mark.parametrize(
    ("content", "part"),
    [
        pytest.param(b"{", "does not parse", id="cut"),
        pytest.param(b"\xff", "does not parse", id="binary"),
        pytest.param(b'{"a":' + b"[" * 100_000, "does not parse", id="deep"),
        pytest.param(b'{"a":' + b"9" * 5000 + b"}", "does not parse", id="endless_number"),
        pytest.param(b'{"a": 1, "a": 2}', "key 'a' stands twice", id="key_twice"),
        pytest.param(rb'{"a": "\ud800"}', "does not parse", id="half_a_character"),
        pytest.param(b"[]", "found a list", id="list"),
    ],
)
def test_a_file_that_is_no_json_object_is_a_config_error(tmp_path, content, part):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json: expected a JSON object") as caught:
        read_config(tmp_path)
    assert part in str(caught.value) and "download the file again" in str(caught.value)


def test_a_byte_order_mark_and_pairs_of_escapes_are_read(tmp_path):
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00"}')
    assert read_config(tmp_path) == {"a": "\U0001f600"}


def test_a_config_that_is_a_folder_is_a_config_error(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read \(Is a directory\)"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "name", ["vocab_size", "num_experts", "num_hidden_layers", "first_k_dense_replace", "num_heads"]
)
@pytest.mark.parametrize("value", [HUGE, 100_000_000, -1, 2.0, True, "4", [1]], ids=str)
def test_a_size_is_an_integer_within_bounds(name, value):
    _refused(_changed(name, value), f"{name} is {value!r}"[:60], "expected an integer", "publishes")


def test_so_many_experts_that_their_table_would_fill_the_memory_are_refused():
    config = make_config(num_experts=1 << 18)
    _refused(config, "num_experts is 262144", "at most 524288", "found 786432 over 3")


@pytest.mark.parametrize(
    "name", ["activation_situ_beta", "activation_situ_linear_beta", "routed_scaling_factor"]
)
@pytest.mark.parametrize(
    "value",
    [0, -1.0, float("inf"), float("nan"), 1e39, 1e-46, HUGE, "4", True],
    ids=lambda value: str(value)[:9],
)
def test_a_factor_is_a_positive_number_of_fp32(name, value):
    _refused(_changed(name, value), f"{name} is", "a finite number > 0", "publishes")


@pytest.mark.parametrize("name", ["rms_norm_eps", "mla_norm_eps"])
@pytest.mark.parametrize(
    "value", [-1e-9, 0.2, float("inf"), float("nan"), HUGE, "0"], ids=lambda value: str(value)[:9]
)
def test_a_norms_eps_is_small_and_not_negative(name, value):
    _refused(_changed(name, value), f"{name} is", "expected a number from 0 to 0.1", "publishes")


def test_eps_of_zero_and_other_plain_numbers_are_taken():
    config = make_config(rms_norm_eps=0, mla_norm_eps=1e-3, activation_situ_beta=3)
    architecture = parse_config(config)
    assert (architecture.rms_norm_eps, architecture.mla_norm_eps) == (0.0, 1e-3)
    assert architecture.activation_situ_beta == 3.0


@pytest.mark.parametrize("value", [0, -5.1, float("nan"), -HUGE, "x"], ids=str)
def test_the_decay_bound_is_within_what_the_chunked_form_can_compute(value):
    _refused(_changed("gate_lower_bound", value), "gate_lower_bound is", "[-5.0, 0)")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("hidden_act", "silu", "'situ'"),
        ("topk_method", "greedy", "'noaux_tc'"),
        ("use_grouped_topk", False, "True"),
        ("use_grouped_topk", 1, "True"),
        ("moe_layer_freq", 2, "1"),
        ("use_full_rank_gate", False, "True"),
        ("tie_word_embeddings", True, "False"),
    ],
)
def test_another_variant_is_refused(name, value, expected):
    _refused(_changed(name, value), f"{name} is {value!r}, expected {expected}", "not implemented")


def test_tied_embeddings_around_the_text_config_are_refused():
    _refused(make_config() | {"tie_word_embeddings": True}, "tie_word_embeddings is True")


def test_fields_that_say_what_k3_always_does_may_be_absent():
    config = make_config()
    for name in ("topk_method", "use_grouped_topk", "tie_word_embeddings", "topk_group"):
        del config["text_config"][name]
    del config["tie_word_embeddings"]
    assert parse_config(config) == parse_config(make_config())


@pytest.mark.parametrize("where", ["top", "text"])
@pytest.mark.parametrize("value", ["4", HUGE, True, 1.5, [1, "2"]], ids=lambda v: str(v)[:9])
def test_a_token_id_is_an_integer(where, value):
    config = make_config()
    (config if where == "top" else config["text_config"])["eos_token_id"] = value
    _refused(config, "eos_token_id is", "expected a token id", "publishes")


def test_several_ends_and_no_padding_are_taken():
    config = make_config() | {"eos_token_id": [1, 2], "pad_token_id": None}
    parse_config(config)


def test_layers_that_are_not_each_named_once_are_refused():
    config = make_config()
    config["text_config"]["linear_attn_config"]["kda_layers"] = [1, 2, 2]
    _refused(config, "must name each layer from 1 to 4 once", "[1, 2, 2, 4]", "publishes")


def test_a_text_config_alone_is_read_as_the_nested_one():
    assert parse_config(make_config()["text_config"]) == parse_config(make_config())


def test_a_native_kimi_linear_config_is_told_what_it_lacks():
    config = {"model_type": "kimi_linear", "hidden_size": 64}
    _refused(config, "kimi_linear", "lacks fields of Kimi K3: vocab_size", "attn_res_block_size")
