"""Where the reasoning of a text ends and its answer begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Tokens looked at beside those that the delimiter may be made of: a character may be cut, and a decoder may strip the
# first space of what it is given.
SPARE_TOKENS = 8
CUT_CHARACTER = "\ufffd"


class Delimiter:
    r"""A text such as `\boxed{` or `####`; where the tokenizer has an added token of just this text, such as `</think>`,
    that token."""

    def __init__(self, text: str, tokenizer: Any):
        self.text, self.tokenizer = text, tokenizer
        self.token: int | None = tokenizer.get_added_vocab().get(text)
        self._may_end: dict[int, bool] = {}

    def just_came(self, tokens: Sequence[int]) -> bool:
        """Whether the last token completes the delimiter; to be asked after every token."""
        if not tokens:
            return False
        if self.token is not None:
            return tokens[-1] == self.token
        if not self._ends_it(tokens[-1]):
            return False
        tail = self.tokenizer.decode(tokens[-len(self.text.encode()) - SPARE_TOKENS :], skip_special_tokens=False)
        return self.text in tail

    def _ends_it(self, token: int) -> bool:
        """Whether the delimiter's last character may come with this token."""
        if token not in self._may_end:
            own = self.tokenizer.decode([token], skip_special_tokens=False)
            self._may_end[token] = self.text[-1] in own or CUT_CHARACTER in own
        return self._may_end[token]
