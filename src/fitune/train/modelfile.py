"""Ollama's Modelfile beside a whole model: how it is imported, and the chat template in Ollama's words.

Ollama reads no Jinja, and what it guesses from it is looked for in a file that transformers 5 no longer fills. So the
template is put into its language, where that is true: rendered conversations are cut at their messages, and the pieces
have to give every conversation below again, character by character.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from fitune.data.conversations.messages import Conversation, Message
from fitune.data.conversations.templates import ChatTemplate
from fitune.data.reading.rows import BadRow

IMPORTED = frozenset({
    "LlamaForCausalLM", "MixtralForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
    "Phi3ForCausalLM", "Qwen2ForCausalLM", "Olmo3ForCausalLM", "CohereForCausalLM", "Lfm2ForCausalLM",
})  # fmt: skip
"""Architectures whose safetensors `ollama create` takes and whose exports have the names that it looks for (its
convert/convert.go, August 2026). MistralForCausalLM and Qwen3ForCausalLM are not among them."""

_OPENING = Message("system", "be brief")
_TURNS = [Message("assistant" if number % 2 else "user", f"say {number}") for number in range(5)]


def modelfile(architecture: str, tokenizer: Any, template: ChatTemplate, *, has_vocabulary_file: bool) -> str:
    """The Modelfile; empty for what Ollama cannot import.

    ``has_vocabulary_file``: a tokenizer.model is there. Without one it takes every vocabulary for one of GPT-2's kind.
    """
    if architecture not in IMPORTED or not (has_vocabulary_file or "Ġ" in tokenizer.get_vocab()):
        return ""
    ends = [tokenizer.convert_ids_to_tokens(id) for id in sorted(template.stop_ids)]
    text = ollama_template(tokenizer, template)
    lines = ["FROM .", *(f'PARAMETER stop "{end}"' for end in ends if '"' not in end)]
    if text:
        lines.append(f'TEMPLATE """{text}"""')
    else:
        lines.append("# no TEMPLATE: Ollama's language does not say what chat_template.jinja does")
    return "\n".join(lines) + "\n"


def ollama_template(tokenizer: Any, template: ChatTemplate) -> str:
    """The chat template in Ollama's language, without tools and reasoning; empty where it cannot say the same.

    BOS is left out where the tokenizer puts it there by itself: Ollama does, too.
    """
    try:
        pieces = _pieces(template)
        bos = tokenizer.bos_token or ""
        if bos and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
            pieces = {
                name: text.removeprefix(bos) if name in _STARTS else text for name, text in pieces.items()
            }
    except (BadRow, ValueError):
        return ""
    if any(sign in text for text in pieces.values() for sign in ("{{", '"""')) or pieces["ask"].endswith('"'):
        return ""  # it stands between three quotes
    system, first = "", f"{{{{ if eq $i 0 }}}}{pieces['first']}"
    if "system" in pieces:
        system = f'{{{{ if eq .Role "system" }}}}{pieces["system"]}{{{{ .Content }}}}{{{{ end }}}}'
        first += f"{{{{ else if and $.System (eq $i 1) }}}}{pieces['after system']}"
    return (
        f'{{{{ range $i, $m := .Messages }}}}{system}{{{{ if eq .Role "user" }}}}{first}'
        f"{{{{ else }}}}{pieces['after answer']}{{{{ end }}}}{{{{ .Content }}}}{{{{ end }}}}"
        f'{{{{ if eq .Role "assistant" }}}}{pieces["answer"]}{{{{ .Content }}}}{{{{ end }}}}{{{{ end }}}}'
        f"{pieces['ask']}"
    )


_STARTS = ("system", "first")


def _pieces(template: ChatTemplate) -> dict[str, str]:
    """What the template puts around messages. Raises BadRow or ValueError where it depends on more than the role of a
    message and of the one before it."""
    cut = _between(template, _TURNS[:3])
    pieces = dict(zip(("first", "answer", "after answer", "ask"), cut, strict=True))
    starts: list[list[Message]] = [[]]
    with suppress(BadRow):  # some take no system message
        pieces["system"], pieces["after system"], _ = _between(template, [_OPENING, _TURNS[0]])
        starts.append([_OPENING])
    for messages in [[*start, *_TURNS[:count]] for start in starts for count in (1, 3, 5)]:
        if _said(pieces, messages) != template.prompt_text(Conversation(tuple(messages), "a try")):
            raise ValueError("the template looks at more than a message and the one before it")
    return pieces


def _between(template: ChatTemplate, messages: Sequence[Message]) -> list[str]:
    """The texts before, between and behind the contents of ``messages`` in their prompt."""
    text, found = template.prompt_text(Conversation(tuple(messages), "a try")), []
    for message in messages:
        before, is_there, text = text.partition(message.content)
        if not is_there:
            raise ValueError(f"{message.content} is not shown")
        found.append(before)
    return [*found, text]


def _said(pieces: dict[str, str], messages: Sequence[Message]) -> str:
    """The prompt that Ollama makes of ``pieces``."""
    text, before = "", ""
    for message in messages:
        first = {"": "first", "system": "after system"}.get(before, "after answer")
        name = {"system": "system", "assistant": "answer"}.get(message.role, first)
        text, before = f"{text}{pieces[name]}{message.content}", message.role
    return text + pieces["ask"]
