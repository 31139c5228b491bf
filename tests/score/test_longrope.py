"""With longrope an answer is the same alone and beside prompts on the other side of the boundary."""

import pytest

from fitune.score.engines.engine import Sampling
from fitune.score.engines.engine_transformers import answer_all
from fitune.score.questions import Question
from fitune.score.tasks import Task
from models.streams import make_rows
from models.tiny_models import tiny_model

BOUNDARY, NEW = 24, 8
# three short, three that cross while they answer, one whose last new token would be the first beyond, three long
LENGTHS = (4, 9, 15, 17, 19, 24, 16, 25, 31, 60)


@pytest.fixture(scope="module", params=["phi3", "llama"])
def model(request):
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": BOUNDARY,
        "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.5, 4.0, 9.0, 30.0],
    }  # fmt: skip
    return tiny_model(request.param, rope_parameters=rope, original_max_position_embeddings=BOUNDARY).eval()


def test_longrope_answers_are_equal_alone_and_in_a_batch(model, tiny):
    def answers(tasks, batch_size):
        return answer_all(model, tiny.tokenizer, tiny.template, tasks, sampling, batch_size=batch_size)

    sampling = Sampling(max_new_tokens=NEW)
    tasks = [
        Task(question=Question(id=f"row-{len(row)}", where="here"), prompt_ids=tuple(row.tolist()))
        for row in make_rows(LENGTHS)
    ]
    alone = [answers([task], 1)[0] for task in tasks]
    assert answers(tasks, 16) == alone
    assert answers(tasks[::-1], 3) == alone[::-1]
