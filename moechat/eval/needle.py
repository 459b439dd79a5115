"""A fact hidden in a long text, and the question for it: can the model still find it?

The text is a user's message that ends with the question, as the model's chat template writes it.
What stands before the question crosses the KV path alone, so that no KV policy can know what will
be asked. The question is then fed to the decode side, and answered greedily.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moechat.engine.session import Session
from moechat.engine.text import TextModel
from moechat.errors import Usage
from moechat.eval.crossing import feed
from moechat.messages import Turn
from moechat.sample.params import SamplingParams
from moechat.text.thinking_switches import THINK, ThinkingSwitches

ANSWER_TOKENS = 32  # a sentence with the code; what comes later would not count
MIN_LENGTH_TOKENS = 100
_FILLER = Path(__file__).with_name("filler.txt")
_NAMES = ("Clara", "Tom", "Nora", "Felix", "Anna", "Oscar", "Lucy", "Hugo", "Maya", "Leo")
_MAX_SENTENCE_CHARACTERS = 300
_SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")
# Begins unlike the question: where two prompts part, the question begins.
_OTHER_QUESTION = "Is it so?"


@dataclass(frozen=True, slots=True)
class Trial:
    """One text with its question. ``question_ids`` end with what precedes an answer."""

    length_tokens: int  # of all ids together, as was asked for; at most so many
    depth_percent: float
    code: str
    document_ids: list[int]
    question_ids: list[int]


@dataclass(frozen=True, slots=True)
class Result:
    """What came back for a trial."""

    trial: Trial
    answer: str
    found: bool


def depths_percent(count: int) -> list[float]:
    """``count`` places, evenly apart, without both ends: 5, 10, ... 95 for 19."""
    return [100 * i / (count + 1) for i in range(1, count + 1)]


def sentences_of(text: str) -> list[str]:
    """The different sentences of a text that are not too long, each on one line.

    Raises Usage when there is none.
    """
    parts = (" ".join(part.split()) for part in _SENTENCE_ENDS.split(text))
    found = list(dict.fromkeys(p for p in parts if 1 < len(p) <= _MAX_SENTENCE_CHARACTERS))
    if not found:
        raise Usage("the text has no sentences", "needles are hidden between sentences")
    return found


def built_in_sentences() -> list[str]:
    """Those that come with the program."""
    return sentences_of(_FILLER.read_text("utf-8"))


def make_trials(
    text: TextModel,
    lengths: Sequence[int],
    depths: Sequence[float],
    sentences: Sequence[str],
    seed: int,
) -> Iterator[Trial]:
    """All depths of the first length, then of the next; the same for the same seed."""
    filler = Filler(text, sentences)
    for length in lengths:
        for depth in depths:
            yield filler.trial(length, depth, random.Random(f"{seed} {length} {depth}"))


class Filler:
    """Makes texts of a wanted length out of sentences in random order."""

    def __init__(self, text: TextModel, sentences: Sequence[str]) -> None:
        self._text = text
        self._sentences = [(each, len(text.tokenizer.encode(f" {each}"))) for each in sentences]
        switches = ThinkingSwitches(text.template.variables)
        if any(name == THINK for name, _ in switches.describe()):
            switches.set(THINK, "off")  # the answer is to come at once
        self._variables = switches.variables

    def trial(self, length_tokens: int, depth_percent: float, draw: random.Random) -> Trial:
        """One text of at most ``length_tokens`` tokens, question and template included.

        Raises Usage when not even the needle fits.
        """
        name, code = draw.choice(_NAMES), str(draw.randrange(10_000, 100_000))
        needle, question = f"The code of {name} is {code}.", f"What is the code of {name}?"
        room = length_tokens - len(self._encode([needle], question))
        hay, tokens = self._hay(room, draw)
        while True:
            document = _with_needle(hay, tokens, needle, depth_percent)
            ids = self._encode(document, question)
            if len(ids) <= length_tokens:
                break
            if not hay:
                raise Usage(f"a needle does not fit in {length_tokens} tokens")
            hay, tokens = hay[:-1], tokens[:-1]
        other_ids = self._encode(document, _OTHER_QUESTION)
        split = next((i for i, (a, b) in enumerate(zip(ids, other_ids)) if a != b), len(ids) - 1)
        return Trial(length_tokens, depth_percent, code, ids[:split], ids[split:])

    def _hay(self, room_tokens: int, draw: random.Random) -> tuple[list[str], list[int]]:
        """Sentences and their tokens, one more than there is room for; none twice before all."""
        hay: list[str] = []
        tokens: list[int] = []
        left = room_tokens
        while left > 0:
            for sentence, count in draw.sample(self._sentences, len(self._sentences)):
                hay.append(sentence)
                tokens.append(count)
                left -= count
                if left <= 0:
                    break
        return hay, tokens

    def _encode(self, document: Sequence[str], question: str) -> list[int]:
        turn = Turn("user", f"{' '.join(document)}\n\n{question}")
        return self._text.template.encode([turn], variables=self._variables)


def _with_needle(
    hay: Sequence[str], tokens: Sequence[int], needle: str, depth_percent: float
) -> list[str]:
    before, place, wanted = 0, 0, sum(tokens) * depth_percent / 100
    while place < len(hay) and before + tokens[place] / 2 <= wanted:
        before += tokens[place]
        place += 1
    return [*hay[:place], needle, *hay[place:]]


def ask(session: Session, text: TextModel, trial: Trial) -> Result:
    """Put the question of a trial whose document has crossed."""
    feed(session, trial.question_ids[:-1])
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
    events = list(session.generate(trial.question_ids[-1:], params))
    ids = [event.token_id for event in events if event.token_id is not None]
    answer = text.tokenizer.decode(ids).strip()
    return Result(trial, answer, is_found(answer, trial.code))


def is_found(answer: str, code: str) -> bool:
    """Whether the first number in the answer is the code, digit by digit."""
    number = re.search(r"[0-9]+", answer)
    return number is not None and number.group() == code
