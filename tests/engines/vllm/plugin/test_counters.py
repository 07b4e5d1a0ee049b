import multiprocessing
import os
from collections import defaultdict
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.engines.vllm.plugin import counters as subject
from kvtune.engines.vllm.plugin.collector import Figures
from kvtune.engines.vllm.plugin.counters import METRICS, MODEL, Counters, counters
from kvtune.engines.vllm.plugin.metrics_folder import SHARED, VARIABLE

prometheus_client = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")


FORK = multiprocessing.get_context("fork")


def page(folder):
    registry, figures = prometheus_client.CollectorRegistry(), Figures()
    figures.folder = folder
    registry.register(figures)
    return prometheus_client.generate_latest(registry).decode()


def samples(text):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def in_process(pid):
    """Write as this process would."""
    return mock.patch.object(subject.os, "getpid", return_value=pid)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder that this process counts into as long as the test lasts."""
    monkeypatch.setenv(SHARED, str(tmp_path))
    monkeypatch.setenv(MODEL, "some/model")
    monkeypatch.setattr(subject, "_current", None)
    return tmp_path


@pytest.fixture
def warnings(monkeypatch):
    """What is logged; vLLM, if another test imported it, keeps it from the root of all loggers."""
    found = []
    monkeypatch.setattr(
        subject._logger, "warning", lambda text, *values: found.append(text % values)
    )
    return found


def test_a_page_shows_figures_with_help_and_kind_while_they_are_counted(tmp_path):
    figures = Counters(tmp_path, {"engine": "3"})
    figures.add("pages_read", 2)
    figures.add("pages_read", 5)
    figures.add("evicted_tokens", 64, cause="window")
    figures.set("summary_bytes", 4096)
    figures.set("summary_bytes", 1024)
    assert set(page(tmp_path).splitlines()) == {
        "# HELP kvtune:pages_read_total Pages that decode steps read, of all layers.",
        "# TYPE kvtune:pages_read_total counter",
        'kvtune:pages_read_total{engine="3"} 7.0',
        "# HELP kvtune:evicted_tokens_total Tokens whose KV was dropped.",
        "# TYPE kvtune:evicted_tokens_total counter",
        'kvtune:evicted_tokens_total{cause="window",engine="3"} 64.0',
        "# HELP kvtune:summary_bytes Bytes that summaries of pages take beside the cache.",
        "# TYPE kvtune:summary_bytes gauge",
        'kvtune:summary_bytes{engine="3"} 1024.0',
    }
    figures.add("pages_read", 1)
    assert 'kvtune:pages_read_total{engine="3"} 8.0' in page(tmp_path)


COUNTED = st.tuples(
    st.integers(1, 3),
    st.sampled_from(["pages_seen", "pages_read", "evicted_tokens"]),
    st.sampled_from(["window", "score", 'ä"\\\n', "x" * 61]),
    st.integers(0, 2**40),
)


@given(st.lists(COUNTED, max_size=30))
def test_figures_of_processes_add_up(tmp_path_factory, counted):
    folder = tmp_path_factory.mktemp("processes")
    expected = defaultdict(int)
    processes = {pid: Counters(folder, {"engine": "0"}) for pid in (1, 2, 3)}
    for pid, name, cause, amount in counted:
        labels = {"cause": cause} if METRICS[name].labels else {}
        with in_process(pid):
            processes[pid].add(name, amount, **labels)
        key = (f"kvtune:{name}_total", tuple(sorted({"engine": "0", **labels}.items())))
        expected[key] += amount
    assert samples(page(folder)) == expected


def test_nothing_is_on_the_page_before_it_is_counted_and_0_is_enough(tmp_path):
    figures = Counters(tmp_path, {"engine": "0"})
    assert page(tmp_path) == ""
    figures.add("pages_seen", 0)
    assert samples(page(tmp_path)) == {("kvtune:pages_seen_total", (("engine", "0"),)): 0}


def test_engines_keep_figures_of_their_own(tmp_path):
    for pid, engine in enumerate("01"):
        with in_process(pid):
            Counters(tmp_path, {"engine": engine}).add("pages_read", 10 + pid)
    assert sorted(samples(page(tmp_path)).values()) == [10, 11]


def test_processes_of_one_server_tell_once_what_was_asked(tmp_path):
    for pid in (1, 2):
        with in_process(pid):
            Counters(tmp_path, {"engine": "0"}).set(
                "info", 1, **dict.fromkeys(METRICS["info"].labels, "same")
            )
    assert [*samples(page(tmp_path)).values()] == [1]


@pytest.mark.parametrize(
    ("name", "labels", "error"),
    [
        ("pages", {}, KeyError),
        ("pages_read", {"cause": "window"}, ValueError),
        ("evicted_tokens", {}, ValueError),
    ],
)
def test_what_is_not_in_the_table_is_refused(tmp_path, name, labels, error):
    figures = Counters(tmp_path, {"engine": "0"})
    with pytest.raises(error):
        figures.add(name, 1, **labels)
    assert page(tmp_path) == ""


def test_series_that_have_no_room_are_refused_and_the_others_stay(tmp_path):
    figures = Counters(tmp_path, {"engine": "0"})
    figures.add("evicted_tokens", 7, cause="window")
    with pytest.raises(ValueError, match="no room"):
        figures.add("evicted_tokens", 1, cause="x" * 70_000)
    assert [*samples(page(tmp_path)).values()] == [7]


def test_a_process_that_finds_no_place_for_its_figures_says_so_and_goes_on(tmp_path, warnings):
    figures = Counters(tmp_path / "gone", {"engine": "0"})
    figures.add("pages_read", 4)
    figures.add("pages_read", 4)
    assert figures.get("pages_read") == 8
    (warning,) = warnings
    assert "will be missing on /metrics" in warning
    assert "No such file" in warning


def test_a_process_that_no_page_is_made_of_says_so(own, monkeypatch, warnings):
    monkeypatch.delenv(SHARED)
    monkeypatch.delenv(VARIABLE, raising=False)
    counters().add("pages_read", 1)
    counters().add("pages_read", 1)
    assert counters().get("pages_read") == 2
    assert len(warnings) == 1
    assert [*own.iterdir()] == []


def test_a_fork_counts_into_a_file_of_its_own(own):
    counters().add("pages_read", 1)
    forked = FORK.Process(target=lambda: counters().add("pages_read", 10))
    forked.start()
    forked.join()
    counters().add("pages_read", 100)
    assert counters().get("pages_read") == 101
    assert [*samples(page(own)).values()] == [111]
    assert {file.name for file in own.iterdir()} == {
        f"counter_kvtune-{pid}.db" for pid in (os.getpid(), forked.pid)
    }


def _engine():
    counters().add("pages_seen", 2)
    worker = FORK.Process(target=lambda: counters().add("pages_read", 1), name="VllmWorker-0")
    worker.start()
    worker.join()


@pytest.mark.parametrize(("name", "label"), [("EngineCore", "0"), ("EngineCore_DP12", "12")])
def test_an_engine_and_its_worker_count_for_the_number_that_vllm_gave_it(own, name, label):
    engine = FORK.Process(target=_engine, name=name)
    engine.start()
    engine.join()
    labels = (("engine", label), ("model_name", "some/model"))
    assert samples(page(own)) == {
        ("kvtune:pages_seen_total", labels): 2,
        ("kvtune:pages_read_total", labels): 1,
    }
