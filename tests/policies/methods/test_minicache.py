import pytest
import torch
from contracts.method import MethodContract
from contracts.tiny_models import follow, tiny_engine, tokens

from kvtune.policies.compose import nearest_legal, refusals
from kvtune.policies.footprint import ROLES, footprint
from kvtune.policies.method import History, LayerShape, PlaneShape
from kvtune.policies.method_stack import MethodStack, parse_stack
from kvtune.policies.methods.minicache import MiniCache


class TestMiniCache(MethodContract):
    samples = (
        "minicache",
        "minicache:decode_merge=true",
        "minicache:per_head=true,retain_ratio=0.3",
        "minicache:start_ratio=0.25,retain_ratio=0.0",
    )
    exact = "minicache:start_ratio=1.0"
    ladder = (
        "minicache:start_ratio=0.0",
        "minicache:start_ratio=0.5",
        "minicache:start_ratio=0.5,retain_ratio=0.9",
    )


def full_bytes(shape, held):
    return shape.full_bytes(held.tokens)


def four_bits(shape, held):
    return shape.full_bytes(held.tokens) // 4


def test_pairs_are_adjacent_and_start_in_the_middle():
    method = MiniCache()
    assert [method.partner(layer, 8) for layer in range(8)] == [None] * 4 + [5, 4, 7, 6]
    assert [method.leader(layer, 8) for layer in range(8)] == [None] * 5 + [4, None, 6]
    assert [method.partner(layer, 7) for layer in range(7)] == [None] * 3 + [4, 3, 6, 5]
    assert [method.partner(layer, 5) for layer in range(5)] == [None] * 2 + [3, 2, None]


def test_bytes_of_a_pair_add_up_as_the_paper_counts():
    """D b / 8 shared, two lengths of 2 bytes, and |I| (2 D 2 + 4) for the tokens that stay."""
    width, count, retained = 8 * 128, 1000, 37
    method = MiniCache()
    facts = {"merged": count, "retained": retained}
    for inner, shared in ((full_bytes, width * 2), (four_bits, width // 2)):
        total = sum(
            method.plane_bytes(
                PlaneShape("key", 8, 128, 2, layer, 32), History(count), inner, facts
            )
            for layer in (20, 21)
        )
        # One limit of 4 bytes more than the paper's count.
        assert total == count * (shared + 2 * 2) + retained * (2 * width * 2 + 4) + 4


def test_alone_it_is_at_most_a_quarter_and_five_times_smaller_with_4_bits():
    layers = [LayerShape(n, 32, 32, 32, 128, 128, 2) for n in range(32)]
    method = MiniCache(retain_ratio=0.0)
    full = sum(full_bytes(layer.plane(role), History(2048)) for layer in layers for role in ROLES)
    for inner, ratio in ((full_bytes, 4 / 3), (four_bits, 4 * 4 / 3)):
        held = sum(
            method.plane_bytes(layer.plane(role), History(2048), inner)
            for layer in layers
            for role in ROLES
        )
        # Layers below the middle go through `inner` unmerged.
        assert full / held == pytest.approx(ratio, rel=0.01)


def test_directions_are_read_twice_so_that_merging_alone_saves_no_bandwidth():
    engine = tiny_engine()
    _, sequence = follow(engine, parse_stack("minicache"), tokens(40), tokens(2, 1))
    _, plain = follow(engine, MethodStack(), tokens(40), tokens(2, 1))
    found, full = sequence.measured(), plain.measured()
    assert found.resident_bytes < full.resident_bytes
    assert found.read_bytes_per_step >= full.read_bytes_per_step


def test_the_peak_counts_the_lower_layer_until_the_upper_is_there():
    engine = tiny_engine()
    sequence = engine.start(parse_stack("minicache:retain_ratio=0.0"))
    engine.prefill([sequence], [tokens(100)])
    # Float32: 2 heads of 32 channels; keys and values of 100 tokens in one layer.
    full = 2 * 100 * 2 * 32 * 4
    upper = 2 * (100 * 4)
    lower = full + upper + 2 * 4
    assert sequence.resident_bytes == 2 * full + lower + upper
    # The last layer's staged prompt, and the third layer's copy, which it freed.
    assert sequence.peak_bytes == sequence.resident_bytes + 2 * full


@pytest.mark.parametrize("decode_merge", [False, True])
def test_both_layers_of_a_pair_keep_the_same_tokens_under_an_evictor(decode_merge):
    engine = tiny_engine()
    stack = parse_stack(
        f"streaming-llm:sink_tokens=2,window_tokens=12 + minicache:decode_merge={decode_merge}"
    )
    _, sequence = follow(engine, stack, tokens(40), tokens(8, 1))
    expected = footprint(stack, engine.layers, 40, 8, observed=sequence.observed())
    assert sequence.measured() == expected
    third, fourth = (layer.groups[0] for layer in sequence.layers[2:])
    assert third.tokens == fourth.tokens == stack.held(History(40, 8), engine.layers[0]).tokens
    assert torch.equal(third.positions(third.keys), fourth.positions(fourth.keys))


def test_the_upper_layer_follows_a_choice_that_it_would_not_make():
    engine = tiny_engine()
    alone = "h2o:heavy_tokens=10,recent_tokens=10"
    kept = []
    for text in (alone, f"{alone} + minicache:per_head=true,decode_merge=true"):
        _, sequence = follow(engine, parse_stack(text), tokens(40), tokens(5, 1))
        third, fourth = (layer.groups[0] for layer in sequence.layers[2:])
        kept.append(torch.equal(third.positions(third.keys), fourth.positions(fourth.keys)))
    assert kept == [False, True]


def test_a_fork_goes_on_by_itself():
    engine = tiny_engine()
    stack = parse_stack("minicache:decode_merge=true,retain_ratio=0.3")
    _, one = follow(engine, stack, tokens(40), tokens(3, 1))
    two = one.fork()
    first = [engine.decode([one], [[n]])[0] for n in (1, 2, 3)][-1]
    other = [engine.decode([two], [[n]])[0] for n in (1, 2, 3)][-1]
    assert torch.equal(first, other)
    assert two.layers[3].groups[0].keys.other is two.layers[2].groups[0].keys
    assert one.measured() == two.measured()


def test_directions_can_be_quantized():
    engine = tiny_engine()
    stack = parse_stack("minicache + kivi:bits=4")
    _, sequence = follow(engine, stack, tokens(300), tokens(3, 1))
    _, unquantized = follow(engine, parse_stack("minicache"), tokens(300), tokens(3, 1))
    expected = footprint(stack, engine.layers, 300, 3, observed=sequence.observed())
    assert sequence.measured() == expected
    assert sequence.resident_bytes < 0.7 * unquantized.resident_bytes


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("scissorhands + minicache", "scissorhands + minicache:per_head=True"),
        ("kvzip:mode=pair + palu", "kvzip:mode=pair-uniform + palu"),
    ],
)
def test_heads_that_share_a_vector_ask_for_the_same_tokens(text, nearest):
    stack = parse_stack(text)
    assert refusals(stack)
    assert nearest_legal(stack) == parse_stack(nearest)


def test_projections_inside_are_counted_once_for_both_layers():
    engine = tiny_engine()
    stack = parse_stack("minicache + palu")
    _, sequence = follow(engine, stack, tokens(30), tokens(2, 1))
    found = sequence.measured()
    assert found == footprint(stack, engine.layers, 30, 2, observed=sequence.observed())
    _, unmerged = follow(engine, parse_stack("palu"), tokens(30), [])
    assert 4 * found.constant_bytes == 3 * unmerged.measured().constant_bytes


def test_a_prefix_is_published_only_if_no_token_stays():
    assert MiniCache().publish == "never"
    assert MiniCache(retain_ratio=0).publish == "fingerprint"
