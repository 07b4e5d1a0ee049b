"""What a server may still take, by what a machine and its control groups say."""

from types import SimpleNamespace

import psutil
import pytest

from kvtune.engines.vllm.plugin.tiers import memory
from kvtune.errors import BadInput

FREE = 8_000_000


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A machine that has `FREE` bytes left."""
    machine = SimpleNamespace(available=FREE)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def version_2(folder, limit, used, cached):
    write(folder / "memory.max", limit)
    write(folder / "memory.current", used)
    write(folder / "memory.stat", f"anon 5\ninactive_file {cached}\nactive_file 7")


def test_without_control_groups_it_is_what_the_machine_has(root):
    assert memory.available_bytes(root) == FREE


def test_a_group_without_a_limit_takes_what_the_machine_has(root):
    write(root / "proc/self/cgroup", "0::/service")
    version_2(root / "sys/fs/cgroup/service", "max", 1_000_000, 0)
    assert memory.available_bytes(root) == FREE


def test_a_container_may_take_its_limit_and_what_caches_files_counts_as_free(root):
    write(root / "proc/self/cgroup", "0::/")
    version_2(root / "sys/fs/cgroup", 5_000_000, 4_500_000, 3_000_000)
    assert memory.available_bytes(root) == 3_500_000


@pytest.mark.parametrize("tight", ["", "slice", "slice/service"])
def test_the_tightest_of_the_groups_around_a_process_counts(root, tight):
    write(root / "proc/self/cgroup", "0::/slice/service")
    base = root / "sys/fs/cgroup"
    for group in ("", "slice", "slice/service"):
        version_2(base / group, 4_000_000 if group == tight else 6_000_000, 1_000_000, 0)
    assert memory.available_bytes(root) == 3_000_000


def test_version_1_is_read_from_the_group_that_a_container_sees(root):
    # The path is the host's, of which there is nothing within the container.
    write(root / "proc/self/cgroup", "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/")
    base = root / "sys/fs/cgroup/memory"
    write(base / "memory.limit_in_bytes", 2_000_000)
    write(base / "memory.usage_in_bytes", 1_500_000)
    write(base / "memory.stat", "cache 9\ntotal_inactive_file 400000")
    assert memory.available_bytes(root) == 900_000


def test_more_than_the_limit_may_be_used_already(root):
    write(root / "proc/self/cgroup", "0::/")
    version_2(root / "sys/fs/cgroup", 1_000_000, 1_200_000, 0)
    assert memory.available_bytes(root) == 0


def test_what_is_left_beside_the_cache_has_to_do(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    memory.check(1000)
    memory.check(400, cache_bytes=600)
    with pytest.raises(BadInput, match="take 401 bytes of memory, and the KV cache leaves 400"):
        memory.check(401, cache_bytes=600)
    with pytest.raises(BadInput, match="leaves 0"):
        memory.check(1, cache_bytes=1001)
