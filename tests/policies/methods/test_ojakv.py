import numpy as np
import pytest
import torch
from contracts.method import MethodContract
from contracts.tiny_models import follow, ready, tiny_engine, tokens

from kvtune.errors import BadInput
from kvtune.policies.calibration import LayerSamples
from kvtune.policies.footprint import footprint
from kvtune.policies.method import History, LayerShape, PlaneShape
from kvtune.policies.method_stack import parse_stack
from kvtune.policies.methods.ojakv import OjaKV
from kvtune.policies.plane import PlaneContext, full_plane

HEADS, WIDTH, RANK = 2, 16, 4
SMALL = "first_tokens=4,recent_tokens=8,update_tokens=8"


class TestOjaKV(MethodContract):
    samples = (f"ojakv:{SMALL}", f"ojakv:keep_ratio=0.25,{SMALL},decode_rate=0.0")
    exact = f"ojakv:keep_ratio=1.0,{SMALL}"
    ladder = (
        f"ojakv:keep_ratio=0.2,{SMALL}",
        f"ojakv:keep_ratio=0.5,{SMALL}",
        f"ojakv:keep_ratio=0.8,{SMALL}",
    )
    block_tokens = 8
    window_tokens = 12


def full_bytes(shape, held):
    return shape.full_bytes(held.tokens)


def stream(seed, count, *, noise=0.05, strong=RANK):
    """Vectors near a random subspace of `strong` dimensions, another one in each head."""
    rng = np.random.default_rng(seed)
    bases = np.linalg.qr(rng.standard_normal((HEADS, WIDTH, strong)))[0]
    inside = np.random.default_rng(seed + 1000).standard_normal((HEADS, count, strong)) * 3
    x = inside @ bases.transpose(0, 2, 1)
    return torch.tensor(x + noise * rng.standard_normal(x.shape)).float()


def plane_of(method, text, first_head=0, heads=HEADS):
    shape = LayerShape(0, 4, 4, HEADS, WIDTH, WIDTH, 4)
    samples = LayerSamples(shape, "key", text, torch.zeros(1, 1), torch.zeros(1, 1), None)
    ctx = PlaneContext(
        PlaneShape("key", heads, WIDTH, 4, 0, 4),
        torch.float32,
        torch.device("cpu"),
        {"ojakv": method.calibrate(samples)},
        first_head=first_head,
    )
    return method.plane(ctx, full_plane)


def method_of(**changes):
    small = {"first_tokens": 4, "recent_tokens": 8, "update_tokens": 8}
    return OjaKV(**{"keep_ratio": RANK / WIDTH, **small, **changes})


def error(plane, x):
    middle = slice(4, -8)
    return float((plane.read() - x)[:, middle].norm() / x[:, middle].norm())


def test_first_and_recent_tokens_are_exact_and_those_between_are_not():
    plane = plane_of(method_of(), stream(0, 200))
    x = stream(9, 40)
    plane.append(x)
    for n in range(5):
        plane.append(stream(20 + n, 1))
        x = torch.cat((x, stream(20 + n, 1)), dim=1)
    read = plane.read()
    assert torch.equal(read[:, :4], x[:, :4])
    assert torch.equal(read[:, -8:], x[:, -8:])
    assert not (read[:, 4:-8] == x[:, 4:-8]).any()
    assert plane.inner.tokens == 45 - 12


def test_a_calibrated_subspace_without_updates_is_the_best_projection():
    x = stream(1, 300)
    method = method_of(prefill_rate=0, decode_rate=0)
    plane = plane_of(method, x)
    plane.append(x)
    for head in range(HEADS):
        vectors = x[head].double().numpy()
        _, _, vt = np.linalg.svd(vectors, full_matrices=False)
        expected = vectors @ vt[:RANK].T @ vt[:RANK]
        found = plane.read()[head, 4:-8].numpy()
        np.testing.assert_allclose(found, expected[4:-8], atol=1e-4)


def test_full_rank_loses_nothing_through_updates():
    plane = plane_of(method_of(keep_ratio=1, decode_rate=0.5), stream(2, 200))
    x = stream(3, 60)
    plane.append(x[:, :30])
    for n in range(30, 60):
        plane.append(x[:, n : n + 1])
    torch.testing.assert_close(plane.read(), x, atol=1e-4, rtol=1e-4)


def test_bases_stay_orthonormal():
    plane = plane_of(method_of(decode_rate=1.0), stream(4, 200))
    plane.append(stream(5, 100))
    for n in range(40):
        plane.append(stream(30 + n, 1))
        basis = plane.held["basis"]
        eye = torch.eye(RANK).expand(HEADS, -1, -1)
        torch.testing.assert_close(basis.mT @ basis, eye, atol=2e-6, rtol=0)


def test_a_prompt_of_other_content_is_followed_where_a_fixed_basis_fails():
    calibration, prompt = stream(6, 300), stream(7, 600)
    adapted = plane_of(method_of(), calibration)
    fixed = plane_of(method_of(prefill_rate=0), calibration)
    for plane in (adapted, fixed):
        plane.append(prompt)
    assert error(fixed, prompt) > 0.5
    assert error(adapted, prompt) < error(fixed, prompt) / 2


def test_a_switch_of_content_at_half_ends_with_less_than_half_the_error_of_a_fixed_basis():
    before, after = stream(8, 300), stream(9, 600)
    adapted = plane_of(method_of(decode_rate=1.0), before)
    fixed = plane_of(method_of(prefill_rate=0, decode_rate=0), before)
    for plane in (adapted, fixed):
        plane.append(before)
        plane.append(after)
    late = after[:, 400:-8]
    found = [float((plane.read()[:, 700:-8] - late).norm()) for plane in (adapted, fixed)]
    assert found[0] < found[1] / 2


def test_re_expressing_latents_costs_nothing_where_content_stays():
    """An update with vectors of the subspace itself turns U inside of it only."""
    x = stream(10, 400, noise=0.0)
    plane = plane_of(method_of(decode_rate=1.0), x)
    plane.append(x[:, :200])
    plane.append(x[:, 200:])
    assert error(plane, x) < 1e-4


def test_re_expressed_latents_are_the_projection_on_the_new_basis():
    x = stream(11, 60)
    plane = plane_of(method_of(decode_rate=0.7), x)
    plane.append(x)
    before = plane.held["basis"]
    shown = plane.read()[:, 4:52]
    plane.append(stream(12, 8))
    after = plane.held["basis"]
    assert (after - before).abs().max() > 0.01
    expected = shown @ after @ after.mT
    torch.testing.assert_close(plane.read()[:, 4:52], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("count", [3, 11, 30])
def test_tokens_in_one_piece_are_stored_as_one_by_one(count):
    x, new = stream(13, 50), stream(14, count)
    together, alone = (plane_of(method_of(decode_rate=0.5), x) for _ in range(2))
    together.append(x)
    alone.append(x)
    together.append(new)
    for n in range(count):
        alone.append(new[:, n : n + 1])
    torch.testing.assert_close(together.read(), alone.read(), atol=1e-5, rtol=1e-5)


def test_an_eviction_keeps_latents_and_fills_the_whole_slots():
    x = stream(15, 60)
    plane = plane_of(method_of(), x)
    plane.append(x)
    shown = plane.read()
    index = torch.tensor([[0, 1, 2, 3, *range(20, 60)], [0, 1, 2, 3, *range(20, 60)]])
    plane.keep(index)
    torch.testing.assert_close(plane.read(), shown[:, index[0]], atol=1e-6, rtol=1e-6)
    # One of the first ones is gone: a latent moves up, and is whole from now on.
    shown = plane.read()
    uneven = torch.tensor([[0, 1, 2, *range(5, 44)], [1, 2, 3, *range(5, 44)]])
    plane.keep(uneven)
    expected = torch.stack([shown[head, uneven[head]] for head in range(HEADS)])
    torch.testing.assert_close(plane.read(), expected, atol=1e-5, rtol=1e-5)
    assert plane.held["first"].shape[1] == 4
    plane.keep(torch.tensor([[0, 1, 41]]))
    assert plane.tokens == 3
    assert plane.inner.tokens == 0


def test_the_basis_is_counted_and_pays_off_after_2_d_latents():
    """Llama 3.1 8B at half rank: 8.4 MB a sequence in 16 bits, twice that as held here."""
    layer = PlaneShape("key", 8, 128, 2, 0, 32)
    method = OjaKV()
    basis = method.plane_bytes(layer, History(1), full_bytes) - layer.full_bytes(1)
    assert 2 * 32 * basis == 2 * 8_388_608
    saved = [
        layer.full_bytes(tokens) - method.plane_bytes(layer, History(tokens), full_bytes)
        for tokens in (160 + 255, 160 + 256, 160 + 257)
    ]
    # 128 bytes saved a token and head, for 128 x 64 numbers of 4 bytes: even at 256 tokens.
    assert saved[0] < saved[1] == 0 < saved[2]


def test_the_basis_that_sequences_start_from_is_counted_once_for_all():
    engine = tiny_engine()
    stack = ready(engine, parse_stack(f"ojakv:{SMALL}"))
    one, two = (follow(engine, stack, tokens(40, seed), [1])[1] for seed in (0, 1))
    # 4 layers, keys and values, 2 heads: 32 x 16 numbers of 4 bytes.
    assert one.measured().constant_bytes == 4 * 2 * 2 * 32 * 16 * 4
    assert one.measured() == footprint(stack, engine.layers, 40, 1, observed=one.observed())
    for mine, others in zip(one.layers[1].planes(), two.layers[1].planes(), strict=True):
        assert mine.constants["basis"] is others.constants["basis"]
        assert one.fork().layers[1].groups[0].keys.initial is one.layers[1].groups[0].keys.initial


def test_a_head_held_alone_uses_its_own_basis():
    x = stream(16, 60)
    alone = plane_of(method_of(), x, first_head=1, heads=1)
    together = plane_of(method_of(), x)
    alone.append(x[1:])
    together.append(x)
    torch.testing.assert_close(alone.read(), together.read()[1:], atol=1e-5, rtol=1e-5)


def test_what_is_settled_never_changes_and_nothing_is_shared():
    x = stream(17, 60)
    plane = plane_of(method_of(decode_rate=1.0), x)
    plane.append(x)
    shown = plane.read()[:, : plane.settled_tokens]
    plane.append(stream(18, 20))
    assert torch.equal(plane.read()[:, :4], shown)
    with pytest.raises(BadInput, match="cannot be shared"):
        plane.share(0, 10)
    assert OjaKV().publish == "never"


def test_latents_can_be_quantized_by_token():
    engine = tiny_engine()
    for rest in ("vllm-int8-per-token-head", "turboquant:center_keys=true"):
        stack = ready(engine, parse_stack(f"ojakv:{SMALL} + {rest}"))
        for prompt, decoded in ((60, 10), (1, 1)):
            _, sequence = follow(engine, stack, tokens(prompt), tokens(decoded, 1))
            observed = sequence.observed()
            expected = footprint(stack, engine.layers, prompt, decoded, observed=observed)
            assert sequence.measured() == expected
