"""Real servers whose prompts fell out of a small pool: they come back bit by bit, or are computed.

Prompts are random tokens, which no two of them share. A prompt of 600 tokens has 18 whole pages and
24 tokens more; a pool of 40 pages holds two such prompts and their answers, and no page of a third.
"""

import random

import pytest
from contracts.answers import assert_same

pytestmark = pytest.mark.integration
LAYERS = 8
PAGE_BYTES = LAYERS * 3 * 2 * 64 * 32 * 4
"""Layers, KV heads, key and value, channels, tokens, bytes of each."""
LOADED = 576
RANDOM = random.Random(7)
A, B, C, D = ([RANDOM.randrange(1000, 40000) for _ in range(600)] for _ in range(4))
HOST = {"tiers": {"host_bytes": 100 * PAGE_BYTES}}


@pytest.fixture(scope="module")
def serve(ask, shallow):
    """Starts a server anew, and asks it calls of prompts."""

    def told(asked, calls, pages=40, **more):
        pool = {"pool_bytes": pages * PAGE_BYTES}
        return ask("tiers_engine", shallow, asked=asked, calls=calls, **pool, **more)

    return told


def on_disk(folder, host_pages=30):
    return {
        "tiers": {
            "host_bytes": host_pages * PAGE_BYTES,
            "disk_bytes": 1 << 30,
            "disk_path": str(folder),
        }
    }


def computed(call):
    return call["tokens"].get("local_compute", 0)


def joined(*calls):
    """What calls tell of their prompts, as if these had come together."""
    return {name: [one for call in calls for one in call[name]] for name in ("ids", "best")}


def same_pages(first, later):
    """How many pages hold the same bytes in both. Computed in another batch, few would."""
    return len(first["pages"].items() & later["pages"].items())


@pytest.fixture(scope="module")
def filled(serve, tmp_path_factory):
    """A server that put all on disk and ended, and the folder that it left."""
    folder = tmp_path_factory.mktemp("pages")
    return serve(on_disk(folder), [[A], [B], [C], [A]]), folder


def test_a_prompt_that_fell_out_of_the_pool_comes_back_from_host_memory(serve):
    told = serve(HOST, [[A], [B], [C], [A]])
    first, *between, again = told["calls"]
    assert again["tokens"] == {
        "local_compute": 24,
        "external_kv_transfer": LOADED,
        "host": LOADED,
    }
    assert_same([again], [first])
    assert same_pages(first, again) >= LOADED // 32
    assert all(computed(call) == 600 for call in (first, *between))
    assert told["figures"]["tier_bytes host load"] == LOADED // 32 * PAGE_BYTES
    assert told["warnings"] == []


def test_what_left_host_memory_comes_back_from_disk(filled):
    told, _ = filled
    first, _, _, again = told["calls"]
    assert again["tokens"]["disk"] == LOADED
    assert computed(again) == 24
    assert_same([again], [first])
    assert same_pages(first, again) >= LOADED // 32
    assert told["figures"]["tier_bytes disk load"] == LOADED // 32 * PAGE_BYTES


def test_a_server_that_starts_again_loads_what_the_first_one_computed(serve, filled):
    told, folder = filled
    later = serve(on_disk(folder), [[A, B], [A]])
    both, again = later["calls"]
    assert both["tokens"]["disk"] == 2 * LOADED
    assert_same([both], [joined(*told["calls"][:2])])
    assert same_pages(told["calls"][0], both) >= LOADED // 32
    # What was loaded is in the pool, as any other prompt's pages.
    assert again["tokens"].get("external_kv_transfer", 0) == 0
    assert computed(again) == 24


def test_a_server_that_computes_otherwise_loads_nothing_of_it(serve, filled):
    _, folder = filled
    asked = on_disk(folder) | {"streaming_llm": {"window_tokens": 2000}}
    (call,) = serve(asked, [[A]])["calls"]
    assert computed(call) == 600


def test_damaged_files_and_all_behind_them_are_computed_and_the_answers_are_the_same(
    serve, filled, tmp_path
):
    told, folder = filled
    # Pages lie in the pool in the order in which this first prompt of the server filled them.
    sound = {page[:64] for page in list(told["calls"][0]["pages"])[:10]}
    for path in folder.glob("??/*.kv"):
        content = bytearray(path.read_bytes())
        if path.stem[-64:] not in sound:
            content[len(content) // 2] ^= 1
        copy = tmp_path / path.parent.name / path.name
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(content)
    later = serve(on_disk(tmp_path), [[A], [B]])
    assert_same(later["calls"], told["calls"][:2])
    assert same_pages(told["calls"][0], later["calls"][0]) >= len(sound)
    pages = LOADED // 32
    assert later["figures"]["tier_bytes disk load"] == len(sound) * PAGE_BYTES
    assert later["figures"]["tier_failures disk load"] == 2 * pages - len(sound)
    assert any("could not be used" in warning for warning in later["warnings"])


def test_a_disk_that_cannot_be_written_costs_a_warning_and_no_answer(serve, filled, tmp_path):
    told, _ = filled
    # Where a file's folder should be there is a file, for each of the 256 folders.
    for number in range(256):
        (tmp_path / f"{number:02x}").write_text("")
    later = serve(on_disk(tmp_path), [[A], [B], [C], [A]])
    assert_same(later["calls"], told["calls"])
    assert any("could not be written" in warning for warning in later["warnings"])


def test_requests_that_run_together_are_answered_as_alone(serve, filled):
    told, _ = filled
    of_a, of_b, of_c = told["calls"][:3]
    later = serve(HOST, [[A], [B], [C], [A, B, C], [B, A]], chunk=512)
    together, pair = later["calls"][3:]
    assert_same([together, pair], [joined(of_a, of_b, of_c), joined(of_b, of_a)])
    assert together["tokens"]["host"] >= 2 * LOADED


def test_under_streaming_llm_only_pages_travel_that_saw_all_before_them(serve):
    # Sinks and window of a page each: the first three pages are exact.
    asked = HOST | {"streaming_llm": {"window_tokens": 32, "sink_tokens": 32}}
    first, *_, again = serve(asked, [[A], [B], [C], [D], [A]], pages=14)["calls"]
    assert again["tokens"].get("host", 0) == 3 * 32
    assert_same([again], [first])
