"""``k3tune chat``: turns of a pipe, what the model reads anew, and what stops an answer."""

import io
import os
import pty
import select
import signal
import subprocess
import sys

import pytest

from command_line import Script, make_text_base, markup_ids, run_command
from k3tune.commands.chat import Session
from k3tune.commands.loading import load_model
from k3tune.commands.options import Chat, Model, Sampling
from k3tune.data import K3Tokenizer, render_chat

FIRST = (
    "hm<|close|>think<|sep|><|open|>response<|sep|>Hello<|close|>response<|sep|>"
    "<|close|>message<|sep|><|end_of_msg|>"
)
SECOND = FIRST.replace("hm", "so").replace("Hello", "Bye")


@pytest.fixture(scope="module")
def base(fixtures, tmp_path_factory):
    return make_text_base(fixtures / "k3_tiny", tmp_path_factory.mktemp("base") / "k3_text")


@pytest.fixture(scope="module")
def tokenizer(base):
    return K3Tokenizer.from_pretrained(base)


@pytest.fixture
def model(base):
    return load_model(Model(str(base)))


@pytest.fixture
def talk(capsys, base, model, tokenizer, monkeypatch):
    """Pipe lines into the command; the model says the given texts one after the other."""

    def call(lines, *texts, options=()):
        script = Script(model, [token for text in texts for token in markup_ids(tokenizer, text)])
        monkeypatch.setattr("k3tune.commands.chat.load_model", lambda options: model)
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return *run_command(capsys, "chat", base, *options), script

    return call


def test_each_line_of_a_pipe_is_a_turn_and_contents_alone_are_on_stdout(talk):
    status, out, err, _ = talk(["Hi", "", "And?"], FIRST, SECOND)
    assert (status, out, err) == (0, "Hello\nBye\n", "hm\nso\n")


def test_reasoning_can_be_hidden(talk):
    assert talk(["Hi"], FIRST, options=["--hide-thinking"])[:3] == (0, "Hello\n", "")


def test_quit_leaves_before_the_end_of_the_input(talk):
    assert talk(["Hi", "/quit", "And?"], FIRST)[1] == "Hello\n"


def test_a_word_after_a_slash_is_a_command_and_a_path_is_not(talk):
    status, out, err, _ = talk(["/help", "/etc/passwd?"], FIRST)
    assert (status, out) == (0, "Hello\n")
    assert err.startswith("/help is no command: /reset forgets the conversation")


def test_bytes_that_are_no_text_are_one_sentence(capsys, base, model, monkeypatch):
    monkeypatch.setattr("k3tune.commands.chat.load_model", lambda options: model)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8"))
    status, out, err = run_command(capsys, "chat", base)
    assert (status, out) == (2, "") and err.startswith("the input is no UTF-8")


def test_only_what_is_new_is_read_in_the_second_turn(talk, tokenizer):
    lengths = talk(["Hi", "And?"], FIRST, SECOND)[3].lengths
    turns = [{"role": "user", "content": "Hi"}]
    first = len(render_chat(turns, tokenizer, add_generation_prompt=True).input_ids)
    said = len(markup_ids(tokenizer, FIRST))
    turns += [{"role": "assistant", "content": "Hello", "reasoning_content": "hm"}]
    turns += [{"role": "user", "content": "And?"}]
    second = len(render_chat(turns, tokenizer, add_generation_prompt=True).input_ids)
    # the first answer's last token was said and not yet read
    assert lengths[0] == first and lengths[said] == second - first - said + 1
    assert set(lengths[1:said]) == {1}


def test_reset_forgets_messages_and_cache_but_not_the_system_message(talk, tokenizer):
    options = ["--system", "Be kind."]
    lengths = talk(["Hi", "/reset", "Hi"], FIRST, SECOND, options=options)[3].lengths
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    whole = len(render_chat(turns, tokenizer, add_generation_prompt=True).input_ids)
    assert [lengths[0], lengths[len(markup_ids(tokenizer, FIRST))]] == [whole, whole]


def test_a_turn_after_cached_ones_is_answered_as_if_all_was_read_anew(model, tokenizer):
    session = Session(model, tokenizer, Chat(thinking_effort="none"), Sampling(12))
    for text in ("Hi", "And?", "So?"):
        session.ask(text, lambda piece: None)
        prompt = render_chat(
            session.messages[:-1], tokenizer, thinking_effort=None, add_generation_prompt=True
        ).input_ids
        assert session._read[: len(prompt)] == prompt
        anew = model.generate(
            input_ids=model.dummy_inputs["input_ids"].new_tensor([prompt]),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=tokenizer.stop_token_ids,
            pad_token_id=0,
        )[0].tolist()
        assert session._read == anew[: len(session._read)]


def test_an_interrupted_answer_keeps_what_was_said_and_the_chat_goes_on(model, tokenizer):
    begun = markup_ids(tokenizer, FIRST[: FIRST.index("llo")])
    script = Script(model, [*begun, KeyboardInterrupt, *markup_ids(tokenizer, SECOND)])
    session = Session(model, tokenizer, Chat(), Sampling(64))
    answer = session.ask("Hi", lambda piece: None)
    assert (answer.content, answer.ended, session.num_cached) == ("He", False, 0)
    assert session.messages[-1] == {
        "role": "assistant",
        "content": "He",
        "reasoning_content": "hm",
    }
    assert session.ask("And?", lambda piece: None).content == "Bye"
    # the cut answer is closed in the prompt of the next turn, and all of it is read again
    assert script.lengths[len(begun) + 1] > script.lengths[0] + len(begun)


def test_calls_of_tools_are_dropped_and_said_to_be(talk):
    call = '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>'
    calling = FIRST.replace("<|close|>message", f"{call}<|close|>tools<|sep|><|close|>message")
    status, out, err, _ = talk(["Hi", "And?"], calling, SECOND)
    assert (status, out) == (0, "Hello\nBye\n")
    assert "warning: the answer calls f, which a chat cannot run" in err


def test_a_cut_answer_is_said_to_be_and_the_chat_goes_on_from_it(talk):
    status, out, err, _ = talk(["Hi", "And?"], "So", "So", options=["--max-new-tokens", 2])
    assert (status, out) == (0, "\n\n")
    assert err == "So\nwarning: the answer was cut: /reset, or go on from it\n" * 2


@pytest.mark.slow
def test_in_a_terminal_control_c_stops_an_answer_and_control_d_leaves(base, repository):
    leader, follower = pty.openpty()
    code = "import sys, k3tune.cli; k3tune.cli.main(sys.argv[1:])"
    # a random model seldom ends what it says: Ctrl-C does
    command = [sys.executable, "-c", code, "chat", str(base), "--max-new-tokens", "100000"]
    process = subprocess.Popen(
        command, cwd=repository, stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    heard = b""

    def wait_for(text):
        nonlocal heard
        while text not in heard:
            readable, _, _ = select.select([leader], [], [], 60)
            assert readable, heard
            heard += os.read(leader, 1024)
        heard = heard.partition(text)[2]

    try:
        wait_for(b"> ")
        os.write(leader, b"Hi\n")
        # reasoning is dim
        wait_for(b"\x1b[2m")
        process.send_signal(signal.SIGINT)
        wait_for(b"the answer was cut")
        wait_for(b"> ")
        os.write(leader, b"\x04")
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)
