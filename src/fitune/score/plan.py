"""All settings of a scoring."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fitune.recipe.score_recipe import ScoreRecipe
from fitune.score.engines.engine import Sampling
from fitune.values.answering import ROWS_AT_ONCE, EngineName
from fitune.values.plan import DataSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePlan:
    """Model, tasks and output folder of a scoring. ``graders`` empty: chosen by the references."""

    model: str
    output_dir: str
    sources: tuple[DataSource, ...] = ()
    adapter: str = ""
    merged: str = ""
    """Folder of the adapter merged into the model, for an engine that cannot take it as it is."""
    graders: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    chat_template: str = ""
    id_column: str = ""
    batch_size: int = 0
    """Rows answered together; 0: as many as fit, at most ``ROWS_AT_ONCE``."""
    shard_rows: int = 0
    """Rows of a shard; 0: as many as suit the engine."""
    engine: EngineName = "transformers"
    devices: int = 1
    """GPUs of this node over which vLLM divides the weights."""
    url: str = ""
    """URL of a server, without /completions."""
    dtype: str = ""
    """Precision in which the answers are computed, where it is not that of this machine's device."""
    served_model: str = ""
    """The name under which the server knows the model; empty: ``model``."""

    @property
    def rows_at_once(self) -> int:
        """At most."""
        return self.batch_size or ROWS_AT_ONCE


def plan_from(recipe: ScoreRecipe, **decided: Any) -> ScorePlan:
    """The plan of a recipe: keys of the same name, and what is ``decided`` instead; its engine is transformers where
    none is named."""
    asked = dict(recipe) | {"columns": tuple(recipe.columns.items()), "batch_size": recipe.batch_size or 0}
    asked |= {
        "output_dir": str(recipe.out),
        "engine": recipe.engine or "transformers",
    } | decided

    def part(kind: type[Any]) -> dict[str, Any]:
        """The keys that ``kind`` has a field for."""
        return {each.name: asked[each.name] for each in fields(kind) if each.name in asked}

    sources = tuple(DataSource(path=path, **part(DataSource)) for path in recipe.data)
    return ScorePlan(**part(ScorePlan), sources=sources, sampling=Sampling(**part(Sampling)))


def names_of(sources: Sequence[DataSource]) -> str:
    """The paths of the sources, for people."""
    return ", ".join(source.path for source in sources)
