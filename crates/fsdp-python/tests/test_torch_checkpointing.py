"""The storage for torch_checkpointing: what it keeps of a crash, and what it finds of damage."""

import array
import io
import multiprocessing
import os
import pickle
from pathlib import Path

import fsdp_checkpoint as fc
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_checkpointing")

import ranks  # noqa: E402
from fsdp_checkpoint import torch_checkpointing as ours  # noqa: E402
from torch_checkpointing import CheckpointManager, ItemSpec  # noqa: E402
from torch_checkpointing.checkpoint_layout import JsonSerialization, LayoutInfo, RawSerialization  # noqa: E402
from torch_checkpointing.config import SyncCheckpointSaverConfig  # noqa: E402
from torch_checkpointing.default_resharder import DefaultResharder  # noqa: E402
from torch_checkpointing.storage.base_storage import ReadArgs  # noqa: E402

STREAM = ReadArgs(pre_read_full_file=False)


@pytest.fixture
def storage():
    return ours.StorageConfig().create_storage()


def manager(**options):
    config = {"save": SyncCheckpointSaverConfig(), "storage_config": ours.StorageConfig()} | options
    return CheckpointManager(CheckpointManager.Config(**config))


def state(value=1.0):
    return {"model": {"w": torch.full((1000, 300), value), "b": torch.arange(7.0)}, "step": 5}


def flip(path, at=-200):
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_checkpoint_has_the_hashes_of_all_its_files_and_loads(tmp_path):
    made = manager()
    made.save(str(tmp_path / "step_5"), state())
    assert sorted(os.listdir(tmp_path)) == ["step_5"]
    assert sorted(os.listdir(tmp_path / "step_5")) == [".integrity", "model_0.pt", "step_0.pt"]
    loaded = made.load(str(tmp_path / "step_5"), into={"model": {"w": torch.zeros(1000, 300), "b": torch.zeros(7)}, "step": 0})
    assert torch.equal(loaded["model"]["w"], state()["model"]["w"]) and loaded["step"] == 5
    made.close()
    # The library's own storage reads it too.
    own = CheckpointManager(CheckpointManager.Config(save=SyncCheckpointSaverConfig()))
    assert own.load(str(tmp_path / "step_5"), into={"step": 0})["step"] == 5
    own.close()


def test_verify_checks_the_hashes(tmp_path):
    made = manager(items={"model": ItemSpec(resharder=DefaultResharder())})
    made.save(str(tmp_path / "a"), state())
    made.close()
    report = fc.verify(tmp_path / "a")
    assert report["ok"] and report["hashed"]
    assert fc.load(tmp_path / "a", "*step")["step"] == 5
    flip(tmp_path / "a" / "model_0.pt")
    assert not fc.verify(tmp_path / "a")["ok"]


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("damage", ["bit", "end", "longer"])
def test_damage_is_found_when_the_file_is_read(tmp_path, damage, use_mmap):
    from torch_checkpointing.config import CheckpointLoaderConfig

    made = manager(load=CheckpointLoaderConfig(use_mmap=use_mmap))
    made.save(str(tmp_path / "step_5"), state())
    file = tmp_path / "step_5" / "model_0.pt"
    if damage == "bit":
        flip(file, 5000)
    else:
        file.write_bytes(file.read_bytes()[:-1] if damage == "end" else file.read_bytes() + b"\0")
    with pytest.raises(fc.CorruptError, match="model_0.pt"):
        made.load(str(tmp_path / "step_5"), into={"model": state(0.0)["model"]})
    # What is whole loads.
    assert made.load(str(tmp_path / "step_5"), into={"step": 0})["step"] == 5
    made.close()


def test_items_of_all_kinds_and_with_names_of_their_own(tmp_path):
    items = {
        "config": ItemSpec(layout=LayoutInfo(serialization_format=JsonSerialization(), file_path="meta/config.json")),
        "blob": ItemSpec(layout=LayoutInfo(serialization_format=RawSerialization(), file_path="deep/er/blob.bin")),
    }
    made = manager(items=items)
    saved = {"config": {"lr": 0.1}, "blob": b"\x00\xff" * 9, "model": {"w": torch.ones(3)}}
    made.save(str(tmp_path / "a"), saved)
    loaded = made.load(str(tmp_path / "a"), into={"config": {"lr": 0.0}, "blob": b"", "model": {"w": torch.zeros(3)}})
    assert loaded["config"] == {"lr": 0.1} and loaded["blob"] == saved["blob"] and loaded["model"]["w"].tolist() == [1] * 3
    flip(tmp_path / "a" / "deep" / "er" / "blob.bin", 3)
    with pytest.raises(fc.CorruptError, match="deep/er/blob.bin"):
        made.load(str(tmp_path / "a"), into={"config": {}, "blob": b""})
    made.close()


def save_in_background(place):
    made = CheckpointManager(CheckpointManager.Config(storage_config=ours.StorageConfig()))
    for step in (1, 2):
        made.save(os.path.join(place, f"step_{step}"), state(float(step))).result()
    made.close()


def test_a_save_in_the_background_is_the_same(tmp_path):
    # The library starts processes of its own, which must not begin as this one has.
    process = multiprocessing.get_context("spawn").Process(target=save_in_background, args=(str(tmp_path),))
    process.start()
    process.join(240)
    assert process.exitcode == 0
    made = manager()
    for step in (1, 2):
        assert ".integrity" in os.listdir(tmp_path / f"step_{step}")
        loaded = made.load(str(tmp_path / f"step_{step}"), into={"model": state(0.0)["model"]})
        assert loaded["model"]["w"].unique().tolist() == [step]
    made.close()


def save_on_a_rank(rank, store, place):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    made = manager()
    made.save(os.path.join(place, "step_1"), {"model": {"w": torch.full((50,), float(rank))}})
    made.close()
    torch.distributed.destroy_process_group()


def test_the_hashes_of_all_ranks_are_in_one_file(tmp_path, storage):
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([ranks.__name__])
    started = [processes.Process(target=save_on_a_rank, args=(rank, tmp_path / "store", str(tmp_path))) for rank in (0, 1)]
    for process in started:
        process.start()
    for process in started:
        process.join(240)
    assert [process.exitcode for process in started] == [0, 0]
    place = tmp_path / "step_1"
    assert sorted(os.listdir(place)) == [".integrity", "model_0.pt", "model_1.pt"]
    for name in ("model_0.pt", "model_1.pt"):
        assert torch.load(io.BytesIO(storage.read(place / name)))["w"].tolist() == [float(name[6])] * 50
        flip(place / name)
        with pytest.raises(fc.CorruptError, match=name):
            storage.read(place / name)


def test_everything_is_durable_before_the_rename_and_the_name_after_it(tmp_path, storage, monkeypatch):
    synced = []
    real_sync, real_rename = ours._sync_open, os.rename

    def sync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_sync(descriptor)

    def rename(source, destination):
        synced.append("rename")
        real_rename(source, destination)

    if not os.path.exists("/proc/self/fd"):
        pytest.skip("needs Linux")
    monkeypatch.setattr(ours, "_sync_open", sync)
    monkeypatch.setattr(os, "rename", rename)
    staged = tmp_path / "run" / "tmp_a"
    storage.mkdir(staged / "sub")
    storage.write(staged / "one", b"1")
    with storage.stream_write(staged / "sub" / "two") as stream:
        stream.write(b"2")
    (staged / "foreign").write_bytes(b"3")
    storage.rename(staged, tmp_path / "run" / "a", is_directory=True)
    before, after = synced[: synced.index("rename")], synced[synced.index("rename") + 1 :]
    names = ["one", "sub/two", "foreign", ".integrity"]
    assert {str(staged / name) for name in names} <= set(before)
    assert before[-2:] == [str(staged / "sub"), str(staged)]
    # The directories that were made are names in others.
    assert {str(tmp_path), str(tmp_path / "run"), str(staged)} <= set(before)
    assert after == [str(tmp_path / "run")]


def test_a_write_that_fails_leaves_no_hashes(tmp_path, storage):
    storage.write(tmp_path / "a", b"whole")
    with pytest.raises(RuntimeError, match="halfway"), storage.stream_write(tmp_path / "a") as stream:
        stream.write(b"par")
        raise RuntimeError("halfway")
    assert os.listdir(tmp_path) == ["a"]
    assert storage.read(tmp_path / "a") == b"par"


def test_what_is_written_in_place_is_checked_too(tmp_path, storage):
    storage.write(tmp_path / "a", b"x" * 1000)
    assert storage.ls(tmp_path) == ["a"] and storage.glob(f"{tmp_path}/*") == [str(tmp_path / "a")]
    assert storage.read(tmp_path / "a") == b"x" * 1000
    assert fc._native.HashedFiles(str(tmp_path), "a").file("a").size == 1000
    flip(tmp_path / "a")
    with pytest.raises(fc.CorruptError, match="a"):
        storage.read(tmp_path / "a")
    storage.write(tmp_path / "a", b"again")
    assert storage.read(tmp_path / "a") == b"again"
    storage.delete(tmp_path / "a")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("pieces", [[], [0], [5, 0, 7], [1 << 20] * 40, [100 << 20], [(32 << 20) - 1, 1, 1]])
def test_pieces_of_any_length_give_the_hashes_of_the_file(tmp_path, storage, pieces):
    data = os.urandom(sum(pieces))
    with storage.stream_write(tmp_path / "a") as stream:
        start = 0
        for length in pieces:
            assert stream.write(memoryview(data)[start : start + length]) == length
            start += length
    assert storage.read(tmp_path / "a") == data
    with storage.stream_read(tmp_path / "a", STREAM) as stream:
        assert stream.seek(len(data) // 2) == len(data) // 2
        assert stream.read(10) == data[len(data) // 2 :][:10]
        assert stream.seek(-min(3, len(data)), io.SEEK_END) == max(len(data) - 3, 0)
        assert stream.read() == data[-3:] and stream.read(1) == b"" and stream.tell() == len(data)
    assert storage.getsize(tmp_path / "a") == len(data)


def test_what_has_a_buffer_can_be_written(tmp_path, storage):
    numpy = pytest.importorskip("numpy")
    parts = [b"bytes", bytearray(b"more"), numpy.arange(12, dtype=numpy.int16).reshape(3, 4), array.array("d", [1.5])]
    with storage.stream_write(tmp_path / "a") as stream:
        for part in parts:
            stream.write(part)
    assert storage.read(tmp_path / "a") == b"".join(bytes(memoryview(part).cast("B")) for part in parts)


@pytest.mark.parametrize("source", ["file", "directory"])
@pytest.mark.parametrize("destination", ["absent", "file", "empty", "populated"])
def test_a_rename_takes_free_places_only(tmp_path, storage, source, destination):
    """The table in the library's documentation of `Storage.rename`."""
    start, end = tmp_path / "start", tmp_path / "end"
    if source == "file":
        storage.write(start, b"new")
    else:
        storage.mkdir(start)
        storage.write(start / "a", b"new")
    if destination == "file":
        storage.write(end, b"old")
    elif destination != "absent":
        storage.mkdir(end)
        if destination == "populated":
            (end / "old").write_bytes(b"old")
    allowed = destination in ("absent", "file" if source == "file" else "empty")
    if not allowed:
        with pytest.raises(OSError, match="end.*something else is"):
            storage.rename(start, end, is_directory=source == "directory")
        assert storage.read(start if source == "file" else start / "a") == b"new"
        left = {"file": lambda: end.read_bytes() == b"old", "populated": lambda: os.listdir(end) == ["old"]}
        assert left.get(destination, lambda: os.listdir(end) == [])()
        return
    storage.rename(start, end, is_directory=source == "directory")
    assert storage.read(end if source == "file" else end / "a") == b"new"
    assert not start.exists() and storage.ls(tmp_path) == ["end"]


def test_what_is_no_directory_is_refused_with_what_helps(tmp_path, storage):
    for call in [storage.exists, storage.mkdir, storage.read, storage.stream_write]:
        with pytest.raises(fc.UnsupportedError, match="s3:/bucket/a.*StorageWriter"):
            call(Path("s3://bucket/a"))
    with pytest.raises(RuntimeError, match="nowhere.*is not there"):
        storage.write(tmp_path / "nowhere" / "a", b"1")
    with pytest.raises(FileNotFoundError):
        storage.read(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        storage.getsize(tmp_path / "none")


def test_the_configuration_can_be_sent_to_another_process():
    assert pickle.loads(pickle.dumps(ours.StorageConfig())) == ours.StorageConfig()
