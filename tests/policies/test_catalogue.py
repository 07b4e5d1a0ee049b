"""The catalogue names every policy, and the page in the documentation is the current one."""

from pathlib import Path

from kvtune.policies.base import policies
from kvtune.policies.catalogue import as_markdown, catalogue
from kvtune.policies.method import Axis, Need, Saves, methods
from kvtune.types import Harm

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"


def test_every_policy_has_an_entry():
    names = [entry.name for entry in catalogue()]
    assert sorted(names) == sorted([*policies(), *methods()])


def test_entries_use_the_vocabulary():
    for entry in catalogue():
        assert entry.harm in {harm.value for harm in Harm}
        assert entry.title
        assert entry.summary.endswith("."), entry.name
        assert entry.engines
        if entry.kind != "lever":
            assert entry.axis in {axis.value for axis in Axis}
            assert set(entry.saves) <= {saved.value for saved in Saves}
            assert set(entry.needs) <= {need.value for need in Need}


def test_every_method_of_the_field_is_there():
    assert set(methods()) >= {
        *("paging", "prefix-caching", "prompt-cache", "tiers", "minicache", "scissorhands"),
        *("h2o", "streaming-llm", "snapkv", "quest", "chunkkv", "kvzip", "r-kv", "kivi"),
        *("kvquant", "gear", "palu", "turboquant", "ojakv", "mqa", "gqa", "mla", "yoco"),
        *("vllm-fp8", "vllm-int8-per-token-head", "vllm-int4-per-token-head"),
        "vllm-turboquant",
    }


def test_the_page_of_the_documentation_is_current():
    assert PAGE.read_text() == as_markdown(catalogue()), (
        "make it again: kvtune policies --markdown > docs/policies.md"
    )
