"""The text of a response while its tokens come: whole characters only, and nothing of a stop string."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

BROKEN = "\ufffd"  # what a decoder writes for bytes that are not a whole character yet


class TokenText:
    """Turns tokens into text piece by piece; the pieces joined are the text of all, up to the first stop string.

    Special tokens have no text. What may yet become a stop string is held back until it is decided.

    Attributes:
        stopped: whether a stop string came; no token after that one belongs to the response.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.stopped = False
        self.ids: list[int] = []
        self.start = self.end = 0  # ids before `end` are text; from `start` on they are decoded, for their context
        self.held = ""

    def push(self, token_id: int) -> str:
        """Returns the text that is certain by one more token."""
        self.ids.append(token_id)
        known, text = self._decode_window()
        if len(text) > len(known) and not text.endswith(BROKEN):
            self.start, self.end = self.end, len(self.ids)
            self.held += text[len(known) :]
        return self._release(count_held_back(self.held, self.stops))

    def finish(self) -> str:
        """Returns the rest, when no more tokens come."""
        if self.stopped:
            return ""
        known, text = self._decode_window()
        self.start = self.end = len(self.ids)
        self.held += text[len(known) :]
        return self._release(0)

    def _decode_window(self) -> tuple[str, str]:
        """Returns a window of the ids as text: without those that are not text yet, and with them."""
        windows = self.ids[self.start : self.end], self.ids[self.start :]
        known, text = (self.tokenizer.decode(ids, skip_special_tokens=True) for ids in windows)
        return known, text

    def _release(self, kept: int) -> str:
        """Releases the held text, but for its last `kept` characters, and but for a stop string and all after it."""
        places = [place for stop in self.stops if (place := self.held.find(stop)) >= 0]
        self.stopped = bool(places)
        cut = min(places) if places else len(self.held) - kept
        text, self.held = self.held[:cut], "" if places else self.held[cut:]
        return text


def count_held_back(text: str, stops: Sequence[str]) -> int:
    """Counts the characters at the end of `text` that may begin one of the stop strings."""
    return max((size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)
