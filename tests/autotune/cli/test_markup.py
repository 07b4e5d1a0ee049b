"""Text of the user's that looks like the terminal's markup is shown as it is."""

import pytest

from kvtune.store.database import open_store

TEMPLATE = "{% x %} [INST] {{ text }} [/INST]"


@pytest.fixture
def odd(tuning_on, landscape, kvtune, store):
    """Run `kvtune` on the store of a search whose words all hold brackets."""
    name = "a [bold]name"
    tuning_on(name=name, model="org/[/m]", base={"chat-template": TEMPLATE}).run()

    def run(*words):
        return kvtune(*words, "--store", store.path).out.replace("\n", "")

    return name, run


def test_a_study_a_trial_and_the_history_show_brackets_as_they_are(odd, store):
    name, run = odd
    study = run("show", name)
    assert name in study
    assert "org/[/m]" in study
    trial = run("show", f"{name}/0")
    assert f"chat-template: {TEMPLATE}" in trial
    assert name in run("history")
    with open_store(store.path) as opened:
        assert opened.studies()[0].name == name


def test_a_path_with_brackets_is_shown_as_it_is(kvtune, tmp_path):
    file = tmp_path / "a[" / "b].jsonl"  # its path has what looks like the end of a style
    file.parent.mkdir()
    file.write_text('{"prompt": "hello", "output_tokens": 3}\n')
    assert "1 requests" in kvtune("workload", "inspect", file).out
