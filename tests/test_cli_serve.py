"""``k3tune serve``: what is refused before a base is read."""

import socket

import pytest

from command_line import run_command
from k3tune.commands import loading

pytest.importorskip("uvicorn", reason="needs the extra `serve`")

NANO = "k3tune/assets/k3-nano"


def test_an_address_where_nothing_can_listen_is_refused_in_a_sentence(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        # 192.0.2.1 is kept for documents: no machine has it
        for options in (("--port", port), ("--host", ""), ("--host", "192.0.2.1")):
            status, out, err = run_command(capsys, "serve", NANO, *options)
            assert (status, out) == (2, "") and err.count("\n") == 1
            assert "expected an address" in err


@pytest.fixture
def refused(capsys, monkeypatch):
    """Start with these options; the sentence they are refused with, before any weight is read."""
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("the base was loaded"))

    def refused(*options):
        status, out, err = run_command(capsys, "serve", NANO, "--port", 0, *options)
        assert (status, out) == (2, "") and err.count("\n") == 1
        return err

    return refused


def test_adapters_that_are_none_are_refused(refused, tmp_path):
    assert "no/such/adapter" in refused("--adapter", "x=no/such/adapter")
    assert "expected a folder: make it first" in refused("--adapter-root", tmp_path / "none")
    assert "each name once" in refused("--adapter", "a=x", "--adapter", "a=y")
    assert "two models are called k3-nano" in refused("--adapter", "k3-nano=x")
    file = tmp_path / "file"
    file.write_text("{}")
    assert "file" in refused("--adapter", f"x={file}")


def test_the_adapter_of_another_base_is_refused(refused, fixtures):
    adapter = fixtures / "k3_tiny" / "adapter"
    said = refused("--adapter", f"x={adapter}")
    assert str(adapter) in said and "expected" in said
