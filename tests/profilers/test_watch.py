"""Watching servers of every release, and servers that are slow, talk nonsense, restart or die."""

import asyncio
import itertools
import sys
import threading
import time

import pytest
from contracts.fake_nvml import FakeNvml
from contracts.fake_vllm import VERSIONS, fake_vllm, growing, vllm_page

from kvtune.engines.base import ServerSpec
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.errors import EngineError
from kvtune.profilers.follow import Follower
from kvtune.profilers.verdict import judge
from kvtune.profilers.watch import interval_between, watch
from kvtune.profilers.window import Window
from kvtune.types import Bottleneck, Endpoint, FailureClass

START = "process_start_time_seconds"


def watched(fake, duration_s=0.6, **options):
    """Watch a fake server, often enough for a short test."""
    options = {"interval_s": 0.05, **options}
    return asyncio.run(watch(Endpoint(fake.url, "m"), duration_s, **options))


def rate(run, series="vllm:generation_tokens_total"):
    return run.counters[series] / run.duration_s


def test_watching_samples_the_gauges_and_takes_the_counters_apart(tmp_path):
    spec = ServerSpec("m", arguments={"simulate-time-scale": 0.01})
    seconds = []
    with SimulatedEngine().launch(spec, log_path=tmp_path / "server.log") as server:
        run = asyncio.run(watch(server.endpoint, 0.6, interval_s=0.1, on_second=seconds.append))
    assert run.records == ()
    assert run.duration_s == pytest.approx(0.6, abs=0.3)
    assert seconds[0] == pytest.approx(0.0, abs=0.2)
    assert set(run.counters.values()) == {0.0}, "nothing was sent"
    assert len(run.gauges["vllm:num_requests_running"]) >= 3
    assert (run.warnings, run.lost, run.counted_s) == ((), "", None)


@pytest.mark.parametrize(
    ("reading_s", "interval_s"),
    [(0.0, 1.0), (0.003, 1.0), (0.006, 1.2), (0.023, 4.6), (0.3, 5.0)],
    ids=["none yet", "one engine", "a slower CPU", "eight engines", "over the ocean"],
)
def test_readings_take_half_a_per_cent_of_a_core_and_come_every_five_seconds_at_least(
    reading_s, interval_s
):
    assert interval_between(reading_s) == pytest.approx(interval_s)


def test_a_page_that_takes_long_to_make_is_read_less_often(monkeypatch):
    monkeypatch.setattr("kvtune.profilers.watch.INTERVAL_S", 0.01)
    with fake_vllm(growing(), delay_s=0.01) as fake:
        run = watched(fake, duration_s=0.4, interval_s=None)
    assert len(run.gauges["vllm:num_requests_running"]) == 1, "the next one is due after 2 s"
    assert rate(run) == pytest.approx(400, rel=0.3), "counters are of the whole time"


def test_what_a_reading_costs_is_told_by_the_quickest():
    class Pages:
        def __init__(self):
            self.problems = []
            self.delays_s = [0.3, 0.0, 0.3]

        async def fetch(self):
            await asyncio.sleep(self.delays_s.pop(0))
            return vllm_page()

    async def read():
        follower = Follower(Pages())
        assert follower.quickest_s == 0.0
        for _ in range(3):
            await follower.read()
        return follower.quickest_s

    assert 0.0 < asyncio.run(read()) < 0.3


def test_an_nvml_that_is_slow_to_start_takes_nothing_of_the_time_that_is_watched(monkeypatch):
    class Slow(FakeNvml):
        def nvmlInit(self):
            time.sleep(0.4)
            super().nvmlInit()

    monkeypatch.setitem(sys.modules, "pynvml", Slow())
    with fake_vllm(growing()) as fake:
        run = watched(fake, duration_s=0.3)
    assert len(run.gauges["vllm:num_requests_running"]) >= 2
    assert run.duration_s < 0.6


def test_gpus_of_this_machine_are_watched_meanwhile(monkeypatch):
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with fake_vllm(growing()) as fake:
        run = watched(fake, duration_s=0.1)
    (gpu,) = run.gpus
    assert (gpu.gpu, gpu.samples, gpu.power_w) == (0, 1, 351.5)
    assert nvml.open_sessions == 0


def test_the_start_is_told_when_the_metrics_have_been_read_once():
    told = []
    with fake_vllm(growing()) as fake:
        watched(
            fake,
            on_start=lambda: told.append("start"),
            on_second=lambda _: told.append("second"),
        )
    assert told[0] == "start"
    assert told.count("start") == 1
    assert set(told[1:]) == {"second"}


def test_a_page_that_cannot_be_read_is_a_failure():
    told = []
    with pytest.raises(
        EngineError, match=r"cannot be read: /metrics: connection refused"
    ) as failed:
        asyncio.run(
            watch(Endpoint("http://127.0.0.1:9", "m"), 0.1, on_start=lambda: told.append("start"))
        )
    assert told == [], "nothing was seen"
    assert failed.value.failure is FailureClass.REQUEST_ERRORS
    assert "--metrics-url" in failed.value.fix


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("engines", [1, 4])
def test_every_release_shows_the_same_load(version, engines):
    with fake_vllm(growing(version=version, engines=engines)) as fake:
        run = watched(fake, duration_s=0.25)
    assert run.warnings == ()
    assert rate(run) == pytest.approx(400 * engines, rel=0.3)
    for name in ("prefix_cache_queries_total", "prompt_tokens_total", "request_prompt_tokens_sum"):
        generated = run.counters["vllm:generation_tokens_total"]
        assert run.counters[f"vllm:{name}"] == pytest.approx(5 * generated)
    window = Window(window_s=2.5, counters=run.counters, gauges=run.gauges)
    assert window.engines == engines
    assert window.peak_usage == 0.97
    assert window.waiting_share == 1.0
    assert window.mean_step_s == pytest.approx(2.5 / run.duration_s / 100, rel=0.3)
    verdict = judge(window)
    assert verdict.bottleneck is Bottleneck.KV_CAPACITY, "there is a preemption a request"


def test_servers_that_a_gateway_puts_into_one_page_are_added_up():
    one, two = (growing(labels=f',instance="10.0.0.{n}:8000",job="vllm"') for n in (1, 2))
    with fake_vllm(lambda: one() + two()) as fake:
        run = watched(fake)
    assert rate(run) == pytest.approx(800, rel=0.3)
    assert Window(window_s=1.0, gauges=run.gauges).engines == 2


def test_a_slow_page_is_waited_for_and_does_not_bend_the_rates():
    """The page is made at the end of the delay, in both readings."""
    with fake_vllm(growing(), delay_s=1.2) as fake:
        run = watched(fake, duration_s=1.5)
    assert rate(run) == pytest.approx(400, rel=0.3)
    assert run.lost == ""
    assert "reading the server's counters took 1.2 s each time" in run.warnings


@pytest.mark.parametrize(
    ("garbage", "problem"),
    [
        ("<!doctype html><html>Sign in</html>\n", "a web page came instead of metrics"),
        ("", "the page is empty"),
        (vllm_page()[:-3], "the page is cut off"),
        ("it works\n", "the page holds no metrics"),
        (503, "HTTP 503"),
    ],
)
def test_garbage_in_between_is_left_out_and_said(garbage, problem):
    page, readings = growing(), itertools.count()
    with fake_vllm(lambda: garbage if next(readings) % 3 == 1 else page()) as fake:
        run = watched(fake, duration_s=0.5)
        while run.lost:  # the last reading was garbage, by chance
            run = watched(fake, duration_s=0.5)
    assert rate(run) == pytest.approx(400, rel=0.3)
    assert any(problem in warning for warning in run.warnings)
    with fake_vllm(lambda: garbage) as fake, pytest.raises(EngineError, match=problem):
        watched(fake)


def test_a_counter_that_is_no_number_is_unknown_and_not_a_restart():
    page, readings = growing(), itertools.count()

    def metrics():
        text, reading = page(), next(readings)
        if reading == 0 or reading == 4:
            line = next(row for row in text.splitlines() if row.startswith("vllm:prompt_tokens_t"))
            text = text.replace(line, line.rpartition(" ")[0] + " NaN")
        return text

    with fake_vllm(metrics) as fake:
        run = watched(fake)
    assert run.warnings == ()
    assert "vllm:prompt_tokens_total" not in run.counters
    assert rate(run) == pytest.approx(400, rel=0.3)


@pytest.mark.parametrize("tells_start", [True, False])
def test_a_restart_cuts_the_window(tells_start):
    """Down for a while, then up again with counters at 0: the longer of both lives counts."""
    began_s = time.monotonic()
    lives = [growing(start=1000.0), growing(start=-0.6)]

    def metrics():
        seconds = time.monotonic() - began_s
        if 0.4 < seconds < 0.6:
            raise ConnectionError
        life = int(seconds > 0.5)
        start = f"{START} {1.7e9 + 100 * life}\n" if tells_start else ""
        return lives[life]() + start

    with fake_vllm(metrics) as fake:
        run = watched(fake, duration_s=1.8)
    assert rate(run) == pytest.approx(400, rel=0.3)
    assert run.duration_s == pytest.approx(1.2, abs=0.35)
    assert run.lost == ""
    assert any("the server restarted once meanwhile" in warning for warning in run.warnings)
    assert all(value >= 0 for value in run.counters.values())
    assert min(at_s for at_s, _ in run.gauges["vllm:num_requests_running"]) > 0.4


def test_a_restart_shows_though_the_counters_overtook_the_old_ones():
    lives = [growing(rate=1.0), growing(rate=500.0, start=50.0)]
    readings = itertools.count()

    def metrics():
        life = int(next(readings) > 2)
        return lives[life]() + f"{START} {1.7e9 + life}\n"

    with fake_vllm(metrics) as fake:
        run = watched(fake)
    assert rate(run) == pytest.approx(2000, rel=0.3)
    assert any("restarted once" in warning for warning in run.warnings)


def test_several_servers_in_turn_are_told_from_restarts():
    pages = [growing(start=10.0 * n) for n in (1, 2)]
    readings = itertools.count()

    def metrics():
        turn = next(readings) % 2
        return pages[turn]() + f"{START} {1.7e9 + turn}\n"

    with fake_vllm(metrics) as fake:
        run = watched(fake)
    assert any("leads to several servers in turn" in warning for warning in run.warnings)


def test_a_server_that_dies_leaves_what_was_seen():
    with fake_vllm(growing()) as fake:
        timer = threading.Timer(0.5, fake.stop)
        timer.start()
        run = watched(fake, duration_s=5.0, give_up_s=0.3)
        timer.join()
    assert "could not be read any more after 0." in run.lost
    assert "connection refused" in run.lost
    assert run.lost in run.warnings
    assert run.duration_s == pytest.approx(0.5, abs=0.2)
    assert rate(run) == pytest.approx(400, rel=0.3)


def test_a_server_that_dies_at_once_is_no_error():
    pages = iter([vllm_page()])

    def metrics():
        try:
            return next(pages)
        except StopIteration:
            raise ConnectionError from None

    with fake_vllm(metrics) as fake:
        run = watched(fake, duration_s=0.3)
    assert (run.duration_s, set(run.counters.values())) == (0.0, {0.0})
    assert judge(Window(window_s=run.duration_s, counters=run.counters)).bottleneck is (
        Bottleneck.ABSTAIN
    )
