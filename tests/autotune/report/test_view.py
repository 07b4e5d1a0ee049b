"""What is shown of a workload and a profile, in words."""

from dataclasses import replace

import pytest
from contracts.pages import fingerprint, profile_view, seen, workload
from contracts.windows import stepping

from kvtune.autotune.profiling import Subject
from kvtune.autotune.report.view import (
    prefix_notes,
    rate_text,
    work_text,
    workload_view,
)
from kvtune.autotune.report.view import profile_view as view_of
from kvtune.profilers.window import CACHED, HITS, PROMPTS, QUERIES
from kvtune.types import LoadRun, RequestRecord


def test_what_the_cache_missed_is_told():
    view = profile_view(seen(counters={PROMPTS: 2000, CACHED: 0}))
    # Half comes again in blocks of 128; of a prompt of 1,000 the last block is computed anyway.
    assert prefix_notes(view) == (
        "37% of the prompt tokens came before and were computed again",
        "smaller blocks could serve 30% more: prefixes are shared that end within a block",
    )


def test_hits_beyond_what_comes_again_are_no_reuse():
    view = profile_view(seen(counters={PROMPTS: 2000, CACHED: 1400}))
    assert prefix_notes(view)[0].startswith("20% of the prompt tokens were served beyond")


def test_repeated_lookups_do_not_tell_what_was_served():
    view = profile_view(seen(counters={PROMPTS: 2000, QUERIES: 4000, HITS: 3000}))
    assert "looked up again" in prefix_notes(view)[0]
    nothing = profile_view(seen(counters={}))
    assert "do not tell" in prefix_notes(nothing)[0]


def test_a_cache_that_is_off_is_all_that_is_said():
    off = {"block_size_tokens": 128, "enable_prefix_caching": False}
    assert prefix_notes(profile_view(seen(effective=off))) == (
        "prefix caching is off on this server",
    )


@pytest.mark.parametrize(
    ("value", "text"), [(1.32e12, "1.32 TB/s"), (58e9, "58 GB/s"), (2e6, "2 MB/s"), (5, "5 B/s")]
)
def test_rates_have_the_prefix_that_suits(value, text):
    assert rate_text(value, "B/s") == text


def test_work_is_told_by_what_it_holds():
    decode, prefill, mean = profile_view().roofline.work
    assert work_text(decode) == "4 sequences of 1,100 tokens"
    assert work_text(prefill) == "600 prompt tokens at once"
    assert work_text(mean) == "4 sequences of 1,100 tokens, 12 prompt tokens"


def test_a_workload_says_what_it_lacks_and_nothing_else():
    assert workload().missing == ()
    bare = fingerprint(input_tokens=None, reusable_prefix_share={})
    lacking = workload_view("w", bare, None).missing
    assert [entry.partition(":")[0] for entry in lacking] == [
        "prompt lengths",
        "arrivals",
        "reusable prefixes",
    ]


def record(sent_s):
    return RequestRecord(0, sent_s, sent_s, sent_s + 1, sent_s + 2, (), 5, 2, 2)


def test_what_the_file_does_not_state_the_server_counted():
    base = profile_view()
    bucket = 'vllm:request_prompt_tokens_bucket{le="100.0"}'
    counters = {**stepping().counters, bucket: 2}
    profile = base.profile.model_copy(
        update={"fingerprint": fingerprint(input_tokens=None), "counters": counters}
    )
    run = LoadRun((record(0.0), record(3.0)), 10.0, 0.1, counters, {})
    found = view_of(
        profile,
        run,
        Subject(model=None, endpoint_url="", effective=profile.effective),
        is_load_ours=True,
        workload_name="chat",
        forecasts=(),
    )
    assert found.workload.prompts.counts == (2,)
    assert "by the server" in found.workload.counted_by
    assert found.workload.answers == profile.fingerprint.output_tokens
    assert sum(found.workload.arrivals.counts) == 2
    assert found.roofline.work == (), "the model is not on this disk"


def test_a_server_that_was_only_watched_has_no_workload_of_its_own():
    view = replace(workload(fingerprint=None), arrivals=None)
    assert view.summary == "the requests of others"
    assert view.reusable == {}
