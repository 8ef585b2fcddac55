"""What a server does not take: too much, too many, too slow, from anybody, or to no end."""

import json
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import uvicorn
from running import Running, load, start

from k3tune.serve.run import TOKEN_VARIABLE, ServeOptions, run

BODY = {"prompt": [5, 6], "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
LONG = BODY | {"max_tokens": 1000}


@pytest.fixture(scope="module")
def small(folders):
    """A server with little room."""
    limits = {"max_batch_size": 2, "max_waiting": 1, "max_body_bytes": 2000, "body_timeout_s": 0.5}
    with start(folders, **limits) as running:
        yield running


@pytest.fixture
def client(small):
    with httpx.Client(verify=False, base_url=small.url, timeout=60) as opened:
        yield opened
    small.wait_until_idle()


def raw(server: Running, data: bytes, *, wait_s: float = 10) -> bytes:
    """Bytes in, bytes out."""
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=wait_s) as connection:
        connection.sendall(data)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
            if b"\r\n\r\n" in received:
                break
    return received


def hold(server: Running, count: int) -> list[tuple[httpx.Client, Any]]:
    """Streams that run until they are closed."""
    held = []
    for _ in range(count):
        client = httpx.Client(verify=False, base_url=server.url, timeout=60)
        request = client.build_request("POST", "/v1/completions", json=LONG | {"stream": True})
        held.append((client, client.send(request, stream=True)))
    return held


def let_go(held: list[tuple[httpx.Client, Any]]) -> None:
    for client, response in held:
        response.close()
        client.close()


def test_a_body_that_is_too_long_is_refused(client):
    response = client.post("/v1/completions", json=BODY | {"user": "x" * 3000})
    assert response.status_code == 413
    assert "longer than 2000 bytes" in response.json()["error"]["message"]


def test_a_body_of_unknown_length_that_is_too_long_is_refused(client):
    response = client.post("/v1/completions", content=(b" " * 100 for _ in range(100)))
    assert response.status_code == 413


def test_a_body_that_does_not_arrive_is_refused(small):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
    assert b" 408 " in raw(small, head).splitlines()[0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b"[" * 1900,
        b'{"a":' * 380,
        b'{"prompt": [1], "seed": ' + b"9" * 1900 + b"}",
        b'{"prompt": [1], "temperature": 1e999}',
        b'{"prompt": "\\ud800", "max_tokens": "1"}',
    ],
)
def test_what_is_no_request_is_refused(client, content):
    response = client.post("/v1/completions", content=content)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_text_that_is_no_unicode_is_answered(client):
    content = json.dumps(BODY | {"prompt": "\ud800x", "request_id": "\ud800"})
    assert client.post("/v1/completions", content=content).status_code == 200
    stream = json.dumps(BODY | {"prompt": "x", "request_id": "\ud800", "stream": True})
    assert "[DONE]" in client.post("/v1/completions", content=stream).text


def test_unknown_paths_and_methods_are_refused(client):
    assert client.get("/v1/nothing").status_code == 404
    assert client.get("/v1/completions").status_code == 405
    assert client.get("/v1/nothing").json()["error"]["message"]


def test_a_full_queue_says_when_to_come_back(client, small):
    held = hold(small, 2)
    waiting = threading.Thread(target=lambda: client.post("/v1/completions", json=BODY))
    waiting.start()
    try:
        while small.under_way < 3:
            time.sleep(0.002)
        response = client.post("/v1/completions", json=BODY)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        scoring = client.post("/v1/completions", json=BODY | {"prompt_logprobs": 0})
        assert scoring.status_code == 429
        # and health is answered
        assert client.get("/health").status_code == 200
    finally:
        let_go(held)
    # the one that waited is served
    waiting.join(60)
    small.wait_until_idle()
    assert client.post("/v1/completions", json=BODY).status_code == 200


def test_a_client_that_leaves_frees_its_place(client, small):
    let_go(hold(small, 2))
    small.wait_until_idle()
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=LONG, timeout=0.3)
    client.close()
    small.wait_until_idle()


def test_a_token_is_asked_for_and_never_logged(folders, caplog):
    caplog.set_level(logging.DEBUG)
    with start(folders, token="secret-456") as server:
        with httpx.Client(verify=False, base_url=server.url, timeout=60) as client:
            assert client.get("/health").status_code == 200
            for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret-456"}):
                for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions")):
                    response = client.request(method, path, headers=given, json=BODY)
                    assert response.status_code == 401
            given = {"authorization": "Bearer secret-456"}
            assert client.post("/v1/completions", headers=given, json=BODY).status_code == 200
    assert "secret-456" not in caplog.text


@pytest.mark.parametrize(
    ("host", "token", "said"),
    [
        ("0.0.0.0", None, "is open to other machines, over plain HTTP and without a token"),
        ("0.0.0.0", "secret-789", "is open to other machines, over plain HTTP: put a TLS proxy"),
        ("127.0.0.1", None, ""),
    ],
)
def test_an_open_address_is_warned_of(folders, monkeypatch, caplog, host, token, said):
    monkeypatch.setattr(uvicorn.Server, "run", lambda _: None)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    if token is not None:
        monkeypatch.setenv(TOKEN_VARIABLE, token)
    run(load(folders), None, ServeOptions("tiny", host=host))
    warned = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert len(warned) == bool(said) and all(said in text for text in warned)
    assert "secret" not in caplog.text


def test_a_server_that_stops_lets_answers_end(folders):
    with start(folders) as server:
        answers: list[httpx.Response] = []
        body = BODY | {"max_tokens": 30}
        thread = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            )
        )
        thread.start()
        while not server.under_way:
            time.sleep(0.002)
        server.server.should_exit = True
        thread.join(60)
        [answer] = answers
        assert answer.status_code == 200
        assert len(answer.json()["choices"][0]["token_ids"]) == 30
        server.thread.join(30)
        assert not server.worker.is_well


def test_sixty_four_streams_and_health_under_load(folders):
    """Every stream ends whole, and health is answered in the middle of them."""
    with start(folders) as server:
        body = BODY | {"stream": True, "max_tokens": 6}

        def stream(number: int) -> list[int]:
            ids: list[int] = []
            sent = body | {"seed": number, "prompt": [number % 5, 7]}
            with httpx.Client(verify=False, base_url=server.url, timeout=120) as client:
                with client.stream("POST", "/v1/completions", json=sent) as response:
                    assert response.status_code == 200
                    lines = [line[6:] for line in response.iter_lines() if line]
            assert lines[-1] == "[DONE]"
            for line in lines[:-1]:
                ids += json.loads(line)["choices"][0]["token_ids"]
            return ids

        waits = []
        with ThreadPoolExecutor(64) as pool:
            futures = [pool.submit(stream, number) for number in range(64)]
            while not all(future.done() for future in futures):
                began = time.monotonic()
                assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
                waits.append(time.monotonic() - began)
                time.sleep(0.05)
        assert all(len(future.result()) == 6 for future in futures)
        print(f"longest wait for health: {max(waits):.3f} s of {len(waits)}")
