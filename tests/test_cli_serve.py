"""``k3tune serve``: what is refused before a base is read."""

import socket

import pytest

from command_line import run_command

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
