"""From options to datasets and model: splits, packing, and what does not go together."""

import pytest
from trl import SFTConfig

from k3tune.arguments import DataArguments, LoraArguments, ModelArguments
from k3tune.errors import ConfigError
from k3tune.lora import adapter_parameters, adapter_state, save_adapter
from k3tune.train import build_datasets, build_model, load_tokenizer
from tiny_run import COMMON


@pytest.fixture(scope="module")
def tokenizer(base_folder):
    return load_tokenizer(ModelArguments(str(base_folder)))


def training(tmp_path, **options):
    return SFTConfig(str(tmp_path), **{**COMMON, "max_length": 80, **options})


def data(samples_file, **options):
    return DataArguments(str(samples_file), thinking_effort="none", **options)


def test_samples_keep_their_lines_as_ids(samples_file, tokenizer, tmp_path):
    train, held_out = build_datasets(data(samples_file), tokenizer, training(tmp_path))
    assert train["sample_id"][:] == list(range(1, 25)) and held_out is None


def test_a_fraction_is_held_out_by_the_seed_alone(samples_file, tokenizer, tmp_path):
    options = data(samples_file, eval_fraction=0.25)

    def split(seed):
        arguments = training(tmp_path, eval_strategy="steps", eval_steps=1, seed=seed)
        train, held_out = build_datasets(options, tokenizer, arguments)
        return set(train["sample_id"]), set(held_out["sample_id"])

    train, held_out = split(1)
    assert len(held_out) == 6 and train | held_out == set(range(1, 25))
    assert split(1) == (train, held_out) and split(2) != (train, held_out)


def test_evaluation_data_of_its_own_is_packed_like_the_rest(samples_file, tokenizer, tmp_path):
    arguments = training(tmp_path, eval_strategy="epoch", packing=True)
    options = data(samples_file, eval_path=str(samples_file))
    train, held_out = build_datasets(options, tokenizer, arguments)
    for rows in (train, held_out):
        ids = [number for row in rows["sample_ids"] for number in row]
        assert sorted(ids) == list(range(1, 25)) and len(rows) < 24


@pytest.mark.parametrize(
    ("own", "trl", "message"),
    [
        ({"eval_fraction": 0.5}, {}, "eval_strategy is 'no' and evaluation data is given"),
        ({}, {"eval_strategy": "epoch"}, "eval_strategy is 'epoch' and evaluation data is not"),
        ({"eval_fraction": 0.01}, {"eval_strategy": "epoch"}, "24 samples, which is 0"),
        (
            {"eval_fraction": 0.5},
            {"eval_strategy": "epoch", "eval_packing": True},
            "eval_packing is True and packing is False",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(samples_file, tokenizer, tmp_path, own, trl, message):
    with pytest.raises(ConfigError, match=message):
        build_datasets(data(samples_file, **own), tokenizer, training(tmp_path, **trl))


def test_a_missing_tokenizer_is_named(fixtures):
    with pytest.raises(ConfigError, match=r"k3_tiny holds no tiktoken.model"):
        load_tokenizer(ModelArguments(str(fixtures / "k3_tiny")))
    with pytest.raises(ConfigError, match="no/such/folder is not there, expected a folder with"):
        load_tokenizer(ModelArguments(str(fixtures / "k3_tiny"), tokenizer="no/such/folder"))


def test_a_tokenizer_of_another_base_is_refused(base_folder, repository):
    nano = str(repository / "k3tune" / "assets" / "k3-nano")
    with pytest.raises(ConfigError, match="has 384 ids, expected at most the 272 of the base's"):
        load_tokenizer(ModelArguments(str(base_folder), tokenizer=nano))


def test_a_new_adapter_follows_the_options_and_the_seed(base_folder, tmp_path):
    options = LoraArguments(lora_targets=["dense", "experts"], lora_rank=3)
    model = build_model(ModelArguments(str(base_folder)), options, training(tmp_path, seed=5))
    assert adapter_parameters(model).keys() == {"dense", "experts"}
    other = build_model(ModelArguments(str(base_folder)), options, training(tmp_path, seed=6))
    key = next(key for key in adapter_state(model) if "lora_A" in key)
    assert not adapter_state(model)[key].equal(adapter_state(other)[key])


def test_an_adapter_can_be_gone_on_with(base_folder, tmp_path, caplog):
    options = LoraArguments(lora_targets=["dense"], lora_rank=3)
    first = build_model(ModelArguments(str(base_folder)), options, training(tmp_path))
    folder = save_adapter(first, tmp_path / "adapter")
    again = LoraArguments(adapter=str(folder))
    model = build_model(ModelArguments(str(base_folder)), again, training(tmp_path))
    assert all(p.requires_grad for p in adapter_parameters(model)["dense"].values())
    assert adapter_parameters(model).keys() == {"dense"}
    assert "lora_* options are not used" in caplog.text
