"""A scripted conversation, and a chat with it: ``python fakes.py '{"plain": true}'``."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from moechat.errors import BadParameter, NonFiniteLogits, PromptTooLong, Usage
from moechat.events import Event, Finished, PrefillProgress, Token, TurnStats
from moechat.messages import Turn
from moechat.sample.params import SamplingParams

HOSTILE = "a[i] [bold] list[int] [/INST] \x1b[31m end"


class FakeConversation:
    """Answers by the first word of a message; any other message is echoed with what was sent."""

    def __init__(self) -> None:
        self.system, self.turns = "", []
        self.context_tokens, self.trained_context_tokens = 100, 4096
        self._think: str | None = None
        self._cancelled = threading.Event()

    @property
    def used_tokens(self) -> int:
        return 10 * len(self.turns)

    def ask(self, text: str, params: SamplingParams) -> Iterator[Event]:
        if text.startswith("toolong"):
            raise PromptTooLong("the prompt has 123 tokens; the limit is 100")
        if text == "late":  # there is nothing to cancel yet
            print("encoding", file=sys.stderr, flush=True)
            time.sleep(0.3)
        return self._answer([*self.turns, Turn("user", text)], params)

    def regenerate(self, params: SamplingParams) -> Iterator[Event]:
        return self._answer(self.turns[:-1], params, again=True)

    def undo(self) -> bool:
        done = bool(self.turns)
        del self.turns[-2:]
        return done

    def clear(self) -> None:
        self.turns.clear()

    def set_system(self, text: str) -> None:
        self.system = text

    def set_switch(self, name: str, value: str | None) -> None:
        if name != "think":
            raise Usage("this model has no reasoning effort to set")
        if value not in ("on", "off", None):
            raise BadParameter("think cannot be that")
        self._think = value

    def switches(self) -> list[tuple[str, str | None]]:
        return [("think", self._think)]

    def cancel(self) -> None:
        self._cancelled.set()

    def _answer(
        self, turns: list[Turn], params: SamplingParams, again: bool = False
    ) -> Iterator[Event]:
        self._cancelled.clear()
        said, thought, reason = [], 0, "stop"
        for event in self._script(turns, params, again):
            said.append(event.text)
            thought += bool(event.reasoning)
            yield event
            if self._cancelled.is_set() and turns[-1].text != "hang":
                reason = "cancelled"
                break
        text = "".join(said)
        if text:
            self.turns = [*turns, Turn("assistant", text)]
        tokens = len([piece for piece in said if piece])
        reason = "length" if turns[-1].text == "cut" else reason
        stats = TurnStats(7, 3, 0.1, 0.1, tokens + thought, 0.1, 42, thought)
        yield Finished(reason, "", stats)

    def _script(self, turns: list[Turn], params: SamplingParams, again: bool) -> Iterator[Event]:
        text = turns[-1].text
        word = text.split()[0]
        if word in ("slow", "late"):
            for number in range(500):
                yield Token(1, f"w{number} ")
                self._cancelled.wait(0.02)
        elif word == "think":
            yield from (Token(1, "", piece) for piece in ("Let me\n", "\nsee: ", HOSTILE))
            yield from (Token(1, piece) for piece in ("The **an", "swer**."))
        elif word == "only-think":
            yield Token(1, "", "hm")
        elif word == "ponder":
            for number in range(500):
                yield Token(1, "", f"p{number} ")
                self._cancelled.wait(0.02)
        elif word == "brief":
            for number in range(15):
                yield Token(1, f"b{number} ")
                self._cancelled.wait(0.02)
        elif word == "prefill":
            for layer in range(500):
                yield PrefillProgress(layer, 500, 9, 2.0 + layer / 10)
                self._cancelled.wait(0.02)
        elif word == "hang":
            yield Token(1, "hanging")
            self._cancelled.wait(30)
            yield Token(1, " on")
            threading.Event().wait(30)
        elif word == "crash":
            yield Token(1, "half")
            raise RuntimeError("script [/INST] broke")
        elif word == "nan":
            raise NonFiniteLogits("layer 3 gave NaN")
        elif word == "hostile":
            yield from (Token(1, character) for character in HOSTILE)
        else:
            shown = json.dumps(
                [text, len(turns), self.system, params.temperature, again], ensure_ascii=False
            )
            yield Token(1, f"got {shown}")


def main(options: dict[str, Any]) -> int:
    from moechat.terminal.repl import run_chat
    from moechat.terminal.settings import Settings

    settings = Settings(SamplingParams(top_p=0.9), {"temperature": 0.5, "seed": None})
    conversation = FakeConversation()
    for name, value in options.get("switches", {}).items():
        conversation.set_switch(name, value)
    return run_chat(conversation, settings, model_name="mini", is_demo=True, **options)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
