"""Ask the installed vLLM's own parser about command lines.

Run by path under the engine's interpreter: reads a JSON list of argument lists from standard
input and prints `{"options": [...], "problems": [...]}`, the problem of each list being a message
or null. The warm parent loads this file by path too. Standard library and vLLM only.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import Any


def _parser() -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser(prog="vllm"))


def _problem(parser: Any, arguments: list[str]) -> str | None:
    """What the parser, or the engine's own check of the values, says against `arguments`."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            AsyncEngineArgs.from_cli_args(parser.parse_args(arguments))
    except SystemExit:
        return said.getvalue().rpartition("error: ")[2].strip() or "refused without a message"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def check(argument_lists: list[list[str]]) -> dict[str, Any]:
    """Return the option names that the parser knows and what it says to each list."""
    parser = _parser()
    options = sorted(
        option
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    )
    return {
        "options": options,
        "problems": [_problem(parser, arguments) for arguments in argument_lists],
    }


if __name__ == "__main__":
    # This folder's modules are not meant to be importable by name from here.
    sys.path.pop(0)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is not part of the answer
    answer.write(json.dumps(check(json.load(sys.stdin))) + "\n")
    answer.flush()
