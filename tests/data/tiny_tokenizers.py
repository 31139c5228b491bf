"""Tokenizers trained on the spot, and templates built like those on the Hub (in our words)."""

from functools import cache
from itertools import groupby

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fitune.data.conversations.messages import Conversation, Message

TOO_HARD = "q" * 40 + "z"
"""Panics in Rust where the tokenizer is ``panicking``: its expression goes back too often."""
SPECIALS = ["<s>", "</s>", "<pad>", "<|turn|>", "<|end|>", "<unk>"]
_TEXT = ["hello world, what is two and two? the answer is four. ping pong system user assistant"] * 20

HEADER_STYLE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|turn|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn|>assistant\\n\\n' -}}{%- endif -%}
"""
"""Llama-3.1's way: headers, trimmed content, no generation marks."""

THINKING_STYLE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' and loop.last -%}
    {%- set thought = message.content.split('</think>')[0].split('<think>')[-1] -%}
    {%- if '</think>' not in message.content -%}{%- set thought = '' -%}{%- endif -%}
    {{- '<|turn|>assistant\\n<think>\\n' + thought.strip() + '\\n</think>\\n\\n' -}}
    {{- message.content.split('</think>')[-1].lstrip('\\n') + '<|end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
    {{- '<|turn|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') + '<|end|>\\n' -}}
{%- else -%}
    {{- '<|turn|>' + message.role + '\\n' + message.content + '<|end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn|>assistant\\n' -}}{%- endif -%}
"""
"""Qwen3's way: the last answer gets a thought, empty if need be; earlier answers lose theirs."""

NO_SYSTEM_STYLE = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<|turn|>' + role + '\\n' + message['content'] | trim + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>model\\n' }}{% endif %}
"""
"""Gemma's way: no system messages."""

BRACKET_STYLE = """\
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- bos_token + '[ ' + message.content.strip() + ' ]' -}}
{%- elif message.role == 'assistant' -%}{{- ' ' + message.content.strip() + ' ' + eos_token -}}{%- endif -%}
{%- endfor -%}
"""
"""Llama-2's way: BOS in every turn, EOS after white space, system messages forgotten."""

MARKED_STYLE = """\
{%- for message in messages %}
{{- '<|turn|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}
{{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}
"""
"""With generation marks that leave out the token that ends the turn."""

NO_END_STYLE = """\
{%- for message in messages -%}{{- message.role + ': ' + message.content + '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}
"""
"""Nothing ends a turn."""

UNMARKED_STYLES = {
    "header": HEADER_STYLE,
    "thinking": THINKING_STYLE,
    "no system": NO_SYSTEM_STYLE,
    "bracket": BRACKET_STYLE,
    "no end": NO_END_STYLE,
}
STYLES = {"plain": None, "marked": MARKED_STYLE, **UNMARKED_STYLES}


def byte_tokenizer(*, template=None, **changes):
    """Byte-level BPE, as Llama-3 and Qwen have: any text comes back from its ids."""
    return _wrapped(_trained_bytes(), template, changes)


def prefixing_tokenizer(*, template=None):
    """A tokenizer that puts a space before all it encodes, as SentencePiece does."""
    return _wrapped(_trained_words(), template, {})


def word_tokenizer(*, template=None):
    """WordPiece over words, as BERT has: white space leaves no ids."""
    return _wrapped(_trained_word_pieces(), template, {})


def _wrapped(trained, template, changes):
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(trained), **(names | changes))
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|turn|>", "<|end|>"]})
    tokenizer.chat_template = template
    return tokenizer


@cache
def _trained_bytes():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _train(tokenizer, alphabet)


@cache
def _trained_words():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    alphabet = [chr(code) for code in range(33, 127)] + ["\n", "\u2581"]
    return _train(tokenizer, alphabet)


@cache
def _trained_word_pieces():
    """Letters and the words of _TEXT. Not trained: of pairs that are equally frequent the trainer takes any."""
    letters = [chr(code) for code in range(33, 127)]
    words = sorted(word.strip(",.?") for word in set(_TEXT[0].split()))
    pieces = dict.fromkeys([*SPECIALS, *letters, *(f"##{letter}" for letter in letters), *words])
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer.to_str()


def _train(tokenizer, alphabet):
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer.to_str()


def talk(*turns, system=""):
    """A conversation in which user and assistant take turns."""
    messages = [Message("system", system)] if system else []
    messages += [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(turns)]
    return Conversation(tuple(messages), "row 1")


def as_messages(conversation):
    """As transformers takes it."""
    return [{"role": message.role, "content": message.content} for message in conversation.messages]


def learned(tokenizer, encoded):
    """The text that is learned."""
    return tokenizer.decode([i for i, wanted in zip(encoded.ids, encoded.supervised, strict=True) if wanted])


def learned_stretches(tokenizer, encoded):
    """The stretches that are learned, as text."""
    runs = groupby(zip(encoded.ids, encoded.supervised, strict=True), key=lambda pair: bool(pair[1]))
    return [tokenizer.decode([int(token) for token, _ in run]) for wanted, run in runs if wanted]


def panicking_tokenizer(template=None):
    """As Llama-3's is on a row of millions of spaces: a panic of Rust, which is no Exception."""
    tokenizer = byte_tokenizer(template=template)
    backend = tokenizer.backend_tokenizer
    hard = pre_tokenizers.Split(Regex("(q|qq)+$|z"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([hard, backend.pre_tokenizer])
    return tokenizer
