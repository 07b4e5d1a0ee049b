"""What every emitter promises. A test subclasses `EmitterContract` and reads its files back."""

import re
from abc import ABC, abstractmethod
from typing import ClassVar

import pytest
from contracts.emitter_samples import (
    API_SECRET,
    REALISTIC_REVERT,
    REALISTIC_WORDS,
    SECRET,
    canonical,
    cpu_config,
    expected_words,
    hostile_configs,
    realistic_config,
)
from hypothesis import HealthCheck, given, settings

from kvtune.autotune.emit.base import Emitter, emitters
from kvtune.errors import BadInput
from kvtune.types import Interval, Outcome, ServingConfig, Setting

_LOUD = {
    Outcome.KEEP_BASELINE: "KEEP THE BASELINE",
    Outcome.NO_CLEAR_WINNER: "NO CLEAR WINNER",
    Outcome.INFEASIBLE: "INFEASIBLE",
    Outcome.NOTHING_MEASURED: "NOTHING WAS MEASURED",
}


def prose(files: dict[str, str]) -> str:
    """All comments as one text with single spaces, so that wrapped sentences can be found."""
    comments = re.findall(r"^ *#(.*)$", "\n".join(files.values()), re.MULTILINE)
    return " ".join(" ".join(comments).split())


class EmitterContract(ABC):
    """Subclasses set `emitter` and implement `words` and `variables`."""

    emitter: ClassVar[type[Emitter]]

    @abstractmethod
    def words(self, files: dict[str, str], config: ServingConfig) -> list[str]:
        """The words after `vllm serve` with which the files start the server."""

    @abstractmethod
    def variables(self, files: dict[str, str], config: ServingConfig) -> dict[str, str]:
        """The plain environment variables that the files set."""

    def arranged(self, words: list[str]) -> list[str]:
        """Words in the order in which the format lists them."""
        return words

    def render(self, config: ServingConfig) -> dict[str, str]:
        return self.emitter().render(config)

    def test_is_found_by_its_name(self) -> None:
        assert emitters()[self.emitter.name] is self.emitter
        assert self.emitter.title

    def test_starts_the_measured_server(self) -> None:
        config = realistic_config()
        words = self.words(self.render(config), config)
        assert self.arranged(words) == self.arranged(REALISTIC_WORDS)

    def test_sets_the_measured_environment(self) -> None:
        config = realistic_config()
        assert self.variables(self.render(config), config) == {"VLLM_LOGGING_LEVEL": "WARNING"}

    @given(config=hostile_configs())
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    def test_hostile_text_stays_in_its_place(self, config: ServingConfig) -> None:
        files = self.render(config)
        words = canonical(self.words(files, config))
        assert self.arranged(words) == self.arranged(canonical(expected_words(config)))
        assert self.variables(files, config) == config.environment

    def test_every_file_is_text_that_ends_in_a_line_break(self) -> None:
        for name, content in self.render(realistic_config()).items():
            assert "/" not in name
            assert content.endswith("\n")
            assert "\t" not in content

    def test_carries_every_warning(self) -> None:
        warnings = ("The clock drifted.", "Second: " + "many words " * 30)
        config = realistic_config().model_copy(update={"warnings": warnings})
        comments = prose(self.render(config))
        for warning in warnings:
            assert " ".join(warning.split()) in comments

    def test_warns_of_an_engine_that_is_simulated_or_not_tested(self) -> None:
        config = realistic_config()
        engine = config.engine.model_copy(update={"platform": "simulated", "tested": False})
        comments = prose(self.render(config.model_copy(update={"engine": engine})))
        assert "not tested with this version" in comments
        assert "simulated engine" in comments

    def test_contains_the_command_that_brings_the_baseline_back(self) -> None:
        lines = [
            line
            for content in self.render(realistic_config()).values()
            for line in content.split("\n")
        ]
        assert f"#   {REALISTIC_REVERT}" in lines

    def test_never_writes_a_secret_but_names_it(self) -> None:
        config = realistic_config()
        config = config.model_copy(
            update={"environment": {**config.environment, "AWS_SECRET_ACCESS_KEY": SECRET}}
        )
        files = self.render(config)
        everything = "\n".join(files.values())
        assert SECRET not in everything
        assert API_SECRET not in everything
        for name in ("HF_TOKEN", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY"):
            assert name in prose(files)

    def test_header_is_complete(self) -> None:
        comments = prose(self.render(realistic_config()))
        for part in (
            "WINNER",
            "chat-prod, trial 17",
            "2026-11-29T12:00:00Z by kvtune 0.1.0",
            "vllm 0.32.0 (vllm, cuda), torch 2.13.0+cu130",
            "1 x NVIDIA H200 (cuda), 140.4 GiB each, driver 580.65",
            "meta-llama/Llama-3.1-8B-Instruct, served as chat",
            "max goodput where p95 ttft <= 0.8 s",
            "goodput_requests_per_s (requests/s) "
            "4.213 [4.05, 4.38], 0.95, x5 2.1 [2, 2.21], 0.95, x5",
            "ttft_p95_s (s) 0.61 [0.58, 0.66], 0.95, x5 1.92 [1.8, 2.05], 0.95, x5",
            "intervals by: bootstrap, paired",
            "(base) given by you",
            "(tuned) 62% of the prompt tokens repeat an earlier prefix",
        ):
            assert part in comments

    @pytest.mark.parametrize("outcome", _LOUD)
    def test_says_loudly_that_there_is_no_winner(self, outcome: Outcome) -> None:
        config = realistic_config().model_copy(update={"outcome": outcome})
        content = next(iter(self.render(config).values()))
        top = [line for line in content.split("\n") if line.startswith("# ")][:6]
        assert any(line.startswith(f"# {_LOUD[outcome]}") for line in top)
        assert sum("!!!!" in line for line in top) == 2
        assert "WINNER:" not in content.replace("NO CLEAR WINNER:", "")

    def test_says_loudly_that_a_person_picked_the_trial(self) -> None:
        config = realistic_config().model_copy(update={"outcome": None})
        assert "PICKED BY HAND" in prose(self.render(config))

    def test_a_figure_of_one_repeat_is_shown_without_an_interval(self) -> None:
        once = Interval(estimate=1.234, low=None, high=None, unit="s", repeats=1)
        config = realistic_config().model_copy(update={"figures": {"ttft_p95_s": once}})
        assert "1.234, x1 (no interval)" in prose(self.render(config))

    def test_says_that_nothing_was_measured_when_there_are_no_figures(self) -> None:
        config = realistic_config().model_copy(update={"figures": {}, "baseline_figures": {}})
        assert "no figures were recorded" in prose(self.render(config))

    def test_is_deterministic(self) -> None:
        config = realistic_config()
        turned = dict(reversed(config.environment.items()))
        assert self.render(config) == self.render(config.model_copy(update={"environment": turned}))

    def test_works_without_any_setting(self) -> None:
        bare = {
            "settings": (),
            "environment": {},
            "served_model_name": None,
            "revert_arguments": {},
        }
        config = realistic_config().model_copy(update=bare)
        assert self.words(self.render(config), config) == [config.model]

    def test_serves_a_local_model_on_a_cpu(self) -> None:
        config = cpu_config()
        words = self.words(self.render(config), config)
        assert self.arranged(words) == self.arranged(["/models/smol", *REALISTIC_WORDS[1:]])

    @pytest.mark.parametrize(
        "change",
        [
            {"settings": (Setting(name="--max-num-seqs", value=1, because=""),)},
            {"settings": (Setting(name="x y", value=1, because=""),)},
            {"settings": (Setting(name="dtype", value="a\0b", because=""),)},
            {"settings": (Setting(name="middleware", value=["a\0b"], because=""),)},
            {"model": "a\0b"},
            {"environment": {"A-B": "1"}},
            {"environment": {"A": "\0"}},
        ],
    )
    def test_refuses_what_no_command_line_can_carry(self, change: dict[str, object]) -> None:
        with pytest.raises(BadInput) as caught:
            self.render(realistic_config().model_copy(update=change))
        assert caught.value.fix
