import numpy as np
import pytest
import torch

from kvtune.kernels.oja import largest_energy, oja_update

torch.set_num_threads(1)
DIM, RANK = 64, 8


def covariance(seed):
    """8 strong directions of energy 10 to 3 among 56 of 0.3: (basis, its square root)."""
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.standard_normal((DIM, DIM)))
    energies = np.concatenate([np.linspace(10, 3, RANK), np.full(DIM - RANK, 0.3)])
    return basis, basis * np.sqrt(energies), rng


def captured(basis, root):
    """tr(Uᵀ C U) / tr C."""
    return float(((root.T @ basis.double().numpy()) ** 2).sum() / (root**2).sum())


def test_a_hundred_updates_find_the_strong_directions():
    _, root, rng = covariance(0)
    start, _ = np.linalg.qr(rng.standard_normal((DIM, RANK)))
    basis = torch.tensor(start).float()
    before = captured(basis, root)
    for _ in range(100):
        x = torch.tensor(rng.standard_normal((16, DIM)) @ root.T).float()
        basis = oja_update(basis, x, 0.05)
        eye = basis.T @ basis
        torch.testing.assert_close(eye, torch.eye(RANK), atol=1e-6, rtol=0)
    best = 52 / (52 + 56 * 0.3)
    assert best == pytest.approx(0.756, abs=5e-4)
    assert before < 0.2
    assert captured(basis, root) == pytest.approx(0.740, abs=0.012)
    assert captured(basis, root) < best


def test_one_update_is_the_rule_written_out():
    rng = np.random.default_rng(1)
    start, _ = np.linalg.qr(rng.standard_normal((6, 2)))
    x = rng.standard_normal((5, 6))
    moved = start + 0.3 * x.T @ (x @ start) / 5
    found = oja_update(torch.tensor(start), torch.tensor(x), 0.3).numpy()
    # The same subspace, and columns that point the same way.
    np.testing.assert_allclose(found @ found.T @ moved, moved, atol=1e-12)
    assert (np.einsum("dr,dr->r", found, moved) > 0).all()


def test_rate_zero_leaves_the_basis_alone_and_rates_are_per_head():
    generator = torch.Generator().manual_seed(2)
    basis, _ = torch.linalg.qr(torch.randn(2, 8, 3, generator=generator))
    x = torch.randn(2, 10, 8, generator=generator)
    found = oja_update(basis, x, torch.tensor([0.0, 0.5]))
    torch.testing.assert_close(found[0], basis[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(found[1], oja_update(basis[1], x[1], 0.5), atol=1e-6, rtol=0)
    assert (found[1] - basis[1]).abs().max() > 0.01


def test_vectors_of_zeros_turn_nothing():
    basis, _ = torch.linalg.qr(torch.randn(8, 3, generator=torch.Generator().manual_seed(3)))
    torch.testing.assert_close(oja_update(basis, torch.zeros(4, 8), 1.0), basis, atol=1e-6, rtol=0)


def test_the_largest_energy_is_the_largest_eigenvalue_of_the_second_moment():
    x = torch.randn(3, 20, 8, generator=torch.Generator().manual_seed(4))
    expected = torch.linalg.eigvalsh(x.mT @ x / 20)[:, -1]
    torch.testing.assert_close(largest_energy(x), expected)
