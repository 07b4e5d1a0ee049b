"""What happens where arguments become a configuration, on stand-ins of vLLM's classes."""

import logging
import sys
import types
from types import SimpleNamespace

import pytest

from kvtune.engines.vllm.plugin import front
from kvtune.engines.vllm.plugin.facts import BACKEND
from kvtune.engines.vllm.plugin.refusals import Facts
from kvtune.errors import BadInput

SERVER = SimpleNamespace(name="OPENAI_API_SERVER")
STREAMING = {"kvtune": {"streaming_llm": {"window_tokens": 256}}}


class Member:
    def __init__(self, path=None):
        self.path = path

    def is_overridden(self):
        return self.path is not None


@pytest.fixture
def vllm(monkeypatch):
    """A vLLM whose registry and arguments can be looked at, and whose facts can be changed."""
    members = SimpleNamespace(CPU_ATTN=Member(), CUSTOM=Member())

    class EngineArgs:
        made = 0

        def __init__(self, additional_config):
            self.additional_config = additional_config

        def create_engine_config(self, usage_context=None, headless=False):
            EngineArgs.made += 1
            return SimpleNamespace(additional_config=self.additional_config, headless=headless)

    def register_backend(member, path):
        member.path = path

    def stand_in(name, **content):
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)

    stand_in(
        "vllm.v1.attention.backends.registry",
        AttentionBackendEnum=members,
        register_backend=register_backend,
    )
    stand_in("vllm.engine.arg_utils", EngineArgs=EngineArgs)
    state = SimpleNamespace(
        members=members,
        arguments=EngineArgs,
        facts=Facts(vllm_version="0.32.0", platform="cpu"),
        begun=[],
        forgotten=0,
        checks_marks=0,
    )

    def forget():
        state.forgotten += 1

    def check_marks():
        state.checks_marks += 1

    monkeypatch.setattr(front, "facts_of", lambda config: state.facts)
    monkeypatch.setattr(front, "_forget_backends", forget)
    monkeypatch.setattr(front.marks, "refuse_bad_marks", check_marks)
    monkeypatch.setattr(front.collector, "begin", lambda asked, config: state.begun.append(asked))
    return state


def test_our_backend_is_registered_for_cpu_and_as_custom(vllm):
    front.register()
    assert vllm.members.CPU_ATTN.path == vllm.members.CUSTOM.path == BACKEND


def test_a_backend_of_somebody_elses_is_left_in_its_place(vllm):
    vllm.members.CUSTOM.path = "theirs.Backend"
    front.register()
    assert vllm.members.CUSTOM.path == "theirs.Backend"


def test_registering_again_changes_nothing(vllm):
    front.register()
    once = vllm.arguments.create_engine_config
    front.register()
    assert vllm.arguments.create_engine_config is once


@pytest.fixture
def strange_vllm(vllm, monkeypatch):
    """Another version, which has neither the registry nor the facts where we look for them."""
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", types.ModuleType("r"))

    def facts_of(config):
        raise AttributeError("'ModelConfig' has no 'rswa_window'")

    monkeypatch.setattr(front, "facts_of", facts_of)
    return vllm


def test_on_a_vllm_of_another_shape_a_server_that_asks_for_nothing_starts(strange_vllm):
    front.register()
    assert strange_vllm.arguments({}).create_engine_config(SERVER).additional_config == {}


def test_on_a_vllm_of_another_shape_a_server_that_asks_is_refused_in_one_line(strange_vllm):
    front.register()
    with pytest.raises(SystemExit, match=r"rswa_window.* To fix: install vLLM 0\.32"):
        strange_vllm.arguments(STREAMING).create_engine_config(SERVER)
    assert strange_vllm.begun == []


def test_looking_backends_up_anew_needs_no_cache_of_them(monkeypatch):
    selector = types.ModuleType("vllm.v1.attention.selector")
    monkeypatch.setitem(sys.modules, "vllm.v1.attention", types.ModuleType("a"))
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.selector", selector)
    front._forget_backends()
    selector._cached_get_attn_backend = SimpleNamespace(cache_clear=lambda: cleared.append(1))
    cleared = []
    sys.modules["vllm.v1.attention"].selector = selector
    front._forget_backends()
    assert cleared == [1]


def test_a_server_that_asks_for_nothing_starts_as_ever(vllm):
    front.register()
    config = vllm.arguments({"theirs": 1}).create_engine_config(SERVER, headless=True)
    assert (config.additional_config, config.headless) == ({"theirs": 1}, True)
    assert vllm.begun == []


def test_what_can_be_served_is_said_and_begun(vllm, caplog):
    front.register()
    with caplog.at_level(logging.INFO, "vllm.kvtune"):
        vllm.arguments(STREAMING).create_engine_config(SERVER)
    (asked,) = vllm.begun
    assert asked.streaming_llm.window_tokens == 256
    assert vllm.checks_marks == 1
    assert '"window_tokens":256' in caplog.text
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_bad_value_ends_a_servers_start_in_one_line_before_anything_is_made(vllm):
    front.register()
    bad = {"kvtune": {"streaming_llm": {"window_tokens": 0}}}
    with pytest.raises(SystemExit) as ended:
        vllm.arguments(bad).create_engine_config(SERVER)
    line = ended.value.code
    assert line.startswith("kvtune: ")
    assert "kvtune.streaming_llm.window_tokens" in line
    assert "To fix: " in line
    assert "\n" not in line
    assert vllm.arguments.made == 0


def test_what_cannot_be_served_ends_a_servers_start_with_every_reason(vllm):
    vllm.facts = Facts("0.32.0", "cpu", tensor_parallel=2, is_speculative=True)
    front.register()
    with pytest.raises(SystemExit, match=r"tensor parallelism; .*speculative"):
        vllm.arguments(STREAMING).create_engine_config(SERVER)
    assert vllm.begun == []


def test_a_program_that_makes_an_engine_gets_an_error_that_it_can_catch(vllm):
    vllm.facts = Facts("0.32.0", "cpu", uses_mla=True)
    front.register()
    with pytest.raises(BadInput, match="MLA") as refused:
        vllm.arguments(STREAMING).create_engine_config(SimpleNamespace(name="LLM_CLASS"))
    assert any(note.startswith("To fix: ") for note in refused.value.__notes__)


def test_a_version_that_was_never_tried_is_said_aloud(vllm, caplog):
    vllm.facts = Facts("0.33.0", "cpu")
    front.register()
    with caplog.at_level(logging.WARNING, "vllm.kvtune"):
        vllm.arguments(STREAMING).create_engine_config(SERVER)
    assert "never tried with vLLM 0.33.0" in caplog.text


def test_each_configuration_has_its_backend_looked_up_anew(vllm):
    front.register()
    for asked in (STREAMING, {}):
        vllm.arguments(asked).create_engine_config(SERVER)
    assert vllm.forgotten == 2
