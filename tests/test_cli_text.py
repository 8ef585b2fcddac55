"""``k3tune generate`` on text: prompts in the chat format, answers taken apart."""

import json

import pytest

from command_line import Script, make_text_base, markup_ids, run_command
from k3tune.commands.loading import load_model
from k3tune.commands.options import Model
from k3tune.data import K3Tokenizer, render_chat

ANSWER = (
    "two and two<|close|>think<|sep|><|open|>response<|sep|>4<|close|>response<|sep|>"
    "<|close|>message<|sep|>"
)
PLAIN = ANSWER[ANSWER.index("4") :]
CALL = (
    '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" '
    'type="number"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
)


@pytest.fixture(scope="module")
def base(fixtures, tmp_path_factory):
    return make_text_base(fixtures / "k3_tiny", tmp_path_factory.mktemp("base") / "k3_text")


@pytest.fixture(scope="module")
def tokenizer(base):
    return K3Tokenizer.from_pretrained(base)


@pytest.fixture
def run(capsys):
    return lambda *arguments: run_command(capsys, *arguments)


@pytest.fixture
def says(base, tokenizer, monkeypatch):
    """Make the model of the next command say a text in markup, then stop or be cut."""

    def script(text, stop="<|end_of_msg|>"):
        model = load_model(Model(str(base)))
        Script(model, markup_ids(tokenizer, text + stop))
        monkeypatch.setattr("k3tune.commands.generate.load_model", lambda options: model)

    return script


def user(text):
    return {"role": "user", "content": text}


def prompt_ids(tokenizer, messages, **options):
    return render_chat(messages, tokenizer, add_generation_prompt=True, **options).input_ids


def test_the_content_is_printed_and_nothing_else(run, base, says):
    says(ANSWER)
    assert run("generate", base, "--prompt", "2 + 2?") == (0, "4\n", "")


def test_the_reasoning_goes_to_stderr_when_asked_for(run, base, says):
    says(ANSWER)
    assert run("generate", base, "--prompt", "2?", "--show-thinking") == (0, "4\n", "two and two\n")


@pytest.mark.parametrize(
    ("options", "rendering", "answer"),
    [
        ([], {}, ANSWER),
        (["--thinking-effort", "low"], {"thinking_effort": "low"}, ANSWER),
        (["--thinking-effort", "none"], {"thinking_effort": None}, ANSWER),
        (["--no-thinking"], {"thinking": False}, PLAIN),
    ],
    ids=str,
)
def test_json_has_ids_text_answer_and_reason(
    run, base, says, tokenizer, options, rendering, answer
):
    says(answer)
    status, out, _ = run("generate", base, "--prompt", "Hé?", "--json", *options)
    row = json.loads(out)
    assert status == 0 and row["prompt_ids"] == prompt_ids(tokenizer, [user("Hé?")], **rendering)
    assert row["completion_ids"] == markup_ids(tokenizer, answer + "<|end_of_msg|>")
    assert (row["text"], row["finish_reason"]) == (answer, "stop")
    thought = {"reasoning_content": "two and two"} if answer == ANSWER else {}
    assert row["answer"] == {"role": "assistant", "content": "4", **thought, "malformed": []}


def test_a_call_of_a_tool_is_printed_with_its_arguments(run, base, says, tokenizer, tmp_path):
    says(ANSWER.replace("<|close|>message", CALL + "<|close|>message"))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"messages": [user("2 + 2?")], "tools": tools}))
    status, out, err = run("generate", base, "--messages", file)
    expected = '4\ntool call: {"name": "add", "arguments": {"a": 2}}\n'
    assert (status, out, err) == (0, expected, "")


def test_an_answer_without_its_end_is_cut_and_said_to_be(run, base, says):
    says(ANSWER, stop="")
    tokens = 15
    status, out, err = run("generate", base, "--prompt", "2?", "--max-new-tokens", tokens)
    assert (status, out) == (0, "\n")
    assert err == f"warning: cut after {tokens} tokens: raise --max-new-tokens for more\n"


def test_an_answer_that_is_no_markup_is_said_to_be(run, base, says):
    says("4")
    status, out, err = run("generate", base, "--prompt", "2?")
    assert (status, out) == (0, "\n")
    assert err.startswith("warning: the answer's markup is malformed: <|end_of_msg|> comes before")


@pytest.mark.parametrize("stop", ["[EOS]", "<|end_of_msg|>"])
def test_raw_text_is_continued_as_it_stands(run, base, says, tokenizer, stop):
    says(" upon a time", stop)
    status, out, _ = run("generate", base, "--prompt", "Once <|sep|>", "--raw", "--json")
    row = json.loads(out)
    assert row["prompt_ids"] == tokenizer.encode_text("Once <|sep|>")
    assert (row["text"], row["finish_reason"]) == (" upon a time", "stop")
    assert status == 0 and "answer" not in row
    says(" upon a time", stop)
    assert run("generate", base, "--prompt", "Once", "--raw")[1] == " upon a time\n"


HISTORY = [
    user("1?"),
    {"role": "assistant", "content": "1", "reasoning_content": "one"},
    user("2?"),
]


@pytest.mark.parametrize("form", ["list", "object", "lines"])
def test_messages_come_from_json_or_a_line_each(run, base, tokenizer, tmp_path, form):
    chats = [HISTORY, [user("x")]] if form == "lines" else [HISTORY]
    written = chats if form != "object" else [{"messages": chat} for chat in chats]
    file = tmp_path / "chats.json"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in written))
    status, out, _ = run("generate", base, "--messages", file, "--max-new-tokens", 1, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [row["prompt_ids"] for row in rows] == [prompt_ids(tokenizer, chat) for chat in chats]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty, expected a list of messages"),
        ('[{"role": "user", "content": "x"}]\n{', "line 2 is no JSON"),
        ("3", "is a JSON int, expected a list of messages"),
        ('{"prompt": "x"}', "is an object with ['prompt'], expected messages"),
        ("[]", "messages is an empty list"),
        ('[{"role": "bot", "content": "x"}]', "message 1 has role 'bot'"),
        (json.dumps(HISTORY[:2]), "the generation prompt follows an assistant message"),
    ],
)
def test_a_bad_conversation_is_one_sentence(run, base, tmp_path, content, message):
    file = tmp_path / "chat.json"
    file.write_text(content)
    status, out, err = run("generate", base, "--messages", file)
    assert (status, out) == (2, "")
    assert str(file) in err and message in err and len(err.splitlines()) == 1


def test_messages_that_cannot_be_read_are_one_sentence(run, base, tmp_path):
    status, _, err = run("generate", base, "--messages", tmp_path / "none.json")
    assert status == 2 and err.startswith("cannot read ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "expected one of --prompt, --messages, --prompt-ids, --prompt-ids-file, got none"),
        (["--prompt", "a", "--prompt-ids", "1"], "got --prompt and --prompt-ids"),
        (["--prompt", ""], "--prompt is empty"),
        (["--messages", "x", "--raw"], "--raw goes with --prompt, got it with --messages"),
        (["--prompt-ids", "1", "--raw"], "--raw goes with --prompt, got it with --prompt-ids"),
    ],
)
def test_prompts_that_make_no_sense_are_one_sentence(run, base, options, message):
    status, out, err = run("generate", base, *options)
    assert (status, out) == (2, "")
    assert message in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_base_without_a_tokenizer_is_one_sentence(run, fixtures, command):
    options = ["--prompt", "x"] if command == "generate" else []
    status, out, err = run(command, fixtures / "k3_tiny", *options)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1
    assert "k3_tiny holds no tiktoken.model" in err
    # what the other command does not have is not advised
    assert ("--prompt-ids" in err) == (command == "generate")


def test_a_tokenizer_of_another_base_is_one_sentence(run, base, fixtures, tmp_path):
    folder = make_text_base(fixtures / "k3_tiny", tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = 319
    (folder / "config.json").write_text(json.dumps(config))
    status, _, err = run("generate", folder, "--prompt", "x")
    assert status == 2 and "has 320 ids, expected at most the 319" in err
