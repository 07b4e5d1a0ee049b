import subprocess
import sys

import pytest

pytest.importorskip("prometheus_client")

PROCESS = """
import pathlib, sys
from kvtune.engines.vllm.plugin import metrics_folder
metrics_folder._MEMORY = base = pathlib.Path(sys.argv[1])
from kvtune.engines.vllm.plugin.collector import expose
from kvtune.engines.vllm.plugin.counters import counters
import prometheus_client
expose()
expose()
before = prometheus_client.generate_latest().decode()
made = [*base.iterdir()]
counters().add("pages_read", 12)
after = prometheus_client.generate_latest().decode()
assert "kvtune" not in before and not made
print(*(line for line in after.splitlines() if line.startswith("kvtune")), sep="\\n")
"""


def test_the_page_of_a_process_shows_what_it_counts_once_and_nothing_before(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout == 'kvtune:pages_read_total{engine="0"} 12.0\n'
    assert [*tmp_path.iterdir()] == []
