"""Chat templates that a recipe names instead of a file."""

from collections.abc import Container

from fitune.errors import RecipeError

CHATML_MARKS = ("<|im_start|>", "<|im_end|>")
"""The marks that begin and end each message of ChatML."""

NAMED_TEMPLATES = {
    "chatml": """\
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message.content ~ '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message.content ~ '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
}


def require_marks(template: str, known: Container[str]) -> None:
    """Raises RecipeError where a named template marks messages by what the vocabulary ``known`` has no token for: each
    mark would be several tokens, as in plain text."""
    missing = [mark for mark in CHATML_MARKS if mark not in known] if template in NAMED_TEMPLATES else []
    if missing:
        raise RecipeError(
            f"chat_template: {template}: the tokenizer has no token {' or '.join(missing)}, which would become several",
            hint=f"training with added_tokens: {missing} gives each a token and a row; else leave chat_template out",
        )
