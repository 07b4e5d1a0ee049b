"""`kvtune serve`: start the winner."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kvtune.autotune.cli import options
from kvtune.autotune.cli.emit import Study

EPILOG = "Example: kvtune serve --study latest --port 8000"


def serve(
    study: Study = "latest",
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")
    ] = 8000,
    engine_python: options.EnginePython = None,
    engine_command: options.EngineCommand = None,
    start_timeout: options.StartTimeout = 600.0,
    store: options.StoreUrl = None,
) -> None:
    """Start a server with the recommended configuration of a study, until Ctrl-C.

    The server is started from the emitted vLLM YAML file, so what runs here is what is handed over.
    """
    import tempfile
    from pathlib import Path

    from kvtune.autotune.cli.console import TerminalReporter, stdout
    from kvtune.autotune.emit.vllm_yaml import VllmYaml
    from kvtune.autotune.handover import serving_config
    from kvtune.engines.base import ServerSpec
    from kvtune.engines.vllm.environment import refuse_without_plugin
    from kvtune.errors import EngineError

    reporter = TerminalReporter()
    with options.open_history(store) as history, tempfile.TemporaryDirectory() as work:
        reference = history.resolve(study)
        number = None if reference.trial is None else reference.trial.number
        config = serving_config(history, reference.study, number)
        runner = options.make_engine(
            config.engine.name, python=engine_python, command=engine_command, cold_start=True
        )
        arguments: options.Arguments
        if config.engine.name == "vllm" and engine_command is None:
            # A file of arguments is not looked into before it is served.
            given = {setting.name: setting.value for setting in config.settings}
            refuse_without_plugin(given, runner.describe())
            name, text = next(iter(VllmYaml().render(config).items()))
            path = Path(work) / name
            path.write_text(text)
            arguments = {"config": str(path)}
        else:
            arguments = {setting.name: setting.value for setting in config.settings}
        spec = ServerSpec(
            model=config.model,
            served_model_name=config.served_model_name,
            arguments=arguments,
            environment=config.environment,
            host=host,
            port=port,
            measured=False,
        )
        with runner:
            with reporter.live():
                reporter.phase(f"Starting trial {config.trial} of {config.study}")
                server = runner.launch(
                    spec,
                    log_path=options.log_directory(history, config.study) / "serve.log",
                    start_timeout_s=start_timeout,
                    on_log=reporter.server_log,
                )
            with server:
                stdout.print(
                    f"{server.endpoint.url} serves {server.endpoint.model}; log: {server.log_path}",
                    markup=False,
                    soft_wrap=True,
                )
                stdout.print("Ctrl-C stops it.")
                while (failure := server.failure()) is None:
                    time.sleep(1.0)
                raise EngineError(
                    failure.failure, failure.message, failure.fix, failure.log_excerpt
                )


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog=EPILOG)(serve)
