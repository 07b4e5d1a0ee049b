"""Who is asked: servers that are started and stopped, servers that only run, and stacks."""

import asyncio
import os
from types import SimpleNamespace

import pytest
from contracts.tiny_models import tiny_model

from kvtune.autotune.quality.subjects import (
    Opened,
    ReferenceModel,
    ReferenceSubject,
    RunningSubject,
    ServedSubject,
    StartedSubject,
)
from kvtune.autotune.reporting import Quiet
from kvtune.engines.base import ServerSpec
from kvtune.engines.reference.engine import ReferenceEngine
from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.errors import BadInput, EngineError
from kvtune.policies.method_stack import parse_stack
from kvtune.policies.plugin_config import PluginConfig
from kvtune.profilers.quality.suite import Item
from kvtune.types import EffectiveConfig, Endpoint, EngineInfo, Failure, FailureClass

ITEM = Item("a", "x", prompt="The code of the door is 4711. The code of the door is")


def nothing(done, total):
    pass


def served(tmp_path, **arguments):
    spec = ServerSpec("org/tiny", arguments={"simulate-time-scale": 0.02, **arguments})
    return ServedSubject(SimulatedEngine(), spec, log_path=tmp_path / "log")


def test_a_server_is_started_asked_and_stopped(tmp_path):
    subject = served(tmp_path)
    with subject.open(Quiet(), nothing) as opened:
        (answer,) = asyncio.run(opened.asker.ask([ITEM], seed=0, concurrency=1))
        endpoint = opened.asker.endpoint
        assert opened.versions["engine"]
        opened.check()
    assert answer.texts == (" 4711.",)
    running = RunningSubject(endpoint, None)
    with running.open(Quiet(), nothing) as opened:
        (gone,) = asyncio.run(opened.asker.ask([ITEM], seed=0, concurrency=1))
    assert gone.error is not None


def test_a_server_that_somebody_else_started_is_asked_until_asking_has_to_end(tmp_path):
    subject = served(tmp_path)
    spec = ServerSpec("org/tiny", arguments={"simulate-time-scale": 0.02})
    reasons = [None]
    with SimulatedEngine().launch(spec, log_path=tmp_path / "log") as server:
        started = StartedSubject(subject, server, lambda: reasons[0])
        assert (started.by, started.key, started.max_tokens) == (
            subject.by,
            subject.key,
            subject.max_tokens,
        ), "its answers are those of the subject"
        with started.open(Quiet(), nothing) as opened:
            (answer,) = asyncio.run(opened.asker.ask([ITEM], seed=0, concurrency=1))
            assert answer.texts == (" 4711.",)
            opened.check()
            reasons[0] = Failure(failure=FailureClass.UNKNOWN, message="enough")
            with pytest.raises(EngineError, match="enough"):
                opened.check()
        assert server.failure() is None, "nobody has stopped it"


def test_a_running_server_is_asked_and_goes_on_running(tmp_path):
    spec = ServerSpec("org/tiny", arguments={"simulate-time-scale": 0.02})
    with SimulatedEngine().launch(spec, log_path=tmp_path / "log") as server:
        subject = RunningSubject(server.endpoint, server.effective)
        for _ in range(2):
            with subject.open(Quiet(), nothing) as opened:
                (answer,) = asyncio.run(opened.asker.ask([ITEM], seed=0, concurrency=1))
            assert answer.texts == (" 4711.",)
    assert subject.key is None
    assert subject.max_tokens == 8192
    assert server.endpoint.url in subject.by


def test_a_server_is_known_by_all_that_its_answers_depend_on(tmp_path):
    plain, same, other = (
        served(tmp_path, **arguments) for arguments in ({}, {}, {"block-size": 16})
    )
    assert plain.key == same.key != other.key
    assert "--block-size 16" in other.by
    for given, tokens in ((2048, 2048), ("1k", 1000), ("1K", 1024), ("auto", None)):
        assert served(tmp_path, **{"max-model-len": given}).max_tokens == tokens


def test_a_server_is_known_by_its_checkpoint_and_environment(tmp_path, monkeypatch):
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    weights = checkpoint / "model.safetensors"

    def key():
        spec = ServerSpec(str(checkpoint))
        return ServedSubject(SimulatedEngine(), spec, log_path=tmp_path / "log").key

    weights.write_bytes(b"one")
    os.utime(weights, (1, 1))
    before = key()
    weights.write_bytes(b"two")
    os.utime(weights, (2, 2))
    trained_on = key()
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "OTHER")
    assert before != trained_on != key()
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    assert "hush" not in str(key())


def test_a_server_whose_version_nobody_knows_is_not_known(tmp_path):
    engine = SimulatedEngine()
    engine.describe = lambda: EngineInfo(
        name="vllm", version="unknown", distribution="unknown", platform="unknown", python=None
    )
    assert ServedSubject(engine, ServerSpec("org/tiny"), log_path=tmp_path / "log").key is None


def test_a_server_without_arguments_is_called_stock(tmp_path):
    subject = ServedSubject(SimulatedEngine(), ServerSpec("org/tiny"), log_path=tmp_path / "log")
    assert subject.by == "stock settings"
    assert subject.max_tokens is None


def test_a_subject_that_died_says_so():
    dead = Failure(failure=FailureClass.CRASH_UNDER_LOAD, message="it ended", fix="look")
    with pytest.raises(EngineError, match="it ended"):
        Opened(SimpleNamespace(), failure=lambda: dead).check()
    Opened(SimpleNamespace()).check()


class Letters:
    """A tokenizer in which every letter is a token."""

    eos_token_id = None

    def __call__(self, text, **options):
        ids = [5 + ord(letter) % 90 for letter in text]
        return (
            SimpleNamespace(input_ids=ids)
            if "add_special_tokens" not in options
            else {"input_ids": ids}
        )


@pytest.fixture
def model():
    found = ReferenceModel("/nowhere")
    found.__dict__["engine"] = ReferenceEngine(tiny_model(), Letters())
    return found


def test_stacks_are_known_by_their_methods(model):
    stacks = [parse_stack(text) for text in ("full", "full", "snapkv:budget_tokens=64")]
    full, same, small = (ReferenceSubject(model, stack) for stack in stacks)
    assert full.key == same.key != small.key
    assert full.by == "reference: full"


def test_a_method_that_must_learn_learns_once(model, monkeypatch):
    import kvtune.autotune.quality.subjects as module

    monkeypatch.setattr(module, "CALIBRATION_TEXTS", 2)
    monkeypatch.setattr(module, "CALIBRATION_TOKENS", 64)
    stack = parse_stack("palu")
    notes = []

    class Noting(Quiet):
        def note(self, text):
            notes.append(text)

    subject = ReferenceSubject(model, stack)
    for _ in range(2):
        with subject.open(Noting(), nothing):
            pass
    assert len(notes) == 1
    assert stack.methods[0].calibration_key in model.engine.calibrations


def test_a_checkpoint_that_is_not_there_is_bad_input():
    subject = ReferenceSubject(ReferenceModel("/nowhere/at/all"), parse_stack("full"))
    with pytest.raises(BadInput, match="no checkpoint"), subject.open(Quiet(), nothing):
        pass


def test_an_endpoint_that_is_no_vllm_has_no_known_context():
    assert RunningSubject(Endpoint("http://h", "m", is_vllm=False), None).max_tokens is None


def test_what_the_plugin_does_in_a_server_is_known(tmp_path):
    arguments = {"additional-config.kvtune.quest.budget_tokens": 256}
    subject = served(tmp_path, **arguments)
    assert subject.plugin.quest.budget_tokens == 256
    assert StartedSubject(subject, None, lambda: None).plugin == subject.plugin
    endpoint = Endpoint(url="http://localhost:1", model="m")
    told = EffectiveConfig(plugin={"quest": {"pages": 8}})
    assert RunningSubject(endpoint, told).plugin.quest.pages == 8
    newer = EffectiveConfig(plugin={"quest": {"pages": 8, "of_tomorrow": 1}})
    for unknown in (None, EffectiveConfig(), newer):
        assert RunningSubject(endpoint, unknown).plugin == PluginConfig()
