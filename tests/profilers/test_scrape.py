import asyncio
import string
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.profilers.scrape import (
    ENGINES,
    LOAD_GAUGES,
    START,
    Samples,
    Scraper,
    counter_resets,
    counters_delta,
    of_model,
    page_problem,
    parse_metrics,
)
from kvtune.types import Endpoint

PAGE = r"""
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# HELP vllm:num_requests_waiting_by_reason Waiting, by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 120.0
# TYPE vllm:prompt_tokens_created gauge
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 4.0
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="m"} 6.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 6.0
vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 99.5
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="912"} 1.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
# TYPE process_open_fds gauge
process_open_fds 40
"""


def test_series_are_named_without_the_engine():
    samples = parse_metrics(PAGE)
    assert samples.gauges == {
        "vllm:num_requests_running": 3.0,
        'vllm:num_requests_waiting_by_reason{reason="capacity"}': 2.0,
        'vllm:num_requests_waiting_by_reason{reason="deferred"}': 0.0,
        "vllm:kv_cache_usage_perc": 0.25,
        "process_open_fds": 40.0,
    }
    assert samples.counters == {
        "vllm:prompt_tokens_total": 120.0,
        'vllm:iteration_tokens_total_bucket{le="1.0"}': 4.0,
        'vllm:iteration_tokens_total_bucket{le="+Inf"}': 6.0,
        "vllm:iteration_tokens_total_count": 6.0,
        "vllm:iteration_tokens_total_sum": 99.5,
    }
    assert samples.skipped_lines == 0


def test_other_models_behind_a_gateway_are_left_out():
    page = """
vllm:cache_config_info{engine="0",block_size="16"} 1
vllm:prompt_tokens_total{engine="0",model_name="ours"} 10
vllm:prompt_tokens_total{engine="0",model_name="ours",pod="b"} 5
vllm:prompt_tokens_total{engine="0",model_name="ours-large"} 900
vllm:num_requests_running{engine="0",model_name="theirs"} 7
process_start_time_seconds 3
"""
    ours = of_model(page, "ours")
    assert parse_metrics(ours).counters == {"vllm:prompt_tokens_total": 15.0}
    assert "cache_config_info" in ours
    assert parse_metrics(ours).gauges == {"process_start_time_seconds": 3.0, "kvtune:engines": 2.0}
    assert of_model(page, "a name of the gateway's own") == page


def test_figures_of_kvtune_s_plugin_are_read_beside_those_of_vllm():
    # As a server shows them, of two engines that are asked for Quest.
    page = r"""
# HELP kvtune:pages_read_total Pages that decode steps read, of all layers.
# TYPE kvtune:pages_read_total counter
kvtune:pages_read_total{engine="0",model_name="m"} 640.0
kvtune:pages_read_total{engine="1",model_name="m"} 60.0
# TYPE kvtune:evicted_tokens_total counter
kvtune:evicted_tokens_total{cause="window",engine="0",model_name="m"} 4096.0
# TYPE kvtune:info gauge
kvtune:info{config="{\"quest\": {\"pages\": 8}}",engine="0",model_name="m",policies="quest"} 1.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
"""
    samples = parse_metrics(page)
    assert samples.counters == {
        "kvtune:pages_read_total": 700.0,
        'kvtune:evicted_tokens_total{cause="window"}': 4096.0,
    }
    assert samples.gauges == {"vllm:num_requests_running": 4.0, ENGINES: 2.0}
    assert samples.skipped_lines == 0


def test_engines_of_one_server_are_added_and_shares_averaged():
    page = """
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0"} 10
vllm:prompt_tokens_total{engine="1"} 32
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3
vllm:num_requests_running{engine="1"} 1
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.2
vllm:kv_cache_usage_perc{engine="1"} 0.6
"""
    expected = {
        "vllm:num_requests_running": 4.0,
        "vllm:kv_cache_usage_perc": pytest.approx(0.4),
        'vllm:kv_cache_usage_perc{engines="fullest"}': 0.6,
        ENGINES: 2.0,
    }
    samples = parse_metrics(page)
    assert samples.counters == {"vllm:prompt_tokens_total": 42.0}
    assert samples.gauges == expected
    assert parse_metrics(page, LOAD_GAUGES).gauges == expected


def test_histograms_of_several_engines_are_added_by_bucket():
    page = "# TYPE vllm:iteration_tokens_total histogram\n" + "".join(
        f'vllm:iteration_tokens_total_bucket{{engine="{engine}",le="8.0",model_name="m"}} {low}\n'
        f'vllm:iteration_tokens_total_count{{engine="{engine}",model_name="m"}} {count}\n'
        for engine, low, count in ((0, 2, 3), (1, 5, 9))
    )
    assert parse_metrics(page).counters == {
        'vllm:iteration_tokens_total_bucket{le="8.0"}': 7.0,
        "vllm:iteration_tokens_total_count": 12.0,
    }


def test_renamed_usage_of_several_engines_keeps_its_fullest():
    page = "".join(f'vllm:gpu_cache_usage_perc{{engine="{i}"}} {i / 4}\n' for i in range(4))
    gauges = parse_metrics(page, LOAD_GAUGES).gauges
    assert gauges["vllm:kv_cache_usage_perc"] == pytest.approx(0.375)
    assert gauges['vllm:kv_cache_usage_perc{engines="fullest"}'] == 0.75


def test_a_series_printed_twice_counts_once():
    line = 'vllm:prompt_tokens_total{engine="0",model_name="m"} 10\n'
    assert parse_metrics(line + line).counters == {"vllm:prompt_tokens_total": 10.0}


def test_labels_are_sorted_and_may_contain_anything():
    line = r'a_total{z="}",b="x \"y\" \\ , {n=\"1\"} # \n",model_name="m"} 1 1700000000000'
    samples = parse_metrics(line)
    key = r'a_total{b="x \"y\" \\ , {n=\"1\"} # \n",z="}"}'
    assert samples.counters == {key: 1.0}


def test_kinds_win_over_names_and_names_decide_without_kinds():
    page = (
        "# TYPE a_count gauge\na_count 1\nb_count 2\nb 3\n# TYPE c counter\nc 4\n# TYPE d summary\n"
    )
    page += 'd{quantile="0.5"} 5\nd_sum 6\n'
    samples = parse_metrics(page)
    assert samples.counters == {"b_count": 2.0, "c": 4.0, "d_sum": 6.0}
    assert samples.gauges == {"a_count": 1.0, "b": 3.0, 'd{quantile="0.5"}': 5.0}


def test_values_that_are_not_finite_are_unknown():
    samples = parse_metrics("a NaN\nb +Inf\nc_total -Inf\nd 1e3\n")
    assert (samples.gauges, samples.counters) == ({"d": 1000.0}, {})
    assert samples.unknown == {"a", "b", "c_total"}
    assert samples.skipped_lines == 0


def test_one_engine_that_is_not_finite_makes_the_sum_unknown():
    samples = parse_metrics('a_total{engine="0"} NaN\na_total{engine="1"} 5\n')
    assert samples == Samples({}, {ENGINES: 2.0}, 0, frozenset({"a_total"}))


def test_growth_from_or_to_the_unknown_is_unknown():
    known, unknown = Samples({"a": 5.0}, {}), Samples({}, {}, 0, frozenset({"a"}))
    for before, after in ((known, unknown), (unknown, known)):
        assert counters_delta(before, after) == {}
        assert counter_resets(before, after) == ()


@pytest.mark.parametrize("label", ["engine", "model_name", "instance", "pod", "WorkerId"])
def test_who_exports_a_series_is_no_part_of_its_name(label):
    page = "".join(f'vllm:x_total{{engine="0",reason="r",{label}="{n}"}} 2\n' for n in (0, 1))
    assert parse_metrics(page).counters == {'vllm:x_total{reason="r"}': 4.0}
    assert parse_metrics(page).gauges == {ENGINES: 2.0}


ZONES = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m",zone="a"} 3
vllm:num_requests_running{engine="0",model_name="m",zone="b"} 1
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m",zone="a"} 0.2
vllm:kv_cache_usage_perc{engine="0",model_name="m",zone="b"} 0.6
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m",zone="a"} 5
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m",zone="b"} 2
process_start_time_seconds{zone="a"} 100
process_start_time_seconds{zone="b"} 20
"""


@pytest.mark.parametrize("only", [None, (*LOAD_GAUGES, "vllm:request_success_total", START)])
def test_labels_that_whoever_collects_adds_set_engines_apart_and_hide_nothing(only):
    samples = parse_metrics(ZONES, only)
    assert samples.gauges == {
        "vllm:num_requests_running": 4.0,
        "vllm:kv_cache_usage_perc": pytest.approx(0.4),
        'vllm:kv_cache_usage_perc{engines="fullest"}': 0.6,
        "process_start_time_seconds": 120.0,
        ENGINES: 2.0,
    }
    assert samples.counters == {'vllm:request_success_total{finished_reason="stop"}': 7.0}


@pytest.mark.parametrize("only", [None, LOAD_GAUGES, ("vllm:prompt_tokens_total",)])
@given(
    label=st.from_regex(r"[a-z]{1,12}", fullmatch=True).filter(
        lambda label: label not in ("engine", "model_name", "reason", "le")
    )
)
def test_one_more_label_on_everything_changes_nothing(only, label):
    page = "".join(
        line
        if line.startswith("#")
        else line.replace("{", f'{{{label}="x",').replace(" 40", f'{{{label}="x"}} 40')
        for line in PAGE.splitlines(keepends=True)
    )
    assert page.count(f'{label}="x"') == 12, "every line has it"
    assert parse_metrics(page, only) == parse_metrics(PAGE, only)


def test_what_a_series_counts_stays_in_its_name_also_where_it_is_new():
    page = ZONES + 'vllm:x_total{engine="0",model_name="m",tier="disk",zone="a"} 4\n'
    assert parse_metrics(page).counters['vllm:x_total{tier="disk"}'] == 4.0


@pytest.mark.parametrize(
    "garbage", ["<html>", "a", "a{b=} 1", 'a{b="1" 2', "a one", "1a 2", 'a{b="1"}2', "{} 1"]
)
def test_garbage_is_skipped_and_counted(garbage):
    samples = parse_metrics(f"x 1\n{garbage}\ny 2\n")
    assert samples.gauges == {"x": 1.0, "y": 2.0}
    assert samples.skipped_lines == 1


def test_openmetrics_exemplars_and_end_are_tolerated():
    page = 'a_total{b="1"} 5 # {trace_id="abc"} 0.67 1700000000.0\n# EOF\n'
    samples = parse_metrics(page)
    assert samples.counters == {'a_total{b="1"}': 5.0}
    assert samples.skipped_lines == 0


def test_old_names_are_read_as_the_new_ones():
    page = "vllm:gpu_cache_usage_perc 0.5\nvllm:gpu_prefix_cache_hits_total 7\n"
    samples = parse_metrics(page)
    assert samples.gauges == {"vllm:kv_cache_usage_perc": 0.5}
    assert samples.counters == {"vllm:prefix_cache_hits_total": 7.0}
    assert parse_metrics(page, LOAD_GAUGES).gauges == {"vllm:kv_cache_usage_perc": 0.5}


def test_a_server_with_both_names_is_not_counted_twice():
    page = "vllm:gpu_prefix_cache_hits_total 7\nvllm:prefix_cache_hits_total 7\n"
    assert parse_metrics(page).counters["vllm:prefix_cache_hits_total"] == 7.0


def test_only_what_was_asked_for_is_read():
    assert parse_metrics(PAGE, LOAD_GAUGES) == Samples(
        {},
        {
            "vllm:num_requests_running": 3.0,
            'vllm:num_requests_waiting_by_reason{reason="capacity"}': 2.0,
            'vllm:num_requests_waiting_by_reason{reason="deferred"}': 0.0,
            "vllm:kv_cache_usage_perc": 0.25,
        },
    )


def test_counters_grow_from_zero_when_they_are_new():
    before, after = Samples({"a": 5.0}, {}), Samples({"a": 9.0, "b": 2.0}, {})
    assert counters_delta(before, after) == {"a": 4.0, "b": 2.0}
    assert counter_resets(before, after) == ()


def test_a_restart_shows_as_counters_that_went_back_or_vanished():
    before = Samples({"a": 5.0, "b": 2.0, "c": 1.0, "zero": 0.0}, {})
    after = Samples({"a": 3.0, "b": 4.0}, {})
    assert counters_delta(before, after) == {"a": 3.0, "b": 2.0}
    assert counter_resets(before, after) == ("a", "c")


label_values = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=8)


@given(
    st.dictionaries(st.text(string.ascii_lowercase, min_size=1, max_size=2), label_values),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_what_is_printed_is_read_back(labels, value):
    def escape(text):
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    printed = [f'{name}="{escape(text)}"' for name, text in labels.items()]
    samples = parse_metrics(f"m{{{','.join(printed)}}} {value!r}")
    assert samples.skipped_lines == 0
    series = f"m{{{','.join(sorted(printed))}}}" if printed else "m"
    assert samples.gauges == {series: value}


@given(st.text(max_size=200))
def test_no_page_makes_the_parser_fail(page):
    parse_metrics(page)


@asynccontextmanager
async def answer_with(page, status=b"200 OK", delay_s=0.0):
    answering = []

    async def connected(reader, writer):
        answering.append(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(delay_s)
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(page), page))
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    yield Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m")
    server.close()
    await asyncio.gather(*answering)


def scrape(*args, timeout_s=5.0, **options):
    async def main():
        async with (
            answer_with(*args, **options) as endpoint,
            Scraper(endpoint, timeout_s=timeout_s) as scraper,
        ):
            return await scraper.fetch(), scraper.problems

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        (PAGE, None),
        ("a 1\n", None),
        ("# HELP only\na 1\n# EOF\n", None),
        (PAGE[:-5], "cut off"),
        ("a 1", "cut off"),
        ("", "empty"),
        ("\n \n", "empty"),
        (" <html>\n</html>\n", "web page"),
        ("# HELP a\n# TYPE a gauge\n", "no metrics"),
        ('{"detail":"Not Found"}\n', "no metrics"),
    ],
)
def test_a_page_that_is_no_page_of_metrics_is_known(page, problem):
    found = page_problem(page)
    assert found is problem is None or problem in found


def test_metrics_elsewhere_are_fetched_with_their_own_authorization():
    seen = []

    async def main():
        async def connected(reader, writer):
            seen.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\na 1\n")
            writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        endpoint = Endpoint(
            "http://nowhere.invalid",
            "m",
            metrics_url=f"http://127.0.0.1:{port}/x/federate?match=a",
            authorization="Bearer api",
            metrics_authorization="Basic own",
        )
        async with Scraper(endpoint) as scraper:
            page = await scraper.fetch()
        server.close()
        return page

    assert asyncio.run(main()) == "a 1\n"
    assert seen[0].startswith("GET /x/federate?match=a HTTP/1.1\r\n")
    assert "Authorization: Basic own\r\n" in seen[0]


def test_the_page_is_fetched():
    assert scrape(b"a 1\n") == ("a 1\n", [])


def test_a_failed_fetch_is_a_problem_not_an_exception():
    assert scrape(b"no", status=b"404 Not Found") == (None, ["/metrics: HTTP 404"])
    text, problems = scrape(b"a 1\n", delay_s=0.4, timeout_s=0.1)
    assert (text, problems) == (None, ["/metrics: no answer within 0.1 s"])


def test_nobody_there_is_a_problem_too():
    async def main():
        async with answer_with(b"") as endpoint:
            pass
        async with Scraper(endpoint) as scraper:
            return await scraper.read(), scraper.problems

    samples, problems = asyncio.run(main())
    assert samples is None
    assert problems[0].startswith("/metrics: connection refused")
