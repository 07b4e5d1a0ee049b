"""Where pages are kept and who leaves: what is asked for is there, and what is in use stays."""

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtune.engines.vllm.plugin.tiers.placement import Load, Placement, Store

NAMES = [f"page-{number}" for number in range(9)]


def placement(slots, disk_bytes, file_bytes, on_disk=()):
    """With a disk from the start."""
    places = Placement(slots)
    places.use_disk(disk_bytes, file_bytes, on_disk)
    return places


def keep(places, name, block_id=0):
    """Store a page and have its file written."""
    store = places.store(name, block_id)
    if store is not None and store.writes_file:
        places.written(name, is_there=True)
    return store


def test_a_kept_page_is_found_in_host_memory_and_loaded_from_its_slot():
    places = Placement(slots=2)
    store = keep(places, "a", 7)
    assert store == Store("a", 7, store.slot, writes_file=False)
    assert places.found(["a", "b"]) == ["host"]
    assert places.load(["a"], [4]) == [Load("a", 4, store.slot, reads_file=False)]


def test_found_ends_at_the_first_page_that_is_nowhere():
    places = Placement(slots=3)
    for name in "ac":
        keep(places, name)
    assert places.found(["a", "b", "c"]) == ["host"]


def test_a_kept_page_is_not_kept_twice():
    places = Placement(slots=2)
    keep(places, "a")
    assert places.store("a", 3) is None
    assert places.take_skipped() == 0


def test_the_least_recently_used_page_leaves_and_its_file_stays():
    places = placement(2, disk_bytes=100, file_bytes=10)
    for name in "ab":
        keep(places, name)
    keep(places, "a")
    keep(places, "c")
    assert places.found(["a"]) == places.found(["c"]) == ["host"]
    assert places.found(["b"]) == ["disk"]


def test_a_full_disk_tier_drops_the_file_that_was_used_longest_ago():
    places = placement(1, disk_bytes=25, file_bytes=10)
    for name in "abc":
        keep(places, name)
    assert places.take_dropped() == ["a"]
    assert places.take_dropped() == []
    assert places.found(["b"]) == ["disk"]


def test_files_of_an_earlier_server_count_and_leave_first():
    places = placement(1, 30, 10, on_disk=[("old", 15), ("older-format", 12)])
    assert places.found(["old"]) == ["disk"]
    keep(places, "a")
    assert places.take_dropped() == ["old"]


def test_a_disk_that_is_there_later_is_used_from_then_on():
    places = Placement(1)
    assert keep(places, "a") == Store("a", 0, 0, writes_file=False)
    places.use_disk(30, 10, [("old", 10)])
    assert places.found(["old"]) == ["disk"]
    assert keep(places, "b") == Store("b", 0, 0, writes_file=True)
    assert places.found(["b"]) == ["host"]


def test_more_files_than_may_be_are_dropped_at_the_start():
    places = placement(1, 20, 10, on_disk=[("oldest", 10), ("old", 10), ("new", 10), ("huge", 99)])
    assert places.take_dropped() == ["oldest", "huge"]


def test_a_page_from_disk_is_promoted_and_holds_both_places_until_it_is_there():
    places = placement(1, 20, 10, on_disk=[("a", 10)])
    (load,) = places.load(["a"], [5])
    assert load == Load("a", 5, load.slot, reads_file=True)
    assert load.slot is not None
    assert places.store("b", 1) is None, "its slot is being filled"
    assert places.take_skipped() == 1
    assert places.take_skipped() == 0
    places.loaded([load], [])
    assert places.found(["a"]) == ["host"]
    assert keep(places, "b").slot == load.slot
    assert places.found(["a"]) == ["disk"]


def test_with_no_slot_to_spare_a_page_comes_from_disk_all_the_same():
    places = placement(1, 40, 10, on_disk=[("a", 10), ("b", 10)])
    first, second = places.load(["a", "b"], [1, 2])
    assert first.slot is not None
    assert second == Load("b", 2, None, reads_file=True)
    places.loaded([first, second], [])
    assert keep(places, "c") is not None
    assert keep(places, "d") is not None


def test_promoted_pages_push_none_out_that_is_loaded_with_them():
    places = placement(1, 40, 10, on_disk=[("b", 10)])
    keep(places, "a")
    assert [load.name for load in places.load(["a", "b"], [1, 2])] == ["a", "b"]
    assert places.found(["a"]) == ["host"]


def test_a_page_that_is_being_written_keeps_its_slot():
    places = placement(1, 40, 10)
    assert places.store("a", 1).writes_file
    assert places.store("b", 2) is None
    places.written("a", is_there=True)
    assert places.store("b", 2) is not None


def test_a_file_that_could_not_be_written_is_not_there():
    places = placement(1, 40, 10)
    places.store("a", 1)
    places.written("a", is_there=False)
    assert places.found(["a"]) == ["host"]
    keep(places, "b")
    assert places.found(["a"]) == []
    assert places.disk.used == 10


def test_a_lost_page_is_nowhere_and_its_file_goes():
    places = placement(1, 40, 10, on_disk=[("a", 10)])
    loads = places.load(["a"], [5])
    places.loaded(loads, ["a"])
    assert places.found(["a"]) == []
    assert places.take_dropped() == ["a"]
    assert keep(places, "a") is not None


def test_the_slot_of_a_lost_page_is_free_only_when_nobody_reads_it_any_more():
    places = Placement(1)
    keep(places, "a")
    first, second = places.load(["a"], [1]), places.load(["a"], [2])
    places.loaded(first, ["a"])
    assert places.found(["a"]) == []
    assert places.store("b", 3) is None
    places.loaded(second, [])
    assert places.store("b", 3) is not None


def test_to_forget_takes_all_of_one_server_and_what_moves_once_it_ended():
    places = placement(2, 40, 10, on_disk=[("mine-1", 10), ("other-1", 10)])
    store = places.store("mine-2", 1)
    places.forget("mine-")
    assert places.found(["mine-1"]) == places.found(["mine-2"]) == []
    assert places.take_dropped() == ["mine-1"]
    assert places.store("mine-2", 1) is None, "other content is on its way under this name"
    places.written(store.name, is_there=True)
    assert places.take_dropped() == ["mine-2"]
    assert places.found(["other-1"]) == ["disk"]
    assert keep(places, "mine-2") is not None


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.lists(st.sampled_from(NAMES), max_size=40))
def test_host_memory_alone_is_lru(slots, order):
    places, model = Placement(slots), OrderedDict()
    for name in order:
        keep(places, name)
        model[name] = None
        model.move_to_end(name)
        if len(model) > slots:
            model.popitem(last=False)
        assert {each for each in NAMES if places.found([each])} == set(model)


class Moves(RuleBasedStateMachine):
    """Any order of plans and ends, some of which fail. Rows and files are simulated as a worker
    would have them, so that a slot that is given away too early is seen as other content."""

    def __init__(self):
        super().__init__()
        self.places = placement(3, disk_bytes=45, file_bytes=10)
        self.rows, self.files = {}, set()
        self.loading, self.writing = [], []

    @rule(name=st.sampled_from(NAMES))
    def store(self, name):
        store = self.places.store(name, 0)
        if store is not None:
            busy = {load.slot for loads in self.loading for load in loads}
            busy |= {each.slot for each in self.writing}
            assert store.slot not in busy
            self.rows[store.slot] = name
            if store.writes_file:
                self.writing.append(store)
        self.drop()

    @rule(prefix=st.sampled_from(["page", "page-3"]))
    def forget(self, prefix):
        self.places.forget(prefix)
        assert self.places.found(["page-3"]) == []
        self.drop()

    @rule(names=st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
    def load(self, names):
        found = self.places.found(names)
        if found:
            self.loading.append(self.places.load(names[: len(found)], range(len(found))))

    @precondition(lambda self: self.writing)
    @rule(works=st.booleans())
    def write(self, works):
        store = self.writing.pop(0)
        assert self.rows[store.slot] == store.name
        if works:
            self.files.add(store.name)
        self.places.written(store.name, is_there=works)
        self.drop()

    @precondition(lambda self: self.loading)
    @rule(breaks=st.sets(st.sampled_from(NAMES)))
    def end_load(self, breaks):
        loads = self.loading.pop(0)
        lost = []
        for load in loads:
            if load.reads_file:
                assert load.name in self.files
                works = load.name not in breaks
                if load.slot is not None:
                    self.rows[load.slot] = load.name if works else None
            else:
                # Of an earlier load of the page the file may have been damaged.
                works = self.rows[load.slot] == load.name
                assert works or self.rows[load.slot] is None
            if not works:
                lost.append(load.name)
        self.places.loaded(loads, lost)
        self.drop()

    def drop(self):
        self.files -= set(self.places.take_dropped())

    @invariant()
    def tiers_keep_their_bounds(self):
        assert self.places.host.used <= 3
        assert self.places.disk.used <= 45

    @invariant()
    def when_nothing_moves_all_that_is_found_is_there(self):
        if self.loading or self.writing:
            return
        for name in NAMES:
            where = self.places.found([name])
            if where == ["host"]:
                assert name in self.rows.values()
            assert where != ["disk"] or name in self.files
        assert self.places.disk.used == 10 * len(self.files)

    def teardown(self):
        while self.loading:
            self.end_load(set())
        while self.writing:
            self.write(True)
        fresh = [self.places.store(f"fresh-{number}", 0) for number in range(3)]
        assert None not in fresh, "something that ended is still held"
        assert {store.slot for store in fresh} == {0, 1, 2}


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=150, deadline=None)
