"""The worker's side on caches of its own: what comes back is what was kept, or nothing."""

import os
import threading
import time

import numpy as np
import psutil
import pytest
import torch

from kvtune.engines.vllm.plugin import counters
from kvtune.engines.vllm.plugin.tiers import files, memory, mover
from kvtune.engines.vllm.plugin.tiers.mover import Mover
from kvtune.engines.vllm.plugin.tiers.pages import Pages, host_rows
from kvtune.engines.vllm.plugin.tiers.placement import Load, Store
from kvtune.errors import BadInput

PAGES, LAYERS = 6, 3
PAGE_BYTES = 2 * 4 * 8 * 4
"""Of a layer: heads, tokens, channels, bytes of each."""
ROW_BYTES = LAYERS * PAGE_BYTES
NAMES = [f"0123456789abcdef-{number:064x}" for number in range(9)]


@pytest.fixture(autouse=True)
def figures(monkeypatch):
    counters.start_anew()
    monkeypatch.setattr(mover, "_said_s", {})
    return counters.counters()


@pytest.fixture
def caches():
    return [torch.randn(PAGES, 2, 4, 8) for _ in range(LAYERS)]


@pytest.fixture
def made(caches, tmp_path):
    made = Mover(Pages(caches, PAGES), slots=4, folder=tmp_path)
    yield made
    made.close()


def take(made, loads=0, writes=0):
    """Wait until so many ended."""
    loaded, written = [], []
    end_s = time.monotonic() + 30
    while len(loaded) < loads or len(written) < writes:
        assert time.monotonic() < end_s
        more_loaded, more_written = made.take()
        loaded += more_loaded
        written += more_written
    return loaded, written


def page(caches, block_id):
    return [cache[block_id].clone() for cache in caches]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_page_that_was_overwritten_comes_back_into_another_bit_by_bit(made, caches):
    caches[1][2, 0, 0, 0] = float("nan")
    kept = [cache[2].view(torch.uint8).clone() for cache in caches]
    made.store([Store(NAMES[0], 2, 1, writes_file=False)])
    for cache in caches:
        cache[2] = 0
    made.load("r", [Load(NAMES[0], 5, 1, reads_file=False)])
    ((loaded,), _) = take(made, loads=1)
    assert (loaded.request_id, loaded.lost) == ("r", ())
    assert same([cache[5].view(torch.uint8) for cache in caches], kept)


def test_only_the_page_that_was_asked_for_changes(made, caches):
    made.store([Store(NAMES[0], 2, 1, writes_file=False)])
    before = [page(caches, block_id) for block_id in range(PAGES)]
    made.load("r", [Load(NAMES[0], 5, 1, reads_file=False)])
    take(made, loads=1)
    assert all(same(page(caches, block_id), before[block_id]) for block_id in range(PAGES - 1))


def test_a_file_outlives_its_row_and_its_server(made, caches, tmp_path):
    kept = page(caches, 2)
    made.store([Store(NAMES[0], 2, 1, writes_file=True)])
    (_, (written,)) = take(made, writes=1)
    assert (written.name, written.is_there) == (NAMES[0], True)
    other = [torch.zeros_like(cache) for cache in caches]
    later = Mover(Pages(other, PAGES), slots=1, folder=tmp_path)
    later.load("r", [Load(NAMES[0], 4, 0, reads_file=True), Load(NAMES[0], 3, 0, reads_file=False)])
    take(later, loads=1)
    later.close()
    assert same(page(other, 4), kept)
    assert same(page(other, 3), kept)


def test_pages_without_a_slot_take_turns_and_none_is_mixed_up(made, caches, tmp_path):
    made.store([Store(NAMES[n], n, n, writes_file=True) for n in range(3)])
    take(made, writes=3)
    kept = [page(caches, n) for n in range(3)]
    made.load("r", [Load(NAMES[n], 3 + n, None, reads_file=True) for n in range(3)])
    take(made, loads=1)
    assert all(same(page(caches, 3 + n), kept[n]) for n in range(3))


def test_a_row_gives_out_nothing_under_another_name(made, caches):
    made.store([Store(NAMES[0], 2, 1, writes_file=False)])
    made.store([Store(NAMES[1], 3, 1, writes_file=False)])
    before = page(caches, 5)
    wanted = Load(NAMES[0], 5, 1, reads_file=False)
    made.load("r", [wanted])
    ((loaded,), _) = take(made, loads=1)
    assert loaded.lost == (wanted,)
    assert same(page(caches, 5), before)


def damage(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "break_file",
    [damage, lambda path: os.truncate(path, 60), lambda path: path.unlink()],
    ids=["damaged", "truncated", "gone"],
)
def test_a_page_whose_file_broke_is_lost_with_a_warning_and_the_others_come(
    made, caches, tmp_path, break_file, caplog, figures
):
    made.store([Store(NAMES[n], n, n, writes_file=True) for n in range(2)])
    take(made, writes=2)
    kept = page(caches, 1)
    break_file(files.path_of(tmp_path, NAMES[0]))
    loads = [Load(NAMES[n], 4 + n, 2 + n, reads_file=True) for n in range(2)]
    made.load("r", loads)
    # What was to be promoted is not there for the next request either.
    again = Load(NAMES[0], 3, 2, reads_file=False)
    made.load("s", [again])
    ((first, second), _) = take(made, loads=2)
    assert first.lost == (loads[0],)
    assert second.lost == (again,)
    assert same(page(caches, 5), kept)
    assert "could not be used" in caplog.text
    assert figures.get("tier_failures", tier="disk", direction="load") == 1


def test_a_full_disk_is_told_once_and_the_page_stays_in_host_memory(
    made, caches, monkeypatch, caplog, figures
):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    kept = page(caches, 1)
    made.store([Store(NAMES[n], n, n, writes_file=True) for n in range(3)])
    (_, written) = take(made, writes=3)
    assert [each.is_there for each in written] == [False] * 3
    assert caplog.text.count("No space left") == 1
    assert figures.get("tier_failures", tier="disk", direction="store") == 3
    made.load("r", [Load(NAMES[1], 5, 1, reads_file=False)])
    take(made, loads=1)
    assert same(page(caches, 5), kept)


def test_a_dropped_file_goes_after_it_was_written(made, tmp_path):
    made.store([Store(NAMES[0], 2, 1, writes_file=True)])
    made.drop([NAMES[0], NAMES[1]])
    made.close()
    assert files.kept(tmp_path) == []


def test_a_server_that_ends_does_not_wait_for_a_disk_that_hangs(
    made, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(mover, "CLOSE_S", 0.1)
    goes_on = threading.Event()
    write = files.write

    def hangs(*given):
        goes_on.wait(30)
        write(*given)

    monkeypatch.setattr(files, "write", hangs)
    made.store([Store(NAMES[n], n, n, writes_file=True) for n in range(4)])
    made.close()
    assert not goes_on.is_set()
    goes_on.set()
    assert "before 4 pages are on disk" in caplog.text
    end_s = time.monotonic() + 30
    while not files.path_of(tmp_path, NAMES[0]).exists():
        assert time.monotonic() < end_s
    assert [name for name, _ in files.kept(tmp_path)] == NAMES[:1]


def test_a_server_that_ends_writes_what_it_can(made, tmp_path):
    made.store([Store(NAMES[n], n, n, writes_file=True) for n in range(4)])
    made.close()
    assert sorted(name for name, _ in files.kept(tmp_path)) == NAMES[:4]


def test_host_memory_is_taken_at_the_start():
    """Of what is only promised, nothing would be resident."""
    before = psutil.Process().memory_info().rss
    rows = host_rows(64, 1 << 20)
    assert psutil.Process().memory_info().rss - before > 60 << 20
    assert rows.shape == (64, 1 << 20)


def test_host_memory_that_is_not_there_is_refused_with_the_numbers(caches, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 5 * ROW_BYTES - 1)
    pages = Pages(caches, PAGES)
    with pytest.raises(BadInput, match=f"take {5 * ROW_BYTES} bytes .* {5 * ROW_BYTES - 1}"):
        Mover(pages, slots=4, folder=tmp_path)
    Mover(pages, slots=3, folder=tmp_path).close()


def test_bytes_and_seconds_of_each_tier_and_direction_are_counted(made, figures):
    made.store([Store(NAMES[n], n, n, writes_file=n > 0) for n in range(3)])
    take(made, writes=2)
    made.load("r", [Load(NAMES[0], 3, 0, reads_file=False), Load(NAMES[1], 4, 3, reads_file=True)])
    take(made, loads=1)
    rows = {("host", "store"): 3, ("disk", "store"): 2, ("host", "load"): 2, ("disk", "load"): 1}
    for (tier, direction), moved in rows.items():
        labels = {"tier": tier, "direction": direction}
        assert figures.get("tier_bytes", **labels) == moved * ROW_BYTES
        assert figures.get("tier_seconds", **labels) > 0


def test_caches_of_finer_blocks_are_moved_by_whole_pages():
    fine = [torch.randn(8, 1, 2, 4)]
    pages = Pages(fine, num_blocks=4)
    row = np.zeros(pages.row_bytes, dtype=np.uint8)
    kept = fine[0][4:6].clone()
    pages.to_row(2, row)
    pages.from_row(row, 3)
    assert torch.equal(fine[0][6:], kept)


def test_layers_that_lie_between_each_others_pages_are_kept_apart():
    packed = torch.randn(PAGES, LAYERS, 2, 4, 8)
    caches = [packed[:, layer] for layer in range(LAYERS)]
    pages = Pages(caches, PAGES)
    row = np.zeros(pages.row_bytes, dtype=np.uint8)
    expected = packed.clone()
    expected[5] = expected[2]
    pages.to_row(2, row)
    pages.from_row(row, 5)
    assert torch.equal(packed, expected)


def test_pages_whose_bytes_are_apart_are_refused():
    apart = torch.randn(2, PAGES, 4, 8).transpose(0, 1)
    with pytest.raises(BadInput, match="apart"):
        Pages([apart], PAGES)
