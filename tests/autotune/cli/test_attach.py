"""`kvtune profile --url` against a fake vLLM: keys, TLS, prefixes, and every kind of trouble."""

import itertools
import json
import shutil
import threading

import pytest
from contracts.fake_vllm import VERSIONS, fake_vllm, growing, self_signed, vllm_page

from kvtune.kernels.device import detect_device
from kvtune.store import open_store
from kvtune.types import Bottleneck, Ceilings, Profile

WATCH = ("--duration", "400ms", "--json")


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    for name in ("KVTUNE_API_KEY", "OPENAI_API_KEY", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def certificate(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    return self_signed(tmp_path)


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt": "hello", "output_tokens": 3}\n' * 12)
    return path


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_the_oldest_and_the_newest_release_are_profiled_alike(version, kvtune):
    with fake_vllm(growing(version=version)) as fake:
        profile = Profile.model_validate_json(
            kvtune("profile", "--url", fake.url, "--duration", "2.5s", "--json").out
        )
    assert profile.verdict.bottleneck is Bottleneck.KV_CAPACITY
    assert profile.effective.kv_cache_size_tokens == 912 * 16
    assert (profile.model, profile.warnings) == ("m", ())


def test_a_key_is_sent_with_everything_and_shown_nowhere(kvtune, workload):
    with fake_vllm(growing(), key="s3cret") as fake:
        words = ("profile", "--url", fake.url, "--workload", workload, "--concurrency", 2)
        refused = kvtune(*words, code=3)
        assert "it asks for an API key" in refused.err
        assert "it does not take" in kvtune(*words, "--api-key", "wrong", code=3).err
        fake.seen.clear()
        said = kvtune(*words, "--api-key", "s3cret", "--json")
    assert {sent for _, _, sent in fake.seen} == {"Bearer s3cret"}
    assert {path for _, path, _ in fake.seen} >= {"/metrics", "/v1/models", "/v1/completions"}
    assert "s3cret" not in said.out + said.err
    assert Profile.model_validate_json(said.out).metrics["failed_requests"] == (0.0,)


def test_an_openai_key_is_proposed_and_not_sent(kvtune, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    with fake_vllm(key="s3cret") as fake:
        said = kvtune("profile", "--url", fake.url, *WATCH[:2], code=3)
    assert '--api-key "$OPENAI_API_KEY"' in said.err
    assert {sent for _, _, sent in fake.seen} == {None}


def test_an_unknown_certificate_is_refused_with_the_way_to_trust_it(
    kvtune, certificate, monkeypatch, workload
):
    with fake_vllm(growing(), certificate=certificate, prefix="/llm") as fake:
        words = ("profile", "--url", f"{fake.url}/v1", "--workload", workload, "--json")
        refused = kvtune(*words, code=3).json()
        assert "self-signed certificate" in refused["error"]
        assert "--ca-cert FILE" in refused["fix"]
        said = kvtune(*words, "--ca-cert", certificate[1])
        assert Profile.model_validate_json(said.out).endpoint_url == fake.url
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[1]))
        profile = Profile.model_validate_json(kvtune(*words).out)
        assert profile.counters["vllm:generation_tokens_total"] > 0
        other_name = fake.url.replace("127.0.0.1", "localhost")
        refused = kvtune("profile", "--url", other_name, code=3)
        assert "the name that the certificate was made for" in refused.err
    assert {path for _, path, _ in fake.seen} >= {"/llm/metrics", "/llm/v1/completions"}


def test_a_file_without_certificates_is_refused(kvtune, tmp_path):
    (tmp_path / "no.pem").write_text("nothing")
    words = ("profile", "--url", "https://127.0.0.1:9", "--ca-cert", tmp_path / "no.pem")
    assert "holds no certificate" in kvtune(*words, code=2).err


def test_https_where_none_is_spoken_says_so(kvtune):
    with fake_vllm() as fake:
        url = fake.url.replace("http:", "https:")
        assert "try http://" in kvtune("profile", "--url", url, code=3).err


def test_metrics_elsewhere_are_read_where_the_user_says(kvtune):
    with fake_vllm(growing()) as metrics, fake_vllm(lambda: 404) as api:
        said = kvtune("profile", "--url", api.url, *WATCH[:2], code=3)
        assert "--metrics-url names another place" in said.err
        words = ("profile", "--url", api.url, "--metrics-url", f"{metrics.url}/metrics", *WATCH)
        profile = Profile.model_validate_json(kvtune(*words).out)
        assert profile.counters["vllm:generation_tokens_total"] > 0
        wrong = kvtune(*words[:4], f"{metrics.url}/nothing?token=s3cret", code=3).err
        assert "answers with HTTP 404" in wrong
        assert "s3cret" not in wrong


@pytest.mark.parametrize("option", ["--metrics-url", "--ca-cert"])
def test_what_says_how_to_attach_is_refused_where_nothing_is_attached_to(kvtune, option):
    said = kvtune("profile", "--model", "org/name", option, "http://h/metrics", code=2).err
    assert f"{option} is about a running server" in said


def test_a_sign_in_page_for_metrics_is_said(kvtune, workload):
    with fake_vllm(lambda: "<html>Sign in</html>\n") as fake:
        said = kvtune("profile", "--url", fake.url, *WATCH[:2], code=3)
        assert "a web page came instead of metrics" in said.err
        words = ("profile", "--url", fake.url, "--workload", workload, "--json")
        profile = Profile.model_validate_json(kvtune(*words).out)
    assert profile.verdict.bottleneck is Bottleneck.ABSTAIN
    assert profile.metrics["failed_requests"] == (0.0,)


def test_a_server_that_dies_while_watched_leaves_a_partial_profile_and_exit_code_3(kvtune):
    page, readings = growing(), itertools.count()

    def metrics():
        if next(readings) == 1:  # the first one told what kind of server it is
            threading.Timer(3.4, fake.stop).start()
        return page()

    with fake_vllm(metrics) as fake:
        said = kvtune("profile", "--url", fake.url, "--duration", "4s", "--json", code=3)
    profile = Profile.model_validate_json(said.out)
    assert profile.verdict.bottleneck is Bottleneck.KV_CAPACITY
    assert any("could not be read any more" in warning for warning in profile.warnings)
    assert 2.0 < profile.window_s < 4.0


def test_a_server_that_dies_under_the_load_leaves_a_partial_profile(kvtune, workload):
    lines = [
        json.dumps({"prompt": "hello", "output_tokens": 3, "arrival_s": n / 10}) for n in range(30)
    ]
    workload.write_text("\n".join(lines) + "\n")
    page, readings = growing(), itertools.count()

    def metrics():
        if next(readings) == 1:  # before the load; then one each second
            threading.Timer(1.6, fake.stop).start()
        return page()

    with fake_vllm(metrics) as fake:
        said = kvtune("profile", "--url", fake.url, "--workload", workload, "--json", code=3)
    profile = Profile.model_validate_json(said.out)
    assert profile.counters["vllm:generation_tokens_total"] > 0
    assert any("requests failed" in warning for warning in profile.warnings)
    assert any("could not be read any more" in warning for warning in profile.warnings)


def test_a_restart_while_watched_is_said_and_no_failure(kvtune):
    lives, readings = (growing(start=500.0), growing()), itertools.count()
    with fake_vllm(lambda: lives[int(next(readings) > 3)]()) as fake:
        said = kvtune("profile", "--url", fake.url, "--duration", "2s")
    assert "the server restarted once meanwhile" in said.out


def test_a_redirect_is_not_followed_with_a_key(kvtune):
    with fake_vllm() as fake:
        plain = fake.answer
        fake.answer = lambda path: (301, "moved") if path == "/v1/models" else plain(path)
        assert "answers with HTTP 301" in kvtune("profile", "--url", fake.url, code=3).err


def test_an_empty_page_of_a_real_server_is_not_taken_for_an_idle_one(kvtune):
    with fake_vllm(lambda: vllm_page().replace("vllm:", "other:")) as fake:
        said = kvtune("profile", "--url", fake.url, "--duration", "2.2s", "--json")
    verdict = Profile.model_validate_json(said.out).verdict
    assert verdict.bottleneck is Bottleneck.ABSTAIN
    assert "--disable-log-stats" in verdict.next_experiment


def test_a_local_server_is_judged_by_the_ceilings_that_are_kept_of_this_machine(kvtune, tmp_path):
    kept = Ceilings(
        device=detect_device().key,
        read_bytes_per_s=8e10,
        copy_bytes_per_s=4e10,
        matrix_flop_per_s=1e12,
        matrix_dtype="bfloat16",
        threads=2,
        method="given by this test",
        measured_at="2026-11-29T00:00:00+00:00",
    )
    with fake_vllm(growing()) as fake:
        words = ("profile", "--url", fake.url, *WATCH)
        before = kvtune(*words)
        with open_store(tmp_path / "home" / "kvtune.db") as store:
            store.save_ceilings(kept)
        after = kvtune(*words)
    assert Profile.model_validate_json(before.out).ceilings is None
    assert "stop the load, run `kvtune doctor --measure` once" in before.err
    assert "doctor" not in after.err
    assert Profile.model_validate_json(after.out).ceilings == kept


def test_a_server_elsewhere_is_to_be_judged_where_it_runs(kvtune, monkeypatch):
    monkeypatch.setattr("kvtune.engines.vllm.readiness.is_loopback", lambda host: False)
    with fake_vllm() as fake:
        said = kvtune("profile", "--url", fake.url, *WATCH)
    assert "run `kvtune doctor --measure` on the server's machine" in said.err
    assert "--url http://127.0.0.1:PORT" in said.err
    assert "levers which depend on its device are not forecast" in said.err
    told = Profile.model_validate_json(said.out).forecasts
    # It does not tell its limits, so that those of a step are not known either.
    known = {one.lever for one in told if one.predicted is not None}
    assert known == {"kv memory x2", "kv memory x0.5", "prefix caching off"}


def test_labels_that_a_proxy_adds_do_not_hide_what_a_server_says(kvtune):
    with fake_vllm(growing(labels=',zone="a"')) as fake:
        said = kvtune("profile", "--url", fake.url, "--duration", "2.2s", "--json")
    profile = Profile.model_validate_json(said.out)
    assert profile.verdict.bottleneck is Bottleneck.KV_CAPACITY
    held = {row.metric: row.value for row in profile.verdict.evidence}
    assert held["peak_kv_usage"] == 0.97


def test_what_a_server_does_not_say_the_user_may(kvtune):
    with fake_vllm() as fake:
        words = ("profile", "--url", fake.url, *WATCH)
        unknown = Profile.model_validate_json(kvtune(*words).out).effective
        said = ("--engine-args", "--max-num-seqs 4 --block-size 32")
        told = Profile.model_validate_json(kvtune(*words, *said).out).effective
    assert (unknown.max_num_seqs, told.max_num_seqs) == (None, 4)
    assert told.block_size_tokens == 16, "the server says it, and it is right"
    assert told.source == ("metrics", "arguments")


def test_servers_behind_one_address_that_differ_are_said(kvtune):
    pages = (vllm_page(labels=',pod="a"'), vllm_page(labels=',pod="b"').replace('"912"', '"700"'))
    with fake_vllm(lambda: pages[0] + pages[1].replace("14592", "11200")) as fake:
        profile = Profile.model_validate_json(kvtune("profile", "--url", fake.url, *WATCH).out)
    assert profile.effective.kv_cache_size_tokens == 11_200
    assert any(
        "differ in kv_cache_size_tokens (11200, 14592), num_gpu_blocks (700, 912)" in warning
        for warning in profile.warnings
    )
