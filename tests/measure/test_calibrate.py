"""Fitting rates to times, counting operations, and measuring this machine with shapes small enough for a test."""

import pytest
import torch

from fitune.measure import device_rates
from fitune.measure.calibrate import attention_rate, calibrate, product_rate
from fitune.measure.device_rates import CountedOperations
from fitune.measure.hardware import detect_hardware
from fitune.spec.serial import from_json, to_json


def test_a_line_through_times_gives_back_start_and_rate():
    samples = [(flops, 5e-6 + flops / 80e9) for flops in (1e4, 1e6, 1e8)]
    rate = product_rate("fp32", samples)
    assert rate.flops == pytest.approx(80e9)
    assert rate.start_seconds == pytest.approx(5e-6)


def test_rows_of_attention_give_back_the_rate_and_how_badly_short_ones_do():
    per_pair = device_rates.FLOPS_PER_PAIR / 40e9
    samples = [(n, per_pair * n * (n + 100) / 2) for n in (64, 256, 1024)]
    rate = attention_rate("fp32", samples)
    assert rate.flops == pytest.approx(40e9)
    assert rate.row_tokens == pytest.approx(100)


def test_two_widths_of_heads_give_back_what_scores_and_starts_cost():
    def seconds(head_size: int, n: int) -> float:
        pairs = n * (n + 100) / 2 * head_size + n * n / 2 * 24
        return device_rates.HEADS * (14 * pairs / 60e9 + 2e-4)

    wide, narrow = ([(n, seconds(d, n)) for n in (64, 256, 1024)] for d in (128, 64))
    rate = attention_rate("bf16", wide, narrow)
    assert rate.flops == pytest.approx(60e9)
    assert rate.row_tokens == pytest.approx(100)
    assert rate.score_columns == pytest.approx(24)
    assert rate.start_seconds == pytest.approx(2e-4)


def test_elementwise_operations_are_counted_in_bytes():
    x = torch.ones(4, 4)
    with CountedOperations() as counted:
        (x + x).view(16)  # one tensor read, one written
        x.mul_(2.0)
    assert counted.bytes == 4 * 16 * 4


def test_relative_errors_count_so_that_small_products_are_not_lost():
    samples = [(1e6, 2e-5), (1e9, 1.1e-2), (1e11, 0.9)]
    rate = product_rate("fp32", samples)
    for flops, seconds in samples:
        assert rate.start_seconds + flops / rate.flops == pytest.approx(seconds, rel=0.15)


def test_noise_that_would_make_a_negative_start_goes_through_zero():
    rate = product_rate("fp32", [(1e6, 1e-5), (1e7, 1.5e-4)])
    assert rate.start_seconds == 0
    assert 1e7 / 1.5e-4 < rate.flops < 1e6 / 1e-5
    assert product_rate("fp32", [(1e6, 1e-5)]).flops == pytest.approx(1e11)


def test_views_and_empty_tensors_are_no_operations():
    x = torch.ones(4, 4)
    with CountedOperations() as counted:
        y = x.view(16).reshape(2, 8).transpose(0, 1)
        torch.empty_like(x)
        y[0].detach()
    assert counted.count == 0
    with CountedOperations() as counted:
        x.add_(1)
        torch.nn.functional.silu(x @ x)
    assert counted.count == 3


def test_this_machine_is_measured_and_the_result_survives_its_file(monkeypatch):
    monkeypatch.setattr(device_rates, "PRODUCTS_TDF", device_rates.PRODUCTS_TDF[:1])
    monkeypatch.setattr(device_rates, "ROW_LENGTHS", (64,))
    monkeypatch.setattr(device_rates, "TENSOR_MIB_CPU", (0.25, 1))
    monkeypatch.setattr(device_rates, "ADAM_PARAMETERS", 2**16)
    monkeypatch.setattr(device_rates, "POOL_BYTES", 2**20)
    monkeypatch.setattr(device_rates, "TRIALS", 2)
    monkeypatch.setattr(device_rates, "TRIAL_SECONDS", 1e-3)
    found = calibrate(detect_hardware(use_gpus=False))
    assert found.device.startswith("cpu-")
    assert {rate.numbers for rate in found.products} == {"fp32", "bf16", "fp16"}
    assert 1e8 < found.product_rate("fp32").flops < 1e13
    assert 1e-7 < found.forward_launch_seconds < 1e-2
    assert found.cpu_adam > 1e6
    assert found.collectives is None
    assert from_json(type(found), to_json(found)) == found
