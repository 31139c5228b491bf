"""Products by oneDNN are those of torch up to rounding, and nothing of them is left behind."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fitune.score.engines.products import fast_products
from models.tiny_models import tiny_model

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}


class Products(TorchDispatchMode):
    """Counts the calls of oneDNN."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "_linear_pointwise" in str(func)
        return func(*args, **(kwargs or {}))


def test_large_products_are_onednns_and_small_ones_torchs():
    """Seven products of each of two blocks; the head of one row and a step of one row are small."""
    model = tiny_model("llama", **WIDE).eval()
    ids = torch.arange(96)[None]
    with torch.inference_mode():
        before = model(input_ids=ids, logits_to_keep=1).logits
        with fast_products(model):
            with Products() as large:
                found = model(input_ids=ids, logits_to_keep=1).logits
            with Products() as small:
                model(input_ids=ids[:, :1])
        after = model(input_ids=ids, logits_to_keep=1).logits
    assert (large.count, small.count) == (14, 0)
    assert torch.allclose(found, before, rtol=1e-4, atol=1e-4)
    assert torch.equal(after, before)
    assert not any("forward" in vars(module) for module in model.modules())


def test_biases_are_added_and_gradients_flow():
    linear = torch.nn.Sequential(torch.nn.Linear(300, 200))
    hidden = torch.randn(2, 70, 300)
    with fast_products(linear):
        linear(hidden).sum().backward()
        with torch.inference_mode(), Products() as large:
            found = linear(hidden)
    assert large.count == 1
    assert torch.allclose(found, linear(hidden), rtol=1e-4, atol=1e-5)
    assert linear[0].weight.grad is not None


def test_a_forward_that_somebody_replaced_and_other_types_stay():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, dtype=torch.bfloat16))
    own = model[0].forward = lambda hidden: hidden
    with fast_products(model):
        assert model[0].forward is own
        assert "forward" not in vars(model[1])
    assert model[0].forward is own
