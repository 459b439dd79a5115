"""``moechat run`` with a scripted engine: streams, prompts, flags, exit codes."""

import json
import os
import signal

import pytest

from moechat.cli import run as run_module
from moechat.cli.options import KV_POLICIES
from moechat.errors import NonFiniteLogits, PromptTooLong, Usage
from moechat.events import Token
from moechat.kv.policy import NAMES

QUESTION = "What is the capital of Norway?"


def test_answer_alone_is_on_stdout(moechat):
    result = moechat("run", "mini", "--temperature", "0", QUESTION)
    assert (result.code, result.stdout, result.stderr) == (0, "Oslo.\n", "")
    assert moechat.engine.asked == [QUESTION]
    assert moechat.engine.folder.name == "mini"
    assert moechat.engine.closed == 1


@pytest.mark.parametrize(
    ("stdin", "arguments", "prompt"),
    [
        (b"piped", (), "piped"),
        (b"piped\n", ("question",), "piped\n\nquestion"),
        (b"piped\n\n", ("question",), "piped\n\n\nquestion"),
        (b"a\r\nb\r\n", ("question",), "a\nb\n\nquestion"),
        (b"\xef\xbb\xbfpiped", (), "piped"),
        (b"", ("question",), "question"),
        (b"\n", ("question",), "question"),
        (b"piped", ("",), "piped"),
        (b'print("a\\nb")', (), 'print("a\\nb")'),
        (b"", ("a\r\nb",), "a\nb"),
        (b"", ("--", "--help"), "--help"),
    ],
)
def test_prompt_is_made_of_the_pipe_and_the_argument(moechat, stdin, arguments, prompt):
    result = moechat("run", "mini", *arguments, stdin=stdin)
    assert (result.code, result.stderr) == (0, "")
    assert moechat.engine.asked == [prompt]


def test_model_may_be_left_out_when_text_is_piped(moechat):
    assert moechat("run", stdin=b"hello").code == 0
    assert moechat.engine.folder.name == "mini"


@pytest.mark.parametrize("arguments", [(), ("",), ("  \n",)])
def test_empty_prompt_is_refused(moechat, arguments):
    result = moechat("run", "mini", *arguments, stdin=b"\n")
    assert result.code == 2
    assert "[prompt-empty]" in result.stderr
    assert moechat.engine.folder is None, "nothing should be loaded for it"


def test_invalid_utf8_on_stdin_names_the_byte(moechat):
    result = moechat("run", "mini", stdin=b"abc\xff\xfe def\n")
    assert (result.code, result.stdout) == (2, "")
    assert "offset 3" in result.stderr and "[invalid-utf8]" in result.stderr


def test_invalid_utf8_in_an_argument_names_the_byte(moechat):
    result = moechat("run", "mini", os.fsdecode(b"ab\xff"))
    assert result.code == 2
    assert "offset 2" in result.stderr


def test_prompt_on_a_terminal_does_not_read_it(moechat):
    result = moechat("run", "mini", "question", stdin=b"never read", terminals="ioe")
    assert result.code == 0
    assert moechat.engine.asked == ["question"]


def test_terminal_without_prompt_and_redirected_stdout_is_refused(moechat):
    result = moechat("run", "mini", terminals="ie")
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: there is no prompt") and "[usage]" in result.stderr


@pytest.mark.parametrize("arguments", [(), ("run",), ("run", "mini", "--plain", "--no-history")])
def test_terminals_without_prompt_chat(moechat, monkeypatch, arguments):
    called = {}

    def chat(conversation, settings, **options):
        called.update(options, params=settings.params(), origins=settings.describe())
        return 0

    monkeypatch.setattr("moechat.terminal.repl.run_chat", chat)
    assert moechat(*arguments, terminals="ioe").code == 0
    assert called["model_name"] == "mini" and called["is_demo"]
    assert called["stats"] == "line"
    assert called["plain"] == ("--plain" in arguments)
    assert called["history"] == ("--no-history" not in arguments)
    assert called["params"].temperature == 0.6
    assert moechat.engine.closed == 1


def test_chat_knows_which_values_came_from_flags(moechat, monkeypatch):
    seen = {}

    def chat(conversation, settings, **options):
        seen.update({name: (value, origin) for name, value, origin in settings.describe()})
        return 130

    monkeypatch.setattr("moechat.terminal.repl.run_chat", chat)
    assert moechat("run", "mini", "--seed", "5", terminals="ioe").code == 130
    assert seen["seed"] == ("5", "flag")
    assert seen["temperature"] == ("0.6", "model")


def test_flags_override_the_vendors_defaults(moechat):
    moechat("run", "mini", "q")
    flags = "--temperature 0.5 --top-k 3 --min-p 0.1 --repetition-penalty 1.1"
    flags += " --presence-penalty -0.5 --seed 7 --max-tokens 9 --stop A --stop B"
    moechat("run", "mini", *flags.split(), "q")
    vendor, own = moechat.engine.params
    assert (vendor.temperature, vendor.top_p, vendor.stop) == (0.6, 0.95, ())
    assert (own.temperature, own.top_k, own.top_p, own.min_p) == (0.5, 3, 0.95, 0.1)
    assert (own.repetition_penalty, own.presence_penalty, own.seed) == (1.1, -0.5, 7)
    assert (own.max_tokens, own.stop) == (9, ("A", "B"))


def test_engine_flags_reach_the_engine(moechat):
    moechat(
        "run", "mini", "--ctx", "256", "--threads", "2", "--compute", "exact", "--speculate", "q"
    )
    assert moechat.engine.settings == {
        "compute": "exact",
        "threads": 2,
        "kv": "native",
        "context_tokens": 256,
        "speculate": True,
        "device": "auto",
        "gpu_decode": "auto",
    }
    moechat("run", "mini", "q")
    assert moechat.engine.settings["speculate"] is False


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--device", "gpu"),
        ("--device", "cuda:0,"),
        ("--device", "cuda:0,cuda:0"),
        ("--gpu-memory", "20"),
        ("--gpu-memory", "0GB"),
        ("--gpu-memory", "-1GB"),
        ("--gpu-memory", "20gb"),
        ("--gpu-prefill-tokens", "-1"),
        ("--gpu-decode", "yes"),
        ("--gpu-experts", "-1"),
        ("--gpu-experts", "all"),
        ("--gpu-prefill-tokens", "1e3"),
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--temperature", "hot"),
        ("--top-k", "-1"),
        ("--top-k", "1.5"),
        ("--top-p", "0"),
        ("--top-p", "1.01"),
        ("--min-p", "2"),
        ("--repetition-penalty", "0"),
        ("--presence-penalty", "inf"),
        ("--seed", "-1"),
        ("--seed", "99999999999999999999999"),
        ("--stop", ""),
        ("--max-tokens", "0"),
        ("--ctx", "0"),
        ("--threads", "0"),
        ("--compute", "fp4"),
        ("--kv-budget", "0"),
        ("--kv-budget", "1.1"),
        ("--kv-budget", "nan"),
        ("--kv-budget", "much"),
        ("--kv", "nonsense"),
        ("--stats", "all"),
        ("--reasoning-effort", "extreme"),
    ],
)
def test_bad_flag_value_is_one_line_that_names_the_flag(moechat, flag, value):
    result = moechat("run", "mini", flag, value, "q")
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert flag in result.stderr
    words = ("allowed: ", "not one of ")
    assert any(word in result.stderr for word in words)
    assert moechat.engine.folder is None


@pytest.mark.parametrize("policy", KV_POLICIES)
def test_the_kv_policy_reaches_the_engine(moechat, policy):
    moechat("run", "mini", "--kv", policy, "q")
    assert moechat.engine.settings["kv"] == policy
    assert "kv_budget" not in moechat.engine.settings
    assert {*KV_POLICIES} == {"auto", *NAMES}
    assert moechat.engine.settled == ([None] if policy == "spectrum" else [])


@pytest.mark.parametrize("verb", [("run", "mini", "q"), ("batch", os.devnull)])
@pytest.mark.parametrize("policy", [None, *KV_POLICIES])
def test_a_kv_budget_is_for_policies_that_read_it(moechat, verb, policy):
    chosen = () if policy is None else ("--kv", policy)
    result = moechat(*verb, *chosen, "--kv-budget", "0.3")
    if policy in ("auto", "spectrum", "pdtrim", "snapkv"):
        assert result.code == 0 and moechat.engine.settings["kv_budget"] == 0.3
        assert moechat.engine.settled == ([0.3] if policy == "spectrum" else [])
    else:
        assert (result.code, moechat.engine.folder) == (2, None)
        assert f"--kv-budget does nothing with --kv {policy or 'native'}" in result.stderr


def test_system_text_comes_from_the_flag_or_a_file(moechat, tmp_path):
    file = tmp_path / "system.txt"
    file.write_bytes(b"\xef\xbb\xbfBe\r\nbrief.\n")
    moechat("run", "mini", "--system", "Be kind.", "q")
    moechat("run", "mini", "--system-file", str(file), "q")
    assert moechat.engine.systems == ["Be kind.", "Be\nbrief."]
    both = moechat("run", "mini", "--system", "a", "--system-file", str(file), "q")
    assert both.code == 2 and "--system-file" in both.stderr


@pytest.mark.parametrize(
    ("content", "code", "name"),
    [(None, 3, "file-missing"), (b"\xff", 2, "invalid-utf8")],
)
def test_bad_system_file_is_one_line(moechat, tmp_path, content, code, name):
    file = tmp_path / "system.txt"
    if content is not None:
        file.write_bytes(content)
    result = moechat("run", "mini", "--system-file", str(file), "q")
    assert result.code == code
    assert f"[{name}]" in result.stderr and "system.txt" in result.stderr


THINKING = [Token(5, "", "Hm."), Token(6, "Oslo.")]


@pytest.mark.parametrize(
    ("flags", "terminals", "shown"),
    [
        ((), "", False),
        ((), "ie", False),  # the answer goes into a pipe: nobody watches
        ((), "ioe", True),
        ((), "io", False),
        (("--think",), "ie", True),
        (("--think",), "", False),
        (("--no-think",), "ie", False),
    ],
)
def test_thinking_is_for_people_on_stderr(moechat, monkeypatch, switches, flags, terminals, shown):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    moechat.engine.script = lambda text: THINKING
    result = moechat("run", "mini", *flags, "--stats", "none", "q", terminals=terminals)
    assert (result.code, result.stdout) == (0, "Oslo.\n")
    assert result.stderr == ("\x1b[2mHm.\x1b[0m\n\n" if shown else "")


@pytest.fixture
def switches(moechat, monkeypatch):
    """What the flags set in a conversation; its model has no reasoning effort."""
    given = []

    def set_switch(self, name, value):
        if name == "reasoning_effort":
            raise Usage("this model has no reasoning effort to set")
        given.append((name, value))

    conversation_class = run_module.new_conversation
    monkeypatch.setattr(conversation_class, "set_switch", set_switch, raising=False)
    return given


def test_switches_reach_the_conversation(moechat, monkeypatch, switches):
    moechat("run", "mini", "q")
    assert switches == []
    moechat("run", "mini", "--no-think", "q")
    moechat("run", "mini", "--think", "--batch", stdin=b"q\n")
    assert switches == [("think", "off"), *[("think", "on")] * 4]
    seen = {}

    def chat(*_, **options):
        seen.update(options)
        return 0

    monkeypatch.setattr("moechat.terminal.repl.run_chat", chat)
    moechat("run", "mini", "--no-think", terminals="ioe")
    assert seen["switches"] == {"think": "off"}


def test_a_switch_that_the_model_lacks_is_one_line(moechat, switches):
    result = moechat("run", "mini", "--reasoning-effort", "low", "q")
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr == "error: this model has no reasoning effort to set. [usage]\n"
    assert moechat.engine.closed == 1


def test_stats_go_to_stderr(moechat):
    line = moechat("run", "mini", "--stats", "line", "q")
    assert line.stdout == "Oslo.\n" and "seed 77" in line.stderr and "stop" in line.stderr
    as_json = moechat("run", "mini", "--stats", "json", "q")
    assert json.loads(as_json.stderr)["finish_reason"] == "stop"
    assert "seed 77" in moechat("run", "mini", "q", terminals="ie").stderr
    assert moechat("run", "mini", "q", "--stats", "none", terminals="ie").stderr == ""


def test_cut_answer_says_so_also_without_stats(moechat):
    moechat.engine.finish_reason = "length"
    result = moechat("run", "mini", "q")
    assert result.code == 0 and "max_tokens" in result.stderr


def test_unknown_model_names_close_ones_and_the_order(moechat):
    result = moechat("run", "mimi")
    assert (result.code, result.stdout) == (3, "")
    assert "mini" in result.stderr and 'moechat run mini "…"' in result.stderr
    ordered = moechat("run", "mimi", "q")
    assert ordered.code == 3 and "comes before" not in ordered.stderr
    whole_question = moechat("run", QUESTION)
    assert whole_question.code == 3 and 'moechat run mini "…"' in whole_question.stderr


def test_known_model_without_weights_says_where_they_are(moechat):
    result = moechat("run", "deepseek-v3", "q")
    assert result.code == 3
    for part in ("689 GB", "deepseek-ai/DeepSeek-V3", "give /path/to/folder"):
        assert part in result.stderr


def test_over_long_prompt_offers_a_larger_context_where_there_is_one(moechat):
    def refuse(text):
        raise PromptTooLong("the prompt has 900 tokens; the limit is 100")

    moechat.engine.script = refuse
    moechat.engine.context_tokens = 100
    result = moechat("run", "mini", "q")
    assert (result.code, result.stdout) == (4, "")
    assert "900" in result.stderr and "--ctx" in result.stderr and "4096" in result.stderr
    moechat.engine.context_tokens = 4096
    assert "--ctx" not in moechat("run", "mini", "q").stderr


def test_engine_error_in_an_answer_has_its_name_and_code(moechat):
    def fail(text):
        yield Token(5, "Os")
        raise NonFiniteLogits("the model produced NaN", "layer 3")

    moechat.engine.script = fail
    result = moechat("run", "mini", "q")
    assert result.code == 1
    assert result.stdout.rstrip("\n") == "Os"
    assert "[non-finite-logits]" in result.stderr and "Traceback" not in result.stderr
    assert moechat.engine.closed == 1


def test_internal_error_is_one_line_and_debug_shows_the_traceback(moechat):
    def fail(text):
        raise ZeroDivisionError("first\nsecond")

    moechat.engine.script = fail
    result = moechat("run", "mini", "q")
    assert result.code == 1
    assert result.stderr.count("\n") == 1
    assert "internal error: ZeroDivisionError: first" in result.stderr
    assert "--debug" in result.stderr
    for arguments in [("run", "mini", "--debug", "q"), ("--debug", "run", "mini", "q")]:
        debug = moechat(*arguments)
        assert debug.code == 1 and "Traceback" in debug.stderr
    assert "`moechat --debug …`" in result.stderr
    known = moechat("run", "nosuch", "--debug")
    assert known.code == 3 and "Traceback" in known.stderr


def test_interrupt_keeps_what_was_printed(moechat):
    def interrupted(text):
        yield Token(5, "Os")
        os.kill(os.getpid(), signal.SIGINT)
        yield Token(6, "lo")

    moechat.engine.script = interrupted
    moechat.engine.finish_reason = "cancelled"
    result = moechat("run", "mini", "q")
    assert (result.code, result.stdout) == (130, "Oslo\n")
    assert moechat.engine.cancelled == 1 and moechat.engine.closed == 1


def test_interrupt_while_loading_is_quiet(moechat, monkeypatch):
    def slow(folder, **settings):
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the signal should have ended this")

    monkeypatch.setattr(run_module, "open_engine", slow)
    result = moechat("run", "mini", "q")
    assert (result.code, result.stdout, result.stderr) == (130, "", "")
