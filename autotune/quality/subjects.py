"""What can be asked: a server that kvtune starts, one that runs already, or a stack of methods."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from kvtune.autotune.ledger import checkpoint_signature
from kvtune.autotune.reporting import Reporter
from kvtune.autotune.trial import versions_of
from kvtune.engines.base import Engine, RunningServer, ServerSpec
from kvtune.engines.vllm.environment import measured_environment
from kvtune.errors import BadInput, EngineError, MissingExtra
from kvtune.kernels.device import detect_device
from kvtune.policies.checkpoint import model_shape
from kvtune.policies.plugin_arguments import NOTHING, asked_by
from kvtune.policies.plugin_config import SECTION, PluginConfig, plugin_config
from kvtune.policies.settings import read_count
from kvtune.profilers.quality.server_asker import ServerAsker
from kvtune.profilers.quality.suite import Asker
from kvtune.types import EffectiveConfig, Endpoint, Failure

if TYPE_CHECKING:
    from kvtune.engines.reference.engine import ReferenceEngine
    from kvtune.policies.method_stack import MethodStack

OnProgress = Callable[[int, int], None]

UNKNOWN = "unknown"
"""The version of an engine that has not told it."""

CALIBRATION_TEXTS = 8
CALIBRATION_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Opened:
    """A subject that can be asked now. `failure` says why one no longer answers."""

    asker: Asker
    versions: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    failure: Callable[[], Failure | None] = lambda: None

    def check(self) -> None:
        """Let a subject that died say so.

        Raises:
            EngineError: it died.
        """
        if (found := self.failure()) is not None:
            raise EngineError(found.failure, found.message, found.fix, found.log_excerpt)


class Subject(ABC):
    """Something to ask. `by` says in a report what it is.

    `key` holds everything that its answers depend on beside the questions; `None`: nobody knows
    all of it, so answers are not used again. `max_tokens` is the context that it has, if known.
    `plugin` is what kvtune's plugin does in it.
    """

    by: str
    key: Mapping[str, JsonValue] | None
    max_tokens: int | None
    plugin: PluginConfig = NOTHING

    @abstractmethod
    def open(self, reporter: Reporter, on_progress: OnProgress) -> AbstractContextManager[Opened]:
        """Get it ready to be asked, for as long as the block lasts.

        Raises:
            EngineError: it cannot be started.
        """


class ServedSubject(Subject):
    """A server of its own, started with `arguments`."""

    def __init__(
        self,
        engine: Engine,
        spec: ServerSpec,
        *,
        log_path: Path,
        start_timeout_s: float = 300.0,
        request_timeout_s: float = 300.0,
    ) -> None:
        self._engine = engine
        self._spec = spec
        self._log_path = log_path
        self._start_timeout_s = start_timeout_s
        self._request_timeout_s = request_timeout_s
        self.by = _words(spec.arguments) or "stock settings"
        info = engine.describe()
        known_key: dict[str, JsonValue] = {
            "model": spec.model,
            "checkpoint": checkpoint_signature(spec.model),
            "arguments": dict(spec.arguments),
            "engine": [info.name, info.version, info.distribution, info.torch],
            "environment": dict(measured_environment(os.environ, platform=info.platform)),
            "device": detect_device().key,
        }
        # Elsewhere what is sampled is drawn anew each time: see `ServerAsker`.
        self._seeds = info.platform == "cuda"
        # Behind a command, the same words may start another version tomorrow.
        self.key = None if info.version == UNKNOWN else known_key
        asked = read_count(spec.arguments.get("max-model-len"))
        shape = model_shape(spec.model)
        known = None if shape is None else shape.max_tokens
        self.max_tokens = known if asked is None else asked
        self.plugin = asked_by(spec.arguments)

    @contextmanager
    def open(self, reporter: Reporter, on_progress: OnProgress) -> Iterator[Opened]:
        """Start the server, and stop it at the end."""
        reporter.phase(f"Starting {self.by}")
        server = self._engine.launch(
            self._spec,
            log_path=self._log_path,
            start_timeout_s=self._start_timeout_s,
            on_log=reporter.server_log,
        )
        with server:
            reporter.ready(server.start_s)
            yield self.opened(server, server.failure, on_progress)

    def opened(
        self,
        server: RunningServer,
        failure: Callable[[], Failure | None],
        on_progress: OnProgress,
    ) -> Opened:
        """A server that was started with these arguments, to be asked until there is a failure."""
        asker = ServerAsker(
            server.endpoint,
            request_timeout_s=self._request_timeout_s,
            should_stop=failure,
            on_progress=on_progress,
            seeds=self._seeds,
        )
        versions = versions_of(server.effective.engine_version)
        return Opened(asker, versions, server.warnings, failure)


class StartedSubject(Subject):
    """A served subject at a server that somebody else started and will stop; it is only asked.

    `failure` says why asking has to end.
    """

    def __init__(
        self,
        served: ServedSubject,
        server: RunningServer,
        failure: Callable[[], Failure | None],
    ) -> None:
        self._served = served
        self._server = server
        self._failure = failure
        self.by, self.key, self.max_tokens = served.by, served.key, served.max_tokens
        self.plugin = served.plugin

    @contextmanager
    def open(self, reporter: Reporter, on_progress: OnProgress) -> Iterator[Opened]:
        """Nothing has to be started."""
        yield self._served.opened(self._server, self._failure, on_progress)


class RunningSubject(Subject):
    """A server that somebody else runs; it is only asked."""

    def __init__(
        self,
        endpoint: Endpoint,
        effective: EffectiveConfig | None,
        *,
        request_timeout_s: float = 300.0,
    ) -> None:
        self._endpoint = endpoint
        self._effective = effective
        self._request_timeout_s = request_timeout_s
        self.by = f"{endpoint.model} at {endpoint.url}"
        self.key = None
        self.max_tokens = None if effective is None else effective.max_model_len_tokens
        told = None if effective is None else effective.plugin
        if told is not None:
            # One that says what this kvtune does not know is judged as any server.
            with suppress(BadInput):
                self.plugin = plugin_config({SECTION: told})

    @contextmanager
    def open(self, reporter: Reporter, on_progress: OnProgress) -> Iterator[Opened]:
        """Nothing has to be started."""
        reporter.phase(f"Asking {self.by}")
        asker = ServerAsker(
            self._endpoint, request_timeout_s=self._request_timeout_s, on_progress=on_progress
        )
        found = None if self._effective is None else self._effective.engine_version
        yield Opened(asker, versions_of(found))


class ReferenceModel:
    """A checkpoint that is loaded into the reference engine when the first stack is asked."""

    def __init__(self, path: str) -> None:
        self.path = path

    @cached_property
    def engine(self) -> ReferenceEngine:
        """The engine.

        Raises:
            BadInput: the checkpoint cannot be loaded.
            MissingExtra: PyTorch or transformers are not installed.
        """
        try:
            from kvtune.engines.reference.engine import ReferenceEngine
        except ImportError as error:
            raise MissingExtra(
                f"the reference engine needs {error.name}",
                fix="pip install 'kvtune[reference]'",
            ) from error
        return ReferenceEngine.load(self.path)


class ReferenceSubject(Subject):
    """A stack of methods in the reference engine; methods that must learn first do so on filler."""

    def __init__(self, model: ReferenceModel, stack: MethodStack) -> None:
        self._model = model
        self._stack = stack
        self.by = f"reference: {stack}"
        self.key = {
            "model": model.path,
            "checkpoint": checkpoint_signature(model.path),
            "stack": [method.fingerprint for method in stack.methods],
            "engine": ["reference", *map(_installed, ("torch", "transformers"))],
            "device": detect_device().key,
        }
        shape = model_shape(model.path)
        self.max_tokens = None if shape is None else shape.max_tokens

    @contextmanager
    def open(self, reporter: Reporter, on_progress: OnProgress) -> Iterator[Opened]:
        """Load the model, and calibrate what has to be."""
        from kvtune.autotune.quality.reference_asker import ReferenceAsker

        reporter.phase(f"Loading {self.by}")
        engine = self._model.engine
        _calibrate(engine, self._stack, reporter)
        asker = ReferenceAsker(engine, self._stack, on_progress=on_progress)
        yield Opened(asker, versions_of(None))


def _calibrate(engine: Any, stack: MethodStack, reporter: Reporter) -> None:
    from kvtune.engines.reference.calibrate import calibrate
    from kvtune.policies.calibration import CalibratedMethod
    from kvtune.profilers.quality.texts import filler, seeded

    for method in stack.methods:
        if not isinstance(method, CalibratedMethod):
            continue
        if method.calibration_key in engine.calibrations:
            continue
        reporter.note(f"calibrating {method.title} on generated text")
        texts = [
            engine.tokenizer(
                " ".join(filler(seeded("calibration", n), CALIBRATION_TOKENS))
            ).input_ids
            for n in range(CALIBRATION_TEXTS)
        ]
        engine.use_calibration(method, calibrate(engine, method, texts))


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _words(arguments: Mapping[str, JsonValue]) -> str:
    from kvtune.engines.vllm.arguments import to_argv

    return " ".join(to_argv(arguments))
