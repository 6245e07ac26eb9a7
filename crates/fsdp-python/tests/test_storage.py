"""The cases of torch's own tests of storage, with four ranks: each must end well on every rank."""

import multiprocessing

import pytest

torch = pytest.importorskip("torch")

import cases  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from fsdp_checkpoint import UsageError  # noqa: E402
from fsdp_checkpoint.torch import StorageReader, StorageWriter  # noqa: E402

SECONDS = 180


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Run all cases on four ranks, and return how each ended, by case and rank."""
    path = tmp_path_factory.mktemp("cases")
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["ranks", "cases"])
    queue = processes.Queue()
    ranks = [
        processes.Process(target=cases.run, args=(rank, path / "store", queue, str(path)), daemon=True)
        for rank in range(cases.RANKS)
    ]
    for rank in ranks:
        rank.start()
    ended = {name: {} for name in cases.CASES}
    for _ in range(cases.RANKS * len(cases.CASES)):
        rank, name, outcome = queue.get(timeout=SECONDS)
        ended[name][rank] = outcome
    for rank in ranks:
        rank.join(SECONDS)
    return ended


@pytest.mark.parametrize("name", cases.CASES)
def test_case(outcomes, name):
    failed = {rank: outcome for rank, outcome in outcomes[name].items() if outcome != "done"}
    assert not failed, "\n".join(f"rank {rank}: {outcome}" for rank, outcome in failed.items())


def test_the_metadata_tells_its_version(tmp_path):
    dcp.save({"t": torch.ones(2)}, storage_writer=StorageWriter(tmp_path / "c"))
    assert dcp.FileSystemReader(tmp_path / "c").read_metadata().version == "1.0.0"
    assert StorageReader(tmp_path / "c").read_metadata().version == "1.0.0"


def test_a_tensor_of_one_layout_loads_into_another(tmp_path):
    saved = torch.arange(12.0).reshape(3, 4)
    dcp.save({"t": saved.t()}, storage_writer=StorageWriter(tmp_path / "c"))
    loaded = {"t": torch.zeros(4, 3)}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "c"))
    assert torch.equal(loaded["t"], saved.t())


def test_a_reader_that_is_used_again_sees_the_checkpoint_that_is_there_now(tmp_path):
    reader = StorageReader(tmp_path / "c")
    for value in [1.0, 2.0]:
        dcp.save({"t": torch.full((3,), value)}, storage_writer=StorageWriter(tmp_path / "c"))
        loaded = {"t": torch.zeros(3)}
        dcp.load(loaded, storage_reader=reader)
        assert loaded["t"].tolist() == [value] * 3
    # The one that was replaced is not kept for the reader.
    assert [place.name for place in tmp_path.iterdir()] == ["c"]


def test_a_backward_of_values_from_before_a_load_is_an_error(tmp_path):
    dcp.save({"w": torch.ones(3)}, storage_writer=StorageWriter(tmp_path / "c"))
    weight = torch.zeros(3, requires_grad=True)
    loss = (weight.exp() * weight).sum()
    dcp.load({"w": weight}, storage_reader=StorageReader(tmp_path / "c"))
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_saves_of_one_writer_that_overlap_are_an_error(tmp_path):
    writer = StorageWriter(tmp_path / "a")
    dcp.save({"t": torch.ones(3)}, storage_writer=StorageWriter(tmp_path / "b"))
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({"t": torch.zeros(3)}, writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    plan, metadata = planner.create_global_plan([planner.create_local_plan()])
    [plan] = writer.prepare_global_plan(plan)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    # Another save begins before the first has ended.
    writer.reset(tmp_path / "b")
    writer.set_up_storage_writer(True)
    with pytest.raises(UsageError, match="another save"):
        writer.finish(metadata, [results])
    writer.reset()
    loaded = {"t": torch.zeros(3)}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "b"))
    assert loaded["t"].tolist() == [1.0] * 3


def test_extensions_of_torchs_writer_are_read(tmp_path):
    extensions = pytest.importorskip("torch.distributed.checkpoint._extension")
    pytest.importorskip("zstandard")
    saved = {"t": torch.arange(1000.0)}
    writer = dcp.FileSystemWriter(tmp_path / "c", _extensions=[extensions.ZStandard()])
    dcp.save(saved, storage_writer=writer)
    loaded = {"t": torch.zeros(1000)}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "c"))
    assert torch.equal(loaded["t"], saved["t"])


@pytest.mark.parametrize("place", ["", "abc://bucket/c"])
def test_what_is_no_place_is_an_error(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(dcp.api.CheckpointException):
        dcp.save({"t": torch.ones(2)}, storage_writer=StorageWriter(place))
