"""From words on the command line to what `kvtune quality` asks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtune.autotune.cli import options

if TYPE_CHECKING:
    from kvtune.autotune.quality.subjects import ReferenceModel, Subject
    from kvtune.engines.base import Engine
    from kvtune.profilers.quality.suite import Size, Suite

OWN_DATA = "yours"
"""The suite that has nothing to ask without the user's own file."""


@dataclass(frozen=True, slots=True)
class Servers:
    """How servers are reached or started. `shared` are arguments of both; `engine` is None where
    nothing has to be started."""

    engine: Engine | None
    model: str
    served_model_name: str | None
    shared: options.Arguments
    logs: Path
    start_timeout_s: float
    request_timeout_s: float
    api_key: str | None = None
    ca_cert: str | None = None

    def subject(self, who: str, words: str, url: str | None) -> Subject:
        """The server that is running at `url`, or one to start with the arguments in `words`.

        Raises:
            BadInput: the arguments cannot be used.
            EngineError: nobody answers at `url`.
        """
        from kvtune.address import read_address
        from kvtune.autotune.quality.subjects import RunningSubject, ServedSubject
        from kvtune.engines.base import ServerSpec
        from kvtune.engines.vllm.attach import attach
        from kvtune.errors import BadInput

        if url is not None and words:
            raise BadInput(
                f"the server at --url-{who} runs already, --{who} cannot change it",
                fix=f"leave --{who} out, or --url-{who} to start a server with it",
            )
        if url is not None:
            found = attach(read_address(url, api_key=self.api_key, ca_cert=self.ca_cert))
            return RunningSubject(*found, request_timeout_s=self.request_timeout_s)
        if self.engine is None:
            raise BadInput(
                f"there is no server for the {who}: --url-{who}, or --model to start one",
                fix='kvtune quality --model PATH --candidate "--kv-cache-dtype fp8"',
            )
        arguments = {**self.shared, **options.base_arguments(words, None)}
        if problems := self.engine.check_arguments(arguments, self.model):
            raise BadInput(
                f"the engine refuses the {who}'s arguments: " + "; ".join(problems),
                fix=f"correct --{who} or --engine-args",
            )
        return ServedSubject(
            self.engine,
            ServerSpec(
                model=self.model, served_model_name=self.served_model_name, arguments=arguments
            ),
            log_path=self.logs / f"{who}.log",
            start_timeout_s=self.start_timeout_s,
            request_timeout_s=self.request_timeout_s,
        )


def stack_subject(model: ReferenceModel, words: str) -> Subject:
    """A stack of methods in the reference engine; no words are the full cache.

    Raises:
        BadInput: an unknown method, parameter or value, or methods that do not go together.
    """
    from kvtune.autotune.quality.subjects import ReferenceSubject
    from kvtune.policies.compose import require_legal
    from kvtune.policies.method_stack import parse_stack

    stack = parse_stack(words)
    require_legal(stack)
    return ReferenceSubject(model, stack)


def read_size(text: str) -> Size:
    """A size by its name.

    Raises:
        BadInput: there is no such size.
    """
    from kvtune.errors import BadInput
    from kvtune.profilers.quality.suite import Size

    try:
        return Size(text)
    except ValueError:
        names = ", ".join(Size)
        raise BadInput(f"there is no size {text!r}", fix=f"use one of {names}") from None


def chosen_suites(names: list[str], *, has_data: bool) -> tuple[Suite, ...]:
    """The suites of these names, or all that can be asked.

    Raises:
        BadInput: there is no such suite.
    """
    import difflib

    from kvtune.errors import BadInput
    from kvtune.profilers.quality.suite import suites

    known = suites()
    if not names:
        return tuple(suite for name, suite in known.items() if name != OWN_DATA or has_data)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known) or sorted(known)
            raise BadInput(f"there is no suite {name!r}", fix=f"did you mean {', '.join(near)}?")
    if OWN_DATA in names and not has_data:
        raise BadInput(f"the suite {OWN_DATA} asks what you bring", fix="give it --data FILE")
    return tuple(known[name] for name in dict.fromkeys(names))


def workload_prompts(path: str | None, format: str | None) -> tuple[str, ...]:
    """The texts of a workload's prompts; requests that are lengths or token ids have none."""
    from kvtune.autotune.quality.answers import prompt_texts

    if path is None:
        return ()
    return prompt_texts(options.read_workload(path, format=format, limit=None).requests)
