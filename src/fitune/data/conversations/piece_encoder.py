"""Pieces of a rendered conversation to token ids, which one after another are those of the whole text. Content is text:
what looks like a special token inside it is encoded as plain text."""

from collections.abc import Sequence
from typing import Any

from fitune.data.conversations.rendering import Piece
from fitune.data.reading.rows import BadRow
from fitune.errors import DataError, is_failure


class TokenizerFailed(DataError):
    """The tokenizer raised an error, or panicked, on some text."""

    reason = "the tokenizer fails"

    def of_row(self, where: str) -> BadRow:
        """Returns the error as one of the row at ``where``, so that other rows go on."""
        return BadRow(f"{where}: {self.message}", reason=self.reason, hint=self.hint)


class SpecialTokenInText(TokenizerFailed):
    """The tokenizer makes a special token of plain text."""

    reason = "a special token in its text"


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
        """The ids of every piece. Raises TokenizerFailed, also when plain text would become a special id."""
        ids: list[list[int]] = [[] for _ in pieces]
        for plain in (False, True):
            places = [place for place, piece in enumerate(pieces) if piece.plain is plain]
            if places:
                encoded = self._encode_inside([pieces[place] for place in places], plain=plain)
                for place, piece_ids in zip(places, encoded, strict=True):
                    ids[place] = piece_ids
        return ids

    def _encode_inside(self, pieces: Sequence[Piece], *, plain: bool) -> list[list[int]]:
        behind = [
            self._prefixes and not (piece.first or (piece.after_special and self._prefixes_after_special))
            for piece in pieces
        ]
        texts = [
            "\n" + piece.text if after else piece.text for piece, after in zip(pieces, behind, strict=True)
        ]
        encoded = self._encode(texts, plain=plain)
        length = len(self._line_break)
        for place, (ids, piece, after) in enumerate(zip(encoded, pieces, behind, strict=True)):
            if after and ids[:length] == self._line_break:
                encoded[place] = ids[length:]
            elif after:
                encoded[place] = self._encode([piece.text], plain=plain)[0]
            if plain and not self.special_ids.isdisjoint(encoded[place]):
                special = self._tokenizer.decode([id for id in encoded[place] if id in self.special_ids][:1])
                raise SpecialTokenInText(
                    f"the tokenizer makes its special token {special!r} of text",
                    hint="write that text otherwise in the row",
                )
        return encoded

    def _encode(self, texts: list[str], *, plain: bool) -> list[list[int]]:
        try:
            if not self._has_backend:
                return _encoded(self._tokenizer, texts, plain=plain)
            first = _encoded(
                self._tokenizer, texts[:1], plain=plain
            )  # sets up the backend: others use it, too
            return first + _encoded_by_backend(self._tokenizer, texts[1:])
        except BaseException as error:
            if not is_failure(error):
                raise
            raise TokenizerFailed(
                f"the tokenizer fails: {str(error) or type(error).__name__}",
                hint="does it hold a very long run of the same character? shorten or divide it",
            ) from None


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
    """The ids alone, without their places in the text and what a tokenizer of transformers adds: each is a quarter of
    the time."""
    return [
        each.ids for each in tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ]


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
