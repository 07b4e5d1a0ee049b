"""Tells why vLLM would not start: what the plugin says of configurations that vLLM itself makes.

`servers` are [model configuration or None for `model`'s own, arguments of the engine], of which
none is started. Told is what each is refused with, None where it is served.
"""

import json
import tempfile
from pathlib import Path


def answers(model, asked, servers):
    from vllm.model_executor.models import registry

    # Each kind of model would be looked at in a process that imports all of vLLM anew.
    registry._run_in_subprocess = lambda look: look()
    return {"refused": [refusal(model, asked, *server) for server in servers]}


def refusal(model, asked, config, arguments):
    from vllm.engine.arg_utils import EngineArgs

    from kvtune.errors import BadInput

    with tempfile.TemporaryDirectory() as folder:
        if config is not None:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            model = folder
        given = {"dtype": "float32", "max_model_len": 512, "block_size": 32, **arguments}
        try:
            EngineArgs(
                model, additional_config={"kvtune": asked}, skip_tokenizer_init=True, **given
            ).create_engine_config()
        except BadInput as error:
            return error.message
    return None
