"""Rotation is relative, reversible, and equal to complex multiplication."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtune.kernels.rope import apply_rope, cos_sin, rerotate, unapply_rope  # noqa: E402

torch.set_num_threads(1)

D = 16
INV_FREQ = 10_000.0 ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)


def vectors(n, seed=0, dtype=torch.float64):
    return torch.randn(2, n, D, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_each_pair_turns_as_a_complex_number():
    positions = torch.tensor([0, 3, 70])
    x = vectors(3)
    turned = apply_rope(x, *cos_sin(INV_FREQ, positions)).numpy()
    angles = positions.numpy()[:, None] * INV_FREQ.numpy()
    half = D // 2
    expected = (x[..., :half] + 1j * x[..., half:]).numpy() * np.exp(1j * angles)
    np.testing.assert_allclose(turned[..., :half], expected.real, atol=1e-14)
    np.testing.assert_allclose(turned[..., half:], expected.imag, atol=1e-14)


def test_scores_depend_on_the_distance_only():
    q, k = vectors(1, 1), vectors(1, 2)

    def score(p, j):
        rotated_q = apply_rope(q, *cos_sin(INV_FREQ, torch.tensor([p])))
        rotated_k = apply_rope(k, *cos_sin(INV_FREQ, torch.tensor([j])))
        return (rotated_q * rotated_k).sum(-1)

    torch.testing.assert_close(score(900, 890), score(10, 0), atol=1e-12, rtol=0)


def test_a_stored_key_moves_to_a_new_position():
    x = vectors(4)
    old, new = torch.tensor([5, 90, 91, 500]), torch.tensor([0, 1, 2, 3])
    fresh = apply_rope(x, *cos_sin(INV_FREQ, new))
    moved = rerotate(apply_rope(x, *cos_sin(INV_FREQ, old)), INV_FREQ, new - old)
    assert (moved - fresh).abs().max() < 1e-13
    single = rerotate(apply_rope(x, *cos_sin(INV_FREQ, old)).float(), INV_FREQ.float(), new - old)
    torch.testing.assert_close(single, fresh.float(), atol=1e-4, rtol=0)


def test_unapply_undoes_scaling_too():
    cos, sin = cos_sin(INV_FREQ, torch.arange(3), scaling=1.25)
    x = vectors(3)
    rotated = apply_rope(x, cos, sin)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1) * 1.25)
    torch.testing.assert_close(unapply_rope(rotated, cos, sin), x, atol=1e-14, rtol=0)


def test_channels_beyond_the_rotary_ones_pass_untouched():
    x = vectors(3)
    cos, sin = cos_sin(INV_FREQ[: D // 4], torch.tensor([4, 5, 6]))
    rotated = apply_rope(x, cos, sin)
    assert torch.equal(rotated[..., D // 2 :], x[..., D // 2 :])
    torch.testing.assert_close(rotated[..., : D // 2], apply_rope(x[..., : D // 2], cos, sin))


def test_bfloat16_is_rotated_in_float32_and_rounded_once():
    x = vectors(3, dtype=torch.float32).bfloat16()
    cos, sin = cos_sin(INV_FREQ.float(), torch.tensor([7, 8, 9]))
    assert cos.dtype == torch.float32
    rotated = apply_rope(x, cos, sin)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, apply_rope(x.float(), cos, sin).bfloat16())


def test_equals_the_model_library():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    cos, sin = cos_sin(INV_FREQ.float(), torch.arange(5)[None])
    x = vectors(5, dtype=torch.float32)[None]
    expected, _ = llama.apply_rotary_pos_emb(x, x, cos, sin)
    torch.testing.assert_close(apply_rope(x, cos[:, None], sin[:, None]), expected)


def test_more_rotary_channels_than_channels_are_refused():
    cos, sin = cos_sin(torch.ones(D), torch.arange(2))
    with pytest.raises(ValueError, match="at most 16"):
        apply_rope(vectors(2), cos, sin)
