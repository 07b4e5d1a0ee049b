"""The engine process's side: which pages a step keeps and brings back."""

import logging

import pytest

from kvtune.engines.vllm.plugin import counters
from kvtune.engines.vllm.plugin.tiers import files
from kvtune.engines.vllm.plugin.tiers import planner as under_test
from kvtune.engines.vllm.plugin.tiers.planner import Planner
from kvtune.errors import BadInput
from kvtune.policies.plugin_config import TiersConfig

ROW_BYTES = 1000
HASHES = [bytes([number]) * 32 for number in range(9)]
IDENTITY = "0123456789abcdef"


@pytest.fixture(autouse=True)
def figures():
    counters.start_anew()
    return counters.counters()


def planner(host_pages=4, disk_pages=0, folder="", identity=IDENTITY):
    disk_bytes = disk_pages * files.file_bytes(ROW_BYTES)
    asked = TiersConfig(
        host_bytes=host_pages * ROW_BYTES + 999, disk_bytes=disk_bytes, disk_path=str(folder)
    )
    return Planner(asked, identity, block_tokens=32, row_bytes=ROW_BYTES)


def keep(plans, *numbers):
    return plans.step([(HASHES[number], 10 + number) for number in numbers])


def test_what_a_step_computes_is_kept_and_a_later_prompt_loads_it():
    plans = planner()
    stores = keep(plans, 0, 1).stores
    assert [(store.block_id, store.name[-2:]) for store in stores] == [(10, "00"), (11, "01")]
    assert plans.loadable_tokens(HASHES[:3]) == 64
    plans.load("r", HASHES[:2], [5, 6])
    assert plans.tokens_by_tier("r") == {"host": 64}
    loads = keep(plans).loads["r"]
    assert [(load.slot, load.block_id) for load in loads] == [
        (stores[0].slot, 5),
        (stores[1].slot, 6),
    ]
    assert keep(plans).loads == {}


def test_no_two_pages_of_a_step_go_to_one_slot():
    plans = planner(host_pages=2)
    stores = keep(plans, 0, 1, 2, 3, 4).stores
    assert len({store.slot for store in stores}) == len(stores) == 2
    assert {store.block_id for store in stores} == {13, 14}
    assert plans.loadable_tokens(HASHES[3:5]) == 64
    assert plans.loadable_tokens(HASHES[:3]) == 0


def test_tokens_are_told_by_the_tier_they_come_from(tmp_path):
    plans = planner(1, 4, tmp_path)
    for number in (0, 1):
        (store,) = keep(plans, number).stores
        plans.written(store.name, is_there=True)
    plans.load("r", HASHES[:2], [5, 6])
    assert plans.tokens_by_tier("r") == {"disk": 32, "host": 32}
    plans.loaded("r", [])
    assert plans.tokens_by_tier("r") == {}


def test_pages_of_another_model_are_not_found_and_give_way(tmp_path):
    ours = planner(1, 2, tmp_path)
    files.write(tmp_path, ours.name(HASHES[0]), memoryview(bytes(ROW_BYTES)))
    ours.close()
    others = planner(1, 1, tmp_path, identity="f" * 16)
    assert others.loadable_tokens(HASHES[:1]) == 0
    step = keep(others, 0)
    assert [store.writes_file for store in step.stores] == [True]
    assert step.dropped == [ours.name(HASHES[0])]


def test_a_server_that_starts_again_finds_its_files(tmp_path):
    before = planner(1, 2, tmp_path)
    files.write(tmp_path, before.name(HASHES[0]), memoryview(bytes(ROW_BYTES)))
    before.close()
    assert planner(1, 2, tmp_path).loadable_tokens(HASHES[:1]) == 32


def test_two_servers_do_not_share_a_folder(tmp_path, caplog):
    first = planner(1, 2, tmp_path)
    with caplog.at_level(logging.WARNING):
        second = planner(1, 2, tmp_path)
    assert "Another server" in caplog.text
    (store,) = keep(second, 0).stores
    assert not store.writes_file
    first.close()


@pytest.mark.parametrize("asks_first", ["a prompt", "a step"])
def test_a_server_takes_over_when_the_one_that_had_the_folder_ends(
    tmp_path, monkeypatch, asks_first
):
    monkeypatch.setattr(under_test, "ASK_AGAIN_S", 0)
    first, second = planner(1, 2, tmp_path), planner(1, 2, tmp_path)
    assert second.loadable_tokens(HASHES[:1]) == 0
    files.write(tmp_path, first.name(HASHES[0]), memoryview(bytes(ROW_BYTES)))
    first.close()
    if asks_first == "a step":
        (store,) = keep(second, 1).stores
        assert store.writes_file
    assert second.loadable_tokens(HASHES[:1]) == 32
    third = planner(1, 2, tmp_path)
    assert third.loadable_tokens(HASHES[:1]) == 0
    second.close()


def test_a_folder_that_broke_meanwhile_costs_a_warning_and_no_server(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(under_test, "ASK_AGAIN_S", 0)
    folder = tmp_path / "pages"
    folder.mkdir()
    first, second = planner(1, 2, folder), planner(1, 2, folder)
    first.close()
    (folder / "lock").unlink()
    folder.rmdir()
    (store,) = keep(second, 0).stores
    assert not store.writes_file
    assert second.loadable_tokens(HASHES[:1]) == 32
    assert caplog.text.count("cannot be used") == 1


def test_a_folder_that_cannot_be_listed_is_left_to_others(tmp_path, monkeypatch):
    monkeypatch.setattr(under_test, "ASK_AGAIN_S", 0)
    first, second = planner(1, 2, tmp_path), planner(1, 2, tmp_path)
    first.close()
    with monkeypatch.context() as broken:
        broken.setattr(under_test.files, "kept", lambda folder: (folder / "nothing").stat())
        keep(second, 0)
    (store,) = keep(planner(1, 2, tmp_path), 0).stores
    assert store.writes_file


def test_a_server_that_ended_takes_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(under_test, "ASK_AGAIN_S", 0)
    first, second = planner(1, 2, tmp_path), planner(1, 2, tmp_path)
    second.close()
    first.close()
    keep(second, 0)
    assert planner(1, 2, tmp_path, identity="f" * 16).step([(HASHES[0], 1)]).stores[0].writes_file


def test_what_is_lost_is_not_promised_again():
    plans = planner()
    keep(plans, 0, 1)
    plans.load("r", HASHES[:2], [5, 6])
    plans.loaded("r", [plans.name(HASHES[0])])
    assert plans.loadable_tokens(HASHES[:2]) == 0
    assert plans.loadable_tokens(HASHES[1:2]) == 32


def test_a_reset_forgets_pages_on_disk_too(tmp_path):
    plans = planner(2, 4, tmp_path)
    (store,) = keep(plans, 0).stores
    files.write(tmp_path, store.name, memoryview(bytes(ROW_BYTES)))
    plans.written(store.name, is_there=True)
    plans.forget()
    assert plans.loadable_tokens(HASHES[:1]) == 0
    assert files.kept(tmp_path) == []


def test_what_a_reset_cannot_remove_is_left_to_the_worker(tmp_path):
    plans = planner(2, 4, tmp_path)
    (store,) = keep(plans, 0).stores
    files.path_of(tmp_path, store.name).mkdir(parents=True)
    plans.written(store.name, is_there=True)
    plans.forget()
    assert keep(plans).dropped == [store.name]


def test_a_page_that_is_being_written_at_a_reset_is_removed_with_a_later_step(tmp_path):
    plans = planner(2, 4, tmp_path)
    (store,) = keep(plans, 0).stores
    plans.forget()
    assert keep(plans).dropped == []
    plans.written(store.name, is_there=True)
    assert keep(plans).dropped == [store.name]


def test_what_is_kept_after_a_reset_is_for_no_later_server(tmp_path):
    plans = planner(2, 4, tmp_path)
    plans.forget()
    (store,) = keep(plans, 0).stores
    plans.written(store.name, is_there=True)
    files.write(tmp_path, store.name, memoryview(bytes(ROW_BYTES)))
    assert plans.loadable_tokens(HASHES[:1]) == 32
    plans.close()
    later = planner(2, 4, tmp_path)
    assert later.loadable_tokens(HASHES[:1]) == 0
    # It still counts, and leaves when there is need of room.
    keep(later)
    assert counters.counters().get("tier_held_bytes", tier="disk") == files.file_bytes(ROW_BYTES)


def test_how_much_is_kept_is_told(tmp_path, figures):
    plans = planner(2, 4, tmp_path)
    keep(plans, 0)
    assert figures.get("tier_held_bytes", tier="host") == ROW_BYTES
    assert figures.get("tier_held_bytes", tier="disk") == files.file_bytes(ROW_BYTES)


def test_pages_for_which_there_is_no_room_are_counted(tmp_path, figures):
    plans = planner(1, 4, tmp_path)
    keep(plans, 0, 1, 2)
    # The one slot is being written to disk.
    assert figures.get("tier_failures", tier="host", direction="store") == 2


def test_host_memory_for_less_than_a_page_is_refused():
    with pytest.raises(BadInput, match="hold no page") as refused:
        planner(host_pages=0)
    assert "1000" in refused.value.fix
