"""Servers that are asked for kvtune's plugin, of a vLLM that has it or does not."""

import pytest

from kvtune import __version__
from kvtune.engines.base import ServerSpec
from kvtune.errors import BadInput

ASKED = {"additional-config": {"kvtune": {"quest": {"pages": 8}}}}
FIX = f"-m pip install kvtune=={__version__}"


@pytest.fixture
def without_plugin(engine, monkeypatch):
    """The engine, as of an environment that has no kvtune."""
    info = engine.describe()
    monkeypatch.setattr(engine, "_info", info.model_copy(update={"plugin": None}))
    return engine


def test_arguments_are_checked_for_what_the_parser_takes_and_vllm_ignores(without_plugin):
    ok, (asked,), (both, asked_too) = without_plugin.check_many(
        [
            {"additional-config": {"others": 1}},
            ASKED,
            {**ASKED, "max-num-seqs": "many"},
        ],
        "org/model",
    )
    assert ok == ()
    assert asked == asked_too
    assert "not installed" in asked
    assert FIX in asked
    assert "invalid int value" in both


def test_a_plugin_that_is_there_is_checked_for_what_it_knows(engine):
    wrong = {"additional-config": {"kvtune": {"quest": {"page": 8}}}}
    ok, (problem,) = engine.check_many([ASKED, wrong], "org/model")
    assert ok == ()
    assert "kvtune.quest.page" in problem


def test_no_server_is_started_that_would_leave_out_what_it_is_asked_for(
    without_plugin, tmp_path, new_children
):
    spec = ServerSpec(model="org/model", arguments=ASKED)
    with pytest.raises(BadInput, match="not installed") as caught:
        without_plugin.launch(spec, log_path=tmp_path / "log")
    assert FIX in caught.value.fix
    assert new_children() == []
