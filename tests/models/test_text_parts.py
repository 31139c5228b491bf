"""Text parts of models of pictures and text: those that transformers does not build by themselves."""

import pytest
from transformers import AutoConfig

from fitune.errors import ModelError
from fitune.models.door import empty_model


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "mllama"])
def test_a_text_part_without_a_model_of_its_own_is_refused_and_a_text_model_is_named(model_type: str) -> None:
    with pytest.raises(ModelError, match="is the text part of a model of pictures and text") as refused:
        empty_model(AutoConfig.for_model(model_type))
    assert "a text model of its size: " in str(refused.value.hint)
