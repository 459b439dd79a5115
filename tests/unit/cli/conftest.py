"""A command line in this process, with a scripted engine and streams made of memory."""

import io
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from moechat.cli import run as run_module
from moechat.cli.app import main
from moechat.errors import DoesNotFit
from moechat.events import Finished, Token, TurnStats
from moechat.sample.params import SamplingParams


class ScriptedEngine:
    """Remembers how it was opened and asked; ``script`` is what a question gives."""

    def __init__(self):
        self.script = lambda text: [Token(5, "Os"), Token(6, "lo."), Token(1)]
        self.finish_reason = "stop"
        self.settings = None
        self.folder = None
        self.asked = []
        self.systems = []
        self.params = []
        self.cancelled = 0
        self.closed = 0
        self.context_tokens = 4096
        self.notice = ""
        self.prefill_choice = SimpleNamespace(gpu=None)
        self.trained_context_tokens = 4096
        self.fit = None
        self.stats = TurnStats(3, 0, 0.1, 0.1, 3, 0.1, 77)
        self.settled = []  # budgets of settle_tiers

    def open(self, folder, **settings):
        self.folder, self.settings = folder, settings
        return self

    def sessions_that_fit(self):
        return self.fit

    def admit(self, num_sessions):
        if self.fit is not None and num_sessions > self.fit:
            raise DoesNotFit(f"{num_sessions} conversations at once do not fit; {self.fit} would")

    def default_sampling(self):
        return SamplingParams(temperature=0.6, top_p=0.95)

    def close(self):
        self.closed += 1


class ScriptedConversation:
    def __init__(self, engine, system):
        self.engine = engine
        engine.systems.append(system)

    def clear(self):
        pass

    def cancel(self):
        self.engine.cancelled += 1

    def ask(self, text, params):
        self.engine.asked.append(text)
        self.engine.params.append(params)
        return self._events(self.engine.script(text))

    def ask_messages(self, turns, params):
        self.engine.systems.append([t.text for t in turns if t.role == "system"])
        return self.ask(turns[-1].text, params)

    def _events(self, events):
        yield from events
        yield Finished(self.engine.finish_reason, "", self.engine.stats)


class Stream(io.TextIOWrapper):
    """A text stream over memory that may call itself a terminal."""

    def __init__(self, content=b"", terminal=False):
        super().__init__(io.BytesIO(content), encoding="utf-8", newline="")
        self._terminal = terminal

    def isatty(self):
        return self._terminal

    @property
    def content(self):
        self.flush()
        return self.buffer.getvalue().decode()


@dataclass
class Result:
    code: int
    stdout: str
    stderr: str


@dataclass
class CommandLine:
    monkeypatch: pytest.MonkeyPatch
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)

    def __call__(self, *arguments, stdin=b"", terminals=""):
        """Run ``moechat``; ``terminals`` names the streams that are: any of i, o, e."""
        streams = (
            Stream(stdin, "i" in terminals),
            Stream(terminal="o" in terminals),
            Stream(terminal="e" in terminals),
        )
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            self.monkeypatch.setattr(sys, name, stream)
        code = main(arguments)
        return Result(code, streams[1].content, streams[2].content)


@pytest.fixture
def moechat(monkeypatch, tmp_path):
    command_line = CommandLine(monkeypatch)
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(run_module, "open_engine", command_line.engine.open)
    monkeypatch.setattr(
        run_module, "settle_tiers", lambda engine, budget: engine.settled.append(budget)
    )
    monkeypatch.setattr(run_module, "new_conversation", ScriptedConversation)
    return command_line
