"""Text to token ids, piece by piece, with special-token text in content kept plain."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fitune.errors import DataError


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of rendered text that is encoded by itself.

    ``plain`` text is content whose special-token text must not turn into special ids. ``first`` says that nothing
    stands before it.
    """

    text: str
    supervised: bool
    plain: bool
    first: bool


class PieceEncoder:
    """Encodes pieces so that their ids, one after another, are the ids of the whole text.

    Some tokenizers (SentencePiece's) put a space in front of everything they encode, which is wrong inside a
    text. There a piece is encoded behind a line break, whose ids are taken off again.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        specials = sorted((t for t in tokenizer.all_special_tokens if t), key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        self._special_ids = frozenset(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        self._line_break = self._encode(["\n"], plain=False)[0]
        after_break, alone = self._encode(["\na", "a"], plain=False)
        self._prefixes = after_break != self._line_break + alone

    def encode(self, pieces: Sequence[Piece]) -> list[list[int]]:
        """The ids of every piece. Raises DataError when plain text would become a special id all the same."""
        ids: list[list[int]] = [[] for _ in pieces]
        for plain in (False, True):
            places = [place for place, piece in enumerate(pieces) if piece.plain is plain]
            if places:
                encoded = self._encode_inside([pieces[place] for place in places], plain=plain)
                for place, piece_ids in zip(places, encoded, strict=True):
                    ids[place] = piece_ids
        return ids

    def _encode_inside(self, pieces: Sequence[Piece], *, plain: bool) -> list[list[int]]:
        behind = [self._prefixes and not piece.first for piece in pieces]
        texts = [
            "\n" + piece.text if after else piece.text for piece, after in zip(pieces, behind, strict=True)
        ]
        encoded = self._encode(texts, plain=plain)
        for place, after in enumerate(behind):
            if after:
                encoded[place] = self._without_line_break(encoded[place], pieces[place].text, plain=plain)
        if plain:
            self._refuse_specials(encoded, pieces)
        return encoded

    def _without_line_break(self, ids: list[int], text: str, *, plain: bool) -> list[int]:
        length = len(self._line_break)
        if ids[:length] == self._line_break:
            return ids[length:]
        return self._encode([text], plain=plain)[0]

    def _refuse_specials(self, encoded: list[list[int]], pieces: Sequence[Piece]) -> None:
        for ids, piece in zip(encoded, pieces, strict=True):
            if not self._special_ids.isdisjoint(ids):
                raise DataError(f"the tokenizer makes a special token of the plain text {piece.text!r:.60}")

    def _encode(self, texts: list[str], *, plain: bool) -> list[list[int]]:
        return self._tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=plain,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
