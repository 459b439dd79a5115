"""A conversation: turns on one side, a session's timeline on the other, kept in agreement.

Every message renders the whole talk by the model's template; what the timeline already holds stays
in the KV cache, so that only what is new is prefilled. Undo, another answer and a changed system
text need nothing else. Nor does thinking: most vendors' templates drop it from earlier answers, so
that the next prompt leaves the timeline where the last thinking began. The session goes back to
that place and prefills the answer again, without the thinking, as the model was trained to see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from moechat.engine.engine import Engine
from moechat.engine.requests import Handle
from moechat.errors import CheckpointDamaged, MoechatError, PromptEmpty, PromptTooLong, Usage
from moechat.events import Event, Finished, Token
from moechat.messages import Turn
from moechat.sample.params import SamplingParams

if TYPE_CHECKING:
    from moechat.text.thinking_switches import ThinkingSwitches


class Conversation:
    """Turns with one model. Not thread-safe, but for ``cancel()``."""

    def __init__(self, engine: Engine, system: str = "") -> None:
        self._engine = engine
        self._session = engine.session()
        self.system = system
        self.turns: list[Turn] = []
        self._used_tokens = 0
        self._switches: ThinkingSwitches | None = None  # needs the template, which loads late

    @property
    def used_tokens(self) -> int:
        """Tokens of the talk; the very last one of a full context needs no room.

        Those of a message that was taken back do not count, although the timeline has them.
        """
        return min(self._used_tokens, self.context_tokens)

    @property
    def context_tokens(self) -> int:
        """Tokens that fit."""
        return self._engine.context_tokens

    @property
    def trained_context_tokens(self) -> int:
        """The most that --ctx could ask for."""
        return self._engine.trained_context_tokens

    def ask(self, text: str, params: SamplingParams) -> Iterator[Event]:
        """Send a user message; events of the answer.

        Raises PromptEmpty, PromptTooLong and the like before anything changes. An answer that was
        cancelled after its first token stays, as far as it was generated; before that the message
        is taken back.
        """
        if not text:
            raise PromptEmpty("the message is empty")
        return self._answer([*self.turns, Turn("user", text)], params)

    def ask_messages(self, turns: Sequence[Turn], params: SamplingParams) -> Iterator[Event]:
        """Replace the talk by ``turns`` (the last one the user's) and answer it."""
        if not turns or turns[-1].role != "user":
            raise Usage("the last message must be the user's")
        return self._answer(list(turns), params)

    def regenerate(self, params: SamplingParams) -> Iterator[Event]:
        """Drop the last answer and answer the last user turn again."""
        last_user = self._last_user()
        if last_user is None:
            raise Usage("there is no answer to make again")
        return self._answer(self.turns[: last_user + 1], params)

    def undo(self) -> bool:
        """Drop the last user turn and its answer; False when there is none."""
        last_user = self._last_user()
        if last_user is None:
            return False
        try:
            ids = self._encode(self.turns[:last_user], False)
        except MoechatError:  # many templates refuse a talk without a message
            ids = []
        self._session.rewind(self._session.timeline.common_prefix(ids))
        self._used_tokens = len(self._session)
        del self.turns[last_user:]
        return True

    def clear(self) -> None:
        """Forget all turns; the system text stays."""
        self.turns.clear()
        self._used_tokens = 0
        self._session.rewind(0)

    def set_system(self, text: str) -> None:
        """Another system text, from the next message on."""
        self.system = text

    def set_switch(self, name: str, value: str | None) -> None:
        """Set "think" or "reasoning_effort", from the next message on; None: the model's default.

        Raises BadParameter, Usage where the model has no such switch, TextUnavailable.
        """
        self._thinking().set(name, value)

    def switches(self) -> list[tuple[str, str | None]]:
        """The switches for thinking that the model has, with their values."""
        return self._thinking().describe()

    def cancel(self) -> None:
        """Stop the answer under way; from any thread or a signal handler."""
        self._session.cancel()

    def close(self) -> None:
        """Free the KV cache."""
        self._session.close()

    def _thinking(self) -> ThinkingSwitches:
        if self._switches is None:
            from moechat.text.thinking_switches import ThinkingSwitches

            self._switches = ThinkingSwitches(self._engine.text.template.variables)
        return self._switches

    def _last_user(self) -> int | None:
        users = [index for index, turn in enumerate(self.turns) if turn.role == "user"]
        return users[-1] if users else None

    def _encode(self, turns: Sequence[Turn], add_generation_prompt: bool) -> list[int]:
        system = [Turn("system", self.system)] if self.system else []
        return self._engine.text.template.encode(
            [*system, *turns],
            add_generation_prompt=add_generation_prompt,
            limit_tokens=self.context_tokens,
            variables=self._switches.variables if self._switches is not None else None,
        )

    def _answer(self, turns: list[Turn], params: SamplingParams) -> Iterator[Event]:
        ids = self._encode(turns, True)
        self._check_vocabulary(ids)
        if len(ids) > self.context_tokens:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens; the limit is {self.context_tokens}"
            )
        kept = self._session.timeline.common_prefix(ids)
        self._session.rewind(kept)
        handle = self._session.generate(ids[kept:], params)
        return self._events(handle, turns, ids)

    def _check_vocabulary(self, ids: Sequence[int]) -> None:
        """Only here, not on opening: spare tokens beyond the embedding are common and harmless."""
        largest, vocab_size = max(ids, default=0), self._engine.spec.vocab_size
        if largest < vocab_size:
            return
        tokenizer = self._engine.text.tokenizer
        token = (tokenizer.token(largest) or "")[:80]
        raise CheckpointDamaged(
            f"the tokenizer does not fit the model: {token!a} is token {largest}",
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model a vocabulary of "
            f"{vocab_size}",
            "Take the weights and the tokenizer from the same place",
        )

    def _events(
        self, handle: Handle, turns: list[Turn], prompt_ids: Sequence[int]
    ) -> Iterator[Event]:
        text: list[str] = []
        reasoning: list[str] = []
        ids: list[int] = []
        try:
            for event in handle:
                text.append(event.text)
                reasoning.append(event.reasoning)
                if isinstance(event, Token):
                    ids.append(event.token_id)
                if isinstance(event, Finished) and event.finish_reason == "stop":
                    self._drop_end_token(ids)
                yield event
        finally:
            handle.close()
            if ids:
                parts = self._engine.text.reasoning.parts(prompt_ids, ids)
                thought = "".join(reasoning)
                answer = Turn("assistant", "".join(text), tuple(ids), thought, parts)
                self.turns = [*turns, answer]
                self._used_tokens = len(self._session)

    def _drop_end_token(self, ids: list[int]) -> None:
        if ids and ids[-1] in self._engine.end_ids:
            ids.pop()
