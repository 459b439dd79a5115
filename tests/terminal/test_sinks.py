"""Which bytes of an answer go to which stream."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from streams import Terminal, shown

from moechat.errors import CheckpointDamaged
from moechat.events import Finished, PrefillProgress, Queued, Token, TurnStats
from moechat.terminal.sinks import PlainSink, escapes_allowed, format_error, print_closing
from moechat.terminal.stats_text import kv_note, stats_json, stats_line

STATS = TurnStats(20, 5, 0.5, 0.6, 12, 0.25, seed=7)


def run(*texts: str, reason: str = "stop", stats: str = "none", last: str = "") -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    events = [*(Token(1, text) for text in texts), Finished(reason, last, STATS)]
    finished = PlainSink(out, err, stats=stats, context_tokens=64).consume(events)
    assert finished is events[-1]
    return out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("texts", "out"),
    [
        (["Os", "lo."], "Oslo.\n"),
        (["a\n", "\nb", "\n\n"], "a\n\nb\n"),
        ([], "\n"),
        (["a[i] [bold] list[int] [/INST] \ttab"], "a[i] [bold] list[int] [/INST] \ttab\n"),
        (["\x1b[31m red \x9b1m \u202eabc\x00\r"], "␛[31m red �1m �abc␀␍\n"),
        (["a\u2028b\u2069c\ud83d"], "a�b�c�\n"),
    ],
)
def test_stdout_is_the_answer_and_one_newline(texts, out):
    assert run(*texts) == (out, "")


def test_text_held_back_to_the_end_is_printed():
    assert run("a", last="b")[0] == "ab\n"


def test_text_is_flushed_as_it_comes():
    class Counting(io.StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    out = Counting()
    sink = PlainSink(out, io.StringIO())
    sink.write(Token(1, "a"))
    assert out.flushed == "a"


def test_an_answer_that_fails_ends_its_line_but_nothing_else_does():
    def events():
        yield Token(1, "half")
        raise OSError

    out = io.StringIO()
    with pytest.raises(OSError):
        PlainSink(out, io.StringIO()).consume(events())
    assert out.getvalue() == "half\n"


@pytest.mark.parametrize(
    ("reason", "note"),
    [
        ("length", "cut at 12 tokens by the max_tokens limit"),
        ("context", "the context of 64 tokens is full"),
        ("cancelled", "interrupted"),
    ],
)
def test_a_cut_answer_says_so_on_stderr(reason, note):
    out, err = run("x", reason=reason)
    assert out == "x\n"
    assert note in err


def test_stats_line_and_json():
    line = run("x", stats="line")[1]
    for part in ("20 new + 5 cached", "40 tok/s", "0.60 s", "12 tokens", "48.0 tok/s", "seed 7"):
        assert part in line
    assert line.count("\n") == 1
    counters = json.loads(run("x", stats="json")[1])
    assert counters["new_prompt_tokens"] == 20
    assert counters["cached_prompt_tokens"] == 5
    assert counters["decode_tokens_per_second"] == 48.0
    assert counters["seed"] == 7
    assert counters["finish_reason"] == "stop"


def test_drafts_are_counted_where_there_were_any():
    assert "draft" not in run("x", stats="line")[1]
    stats = TurnStats(20, 5, 0.5, 0.6, 12, 0.25, drafted=7, accepted=4)
    assert "48.0 tok/s, 4 of 7 drafts accepted; seed" in stats_line(Finished("stop", "", stats))
    counters = json.loads(stats_json(Finished("stop", "", stats)))
    assert (counters["drafted"], counters["accepted"]) == (7, 4)


def test_experts_on_the_gpu_are_counted_where_there_are_any():
    assert "experts" not in run("x", stats="line")[1]
    finished = Finished("stop", "", TurnStats(20, 5, 0.5, 0.6, 12, 0.25, gpu_experts=16))
    assert "48.0 tok/s, 16 experts a layer on the GPU; seed" in stats_line(finished)
    assert json.loads(stats_json(finished))["gpu_experts"] == 16


def test_kv_bytes_are_told_where_the_path_is_lossy():
    assert "KV" not in run("x", stats="line")[1]
    stats = TurnStats(20, 5, 0.5, kv_bytes=400_000, kv_native_bytes=1_600_000)
    assert "40 tok/s, KV 400 kB of 1.6 MB (25 %); first" in stats_line(Finished("stop", "", stats))
    counters = json.loads(stats_json(Finished("stop", "", stats)))
    assert (counters["kv_bytes"], counters["kv_native_bytes"]) == (400_000, 1_600_000)


def test_a_gpu_says_how_it_read_the_prompt():
    stats = TurnStats(
        20_000,
        5,
        10.0,
        prefill_device="cuda:0",
        prefill_streamed_bytes=500 * 10**9,
        prefill_stream_seconds=10.0,
        prefill_compute_seconds=7.5,
        prefill_wait_seconds=2.25,
        prefill_attention="cudnn",
    )
    assert (
        "2000 tok/s on cuda:0 (500 GB at 50 GB/s, 7.5 s of computing, 2.2 s of waiting, cudnn "
        "attention); first"
    ) in stats_line(Finished("stop", "", stats))
    counters = json.loads(stats_json(Finished("stop", "", stats)))
    assert counters["prefill_device"] == "cuda:0"
    assert counters["prefill_streamed_bytes"] == 500 * 10**9
    assert (counters["prefill_compute_seconds"], counters["prefill_wait_seconds"]) == (7.5, 2.25)


def test_a_slow_stream_has_a_rate_that_says_something():
    stats = TurnStats(9, prefill_device="torch-cpu", prefill_streamed_bytes=28_600_000,
                      prefill_stream_seconds=0.14)  # fmt: skip
    assert "(28.6 MB at 204 MB/s, " in stats_line(Finished("stop", "", stats))


def test_both_devices_are_named():
    stats = TurnStats(
        20, 5, 0.5, 0.6, 12, 0.25, prefill_device="cpu", decode_device="cuda:0, cpu"
    )  # fmt: skip
    line = stats_line(Finished("stop", "", stats))
    assert "40 tok/s on cpu; first" in line and "48.0 tok/s on cuda:0, cpu; seed" in line
    assert json.loads(stats_json(Finished("stop", "", stats)))["decode_device"] == "cuda:0, cpu"


RESUMED = {"prefill_device": "cuda:0", "prefill_layers": 61, "prefill_resumed_layers": 40}


def test_a_resumed_prompt_is_named_and_has_no_rate():
    stats = TurnStats(20_000, 5, 3.2, 4.0, 12, 0.25, prefill_layers_done=61, **RESUMED)
    line = stats_line(Finished("stop", "", stats))
    assert "cached tokens, resumed at layer 40 of 61, 3.2 s on cuda:0; first token" in line
    counters = json.loads(stats_json(Finished("stop", "", stats)))
    assert counters["prefill_resumed_layers"] == 40 and counters["prefill_seconds"] == 3.2
    assert counters["prefill_tokens_per_second"] == 0


def test_a_prompt_that_was_cut_says_how_far_it_came():
    stats = TurnStats(3034, 0, 1.25, prefill_device="cpu", prefill_layers=6, prefill_layers_done=4,
                      kv_bytes=10, kv_native_bytes=20, kv_dropped_fraction=0.5)  # fmt: skip
    end = Finished("cancelled", "", stats)
    assert stats_line(end) == (
        "prompt 3034 new + 0 cached tokens, interrupted at layer 4 of 6 after 1.2 s on cpu; "
        "answer 0 tokens; seed 0; cancelled"
    )
    counters = json.loads(stats_json(end))
    assert (counters["prefill_layers_done"], counters["prefill_layers"]) == (4, 6)
    assert counters["prefill_seconds"] == 1.25 and counters["prefill_tokens_per_second"] == 0
    assert kv_note(end, 0.1) == ""
    again = TurnStats(3034, 0, 1.25, prefill_layers_done=50, **RESUMED)
    assert "resumed at layer 40 of 61, interrupted at layer 50 of 61 after" in stats_line(
        Finished("cancelled", "", again)
    )


def test_no_prefill_rate_without_a_prefill():
    assert "9 cached tokens; first token" in stats_line(Finished("stop", "", TurnStats(1, 9)))


def test_a_prompt_that_was_cancelled_has_no_first_token():
    line = stats_line(Finished("cancelled", "", TurnStats(3034, 0, seed=1)))
    assert line == (
        "prompt 3034 new + 0 cached tokens, none of them read; answer 0 tokens; seed 1; cancelled"
    )
    some = TurnStats(9, 0, decode_tokens=2, decode_seconds=1.0, first_token_seconds=0.1)
    assert "first token 0.10 s; answer 2 tokens, " in stats_line(Finished("cancelled", "", some))


def test_stats_line_is_broken_between_words_on_terminals(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    err = Terminal()
    print_closing(err, Finished("stop", "", STATS), "line", 64)
    assert all(len(line) < 30 for line in err.getvalue().split("\n"))
    assert " ".join(err.getvalue().split()) == run("x", stats="line")[1].strip()


def test_progress_of_a_long_prefill_is_shown_on_terminals_and_erased():
    events = [PrefillProgress(3, 6, 900, 0.9), PrefillProgress(5, 6, 900, 1.5)]
    err = Terminal()
    sink = PlainSink(io.StringIO(), err)
    sink.write(events[0])
    assert err.getvalue() == ""
    sink.write(events[1])
    assert "900 tokens: layer 5/6, 2 s" in shown(err.getvalue())
    sink.write(PrefillProgress(5, 6, 900, 15.0, stream_bytes_per_second=49.96e9))
    assert "layer 5/6, 50 GB/s, 15 s, about 3 s left" in shown(err.getvalue())
    sink.write(PrefillProgress(4, 6, 900, 4.0, stream_bytes_per_second=3.6e7, resumed_layers=3))
    assert "layer 4/6, resumed at 3, 36 MB/s, 4 s, about 8 s left" in shown(err.getvalue())
    sink.write(PrefillProgress(2, 6, 900, 2.0, resumed_layers=3))
    assert "layer 2/6, resumed at 3, 2 s" in shown(err.getvalue())
    assert "left" not in shown(err.getvalue())
    sink.write(Token(1, "x"))
    assert shown(err.getvalue()) == ""
    assert "\x1b" not in err.getvalue()
    pipe = io.StringIO()
    PlainSink(io.StringIO(), pipe).write(events[1])
    assert pipe.getvalue() == ""


def test_an_error_is_one_harmless_line():
    error = CheckpointDamaged("no file a\nb", "\x1b[2J", "Look again")
    assert format_error(error) == "error: no file a b: ␛[2J. Look again. [checkpoint-damaged]"


def test_escapes_only_on_terminals_that_want_them(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert escapes_allowed(Terminal())
    assert not escapes_allowed(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not escapes_allowed(Terminal())
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert not escapes_allowed(Terminal())


def test_sinks_import_nothing_heavy():
    code = (
        "import sys, moechat.terminal.sinks;"
        "sys.exit(' '.join({'rich', 'prompt_toolkit', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).stderr.strip() == b""


def test_waiting_behind_others_is_shown_and_counted():
    stdout, stderr = io.StringIO(), Terminal()
    stats = TurnStats(5, 0, 0.1, 2.5, 3, 0.1, 7, queued_seconds=2.25)
    events = [Queued(ahead=2), Queued(ahead=1), Token(5, "a"), Finished("stop", "", stats)]
    PlainSink(stdout, stderr, stats="line").consume(events)
    shown = stderr.getvalue()
    assert "\rwaiting for 2 requests" in shown and "\rwaiting for 1 request " in shown
    assert "after 2.2 s behind others" in shown
    assert json.loads(stats_json(Finished("stop", "", stats)))["queued_seconds"] == 2.25
    assert "behind" not in stats_line(Finished("stop", "", TurnStats(5, 0, 0.1)))
