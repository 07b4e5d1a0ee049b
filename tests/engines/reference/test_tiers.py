"""Objects that leave the device come back bit by bit, or not at all."""

import hashlib
import resource

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.engines.reference.tiers import TierStore
from kvtune.errors import BadInput
from kvtune.policies.methods.tiers import Tiers

CPU = torch.device("cpu")


def block(seed, count=100):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, count, 4, generator=generator)
    return {
        "0.0.x": x,
        "0.1.half": x.bfloat16(),
        "1.0.codes": (x * 9).to(torch.uint8).mT,
        "1.1.float8": x.to(torch.float8_e4m3fn),
    }


SIZE = sum(x.numel() * x.element_size() for x in block(0).values())


def digest(tensors):
    found = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        found.update(f"{name}{x.dtype}{tuple(x.shape)}".encode())
        found.update(x.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@pytest.fixture
def make(tmp_path):
    def store(host_blocks=2, disk_blocks=3, **changes):
        return TierStore(
            Tiers(
                host_bytes=host_blocks * SIZE,
                disk_bytes=disk_blocks * SIZE,
                folder=str(tmp_path),
                **changes,
            ),
            CPU,
        )

    return store


def files(tmp_path):
    return [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_went_to_the_host_and_the_disk_comes_back_bit_by_bit(make, tmp_path):
    store = make()
    for number in range(5):
        assert store.put(str(number), block(number)) == "host"
    assert [store.tier_of(str(number)) for number in range(5)] == ["disk"] * 3 + ["host"] * 2
    assert (store.held_bytes("host"), store.held_bytes("disk")) == (2 * SIZE, 3 * SIZE)
    assert len(files(tmp_path)) == 3
    for number in range(5):
        assert digest(store.get(str(number))) == digest(block(number))


def test_the_tiers_own_copies(make):
    store = make()
    tensors = block(1)
    store.put("a", tensors)
    tensors["0.0.x"].zero_()
    store.get("a")["0.1.half"].zero_()
    assert digest(store.get("a")) == digest(block(1))


def test_what_leaves_a_full_disk_is_gone_with_its_file(make, tmp_path):
    store = make()
    for number in range(6):
        store.put(str(number), block(number))
    assert store.tier_of("0") is None
    assert store.get("0") is None
    assert len(files(tmp_path)) == 3


def test_without_a_disk_what_leaves_the_host_is_gone():
    store = TierStore(Tiers(host_bytes=SIZE), CPU)
    store.put("a", block(1))
    store.put("b", block(2))
    assert store.tier_of("a") is None
    assert store.put("large", block(3, 500)) is None


def test_an_object_larger_than_the_host_goes_to_the_disk(make):
    store = make(host_blocks=1)
    assert store.put("large", block(3, 250)) == "disk"
    assert digest(store.get("large")) == digest(block(3, 250))


@pytest.mark.parametrize("fault", ["missing", "altered", "cut short"])
def test_a_file_that_is_not_what_was_written_is_a_miss_with_a_warning(make, tmp_path, fault):
    store = make(host_blocks=0)
    store.put("a", block(1))
    (path,) = files(tmp_path)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    if fault == "missing":
        path.unlink()
    else:
        path.write_bytes(content if fault == "altered" else content[:-7])
    with pytest.warns(UserWarning, match="gone from the disk" if fault == "missing" else "altered"):
        assert store.get("a") is None
    assert store.tier_of("a") is None
    assert store.held_bytes("disk") == 0
    assert files(tmp_path) == []


def test_a_full_disk_loses_the_object_and_says_so(make, tmp_path):
    store = make(host_blocks=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, hard))
    try:
        with pytest.warns(UserWarning, match="cannot keep"):
            assert store.put("a", block(1)) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.get("a") is None
    assert files(tmp_path) == []
    assert store.put("b", block(2)) == "disk"


def test_files_vanish_with_the_store(make, tmp_path):
    store = make(host_blocks=0)
    store.put("a", block(1))
    del store
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(BadInput, match="disk tier"):
        TierStore(Tiers(disk_bytes=1, folder=str(tmp_path / "none")), CPU)


def test_links_are_measured(make, tmp_path):
    found = make().probe(1 << 16)
    assert set(found) == {"host", "disk"}
    assert all(speed > 0 for speed in found.values())
    assert files(tmp_path) == []
    assert set(TierStore(Tiers(), CPU).probe(1 << 16)) == {"host"}


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("pgd"), st.integers(0, 7)), max_size=40),
    st.sampled_from(["lru", "arc"]),
)
def test_tiers_never_overflow_and_never_mix_objects_up(steps, eviction):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        method = Tiers(host_bytes=2 * SIZE, disk_bytes=2 * SIZE, folder=folder, eviction=eviction)
        store = TierStore(method, CPU)
        for action, number in steps:
            key = str(number)
            if action == "p":
                assert store.put(key, block(number)) is not None
            elif action == "d":
                store.drop(key)
                assert store.tier_of(key) is None
            elif (found := store.get(key)) is not None:
                assert digest(found) == digest(block(number))
            assert store.held_bytes("host") <= 2 * SIZE
            assert store.held_bytes("disk") <= 2 * SIZE
        inside = sum(store.tier_of(str(number)) is not None for number in range(8))
        assert inside * SIZE == store.held_bytes("host") + store.held_bytes("disk")
        del store
