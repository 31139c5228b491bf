"""Passwords and tokens: refused where they would be saved, taken out of whatever is shown."""

import os
import re
from collections.abc import Mapping

_HIDDEN = "[hidden]"

_USER = re.compile(
    r"(?P<before>\b[a-z][a-z0-9+.-]{0,20}://)"
    r"(?P<secret>[^\s/@:]*:[^\s/@]+|(?<=http://)[^\s/@]+|(?<=https://)[^\s/@]+)@",
    re.I,
)
"""``s3://user:password@host``; a name alone counts for http only, where it is a token: abfs://container@account."""
_PARAMETER = re.compile(
    r"(?P<before>[?&;](?P<name>[\w.-]{0,40}?"
    r"(?:token|secret(?:_?key)?|passw(?:or)?d|passphrase|pwd|credentials?|signature|(?:api|access)_?key(?:_?id)?"
    r"|(?<![a-z])(?:key|sig|auth|authorization))(?![a-z])[\w.-]{0,40})=)"
    r"(?P<secret>[^\s&;#'\"]+)",
    re.I,
)
"""``?X-Amz-Signature=…``, ``&access_token=…``, Azure's ``sig=…``, but not ``author`` or ``design``. Every part is
bounded: texts may be hostile."""
_TOKEN = re.compile(
    r"(?P<secret>\b(?:hf_[A-Za-z0-9]{30,}|gh[opsu]_[A-Za-z0-9]{30,}|github_pat_\w{22,}|glpat-[\w-]{20,}|AKIA[0-9A-Z]{16}"
    r"|AIza[\w-]{35}|sk-[A-Za-z0-9_-]{30,}|(?<=AccountKey=)[A-Za-z0-9+/=]{20,}))"
)
"""Tokens of Hugging Face, GitHub, GitLab, Amazon, Google, OpenAI and Azure, by their shape."""
_SECRET_NAMES = re.compile(r"(token|secret|password|api_?key)(?!.*_(path|file|dir)$)", re.I)
SHORTEST_SECRET = 12
"""Characters; a shorter value (EMPTY, none) may be a word of any text."""

CREDENTIALS_ELSEWHERE = (
    "keep them in the environment (HF_TOKEN, AWS_ACCESS_KEY_ID) or in the storage client's own file"
)


def credential_in(text: str) -> str | None:
    """Name the kind of credential in ``text``, without the credential itself; None when there is none."""
    if _USER.search(text):
        return "a name and password in front of the host"
    if found := _PARAMETER.search(text):
        return f"the parameter {found['name']}"
    return "an access token" if _TOKEN.search(text) else None


def without_credentials(text: str, *, environment: Mapping[str, str] = os.environ) -> str:
    """``text`` with its passwords and tokens hidden, those of the environment too, wherever they stand."""
    for name, value in environment.items():
        if len(value) >= SHORTEST_SECRET and value in text and _SECRET_NAMES.search(name):
            text = text.replace(value, _HIDDEN)
    text = _USER.sub(rf"\g<before>{_HIDDEN}@", text)
    text = _PARAMETER.sub(rf"\g<before>{_HIDDEN}", text)
    return _TOKEN.sub(_HIDDEN, text)
