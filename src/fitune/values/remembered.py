"""Answers of pure functions, remembered for the very objects that they were asked about.

A search asks the same of the same frozen values thousands of times. ``lru_cache`` hashes them, a whole model for each
question, which takes longer than most of the answers. Their identity costs nothing. Whatever was asked about is kept
with the answer, so no other object gets its identity.
"""

from collections.abc import Callable, Hashable
from functools import wraps
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

from fitune.values.plan import Plan

T = TypeVar("T")
P = ParamSpec("P")

_MOST = 2048
"""Answers of one function; then it begins anew."""


def remembered(function: Callable[P, T]) -> Callable[P, T]:
    """``function`` of frozen values, called once for the same objects."""
    return _remembering(function, None)


def remembered_by(*fields: str) -> Callable[[Callable[[Plan], T]], Callable[[Plan], T]]:
    """``function`` of a plan that depends on nothing but these ``fields`` of it: two or more."""
    return lambda function: _remembering(function, attrgetter(*fields))


def _remembering(
    function: Callable[P, T], parts_of: Callable[[Any], tuple[Any, ...]] | None
) -> Callable[P, T]:
    """``function``, called once for the same arguments, or for the same ``parts_of`` the first; what is given by name
    is not remembered."""
    known: dict[Hashable, tuple[Any, T]] = {}

    @wraps(function)
    def answer(*values: P.args, **named: P.kwargs) -> T:
        """The result for these very objects, from an earlier call if there was one."""
        if named:
            return function(*values, **named)
        objects = values if parts_of is None else parts_of(values[0])
        key = tuple(map(id, objects))
        found = known.get(key)
        if found is None:
            if len(known) >= _MOST:
                known.clear()
            found = known[key] = (objects, function(*values, **named))
        return found[1]

    return answer
