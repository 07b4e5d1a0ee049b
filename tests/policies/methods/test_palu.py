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
from kvtune.policies.methods.palu import Palu
from kvtune.policies.methods.turboquant import TurboQuant
from kvtune.policies.plane import PlaneContext, full_plane

HEADS, WIDTH, HIDDEN, TEXT = 4, 8, 48, 300


class TestPalu(MethodContract):
    samples = ("palu", "palu:group_heads=1,keep_ratio=0.25", "palu:rotate_latents=true")
    exact = "palu:keep_ratio=1.0"
    ladder = ("palu:keep_ratio=0.25", "palu:keep_ratio=0.5", "palu:keep_ratio=0.75")
    stores_each_token_alone = True


def full_bytes(shape, held):
    return shape.full_bytes(held.tokens)


def some_bytes(shape, held, tokens):
    return shape.full_bytes(tokens)


def samples_of(seed, *, bias=False, role="key"):
    """Inputs with strongly unequal channels, as hidden states are."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((HEADS * WIDTH, HIDDEN))
    inputs = rng.standard_normal((TEXT, HIDDEN)) @ np.diag(np.geomspace(10, 0.1, HIDDEN))
    offset = rng.standard_normal(HEADS * WIDTH) * 5 if bias else np.zeros(HEADS * WIDTH)
    vectors = (inputs @ weight.T + offset).reshape(TEXT, HEADS, WIDTH).transpose(1, 0, 2)
    shape = LayerShape(0, 4, 2 * HEADS, HEADS, WIDTH, WIDTH, 4)
    return LayerSamples(
        shape,
        role,
        torch.tensor(vectors.copy()).float(),
        torch.tensor(inputs).float(),
        torch.tensor(weight).float(),
        torch.tensor(offset).float() if bias else None,
    )


def plane_of(method, learned, dtype=torch.float32, engine=None):
    shape = PlaneShape("key", HEADS, WIDTH, 4, 0, 4)
    ctx = PlaneContext(
        shape,
        dtype,
        torch.device("cpu"),
        {"palu": learned},
        engine={} if engine is None else engine,
    )
    return method.plane(ctx, full_plane)


def papers_decomposition(weight, inputs, rank):
    """L [out, r] and R [r, in] of the whitened weight, by the paper's recipe in float64."""
    weight, inputs = weight.double().numpy(), inputs.double().numpy()
    root = np.linalg.cholesky(inputs.T @ inputs / len(inputs))
    u, s, vt = np.linalg.svd(weight @ root, full_matrices=False)
    left = u[:, :rank] * np.sqrt(s[:rank])
    right = np.sqrt(s[:rank])[:, None] * vt[:rank] @ np.linalg.inv(root)
    return left, right, s


@pytest.mark.parametrize("group_heads", [1, 2, 4])
def test_projected_vectors_equal_the_papers_weights_applied_to_the_inputs(group_heads):
    samples = samples_of(0)
    method = Palu(group_heads=group_heads, keep_ratio=0.5)
    plane = plane_of(method, method.calibrate(samples))
    plane.append(samples.vectors)
    found = plane.read().numpy()
    latents = plane.inner.read().numpy()
    rank = method.rank(group_heads * WIDTH)
    for group in range(HEADS // group_heads):
        rows = slice(group * group_heads * WIDTH, (group + 1) * group_heads * WIDTH)
        left, right, _ = papers_decomposition(samples.weight[rows], samples.inputs, rank)
        hidden = samples.inputs.double().numpy() @ right.T
        expected = (hidden @ left.T).reshape(TEXT, group_heads, WIDTH).transpose(1, 0, 2)
        own = found[group * group_heads : (group + 1) * group_heads]
        scale = np.abs(expected).max()
        np.testing.assert_allclose(own / scale, expected / scale, atol=1e-6)
        # Latents equal up to the signs that an SVD leaves open.
        np.testing.assert_allclose(
            np.abs(latents[group]), np.abs(hidden), atol=2e-5 * np.abs(hidden).max()
        )


def test_the_error_is_that_of_the_dropped_singular_values_and_below_plain_svd():
    samples = samples_of(1)
    method = Palu(group_heads=4, keep_ratio=0.5)
    plane = plane_of(method, method.calibrate(samples))
    plane.append(samples.vectors)
    rank = method.rank(HEADS * WIDTH)
    assert rank == 16
    error = float((plane.read().double() - samples.vectors.double()).square().sum().sqrt())
    _, _, s = papers_decomposition(samples.weight, samples.inputs, rank)
    assert error == pytest.approx(np.sqrt(TEXT * (s[rank:] ** 2).sum()), rel=1e-5)
    u, sigma, vt = np.linalg.svd(samples.weight.double().numpy())
    plain = (
        samples.inputs.double().numpy()
        @ ((u[:, :rank] * sigma[:rank]) @ vt[:rank] - samples.weight.double().numpy()).T
    )
    assert error < 0.95 * np.linalg.norm(plain)


def test_full_rank_restores_exactly_with_and_without_a_bias():
    for bias in (False, True):
        samples = samples_of(2, bias=bias)
        method = Palu(keep_ratio=1)
        plane = plane_of(method, method.calibrate(samples))
        plane.append(samples.vectors)
        torch.testing.assert_close(plane.read(), samples.vectors, atol=2e-4, rtol=1e-5)


def test_a_bias_takes_no_rank():
    """Taken off before the projection, it changes nothing about the error."""
    errors = []
    for bias in (False, True):
        samples = samples_of(3, bias=bias)
        method = Palu(keep_ratio=0.5)
        plane = plane_of(method, method.calibrate(samples))
        plane.append(samples.vectors)
        errors.append(float((plane.read() - samples.vectors).square().mean()))
    assert errors[1] == pytest.approx(errors[0], rel=1e-3)


@pytest.mark.parametrize("keep_ratio", [0.4, 0.5])
def test_a_fused_rotation_leaves_what_is_read_unchanged_and_evens_out_the_latents(keep_ratio):
    samples = samples_of(4)
    read, spread = [], []
    for rotate in (False, True):
        method = Palu(keep_ratio=keep_ratio, rotate_latents=rotate)
        plane = plane_of(method, method.calibrate(samples))
        plane.append(samples.vectors)
        energy = plane.inner.read()[0].square().mean(0)
        read.append(plane.read())
        spread.append(float(energy.max() / energy.min()))
    torch.testing.assert_close(read[1], read[0], atol=1e-4, rtol=1e-5)
    assert spread[1] < spread[0] / 5


def test_values_can_be_read_through_a_fused_output_projection():
    """(p h L) W_o = p h (L W_o): attention over latents, then one matrix for both."""
    samples = samples_of(5, role="value")
    method = Palu(group_heads=4)
    plane = plane_of(method, method.calibrate(samples))
    plane.append(samples.vectors)
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(TEXT, generator=generator).softmax(0)
    output = torch.randn(HEADS * WIDTH, 24, generator=generator)
    straight = torch.einsum("n,hnd->hd", weights, plane.read()).flatten() @ output
    fused = weights @ plane.inner.read()[0] @ (plane.projector.decode[0].T @ output)
    torch.testing.assert_close(fused, straight, atol=1e-3, rtol=1e-4)


def test_half_the_channels_of_llama_3_take_half_the_bytes():
    llama = PlaneShape("key", 8, 128, 2, 0, 32)
    method = Palu()
    assert method.groups(8) == 2
    assert method.rank(512) == 256
    assert method.plane_bytes(llama, History(1000), full_bytes) == 1000 * 2 * 256 * 2
    assert 2 * method.plane_bytes(llama, History(1000), full_bytes) == llama.full_bytes(1000)


@pytest.mark.parametrize(
    ("channels", "keep_ratio", "rank"),
    [(512, 0.3, 160), (512, 0.01, 32), (192, 0.5, 96), (64, 0.5, 32), (32, 0.4, 16), (3, 0.5, 2)],
)
def test_ranks_are_multiples_of_32_and_finer_for_few_channels(channels, keep_ratio, rank):
    assert Palu(keep_ratio=keep_ratio).rank(channels) == rank


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 1), (5, 5), (6, 2), (8, 2), (9, 3)])
def test_groups_are_the_largest_that_divide_the_heads(heads, groups):
    assert Palu(group_heads=4).groups(heads) == groups


def test_an_eviction_moves_latents_where_heads_agree():
    samples = samples_of(6)
    method = Palu(group_heads=2)
    plane = plane_of(method, method.calibrate(samples))
    plane.append(samples.vectors)
    before = plane.read()
    index = torch.tensor([[0, 7, 20], [0, 7, 20], [1, 2, 250], [1, 2, 250]])
    plane.keep(index)
    expected = torch.stack([before[head, index[head]] for head in range(HEADS)])
    torch.testing.assert_close(plane.read(), expected, atol=1e-4, rtol=1e-6)
    latents = plane.inner.read()
    plane.keep(torch.tensor([[0, 2]]))
    assert torch.equal(plane.inner.read(), latents[:, [0, 2]])


def test_heads_that_keep_different_tokens_are_projected_together_anew():
    samples = samples_of(7)
    method = Palu(group_heads=2, keep_ratio=1)
    plane = plane_of(method, method.calibrate(samples))
    plane.append(samples.vectors)
    plane.keep(torch.tensor([[0, 7], [3, 9], [0, 1], [298, 299]]))
    expected = torch.stack(
        [samples.vectors[h, i] for h, i in enumerate(([0, 7], [3, 9], [0, 1], [298, 299]))]
    )
    torch.testing.assert_close(plane.read(), expected, atol=2e-4, rtol=1e-5)


def test_heads_that_select_different_tokens_read_only_their_latents():
    samples = samples_of(13)
    method = Palu(group_heads=2)
    plane = plane_of(method, method.calibrate(samples))
    plane.append(samples.vectors)
    index = torch.tensor([[0, 7, 20], [1, 5, 6], [1, 2, 250], [3, 4, 299]])
    found, touched = plane.select(index)
    everything = plane.read()
    expected = torch.stack([everything[head, index[head]] for head in range(HEADS)])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-6)
    # Two groups, each read for two heads: 3 tokens of 8 latent channels in float32.
    assert method.rank(2 * WIDTH) == 8
    shape = PlaneShape("key", HEADS, WIDTH, 4, 0, 4)
    formula = method.selected_through(shape, History(TEXT), 3, some_bytes)
    assert touched == formula == 2 * 2 * 3 * 8 * 4


def test_what_is_read_for_each_head_of_a_group_counts_for_each():
    """So does the mean that a format inside has learned, even if reading all would touch less."""
    samples = samples_of(15)
    method, inside = Palu(group_heads=2), TurboQuant(center_keys=True)
    shape = PlaneShape("key", HEADS, WIDTH, 4, 0, 4)
    ctx = PlaneContext(
        shape, torch.float32, torch.device("cpu"), {"palu": method.calibrate(samples)}
    )
    plane = method.plane(ctx, lambda within: inside.plane(within, full_plane))
    plane.append(samples.vectors[:, :20])
    _, touched = plane.select(torch.arange(9).repeat(HEADS, 1))
    # 2 groups, each for 2 heads: 9 tokens of 8 latent channels at 4 bits and a norm, a mean.
    assert touched == 2 * 2 * (9 * (4 + 2) + 8 * 4)
    formula = method.selected_through(shape, History(20), 9, inside.selected_bytes)
    assert formula == touched


def test_latents_can_be_shared_with_other_sequences():
    samples = samples_of(14)
    method = Palu()
    learned = method.calibrate(samples)
    one, two = plane_of(method, learned), plane_of(method, learned)
    one.append(samples.vectors)
    assert one.shares_tokens
    two.adopt(one.share(10, 30))
    assert torch.equal(two.inner.read(), one.inner.read()[:, 10:30])


def test_projections_are_shared_by_sequences_until_the_calibration_changes():
    method, engine = Palu(), {}
    first, second = (method.calibrate(samples_of(seed)) for seed in (8, 9))
    one, two = (plane_of(method, first, engine=engine) for _ in range(2))
    assert one.projector is two.projector
    assert plane_of(method, second, engine=engine).projector is not one.projector


def test_one_calibration_serves_every_ratio_but_not_other_groups():
    assert Palu(keep_ratio=0.25).calibration_key == Palu(keep_ratio=0.75).calibration_key
    assert Palu(group_heads=2).calibration_key != Palu(group_heads=4).calibration_key


def test_fewer_texts_than_channels_still_give_a_basis():
    samples = samples_of(10)
    few = LayerSamples(
        samples.shape, "key", samples.vectors[:, :3], samples.inputs[:3], samples.weight, None
    )
    method = Palu(group_heads=4)
    learned = method.calibrate(few)
    eye = learned["basis"].mT @ learned["basis"]
    torch.testing.assert_close(eye, torch.eye(HEADS * WIDTH)[None], atol=1e-5, rtol=0)
    plane = plane_of(method, learned)
    plane.append(samples.vectors)
    assert plane.read().isfinite().all()


def test_heads_held_alone_need_groups_of_one():
    samples = samples_of(11)
    method = Palu(group_heads=2)
    ctx = one_head(2, method.calibrate(samples))
    with pytest.raises(BadInput) as refused:
        method.plane(ctx, full_plane)
    assert "group_heads=1" in refused.value.fix


def test_a_head_held_alone_reads_as_among_the_others():
    samples = samples_of(12)
    method = Palu(group_heads=1)
    learned = method.calibrate(samples)
    together, alone = plane_of(method, learned), method.plane(one_head(2, learned), full_plane)
    together.append(samples.vectors)
    alone.append(samples.vectors[2:3])
    torch.testing.assert_close(alone.read(), together.read()[2:3], atol=1e-4, rtol=1e-6)
    assert 4 * sum(x.numel() for x in alone.constants.values()) * HEADS == method.constant_bytes(
        PlaneShape("key", HEADS, WIDTH, 4, 0, 4)
    )


def one_head(head, learned):
    shape = PlaneShape("key", 1, WIDTH, 4, 0, 4)
    return PlaneContext(
        shape, torch.float32, torch.device("cpu"), {"palu": learned}, first_head=head
    )


def test_projections_are_counted_once_for_all_sequences():
    engine = tiny_engine()
    stack = ready(engine, parse_stack("palu:keep_ratio=0.5"))
    _, sequence = follow(engine, stack, tokens(30), tokens(2, 1))
    found = sequence.measured()
    # 4 layers, keys and values, 1 group of 2 heads: 32 latent channels of 64, float32.
    assert found.resident_bytes == 4 * 2 * 32 * 32 * 4
    assert found.constant_bytes == 4 * 2 * 4 * (2 * 64 * 32 + 64)
    assert found == footprint(stack, engine.layers, 30, 2, observed=sequence.observed())
