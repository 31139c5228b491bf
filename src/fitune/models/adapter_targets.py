"""Which linears an adapter adapts, and by which rank: PEFT's rules, decided here.

PEFT hands the expressions of an adapter's config to ``re``, without a limit. Here they are matched against the clock
(spec/patterns.py), and PEFT is given the full names that they chose.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from fitune.models.adapter_config import AdapterConfig
from fitune.spec.patterns import Clock

HEAD = "lm_head"

MOST_QUESTIONS = 2_000_000
"""Linears times patterns."""

T = TypeVar("T")


@dataclass(slots=True)
class Targets:
    """The choices of one config. Every method raises ValueError for an expression that cannot be used."""

    config: AdapterConfig
    clock: Clock = field(default_factory=Clock)
    _sets: dict[int, frozenset[str]] = field(default_factory=dict)
    _asked: int = 0

    @property
    def are_plain(self) -> bool:
        """True if names alone choose, so that the end of a name is enough to tell."""
        config = self.config
        is_list = isinstance(config.target_modules, list)
        return is_list and not config.layers_pattern and not isinstance(config.exclude_modules, str)

    def adapts(self, module: str) -> bool:
        """True if the linear of this full name is adapted."""
        config = self.config
        if config.exclude_modules and self._is_among(config.exclude_modules, module):
            return False
        if config.target_modules == "all-linear":
            return module != HEAD
        if isinstance(config.target_modules, list) and module in config.target_modules:
            return True
        return self._is_among(config.target_modules, module) and self._is_in_layer(module)

    def rank(self, module: str) -> int:
        return self._by_pattern(self.config.rank_pattern, module) or self.config.r

    def alpha(self, module: str) -> float:
        found = self._by_pattern(self.config.alpha_pattern, module)
        return self.config.lora_alpha if found is None else found

    def _is_among(self, wanted: str | list[str], module: str) -> bool:
        if isinstance(wanted, str):
            return self.clock.fullmatch(wanted, module) is not None
        names = self._sets.setdefault(id(wanted), frozenset(wanted))
        return any(
            module[begin:] in names for begin in (0, *(dot.end() for dot in re.finditer(r"\.", module)))
        )

    def _is_in_layer(self, module: str) -> bool:
        """Number of the block: the first in the name, or the one behind a ``layers_pattern``."""
        layers = self.config.layers_to_transform
        if layers is None or layers == []:
            return True
        patterns = self.config.layers_pattern or ""
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            anchored = (
                rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." if self.config.layers_pattern else _FIRST_NUMBER
            )
            found = self.clock.match(anchored, module)
            if found is not None:
                number = found["idx"].lstrip("0") or "0"
                return number in map(str, [layers] if isinstance(layers, int) else layers)
        return False

    def _by_pattern(self, patterns: Mapping[str, T] | None, module: str) -> T | None:
        """PEFT's rule: the first pattern that ends the name wins."""
        self._asked += len(patterns or {})
        if self._asked > MOST_QUESTIONS:
            raise ValueError(
                f"rank_pattern or alpha_pattern is too long: over {MOST_QUESTIONS:,} comparisons"
            )
        for pattern, value in (patterns or {}).items():
            if _PLAIN.fullmatch(pattern):
                is_end = _ends_with(module, pattern)
            else:
                is_end = self.clock.match(rf"(.*\.)?({pattern})$", module) is not None
            if is_end:
                return value
        return None


_PLAIN = re.compile(r"[\w\-.]+")


def _ends_with(module: str, pattern: str) -> bool:
    """As the expression of letters and dots would: a dot is any letter."""
    begin = len(module) - len(pattern)
    if begin < 0 or (begin > 0 and module[begin - 1] != "."):
        return False
    return all(wanted in (letter, ".") for wanted, letter in zip(pattern, module[begin:], strict=True))


_FIRST_NUMBER = r".*?\.[^.]*\.(?P<idx>\d+)\."


def settled(config: AdapterConfig, modules: Iterable[str]) -> dict[str, object]:
    """target_modules, rank_pattern and alpha_pattern in full names of ``modules``, for PEFT.

    Raises ValueError for an expression that cannot be used; ``check_adapter`` did so before.
    """
    targets = Targets(config)
    chosen = [module for module in modules if targets.adapts(module)]
    ranks = {module: targets.rank(module) for module in chosen}
    alphas = {module: targets.alpha(module) for module in chosen}
    return {
        "target_modules": chosen,
        "rank_pattern": {re.escape(m): rank for m, rank in ranks.items() if rank != config.r},
        "alpha_pattern": {re.escape(m): alpha for m, alpha in alphas.items() if alpha != config.lora_alpha},
    }
