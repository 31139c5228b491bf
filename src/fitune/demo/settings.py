"""The demo's numbers, and how they were found.

Found by trying on two CPU cores, where about 4 thousand tokens/s are trained, with three wishes: the whole under
three minutes, a base that can read but not do the task, and a task that is learned and not remembered.

* Without ``let_values_pass`` (base_model.py) a model of this size had not learned to copy a value out of its
  sentence after 200,000 tokens (negative log-likelihood of a value 2.6 nats); with it, after 100,000 it had.
* A learning rate of 3e-3 or more kept it from learning to copy at all; 1e-3 and 1.5e-3 do alike.
* Pretraining text that says what it says in one form only (``The city is Oslo.``) made fine-tuning remember the cities
  of its rows: 32 % of the held-out rows right, 100 % of rows about cities it had seen. Two forms: 100 % of both.
"""

from dataclasses import dataclass
from typing import Literal

from fitune.demo.base_model import Shape

SHAPE = Shape(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    max_position_embeddings=2048,
)

PRETRAINING_TEXTS = 4500
TRAINING_ROWS = 600
HELD_OUT_ROWS = 100
MAX_NEW_TOKENS = 32
"""The longest answer has 20 tokens with its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What one of the demo's recipes sets."""

    tuning: Literal["full", "lora"]
    learning_rate: float
    max_steps: int
    micro_batch_size: int = 2
    seq_len: int = 256


PRETRAIN = Training(tuning="full", learning_rate=1.5e-3, max_steps=300)
LORA = Training(tuning="lora", learning_rate=2e-3, max_steps=60)
FULL = Training(tuning="full", learning_rate=5e-4, max_steps=60)
LORA_RANK = 16
