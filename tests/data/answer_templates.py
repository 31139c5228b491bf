"""Templates with the structure and the tokens of models that end, ask for or think before their answers in ways of
their own; in our words, each with the text that a model must write after the words that ask for an answer."""

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import AddedToken

from data.tiny_tokenizers import byte_tokenizer
from fitune.data.conversations.messages import Message


@dataclass(frozen=True, kw_only=True)
class Kind:
    """``said`` gives the text of an answer, ``is_last`` in the conversation, ``is_current`` when no question follows.

    ``empty`` is the thinking block that the template puts before an answer without reasoning, ``own_thoughts`` False
    where it has no place for reasoning, ``calls`` False where it has none for calls of tools.
    """

    template: str
    specials: tuple[str, ...]
    eos: str
    said: Callable[[Message, bool, bool], str]
    empty: Callable[[bool, bool], str] = lambda is_last, is_current: ""
    calls: bool = True


def tokenizer_of(kind):
    tokenizer = byte_tokenizer(template=kind.template, eos_token=kind.eos)
    tokenizer.add_tokens([AddedToken(text, special=True) for text in kind.specials], special_tokens=True)
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer.add_tokens([AddedToken(text, special=False) for text in tags])
    return tokenizer


_ASK = "{%- if add_generation_prompt -%}{{- PROMPT -}}{%- endif -%}"


def _json_calls(message, between="\n"):
    return between.join(f"<tool_call>\n{call.text}\n</tool_call>" for call in message.calls)


# -- Cohere2: two tokens end each turn of the assistant, and the prompt opens the response

COHERE2 = Kind(
    template="""\
{{- bos_token ~ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief. ' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content -}}{%- endif -%}
{{- '<|END_OF_TURN_TOKEN|>' -}}
{%- for message in messages if message.role != 'system' -%}
{{- '<|START_OF_TURN_TOKEN|>' -}}
{%- if message.role == 'user' -%}{{- '<|USER_TOKEN|>' ~ message.content -}}
{%- else -%}{{- '<|CHATBOT_TOKEN|><|START_RESPONSE|>' ~ message.content ~ '<|END_RESPONSE|>' -}}{%- endif -%}
{{- '<|END_OF_TURN_TOKEN|>' -}}
{%- endfor -%}
"""
    + _ASK.replace("PROMPT", "'<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>'"),
    specials=(
        "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
        "<|START_RESPONSE|>", "<|END_RESPONSE|>",
    ),
    eos="<|END_OF_TURN_TOKEN|>",
    said=lambda m, is_last, is_current: (
        (f"<think>\n{m.thought}\n</think>\n\n" if m.thought else "")
        + f"{m.content}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
    ),
    calls=False,
)  # fmt: skip

# -- GLM-4.5: an answer ends where the next role begins; every answer has a thinking block


def _glm_calls(message):
    return "".join(f"\n<tool_call>{call.name}\n{call.arguments}\n</tool_call>" for call in message.calls)


GLM = Kind(
    template="""\
{{- '[gMASK]<sop>' -}}
{%- if tools -%}{{- '<|system|>\\nTools: ' ~ (tools | tojson) -}}{%- endif -%}
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
    {%- set content = message.content or '' -%}{%- set thought = message.reasoning_content or '' -%}
    {%- if '</think>' in content -%}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1] -%}
        {%- set content = content.split('</think>')[-1] -%}
    {%- endif -%}
    {{- '<|assistant|>\\n<think>' ~ (thought.strip() if loop.index0 > last.user else '') ~ '</think>' -}}
    {%- if content.strip() -%}{{- '\\n' ~ content.strip() -}}{%- endif -%}
    {%- for call in message.tool_calls or [] -%}
    {{- '\\n<tool_call>' ~ call.function.name ~ '\\n' ~ (call.function.arguments | tojson) ~ '\\n</tool_call>' -}}
    {%- endfor -%}
{%- elif message.role == 'tool' -%}
    {%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<|observation|>' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' -}}
{%- else -%}{{- '<|' ~ message.role ~ '|>\\n' ~ message.content -}}{%- endif -%}
{%- endfor -%}
"""
    + _ASK.replace("PROMPT", "'<|assistant|>'"),
    specials=(
        "[gMASK]",
        "<sop>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
        "<|endoftext|>",
    ),
    eos="<|endoftext|>",
    said=lambda m, is_last, is_current: (
        (f"\n<think>{m.thought}</think>\n" if m.thought and is_current else "")
        + (m.content + _glm_calls(m)).lstrip("\n")
        + ("<|observation|>" if m.calls else "<|user|>")
    ),
    empty=lambda is_last, is_current: "\n<think></think>\n",
)

# -- gpt-oss: reasoning in a channel of its own; the last answer ends with another token

_ANALYSIS = "<|channel|>analysis<|message|>"


def _gpt_oss(m, is_last, is_current):
    shown = bool(m.thought) and (is_last if not m.calls else is_current)
    text = f"{_ANALYSIS}{m.thought}<|end|><|start|>assistant" if shown else ""
    if m.calls:
        call = m.calls[0]
        return f"{text} to=functions.{call.name}<|channel|>commentary json<|message|>{call.arguments}<|call|>"
    return f"{text}<|channel|>final<|message|>{m.content}<|{'return' if is_last else 'end'}|>"


GPT_OSS = Kind(
    template="""\
{{- '<|start|>system<|message|>Today is ' ~ strftime_now('%Y-%m-%d') ~ '.<|end|>' -}}
{%- if tools -%}{{- '<|start|>developer<|message|>' ~ (tools | tojson) ~ '<|end|>' -}}{%- endif -%}
{%- set called = namespace(name='') -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' and message.tool_calls -%}
    {%- set call = message.tool_calls[0].function -%}{%- set called.name = call.name -%}
    {%- set answered = messages[loop.index:] | selectattr('role', 'equalto', 'assistant')
        | rejectattr('tool_calls', 'defined') | list -%}
    {%- if message.thinking and not answered -%}
    {{- '<|start|>assistant<|channel|>analysis<|message|>' ~ message.thinking ~ '<|end|>' -}}
    {%- endif -%}
    {{- '<|start|>assistant to=functions.' ~ call.name ~ '<|channel|>commentary json<|message|>' -}}
    {{- (call.arguments | tojson) ~ '<|call|>' -}}
{%- elif message.role == 'assistant' -%}
    {%- set ends = loop.last and not add_generation_prompt -%}
    {%- if message.thinking and ends -%}
    {{- '<|start|>assistant<|channel|>analysis<|message|>' ~ message.thinking ~ '<|end|>' -}}
    {%- endif -%}
    {{- '<|start|>assistant<|channel|>final<|message|>' ~ message.content ~ ('<|return|>' if ends else '<|end|>') -}}
{%- elif message.role == 'tool' -%}
    {{- '<|start|>functions.' ~ called.name ~ ' to=assistant<|message|>' ~ (message.content | tojson) ~ '<|end|>' -}}
{%- else -%}
    {{- '<|start|>' ~ message.role ~ '<|message|>' ~ message.content ~ '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
"""
    + _ASK.replace("PROMPT", "'<|start|>assistant'"),
    specials=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
    eos="<|return|>",
    said=_gpt_oss,
)

# -- Qwen3 and Qwen3.5: only the last turn has a thinking block; Qwen3.5 asks with an open one

_QWEN = """\
{%- if tools -%}{{- '<|im_start|>system\\n' ~ (tools | tojson) ~ '<|im_end|>\\n' -}}{%- endif -%}
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
    {%- set content = message.content or '' -%}{%- set thought = message.reasoning_content or '' -%}
    {%- if '</think>' in content -%}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1] -%}
        {%- set content = content.split('</think>')[-1] -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if loop.index0 > last.user and (loop.last or thought or ALWAYS) -%}
    {{- '<think>\\n' ~ thought.strip() ~ '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- content.lstrip('\\n') -}}
    {%- for call in message.tool_calls or [] -%}
    {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson) -}}
    {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
    {%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- else -%}{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
"""
QWEN3 = Kind(
    template=_QWEN.replace("ALWAYS", "false") + _ASK.replace("PROMPT", "'<|im_start|>assistant\\n'"),
    specials=("<|im_start|>", "<|im_end|>"),
    eos="<|im_end|>",
    said=lambda m, is_last, is_current: (
        (f"<think>\n{m.thought}\n</think>\n\n" if m.thought and is_current else "")
        + f"{m.content}{_json_calls(m)}<|im_end|>"
    ),
    empty=lambda is_last, is_current: "<think>\n\n</think>\n\n" if is_last else "",
)
QWEN35 = Kind(
    template=_QWEN.replace("ALWAYS", "true") + _ASK.replace("PROMPT", "'<|im_start|>assistant\\n<think>\\n'"),
    specials=("<|im_start|>", "<|im_end|>"),
    eos="<|im_end|>",
    said=lambda m, is_last, is_current: (
        (f"{m.thought}\n</think>\n\n" if m.thought and is_current else "")
        + f"{m.content}{_json_calls(m)}<|im_end|>"
    ),
    empty=lambda is_last, is_current: "\n</think>\n\n" if is_current else "",
)

# -- DeepSeek-R1: asks with an open thinking block that its conversations leave out

R1 = Kind(
    template="""\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content -}}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- '<|User|>' ~ message.content -}}
{%- elif message.role == 'assistant' -%}
{{- '<|Assistant|>' ~ message.content.split('</think>')[-1].lstrip('\\n') ~ eos_token -}}
{%- endif -%}
{%- endfor -%}
"""
    + _ASK.replace("PROMPT", "'<|Assistant|><think>\\n'"),
    specials=("<|User|>", "<|Assistant|>", "<|end_of_sentence|>"),
    eos="<|end_of_sentence|>",
    said=lambda m, is_last, is_current: (
        (f"{m.thought}\n</think>\n\n" if m.thought and is_last else "") + f"{m.content}<|end_of_sentence|>"
    ),
    empty=lambda is_last, is_current: "\n</think>\n\n" if is_last else "",
    calls=False,
)

# -- Llama-3.1: calls in the place of the content, which end in a way of their own; a date

LLAMA = Kind(
    template="""\
{%- if not date_string is defined -%}{%- set date_string = '26 Jul 2024' -%}{%- endif -%}
{{- bos_token ~ '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' ~ date_string ~ '\\n' -}}
{%- if tools -%}{{- tools | tojson -}}{%- endif -%}
{%- if messages[0].role == 'system' -%}{{- messages[0].content -}}{%- endif -%}
{{- '<|eot_id|>' -}}
{%- for message in messages if message.role != 'system' -%}
{%- set role = 'ipython' if message.role == 'tool' else message.role -%}
{{- '<|start_header_id|>' ~ role ~ '<|end_header_id|>\\n\\n' -}}
{%- if message.tool_calls -%}
{{- '{"name": "' ~ message.tool_calls[0].function.name ~ '", "parameters": ' -}}
{{- (message.tool_calls[0].function.arguments | tojson) ~ '}<|eom_id|>' -}}
{%- else -%}
{{- (message.content | tojson if role == 'ipython' else message.content | trim) ~ '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
"""
    + _ASK.replace("PROMPT", "'<|start_header_id|>assistant<|end_header_id|>\\n\\n'"),
    specials=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    eos="<|eot_id|>",
    said=lambda m, is_last, is_current: (
        f'{{"name": "{m.calls[0].name}", "parameters": {m.calls[0].arguments}}}<|eom_id|>'
        if m.calls
        else (f"<think>\n{m.thought}\n</think>\n\n" if m.thought else "") + f"{m.content}<|eot_id|>"
    ),
)

# -- Phi-3: EOS stands behind the last answer alone

PHI3 = Kind(
    template="""\
{%- for message in messages -%}
{{- '<|' ~ message.role ~ '|>\\n' ~ message.content ~ '<|end|>\\n' -}}
{%- endfor -%}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token -}}
""",
    specials=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
    eos="<|endoftext|>",
    said=lambda m, is_last, is_current: (
        (f"<think>\n{m.thought}\n</think>\n\n" if m.thought else "") + f"{m.content}<|end|>"
    ),
    calls=False,
)

KINDS = {
    "Cohere2": COHERE2, "GLM-4.5": GLM, "gpt-oss": GPT_OSS, "Qwen3": QWEN3, "Qwen3.5": QWEN35, "DeepSeek-R1": R1,
    "Llama-3.1": LLAMA, "Phi-3": PHI3,
}  # fmt: skip
