"""Data is prepared as a run does it, with a small tokenizer made on the spot."""

import pytest

from data.tiny_tokenizers import byte_tokenizer
from fitune.data.preparing import prepare_data
from fitune.values.plan import DataPlan, DataSource

_OF_THE_CALL = {"seq_len", "seed", "contents", "watch", "on_note", "sends"}
"""What prepare_data takes beside the data's own settings."""


@pytest.fixture
def prepare(tmp_path):
    """What is made of sources, or files; ``cache`` names the folder that keeps it."""

    def run(*sources, cache="cache", tokenizer=None, template=None, **settings):
        call = {"seq_len": 64, "seed": 1} | {key: settings.pop(key) for key in _OF_THE_CALL & {*settings}}
        sources = tuple(
            each if isinstance(each, DataSource) else DataSource(path=str(each)) for each in sources
        )
        data = DataPlan(sources=sources, **{"cache_dir": str(tmp_path / cache)} | settings)
        tokenizer = tokenizer or byte_tokenizer(template=template)
        return prepare_data(data, tokenizer=tokenizer, tokenizer_path="tiny", **call)

    return run
