import math

import pytest
import torch

from kvtune.kernels.slerp import angle, slerp, unit

torch.set_num_threads(1)


def directions(seed, *shape):
    return unit(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double())


def test_the_direction_between_two_axes_is_the_papers_example():
    e = slerp(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), 0.6)
    torch.testing.assert_close(e, torch.tensor([0.58779, 0.80902]), atol=1e-5, rtol=0)


def test_the_direction_divides_the_angle_and_has_length_one():
    u, w = directions(0, 50, 24), directions(1, 50, 24)
    e = slerp(u, w, 0.6)
    torch.testing.assert_close(angle(e, u), 0.6 * angle(u, w))
    torch.testing.assert_close(angle(e, w), 0.4 * angle(u, w))
    torch.testing.assert_close(e.norm(dim=-1), torch.ones(50).double())


def test_the_ends_are_the_directions_themselves():
    u, w = directions(2, 20, 8), directions(3, 20, 8)
    torch.testing.assert_close(slerp(u, w, 0.0), u)
    torch.testing.assert_close(slerp(u, w, 1.0), w)


def test_a_rotation_of_both_rotates_what_lies_between():
    u, w = directions(4, 20, 8), directions(5, 20, 8)
    turn, _ = torch.linalg.qr(
        torch.randn(8, 8, generator=torch.Generator().manual_seed(6)).double()
    )
    torch.testing.assert_close(slerp(u @ turn, w @ turn, 0.6), slerp(u, w, 0.6) @ turn)


@pytest.mark.parametrize("radians", [0.0, 1e-7, 5e-5, 1e-3, math.pi - 1e-3, math.pi])
def test_nearly_equal_and_opposite_directions_stay_directions(radians):
    u = torch.tensor([1.0, 0.0])
    w = torch.tensor([math.cos(radians), math.sin(radians)])
    assert float(angle(u, w)) == pytest.approx(radians, rel=1e-3, abs=1e-12)
    assert float(slerp(u, w, 0.6).norm()) == pytest.approx(1, abs=1e-6)


def test_a_vector_without_length_leaves_the_direction_to_the_other():
    u, zero = torch.tensor([0.6, 0.8]), torch.zeros(2)
    torch.testing.assert_close(slerp(u, zero, 0.6), u)
    torch.testing.assert_close(slerp(zero, u, 0.6), u)
    assert torch.equal(slerp(zero, zero, 0.6), zero)
