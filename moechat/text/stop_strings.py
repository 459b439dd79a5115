"""Stop strings in streamed text: never shown, not even in part, and nothing else held back."""

from __future__ import annotations

from moechat.errors import BadParameter


class StopStrings:
    """Follows one answer. The stop string that is completed first ends it.

    What is shown does not depend on how the text is cut into pushes.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if "" in stops:
            raise BadParameter("a stop string is empty")
        self._stops = [_Matcher(stop) for stop in stops]
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is now safe to show, and whether a stop string was completed."""
        if self._stopped:
            return "", True
        pending = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            complete = [len(stop.text) for stop in self._stops if stop.advance(character)]
            if complete:
                self._held, self._stopped = "", True
                return pending[: position - max(complete)], True
        num_held = max((stop.num_matched for stop in self._stops), default=0)
        split = len(pending) - num_held
        self._held = pending[split:]
        return pending[:split], False

    def flush(self) -> str:
        """What was held back, when the answer ends without a stop string."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Knuth-Morris-Pratt: how much of one stop string the text so far ends with."""

    def __init__(self, text: str) -> None:
        self.text, self.num_matched = text, 0
        # _shorter[n]: the longest proper beginning of text[:n] that text[:n] also ends with.
        self._shorter = [0, 0]
        for character in text[1:]:
            self._shorter.append(self._extended(self._shorter[-1], character))

    def advance(self, character: str) -> bool:
        """Take one more character; True when it completes the string."""
        self.num_matched = self._extended(self.num_matched, character)
        return self.num_matched == len(self.text)

    def _extended(self, num_matched: int, character: str) -> int:
        while num_matched and self.text[num_matched] != character:
            num_matched = self._shorter[num_matched]
        return num_matched + (self.text[num_matched] == character)
