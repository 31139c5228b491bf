"""Fitting rates to times, counting operations, and measuring this machine with shapes small enough for a test."""

import math
from dataclasses import replace

import pytest
import torch

from fitune.measure import device_rates
from fitune.measure.calibrate import attention_rate, calibrate, launches, product_rate
from fitune.measure.device_rates import CountedOperations
from fitune.measure.hardware import detect_hardware
from fitune.values.serial import from_json, to_json


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


def test_two_depths_give_back_what_an_operation_and_a_pass_cost():
    each, start = launches((100.0, 5e-4 + 100 * 9e-6), (400.0, 5e-4 + 400 * 9e-6))
    assert each == pytest.approx(9e-6)
    assert start == pytest.approx(5e-4)
    assert launches((100.0, 1e-3), (400.0, 9e-4))[0] > 0  # noise


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
    monkeypatch.setattr(device_rates, "NEW_BYTES", 2**20)
    monkeypatch.setattr(device_rates, "ADAM_PARAMETERS", 2**16)
    little = replace(
        device_rates.HURRIED, products=1, row_lengths=(64,), tensor_mib=(0.25, 1), pool_bytes=2**20
    )
    found = calibrate(detect_hardware(use_gpus=False), effort=little)
    assert found.device.startswith("cpu-")
    assert {rate.numbers for rate in found.products} == {"fp32", "bf16"}
    assert 0 < found.product_rate("fp32").flops < math.inf  # how fast is not known: other work may hold it up
    assert 0 < found.forward_launch_seconds < math.inf
    assert 0 < found.cpu_adam < math.inf
    assert {(each.numbers, each.head_size) for each in found.heads} == {
        (numbers, size) for numbers in ("fp32", "bf16") for size in (64, 128)
    }
    assert found.logit_seconds("bf16") > 0
    assert found.new_page_bandwidth > 0
    assert found.collectives is None
    assert from_json(type(found), to_json(found)) == found
