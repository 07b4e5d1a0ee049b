"""The fast transform equals the matrix it stands for."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtune.kernels.hadamard import hadamard_transform, random_signs  # noqa: E402

torch.set_num_threads(1)


@pytest.mark.parametrize("d", [1, 2, 8, 64])
def test_equals_the_sylvester_matrix(d):
    matrix = np.ones((1, 1))
    while len(matrix) < d:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = torch.randn(3, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    np.testing.assert_allclose(hadamard_transform(x).numpy(), x.numpy() @ matrix, atol=1e-12)


@pytest.mark.parametrize("d", [0, 3, 96])
def test_other_sizes_are_refused(d):
    with pytest.raises(ValueError, match=f"power of two but is {d}"):
        hadamard_transform(torch.zeros(2, d))


def test_signs_are_plus_or_minus_one_and_follow_the_seed():
    signs = random_signs(256, torch.Generator().manual_seed(3))
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < 0.25
    assert torch.equal(signs, random_signs(256, torch.Generator().manual_seed(3)))
