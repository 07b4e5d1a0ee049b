"""Factors are nearly as good as the SVD, and exactly as good where that is promised."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtune.kernels.lowrank import power_iteration  # noqa: E402
from kvtune.kernels.minmax import dequantize, quantize  # noqa: E402

torch.set_num_threads(1)


def matrix(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def svd_error(x, rank):
    return float(torch.linalg.svdvals(x.double())[rank:].square().sum().sqrt())


def test_three_loops_come_within_five_per_cent_of_the_svd():
    x = matrix(256, 128) + 2 * torch.outer(matrix(256, seed=1), matrix(128, seed=2))
    for rank in (1, 2, 4, 16):
        a, b = power_iteration(x, rank)
        assert a.shape == (256, rank)
        assert b.shape == (128, rank)
        error = float((x - a @ b.T).norm())
        assert svd_error(x, rank) * (1 - 1e-9) <= error <= svd_error(x, rank) * 1.05


def test_a_quantized_keys_residual_loses_a_third_of_its_error_to_rank_four():
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((256, 128))
    keys += 2 * np.outer(rng.standard_normal(256), rng.standard_normal(128))
    keys = torch.from_numpy(np.where(rng.random(keys.shape) < 0.01, keys * 10, keys)).float()
    residual = keys - dequantize(*quantize(keys, 2, 0, 64), 0, 64)
    signal = float(keys.square().sum())
    assert float(residual.square().sum()) / signal == pytest.approx(0.433, abs=0.001)
    assert svd_error(residual, 4) ** 2 / signal == pytest.approx(0.287, abs=0.001)
    a, b = power_iteration(residual, 4)
    assert float((residual - a @ b.T).square().sum()) / signal <= 0.287 * 1.05


def test_more_rank_never_costs_error():
    x = matrix(40, 24)
    errors = [float((x - a @ b.T).norm()) for a, b in (power_iteration(x, r) for r in range(25))]
    assert errors[0] == pytest.approx(float(x.norm()))
    assert all(late <= early * 1.0001 for early, late in pairwise(errors))
    assert errors[24] < 1e-12


def test_rank_beyond_the_matrix_is_cut_and_exact():
    x = matrix(3, 8)
    a, b = power_iteration(x, 20)
    assert a.shape == (3, 3)
    torch.testing.assert_close(a @ b.T, x)


def test_weak_directions_survive_a_dominant_one_in_float32():
    left, _ = torch.linalg.qr(matrix(64, 4))
    right, _ = torch.linalg.qr(matrix(32, 4, seed=1))
    x = (left * torch.tensor([1e4, 1.0, 0.9, 0.8])) @ right.T
    a, b = power_iteration(x.float(), 4)
    assert (x - a.double() @ b.double().T).norm() < 0.01


def test_a_matrix_of_a_batch_gets_the_factors_it_gets_alone():
    x = matrix(2, 3, 16, 8, dtype=torch.float32).bfloat16()
    a, b = power_iteration(x, 2)
    assert a.dtype == torch.float32
    alone = power_iteration(x[1, 2], 2)
    torch.testing.assert_close((a[1, 2], b[1, 2]), alone)
    torch.testing.assert_close(a.transpose(-1, -2) @ a, torch.eye(2).expand(2, 3, 2, 2))


def test_zeros_and_single_rows_are_finite_and_seeds_repeat():
    a, b = power_iteration(torch.zeros(5, 4), 2)
    assert (a @ b.T).abs().max() == 0
    row = matrix(1, 4)
    a, b = power_iteration(row, 1)
    torch.testing.assert_close(a @ b.T, row)
    x = matrix(9, 7)
    assert torch.equal(power_iteration(x, 2, seed=3)[1], power_iteration(x, 2, seed=3)[1])


def test_arguments_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="rank must be at least 0 but got -1"):
        power_iteration(matrix(3, 3), -1)
    with pytest.raises(ValueError, match="loops must be at least 1"):
        power_iteration(matrix(3, 3), 1, loops=0)
