"""Text to token ids, piece by piece, with special-token text in content kept plain."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fitune.errors import DataError


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of rendered text that is encoded by itself.

    ``plain`` text is content whose special-token text must not turn into special ids. ``first`` says that nothing
    stands before it, ``after_special`` that a special token does.
    """

    text: str
    supervised: bool
    plain: bool
    first: bool
    after_special: bool = False


class PieceEncoder:
    """Encodes pieces so that their ids, one after another, are the ids of the whole text.

    Some tokenizers (SentencePiece's) put a space in front of everything they encode, which is wrong inside a
    text. There a piece is encoded behind a line break, whose ids are taken off again. Some of them put the space
    behind special tokens, too.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._has_backend = _encodes_as_its_backend(tokenizer)
        specials = _special_tokens(tokenizer)
        self.special_texts = tuple(specials)
        self.special_ids = frozenset(specials.values()) - {tokenizer.unk_token_id}
        self._line_break = self._encode(["\n"], plain=False)[0]
        after_break, alone = self._encode(["\na", "a"], plain=False)
        self._prefixes = after_break != self._line_break + alone
        after_special = self._encode([f"{tokenizer.eos_token}a"], plain=False)[0]
        self._prefixes_after_special = after_special == [tokenizer.eos_token_id, *alone]

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
        if not self._prefixes:
            encoded = self._encode([piece.text for piece in pieces], plain=plain)
            if plain:
                self._refuse_specials(encoded, pieces)
            return encoded
        behind = [self._is_behind_text(piece) for piece in pieces]
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

    def _is_behind_text(self, piece: Piece) -> bool:
        begins = piece.first or (piece.after_special and self._prefixes_after_special)
        return not begins

    def _without_line_break(self, ids: list[int], text: str, *, plain: bool) -> list[int]:
        length = len(self._line_break)
        if ids[:length] == self._line_break:
            return ids[length:]
        return self._encode([text], plain=plain)[0]

    def _refuse_specials(self, encoded: list[list[int]], pieces: Sequence[Piece]) -> None:
        for ids, piece in zip(encoded, pieces, strict=True):
            if not self.special_ids.isdisjoint(ids):
                raise DataError(f"the tokenizer makes a special token of the plain text {piece.text!r:.60}")

    def _encode(self, texts: list[str], *, plain: bool) -> list[list[int]]:
        if not self._has_backend:
            return _encoded(self._tokenizer, texts, plain=plain)
        first = _encoded(self._tokenizer, texts[:1], plain=plain)  # sets up the backend: others use it, too
        return first + _encoded_by_backend(self._tokenizer, texts[1:])


def _encoded(tokenizer: Any, texts: list[str], *, plain: bool) -> list[list[int]]:
    return tokenizer(
        texts,
        add_special_tokens=False,
        split_special_tokens=plain,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"]


def _encoded_by_backend(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """The ids without all else that a tokenizer of transformers makes of an encoding: a quarter less time."""
    return [each.ids for each in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)]


def _encodes_as_its_backend(tokenizer: Any) -> bool:
    """True if nothing of the tokenizer's own comes between a text and its backend."""
    if not tokenizer.is_fast:
        return False
    texts = ["a", " A  b\nC", "\n", "É漢🙂", *tokenizer.all_special_tokens]
    return all(
        _encoded(tokenizer, texts, plain=plain) == _encoded_by_backend(tokenizer, texts)
        for plain in (True, False)
    )


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """Text and id of every special token, longest first.

    Tokenizers name few of theirs: Llama-3's <|start_header_id|> and Gemma-3's <end_of_turn> are special only as
    added tokens.
    """
    named = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    added = {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return dict(
        sorted(((text, id) for text, id in (added | named).items() if text), key=lambda pair: -len(pair[0]))
    )
