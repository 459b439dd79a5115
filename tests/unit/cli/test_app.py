"""The command line as a whole: its frozen surface, help, and exit codes of the outside."""

import errno
import sys

import pytest

from moechat import __version__
from moechat.cli.app import build_command

SURFACE = {
    "run": "model prompt --temperature --top-k --top-p --min-p --repetition-penalty "
    "--presence-penalty --seed --stop --max-tokens --system --system-file "
    "--think --no-think --reasoning-effort --ctx --threads --resident "
    "--device --gpu-memory --gpu-prefill-tokens --gpu-decode --gpu-experts "
    "--compute --kv --kv-budget --speculate --plain --stats --no-history --batch --concurrency "
    "--debug",
    "batch": "file --model --concurrency --temperature --top-k --top-p --min-p "
    "--repetition-penalty --presence-penalty --seed --stop --max-tokens --system --system-file "
    "--think --no-think --reasoning-effort --ctx --threads --resident "
    "--device --gpu-memory --gpu-prefill-tokens "
    "--gpu-decode --gpu-experts --compute --kv --kv-budget --speculate --stats --debug",
    "list": "--json --debug",
    "show": "model --json --debug",
    "doctor": "--json --debug",
    "quantize": "source target --to --json --debug",
    "bench": "--synthetic --layers --experts --format --threads --repetitions --max-context "
    "--plot --json --debug",
    "bench model": "model --threads --repetitions --max-context --device --plot --json --debug",
    "bench kernels": "--format --shape --threads --batch --experts-hit --experts --bursts --isa "
    "--plot --json --debug",
    "eval": "",
    "eval ppl": "model file --window --limit --threads --device --json --debug",
    "eval needle": "model --lengths --depths --filler --seed --threads --device --json --debug",
    "eval probe": "model --threads --device --json --debug",
    "eval kv": "model --text --policies --budgets --window --scored --windows --lengths --depths "
    "--filler --seed --threads --device --plot --json --debug",
}


def test_options_are_those_that_were_agreed():
    surface = {}
    verbs = dict(build_command().commands)
    for group in ("bench", "eval"):
        verbs |= {f"{group} {name}": command for name, command in verbs[group].commands.items()}
    for verb, command in verbs.items():
        names = []
        for parameter in command.params:
            is_option = parameter.param_type_name == "option"
            names += parameter.opts if is_option else [parameter.name]
            if parameter.secondary_opts:
                assert parameter.name == "think", "no --no-x twins"
                names += parameter.secondary_opts
        surface[verb] = " ".join(names)
    assert surface == SURFACE


def test_version(moechat):
    result = moechat("--version")
    assert (result.code, result.stdout, result.stderr) == (0, f"moechat {__version__}\n", "")


def test_nothing_to_do_without_terminals_is_help_and_2(moechat):
    result = moechat(stdin=b"hello")
    assert (result.code, result.stdout) == (2, "")
    assert 'moechat run mini "a question"' in result.stderr and "list" in result.stderr
    assert moechat.engine.folder is None


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("run", "--help"), ("list", "-h")])
def test_help_is_plain_text_on_stdout(moechat, arguments):
    result = moechat(*arguments, terminals="oe")
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.startswith("Usage: moechat") and "\x1b" not in result.stdout
    assert not set("╭│╰─") & set(result.stdout)


@pytest.mark.parametrize("arguments", [(), ("bench",), ("eval",)])
def test_the_list_of_commands_is_not_cut(moechat, arguments):
    _, _, commands = moechat(*arguments, "--help").stdout.partition("\nCommands:\n")
    assert commands and "..." not in commands


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("run", "--nope"), "--nope"),
        (("run", "--temperatur", "1"), "--temperature"),
        (("run", "mini", "What", "is"), "needs quotes"),
        (("run", "--seed"), "--seed"),
        (("rum",), "rum"),
        (("mini",), "mini"),
        (("show",), "MODEL"),
        (("list", "extra"), "extra"),
    ],
)
def test_usage_error_is_one_line_with_a_hint(moechat, arguments, part):
    result = moechat(*arguments, stdin=b"x")
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and result.stderr.endswith("[usage]\n")
    assert result.stderr.count("\n") == 1
    assert part in result.stderr and "--help`" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left"),
        (MemoryError(), 1, "MemoryError"),
    ],
)
def test_trouble_outside_the_engine_is_at_most_one_line(moechat, monkeypatch, error, code, words):
    def fail(folder, **settings):
        raise error

    monkeypatch.setattr(sys.modules["moechat.cli.run"], "open_engine", fail)
    result = moechat("run", "mini", "q")
    assert result.code == code
    assert result.stderr.count("\n") == (1 if words else 0) and words in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bench", "mini"), "`moechat bench model NAME`"),
        (("bench", "kernls"), "Did you mean 'kernels'? See"),
        (("bench", "kernels", "--threads", "x"), "from 1 to 256"),
        (("bench", "--threads", "2", "kernels"), "error: options of `kernels` go after"),
        (("show", "no/such.gguf"), "error: there is no file and no folder 'no/such.gguf'. ["),
    ],
)
def test_a_wrong_line_is_told_what_was_meant(moechat, arguments, words):
    result = moechat(*arguments)
    assert result.code in (2, 3) and words in result.stderr


def test_errors_break_between_words(moechat, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    whole = moechat("show", "nosuch").stderr
    folded = moechat("show", "nosuch", terminals="e").stderr
    assert whole.count("\n") == 1
    assert folded.count("\n") > 3 and folded.split() == whole.split()
    assert all(len(line) < 40 for line in folded.splitlines())
