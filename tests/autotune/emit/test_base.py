import subprocess
import sys

from contracts.emitter_samples import (
    REALISTIC_REVERT,
    REALISTIC_WORDS,
    cpu_config,
    realistic_config,
)

from kvtune.autotune.emit.base import Emitter, emitters, revert_command, serve_argv


def test_finds_all_formats():
    assert {"vllm-yaml", "shell", "compose", "kubernetes", "helm-production-stack"} <= set(
        emitters()
    )
    assert all(issubclass(emitter, Emitter) for emitter in emitters().values())


def test_no_two_formats_share_a_file_name():
    names = [name for emitter in emitters().values() for name in emitter().render(cpu_config())]
    assert len(names) == len(set(names))


def test_words_are_the_model_the_name_and_the_settings():
    assert serve_argv(realistic_config()) == REALISTIC_WORDS


def test_served_name_and_model_of_the_config_win_over_settings():
    config = realistic_config()
    extra = (
        config.settings[0].model_copy(update={"name": "model", "value": "other"}),
        config.settings[0].model_copy(update={"name": "served-model-name", "value": "other"}),
    )
    words = serve_argv(config.model_copy(update={"settings": extra}))
    assert words == ["meta-llama/Llama-3.1-8B-Instruct", "--served-model-name", "chat"]


def test_revert_command_is_one_line_for_a_shell():
    assert revert_command(realistic_config()) == REALISTIC_REVERT


def test_emitting_imports_nothing_heavy():
    code = (
        "import sys, kvtune.autotune.emit.base as b; b.emitters();"
        "print(*{'torch', 'vllm', 'optuna', 'numpy', 'sqlalchemy', 'yaml'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
