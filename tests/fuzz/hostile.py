"""Values that nobody should write and somebody will, and ways to damage what was right."""

import copy
import json

from hypothesis import strategies as st

NUMBERS = st.sampled_from(
    [
        0, -1, 1, 2, 7, 2**31, 2**63, 2**70, -(2**63), 10**18, 1e-300, 1e308, -0.0, 0.1, 5.0, -1.5,
        float("nan"), float("inf"), float("-inf"),
    ]
)  # fmt: skip
_TEXTS = [
    "", " ", "x", "true", "null", "1e-4", "nan", "-", "../x", "/etc/passwd", "/dev/zero", "~", "a" * 5000, "\x00",
    "\ud83d", "\u202e", "{{ 1 }}", "{% for", "(a+)+$", "!!python/object:os.system", "*a", "&a [*a]", "org/name", "a\nb",
    "http://127.0.0.1:9/x", "file:///etc/passwd", "s3://bucket/x", "\\", "'", '"',
]  # fmt: skip
TEXTS = st.one_of(
    st.sampled_from(_TEXTS),
    st.text(max_size=12),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, st.integers(), st.floats())
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(TEXTS, SCALARS, max_size=3),
    st.sampled_from([[], {}, [[]], [{}], {"a": {"b": {"c": []}}}]).map(copy.deepcopy),  # they are changed
)


def nested_json(depth):
    return "[" * depth + "]" * depth


@st.composite
def changed(draw, right, *, most=3):
    """``right`` with up to ``most`` values replaced, removed or added, anywhere inside."""
    value = copy.deepcopy(right)
    for _ in range(draw(st.integers(1, most))):
        containers = [found for found in _containers(value) if found]
        if not containers:
            break
        container = draw(st.sampled_from(containers))
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        key = draw(st.sampled_from(keys))
        match draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"])):
            case "replace":
                container[key] = draw(VALUES)
            case "remove":
                del container[key]
            case "add" if isinstance(container, dict):
                container[draw(TEXTS)] = draw(VALUES)
            case _:
                container.append(draw(VALUES)) if isinstance(container, list) else None
    return value


def _containers(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [value] if isinstance(value, dict | list) else []
    return own + [found for part in inner for found in _containers(part)]


@st.composite
def damaged(draw, right):
    """``right`` cut, flipped, filled, doubled or gone."""
    at = draw(st.integers(0, max(len(right) - 1, 0)))
    match draw(st.sampled_from(["cut", "flip", "zero", "insert", "double", "empty"])):
        case "cut":
            return right[:at]
        case "flip" if right:
            return right[:at] + bytes([right[at] ^ (1 << draw(st.integers(0, 7)))]) + right[at + 1 :]
        case "zero":
            return right[:at] + bytes(min(64, len(right) - at)) + right[at + 64 :]
        case "insert":
            return right[:at] + draw(st.binary(min_size=1, max_size=16)) + right[at:]
        case "double":
            return right + right
        case _:
            return b""


def as_json(value):
    """JSON as a careless program writes it: NaN, Infinity and unpaired surrogates included."""
    return json.dumps(value, ensure_ascii=True)
