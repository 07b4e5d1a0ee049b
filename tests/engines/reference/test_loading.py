"""Sequences and prefix blocks that lie on other tiers: moved whole, loaded where that pays."""

import pytest
import torch
from contracts.tiny_models import follow, ready, tiny_engine, tiny_model, tokens

from kvtune.engines.reference.engine import ReferenceEngine
from kvtune.engines.reference.loading import loading, measure_speeds, swap_in, swap_out
from kvtune.engines.reference.modules import ModuleCache, Prompt
from kvtune.engines.reference.reuse import prefix_cache
from kvtune.errors import BadInput
from kvtune.policies.footprint import footprint
from kvtune.policies.method import ArchitectureMethod, methods
from kvtune.policies.method_stack import parse_stack
from kvtune.policies.methods.prefix_caching import PrefixCaching
from kvtune.policies.methods.tiers import Tiers
from kvtune.policies.prompt_schema import Module, Schema
from kvtune.policies.tiering import Speeds

LOADING_PAYS = Speeds({"host": 1e12, "disk": 1e12}, 1.0)
COMPUTING_PAYS = Speeds({"host": 1.0, "disk": 1.0}, 1e-9)
RUNNING = sorted(
    name for name, method in methods().items() if not issubclass(method, ArchitectureMethod | Tiers)
)
PROMPT = tokens(41)


def copies(sequence):
    return {name: x.clone() for name, x in sequence.tensors().items()}


@pytest.mark.parametrize("name", [*RUNNING, "paging + tiers + quest"])
def test_a_sequence_comes_back_bit_by_bit_and_is_counted_where_it_is(name):
    engine, stack = tiny_engine(), parse_stack(name if "tiers" in name else f"{name} + tiers")
    _, sequence = follow(engine, stack, tokens(150), [3, 4])
    before, resident = copies(sequence), sequence.resident_bytes
    twin = sequence.fork()
    assert twin.measured() == sequence.measured()
    assert swap_out(engine, sequence) == "host"
    moved = sequence.measured()
    assert moved == footprint(stack, engine.layers, 150, 2, observed=sequence.observed())
    assert moved.remote_bytes > 0.3 * resident
    assert moved.resident_bytes + moved.remote_bytes == resident
    assert swap_in(engine, sequence)
    after = copies(sequence)
    assert after.keys() == before.keys()
    for part, x in after.items():
        # Pages may come back elsewhere in the pool.
        assert part.endswith("table") or torch.equal(x, before[part]), part
    assert sequence.measured() == footprint(stack, engine.layers, 150, 2, sequence.observed())
    found, expected = engine.decode([sequence, twin], [[5], [5]])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_pages_are_free_while_a_sequence_is_away():
    engine, stack = ReferenceEngine(tiny_model()), parse_stack("tiers + paging")
    _, sequence = follow(engine, stack, PROMPT, [])
    pool = sequence.layers[0].groups[0].keys.pool
    assert pool.used_blocks == 4 * 2 * 3
    swap_out(engine, sequence)
    assert pool.used_blocks == 0
    swap_in(engine, sequence)
    assert pool.used_blocks == 4 * 2 * 3


def test_a_sequence_that_is_away_cannot_go_on():
    engine, stack = tiny_engine(), parse_stack("tiers")
    _, sequence = follow(engine, stack, PROMPT, [])
    swap_out(engine, sequence)
    with pytest.raises(BadInput, match="swapped out"):
        engine.decode([sequence], [[1]])
    with pytest.raises(BadInput, match="already"):
        swap_out(engine, sequence)
    swap_in(engine, sequence)
    with pytest.raises(BadInput, match="not swapped out"):
        swap_in(engine, sequence)


def test_a_sequence_that_is_away_cannot_fork():
    """Both would be brought back from one place, and the second would find nothing there."""
    engine, stack = tiny_engine(), parse_stack("tiers")
    _, sequence = follow(engine, stack, PROMPT, [])
    swap_out(engine, sequence)
    with pytest.raises(BadInput, match="cannot fork"):
        sequence.fork()
    swap_in(engine, sequence)
    assert sequence.fork().measured() == sequence.measured()


def test_a_sequence_stays_where_no_tier_has_room():
    engine, stack = tiny_engine(), parse_stack("tiers:host_bytes=100")
    _, sequence = follow(engine, stack, PROMPT, [])
    before = copies(sequence)
    assert swap_out(engine, sequence) is None
    assert sequence.measured().remote_bytes == 0
    for name, x in copies(sequence).items():
        assert torch.equal(x, before[name])


def test_a_lost_sequence_is_computed_again_with_a_warning(tmp_path):
    engine = tiny_engine()
    stack = parse_stack(f"tiers:host_bytes=0,disk_bytes=1000000,folder={tmp_path}")
    logits, expected = follow(engine, stack, PROMPT, [3, 4, 5])
    _, sequence = follow(engine, stack, PROMPT, [3, 4])
    assert swap_out(engine, sequence) == "disk"
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    path.write_bytes(b"nonsense")
    with pytest.warns(UserWarning, match="altered|computed again"):
        assert not swap_in(engine, sequence)
    (found,) = engine.decode([sequence], [[5]])
    torch.testing.assert_close(found[-1], logits[-1], atol=1e-5, rtol=1e-5)
    assert sequence.measured().remote_bytes == 0
    assert sequence.resident_bytes == expected.resident_bytes


def test_a_lost_sequence_of_modules_cannot_be_computed_from_its_tokens(tmp_path):
    engine = tiny_engine()
    text = f"prompt-cache + tiers:host_bytes=0,disk_bytes=1000000,folder={tmp_path}"
    schema = Schema([Module("a", (tuple(PROMPT[:9]),)), Module("b", (tuple(PROMPT[9:20]),))])
    cache = ModuleCache(engine, parse_stack(text), schema)
    sequence, _ = cache.prefill(Prompt(("b", "a"), (1, 2), {}))
    swap_out(engine, sequence)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.unlink()
    with (
        pytest.warns(UserWarning, match="gone"),
        pytest.raises(BadInput, match="sequence of modules is lost"),
    ):
        swap_in(engine, sequence)


def test_without_tiers_nothing_can_be_moved():
    engine = tiny_engine()
    with pytest.raises(BadInput, match="no tiers"):
        swap_out(engine, follow(engine, parse_stack("full"), PROMPT, [])[1])


def tiered(engine, rest="", speeds=LOADING_PAYS, **sizes):
    """A stack whose prefix cache holds one block, so that the others go to the tiers."""
    method = Tiers(**sizes)
    text = f"prefix-caching:block_tokens=8,capacity_blocks=1 + {method}{rest}"
    stack = ready(engine, parse_stack(text))
    behind = loading(engine, method)
    behind.speeds = speeds
    cache = prefix_cache(engine, stack.methods[0], method)
    return stack, behind, cache


@pytest.mark.parametrize("rest", ["", " + paging", " + vllm-int8-per-token-head", " + palu"])
def test_blocks_are_loaded_from_the_tiers_and_answers_stay(rest):
    engine = ReferenceEngine(tiny_model())
    stack, behind, cache = tiered(engine, rest)
    engine.generate([PROMPT], stack, new_tokens=6)
    assert len(cache.blocks) == 1
    on_device = parse_stack("prefix-caching:block_tokens=8" + rest)
    for _ in range(2):
        (first,) = engine.generate([PROMPT], on_device, new_tokens=6)
    assert first.sequence.reused_tokens == 40
    (again,) = engine.generate([PROMPT], stack, new_tokens=6)
    assert again.sequence.reused_tokens == 40
    assert cache.loaded_tokens == 32
    assert behind.plans[-1].blocks == 4
    assert again.token_ids == first.token_ids


def test_what_computes_faster_than_it_loads_is_computed():
    engine = ReferenceEngine(tiny_model())
    stack, behind, cache = tiered(engine, speeds=COMPUTING_PAYS)
    for _ in range(2):
        (made,) = engine.generate([PROMPT], stack, new_tokens=2)
    assert behind.plans[-1].blocks == 0
    assert made.sequence.reused_tokens == 8
    assert cache.loaded_tokens == 0


def test_a_damaged_block_ends_the_prefix_and_the_rest_is_computed(tmp_path):
    engine = ReferenceEngine(tiny_model())
    sizes = {"host_bytes": 0, "disk_bytes": 10**7, "folder": str(tmp_path)}
    stack, behind, _ = tiered(engine, **sizes)
    (first,) = engine.generate([PROMPT], stack, new_tokens=6)
    method = PrefixCaching(block_tokens=8)
    third = method.keys(PROMPT, method.root(engine.model_hash, ""))[2]
    path = behind.store._disk[third.hex()].path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="altered"):
        (again,) = engine.generate([PROMPT], stack, new_tokens=6)
    assert again.sequence.reused_tokens == 16
    assert again.token_ids == first.token_ids


def test_bytes_on_the_tiers_are_those_of_the_formula():
    for rest in ("", " + paging", " + vllm-int8-per-token-head"):
        engine = ReferenceEngine(tiny_model())
        stack, behind, cache = tiered(engine, rest)
        engine.generate([PROMPT], stack, new_tokens=2)
        size = Tiers().block_bytes(stack, engine.layers, 8)
        assert behind.store.held_bytes("host") == 4 * size
        assert cache.nbytes == size


def test_speeds_are_measured_before_the_first_plan():
    engine = ReferenceEngine(tiny_model())
    stack, behind, _ = tiered(engine, speeds=None)
    for _ in range(2):
        engine.generate([PROMPT], stack, new_tokens=2)
    assert behind.speeds.prefill_s_per_token > 0
    assert behind.speeds.bytes_per_s["host"] > 0
    assert measure_speeds(engine, behind.store).bytes_per_s["disk"] == 1e-9
