"""An engine that records what it is asked, and answers by a rule."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np

from moechat.events import Finished, Token


class FakeText:
    """Words are tokens; a talk is <bos>, then <user> or <reply> before each message."""

    def __init__(self, bos=True):
        self.words = ["<bos>", "<user>", "<reply>"]
        self.bos = bos
        self.tokenizer = SimpleNamespace(
            encode=self.encode_words, decode=lambda ids: " ".join(self.words[i] for i in ids)
        )
        self.template = SimpleNamespace(
            encode=self.encode_turns, control_ids=frozenset({0, 1, 2}), variables=frozenset()
        )

    def id_of(self, word):
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)

    def encode_words(self, text):
        return [self.id_of(word) for word in text.split()]

    def encode_turns(self, turns, *, add_generation_prompt=True, variables=None):
        ids = [0] if self.bos else []
        for turn in turns:
            ids += [2 if turn.role == "assistant" else 1, *self.encode_words(turn.text)]
        return [*ids, 2] if add_generation_prompt else ids


class FakeSession:
    """Its logits give the token ``id + 1`` after ``id`` the probability that ``odds`` say."""

    vocab = 500

    def __init__(self, engine):
        self.engine, self.ids, self.calls, self.closed = engine, [], [], False
        self.last_stats = SimpleNamespace()

    def rewind(self, count):
        self.calls.append(("rewind", count))
        del self.ids[count:]

    def extend(self, ids, logits="all"):
        self.engine.check(self)
        self.calls.append((logits, list(ids)))
        self.ids += ids
        self.last_stats = SimpleNamespace(
            new_prompt_tokens=len(ids),
            kv_bytes=len(ids) * self.engine.kv_policy.bytes,
            kv_native_bytes=len(ids) * 8,
            kv_encode_seconds=len(ids) * 1e-6,
            kv_decode_seconds=len(ids) * 2e-6,
        )
        if logits is None:
            return None
        shown = np.zeros((len(ids), self.vocab), np.float32)
        shown[np.arange(len(ids)), np.array(ids) + 1] = self.engine.kv_policy.logit
        return shown[-1:] if logits == "last" else shown

    def generate(self, ids, params):
        self.calls.append(("generate", list(ids)))
        self.ids += ids
        text = self.engine.text
        for word in self.engine.answer(self).split():
            yield Token(token_id=text.id_of(word))
        yield Finished("stop")

    def close(self):
        self.closed = True


class FakeEngine(nullcontext):
    """``answer``: a function of a session that gives the words of an answer."""

    name, threads, instruction_set, compute = "fake", 1, "ref", "bf16"
    spec = None

    def __init__(self, answer=lambda session: "", context_tokens=4096):
        super().__init__(self)
        self.text, self.answer, self.context_tokens = FakeText(), answer, context_tokens
        self.sessions = []
        self.kv_policy = SimpleNamespace(bytes=8, logit=5.0)
        self.prefill_choice = SimpleNamespace(gpu=None, names_used="")
        self.check = lambda session: None

    def session(self):
        self.sessions.append(FakeSession(self))
        return self.sessions[-1]
