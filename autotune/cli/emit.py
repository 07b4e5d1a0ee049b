"""`kvtune emit`: write a serving config that a person can use as it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtune.autotune.cli import options

if TYPE_CHECKING:
    from kvtune.types import ServingConfig

EPILOG = "Example: kvtune emit --study latest --format vllm-yaml --format compose -o deploy"

Study = Annotated[
    str, typer.Option("--study", help="Study, the start of its name, or STUDY/TRIAL.")
]


def emit(
    study: Study = "latest",
    format: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            help="vllm-yaml, shell, compose, kubernetes, helm-production-stack or all "
            "(repeatable) [default: vllm-yaml].",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to write to.")] = Path(),
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite files that were edited since.")
    ] = False,
    check: Annotated[
        bool, typer.Option(help="Check the arguments with the installed vLLM's own parser.")
    ] = True,
    engine_python: options.EnginePython = None,
    store: options.StoreUrl = None,
    json: options.Json = False,
) -> None:
    """Write the recommended configuration of a study as files, with its evidence in the header."""
    from kvtune.autotune.cli.console import print_json, stdout
    from kvtune.autotune.emit.base import emitters
    from kvtune.autotune.emit.writer import write_files
    from kvtune.autotune.handover import serving_config
    from kvtune.errors import BadInput

    known = emitters()
    names = list(dict.fromkeys(format or ["vllm-yaml"]))
    if "all" in names:
        names = sorted(known)
    for name in names:
        if name not in known:
            raise BadInput(
                f"there is no format {name!r}", fix=f"use one of: {', '.join(sorted(known))}, all"
            )
    written: dict[str, str] = {}
    with options.open_history(store) as history:
        reference = history.resolve(study)
        number = None if reference.trial is None else reference.trial.number
        config = serving_config(history, reference.study, number)
        if check and config.engine.name == "vllm":
            config = _checked(config, engine_python)
        for name in names:
            files = write_files(known[name]().render(config), output, force=force)
            history.save_emitted(config, name, output, files)
            written.update(files)
    if json:
        import json as to_json

        print_json(
            to_json.dumps(
                {
                    "study": config.study,
                    "trial": config.trial,
                    "directory": str(output.resolve()),
                    "files": written,
                    "warnings": list(config.warnings),
                }
            )
        )
        return
    for name in written:
        stdout.print(str(output / name), markup=False, soft_wrap=True)


def _checked(config: ServingConfig, engine_python: str | None) -> ServingConfig:
    """The config, refused if the installed parser refuses it, marked if there is no parser.

    Raises:
        BadInput: the installed vLLM does not take these arguments.
    """
    from kvtune.engines.vllm.engine import VllmEngine
    from kvtune.errors import BadInput, EngineError

    arguments = {setting.name: setting.value for setting in config.settings}
    warning = ""
    try:
        with VllmEngine(python=engine_python) as engine:
            info = engine.describe()
            if problems := engine.check_arguments(arguments, config.model):
                raise BadInput(
                    f"vLLM {info.version} refuses these arguments: {'; '.join(problems)}",
                    fix="tune again with this version, or emit with --no-check",
                )
            if info.version != config.engine.version:
                warning = (
                    f"measured on {config.engine.version}, "
                    f"checked against the parser of {info.version}"
                )
    except EngineError as error:
        warning = f"the arguments were not checked against vLLM's parser: {error.message}"
    if not warning:
        return config
    return config.model_copy(update={"warnings": (*config.warnings, warning)})


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog=EPILOG)(emit)
