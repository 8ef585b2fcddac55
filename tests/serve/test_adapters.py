"""Adapters that come and go while a server runs, from one folder and no other."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import start

from k3tune.errors import AdapterError, ConfigError


@pytest.fixture(scope="module")
def server(folders):
    with start(folders, max_adapters=3) as running:
        yield running


@pytest.fixture
def client(server):
    with httpx.Client(verify=False, base_url=server.url, timeout=60) as opened:
        yield opened
        for card in opened.get("/v1/models").json()["data"][1:]:
            opened.post("/v1/unload_lora_adapter", json={"lora_name": card["id"]})


def load(client: httpx.Client, name: str, path: Any, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path)} | more
    return client.post("/v1/load_lora_adapter", json=body)


def tokens(client: httpx.Client, model: str, **more: Any) -> list[int]:
    body = {"model": model, "prompt": [5, 6], "seed": 1, "max_tokens": 8}
    body |= {"return_token_ids": True, "ignore_eos": True} | more
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def test_a_name_is_served_from_its_load_to_its_unload(client, folders):
    response = load(client, "v1", folders / "adapters" / "one")
    assert response.status_code == 200 and "v1" in response.text
    assert load(client, "v2", "two").status_code == 200
    base, one, two = (tokens(client, name) for name in ("tiny", "v1", "v2"))
    assert base != one != two != base
    response = client.post("/v1/unload_lora_adapter", json={"lora_name": "v1"})
    assert response.status_code == 200
    assert client.post("/v1/completions", json={"model": "v1", "prompt": [1]}).status_code == 404
    # the others answer as before
    assert (tokens(client, "tiny"), tokens(client, "v2")) == (base, two)
    assert load(client, "v3", "one").status_code == 200
    assert tokens(client, "v3") == one


def test_adapters_are_sampled_side_by_side(client):
    for name in ("one", "two"):
        assert load(client, name, name).status_code == 200
    models = ["tiny", "one", "two"]
    alone = {model: tokens(client, model) for model in models}
    found: dict[int, tuple[str, list[int]]] = {}

    def ask(number: int) -> None:
        model = models[number % 3]
        found[number] = model, tokens(client, model)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    assert all(ids == alone[model] for model, ids in found.values())


@pytest.mark.parametrize("model", ["tiny", "short-lived"])
def test_what_is_sampled_while_adapters_come_and_go_is_sampled_to_its_end(client, server, model):
    load(client, "short-lived", "one")
    whole = tokens(client, model, max_tokens=20)
    body = {"model": model, "prompt": [5, 6], "seed": 1, "max_tokens": 20}
    body |= {"return_token_ids": True, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        received = [next(lines)]
        client.post("/v1/unload_lora_adapter", json={"lora_name": "short-lived"})
        load(client, "newer", "two")
        received += list(lines)
    events = [json.loads(line[6:]) for line in received if line.startswith("data: {")]
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == whole
    server.wait_until_idle()


@pytest.mark.parametrize(
    "path",
    [
        "../outside",
        "one/../../outside",
        "/etc",
        "..",
        "link",
        "linked_file",
        "/proc/self/root/etc",
        "~",
        "loop",
        # an adapter's folder is below the root
        ".",
    ],
)
def test_no_path_leads_out_of_the_root(client, folders, tmp_path, path):
    root = folders / "adapters"
    if not (root / "link").exists():
        (root / "link").symlink_to(folders / "outside")
        (root / "loop").symlink_to(root / "loop")
        shutil.copytree(root / "one", root / "linked_file")
        file = root / "linked_file" / "adapter_model.safetensors"
        file.unlink()
        file.symlink_to(folders / "outside" / "adapter_model.safetensors")
    response = load(client, "x", path)
    assert response.status_code in (400, 403, 404), response.text
    assert client.get("/v1/models").json()["data"][1:] == []


def test_the_absolute_path_of_an_adapter_outside_is_refused(client, folders):
    there, not_there = folders / "outside", folders / "nowhere"
    answers = [load(client, "x", path) for path in (there, not_there)]
    assert [answer.status_code for answer in answers] == [403, 403]
    # whether something is there is nobody's business
    assert answers[0].text == answers[1].text


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"lora_name": "x", "lora_path": "nothing"}, 404),
        ({"lora_name": "x", "lora_path": "one/adapter_config.json"}, 404),
        ({"lora_name": "x", "lora_path": "one\0"}, 400),
        ({"lora_name": "x", "lora_path": "a" * 5000}, 400),
        ({"lora_name": "x", "lora_path": "a" * 300}, 400),
        ({"lora_name": "x"}, 400),
        ({"lora_path": "one"}, 400),
        ({"lora_name": "", "lora_path": "one"}, 400),
        ({"lora_name": "tiny", "lora_path": "one"}, 400),
        ({"lora_name": "x", "lora_path": "one", "load_inplace": True}, 400),
    ],
)
def test_loads_that_are_not_usable_are_refused(client, body, status):
    response = client.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]


def test_a_name_is_loaded_once(client):
    assert load(client, "v1", "one").status_code == 200
    response = load(client, "v1", "two")
    assert response.status_code == 400 and "already been loaded" in response.text


def test_adapters_are_bounded(client):
    for number in range(3):
        assert load(client, f"v{number}", "one").status_code == 200
    response = load(client, "v4", "one")
    assert response.status_code == 400 and "--max-adapters" in response.text


def test_a_damaged_adapter_leaves_the_others_alone(client, folders):
    root = folders / "adapters"
    damaged = shutil.copytree(root / "one", root / "damaged", dirs_exist_ok=True)
    (damaged / "adapter_model.safetensors").write_bytes(b"nothing")
    load(client, "v1", "one")
    before = tokens(client, "v1")
    response = load(client, "v2", "damaged")
    assert response.status_code == 400, response.text
    assert tokens(client, "v1") == before


def test_an_unknown_name_cannot_be_unloaded(client):
    response = client.post("/v1/unload_lora_adapter", json={"lora_name": "nobody"})
    assert response.status_code == 404


def test_without_a_root_nothing_is_loaded(folders):
    with start(folders, with_root=False) as server:
        with httpx.Client(verify=False, base_url=server.url) as client:
            response = load(client, "x", folders / "adapters" / "one")
            assert response.status_code == 403 and "--adapter-root" in response.text


def test_mistakes_show_at_the_start(folders, tmp_path):
    with pytest.raises(ConfigError, match="two models are called tiny"):
        start(folders, adapters={"tiny": folders / "adapters" / "one"}).__enter__()
    with pytest.raises((AdapterError, ConfigError)):
        start(folders, adapters={"x": tmp_path}).__enter__()
    with pytest.raises(ConfigError, match="expected a folder"):
        start(Path(shutil.copytree(folders / "base", tmp_path / "base").parent)).__enter__()
