"""Reading what a server is asked, and what its errors end with."""

from types import SimpleNamespace

import pytest

from kvtune.engines.vllm.plugin.asked import asked_of, telling_fixes
from kvtune.errors import BadInput
from kvtune.policies.plugin_config import PluginConfig


def test_the_plugins_section_is_read_and_others_are_let_be():
    config = SimpleNamespace(
        additional_config={"kvtune": {"streaming_llm": {"window_tokens": 9}}, "theirs": {"x": 1}}
    )
    assert asked_of(config).streaming_llm.window_tokens == 9


@pytest.mark.parametrize("additional", [{}, {"theirs": 1}, None, object()])
def test_without_a_section_nothing_is_asked(additional):
    assert asked_of(SimpleNamespace(additional_config=additional)) == PluginConfig()
    assert not PluginConfig().is_asked


def test_an_error_that_vllm_shows_ends_with_what_to_do():
    with pytest.raises(BadInput, match="too small") as raised, telling_fixes():
        raise BadInput("the pool is too small", fix="add memory")
    assert raised.value.__notes__ == ["To fix: add memory."]
