"""Models × lengths of rows: the plan taken for each."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fitune.planner.matrix import Matrix, matrix
from fitune.planner.matrix_findings import Finding, explain_findings, findings
from fitune.planner.matrix_words import explain_matrix, matrix_data
from fitune.session.planning import wanted_hardware
from fitune.spec.model_config import load_model_spec
from fitune.spec.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixBeside:
    """A matrix, and what it says beside the findings of a published study."""

    matrix: Matrix
    findings: tuple[Finding, ...]


def plan_matrix(recipe: Recipe, *, models: Sequence[str], seq_lens: Sequence[int]) -> MatrixBeside:
    """Plan every model with every length of rows. Raises RecipeError for pins that contradict each other."""
    found = matrix(
        recipe,
        models=[load_model_spec(name) for name in models],
        seq_lens=tuple(seq_lens),
        hardware=wanted_hardware(recipe),
    )
    return MatrixBeside(matrix=found, findings=findings(recipe, found))


def matrix_text(found: MatrixBeside) -> str:
    """The matrix, and the findings where there are any."""
    text = explain_matrix(found.matrix)
    if not found.findings:
        return text
    beside = "Beside the study (arXiv 2406.02290: 8 V100 of 32 GB, Falcon-180B on 16)"
    return f"{text}\n\n{beside}\n{explain_findings(found.findings)}"


def beside_data(found: MatrixBeside) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    return {**matrix_data(found.matrix), "findings": [asdict(finding) for finding in found.findings]}
