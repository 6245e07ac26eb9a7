"""The storage of torch.distributed.checkpoint, in one process."""

import collections
import copy
import gc
import inspect
import json
import os
import pickle
import sys
import typing

import fsdp_checkpoint as fc
import pytest
from conftest import assert_same_bits, of_every_dtype

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
import fsdp_checkpoint.torch as ours  # noqa: E402
from fsdp_checkpoint import _native  # noqa: E402
from fsdp_checkpoint._host import copy_to_host  # noqa: E402
from fsdp_checkpoint.torch import StorageReader, StorageWriter  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

not_utf8 = pytest.mark.skipif(sys.platform != "linux", reason="names of files are UTF-8")


def state():
    """Return a state dict with all that a trainer keeps."""
    torch.manual_seed(0)
    return {
        "model": {
            "weight": torch.randn(33, 17),
            "half": torch.randn(1000).bfloat16(),
            "flags": torch.tensor([True, False]),
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4),
            "transposed": torch.randn(5, 7).t(),
            "complex": torch.randn(3, dtype=torch.complex64),
        },
        "optim": {"lr": 0.1, "betas": (0.9, 0.95), "names": ["a", "b"], "none": None},
        "step": 7,
    }


def zeroed(value):
    """Return the same nest, with tensors of zeros."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: zeroed(item) for key, item in value.items()}
    return None


def assert_same(found, expected, at="state"):
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), at
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value, f"{at}.{key}")
    else:
        assert found == expected and type(found) is type(expected), at


@pytest.mark.parametrize("reader", ["ours", "torch"])
@pytest.mark.parametrize("writer", ["ours", "torch"])
def test_either_reads_what_either_wrote(tmp_path, writer, reader):
    saved, path = state(), tmp_path / "step-1"
    dcp.save(saved, storage_writer=StorageWriter(path) if writer == "ours" else dcp.FileSystemWriter(path))
    loaded = zeroed(saved)
    dcp.load(loaded, storage_reader=StorageReader(path) if reader == "ours" else dcp.FileSystemReader(path))
    assert_same(loaded, saved)


@pytest.mark.parametrize("reader", [StorageReader, dcp.FileSystemReader])
@pytest.mark.parametrize("writer", [StorageWriter, dcp.FileSystemWriter])
def test_every_dtype_of_torch_is_saved_and_loaded(tmp_path, writer, reader):
    saved, loaded = of_every_dtype(1), of_every_dtype(2)
    dcp.save(saved, storage_writer=writer(tmp_path / "c"))
    dcp.load(loaded, storage_reader=reader(tmp_path / "c"))
    for name, tensor in saved.items():
        assert_same_bits(loaded[name], tensor, name)


def test_what_is_read_in_pieces_is_written_as_what_is_in_memory(tmp_path, monkeypatch):
    # As tensors on GPUs are. Several pieces, of which the last one is not whole.
    saved = state() | of_every_dtype(1) | {"long": torch.arange(2_900_001, dtype=torch.int32)}
    dcp.save(saved, storage_writer=StorageWriter(tmp_path / "whole"))
    asked = []

    class Pieces(ours._Pieces):
        def __call__(self, start, length):
            asked.append(length)
            return super().__call__(start, length)

    monkeypatch.setattr(ours, "_source_of", lambda tensor: Pieces(tensor.contiguous()))
    dcp.save(saved, storage_writer=StorageWriter(tmp_path / "pieces"))
    assert max(asked) == 4 << 20 and asked.count(4 << 20) == 2
    assert fc.verify(tmp_path / "pieces", "deep")["ok"]
    files = [(tmp_path / name / "__0_0.distcp").read_bytes() for name in ("whole", "pieces")]
    assert files[0] == files[1]


def test_a_piece_that_cannot_be_read_fails_the_save(tmp_path, monkeypatch):
    first = state()
    dcp.save(first, storage_writer=StorageWriter(tmp_path / "last"))

    def fail(start, length):
        raise RuntimeError("no copy today")

    def give_less(start, length):
        return b"x" * (length - 1)

    for source, message in ((fail, "no copy today"), (give_less, "bytes, where")):
        monkeypatch.setattr(ours, "_source_of", lambda tensor, source=source: source)
        writer = StorageWriter(tmp_path / "last")
        with pytest.raises(CheckpointException, match=message):
            dcp.save(state() | {"step": 8}, storage_writer=writer)
        del writer
        gc.collect()
    loaded = zeroed(first)
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "last"))
    assert_same(loaded, first)
    assert os.listdir(tmp_path) == ["last"]


def test_what_is_written_has_hashes_and_is_verified(tmp_path):
    dcp.save(state(), storage_writer=StorageWriter(tmp_path / "step-1"))
    report = fc.verify(tmp_path / "step-1", "deep")
    assert report["ok"] and report["hashed"] and report["tensors"] == 7
    assert report["digests"] == report["tensors"] + report["values"]
    assert sorted(os.listdir(tmp_path)) == ["step-1"]


def test_it_holds_the_same_as_torchs_own(tmp_path):
    dcp.save(state(), storage_writer=StorageWriter(tmp_path / "ours"))
    dcp.save(state(), checkpoint_id=tmp_path / "torchs")
    assert fc.diff(tmp_path / "ours", tmp_path / "torchs")["equal"]
    ours = dcp.FileSystemReader(tmp_path / "ours").read_metadata()
    torchs = dcp.FileSystemReader(tmp_path / "torchs").read_metadata()
    assert ours.state_dict_metadata == torchs.state_dict_metadata
    assert ours.planner_data == torchs.planner_data
    assert ours.storage_data.keys() == torchs.storage_data.keys()


def test_a_reader_refuses_damage_and_names_the_file(tmp_path):
    dcp.save(state(), storage_writer=StorageWriter(tmp_path / "step-1"))
    data = tmp_path / "step-1" / "__0_0.distcp"
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    with pytest.raises(CheckpointException, match="__0_0.distcp"):
        dcp.load(zeroed(state()), storage_reader=StorageReader(tmp_path / "step-1"))


def test_an_overwrite_replaces_whole(tmp_path):
    first, second = state(), state()
    second["step"], second["model"]["weight"] = 8, torch.ones(33, 17)
    dcp.save(first, storage_writer=StorageWriter(tmp_path / "last"))
    dcp.save(second, storage_writer=StorageWriter(tmp_path / "last"))
    loaded = zeroed(second)
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "last"))
    assert_same(loaded, second)
    with pytest.raises(CheckpointException, match="exists already"):
        dcp.save(first, storage_writer=StorageWriter(tmp_path / "last", overwrite=False))


def test_only_a_checkpoint_is_replaced(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointException, match="cannot be replaced by a checkpoint directory"):
        dcp.save(state(), storage_writer=StorageWriter(tmp_path / "notes"))
    dcp.save(state(), storage_writer=StorageWriter(tmp_path / "step-1"))
    (tmp_path / "step-1" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointException, match="contains `mine.txt`"):
        dcp.save(state(), storage_writer=StorageWriter(tmp_path / "step-1"))
    assert (tmp_path / "notes" / "mine.txt").read_text() == "mine"
    assert (tmp_path / "step-1" / "mine.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    dcp.save(state(), storage_writer=StorageWriter(tmp_path / "empty"))


class FailingPlanner(dcp.DefaultSavePlanner):
    """A planner that fails in the middle of writing."""

    def resolve_data(self, write_item):
        if write_item.index.fqn == "step":
            raise RuntimeError("no data today")
        return super().resolve_data(write_item)


def test_a_save_that_fails_leaves_the_old_one_and_nothing_else(tmp_path):
    first = state()
    dcp.save(first, storage_writer=StorageWriter(tmp_path / "last"))
    writer = StorageWriter(tmp_path / "last")
    with pytest.raises(CheckpointException, match="no data today"):
        dcp.save(state() | {"step": 8}, storage_writer=writer, planner=FailingPlanner())
    del writer
    gc.collect()
    loaded = zeroed(first)
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "last"))
    assert_same(loaded, first)
    assert os.listdir(tmp_path) == ["last"]


def test_one_writer_saves_again_and_again(tmp_path):
    writer = StorageWriter(tmp_path / "step-1")
    for step in (1, 2, 3):
        dcp.save(state() | {"step": step}, storage_writer=writer, checkpoint_id=tmp_path / f"step-{step}")
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2", "step-3"]
    assert fc.load(tmp_path / "step-3", ["step"]) == {"step": 3}
    assert pickle.loads(pickle.dumps(writer)).path == writer.path
    assert copy.copy(writer).path == writer.path


def change(value):
    """Change all that can be changed in a nest of values."""
    if isinstance(value, torch.Tensor):
        value.detach().zero_()
    elif isinstance(value, dict):
        for item in value.values():
            change(item)
        value["later"] = 1
    elif isinstance(value, list):
        value.append("later")


def test_an_async_save_is_of_the_state_that_it_was_called_with(tmp_path, monkeypatch):
    # torch wants a process group for it.
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    staged = []
    monkeypatch.setattr(ours, "copy_to_host", lambda state: staged.append(state) or copy_to_host(state))
    try:
        saved = state()
        future = dcp.async_save(saved, storage_writer=StorageWriter(tmp_path / "step-1"))
        change(saved)
        future.result()
    finally:
        torch.distributed.destroy_process_group()
    assert len(staged) == 1
    loaded = zeroed(state())
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "step-1"))
    assert_same(loaded, state())


class Pair(typing.NamedTuple):
    tensor: torch.Tensor
    values: list[int]


def test_a_staged_state_is_a_copy_of_everything(tmp_path):
    lazy = torch.tensor([1 + 2j, 3 - 4j]).conj()
    parts = {"conj": lazy, "part": torch.arange(12.0).reshape(3, 4)[:, 1:3], "parameter": torch.nn.Parameter(torch.ones(3))}
    saved, expected = state() | of_every_dtype(1) | parts, state() | of_every_dtype(1)
    saved["tied"] = saved["model"]["weight"]
    saved["classes"] = collections.OrderedDict(pair=Pair(torch.ones(2), [1]), size=torch.Size([2, 3]))
    staged = StorageWriter(tmp_path / "c").stage(saved)
    assert staged["tied"] is staged["model"]["weight"] is not saved["tied"]
    assert staged["part"].is_contiguous() and not staged["parameter"].requires_grad
    classes = staged.pop("classes")
    assert type(classes) is collections.OrderedDict and type(classes["size"]) is torch.Size
    pair = classes["pair"]
    kept = {name: staged[name].clone() for name in parts}
    change(saved)
    change(saved["classes"]["pair"]._asdict())
    assert type(pair) is Pair and pair.tensor.tolist() == [1, 1] and pair.values == [1]
    del staged["tied"]
    for name, value in kept.items():
        assert torch.equal(staged.pop(name), value) and value.abs().sum() > 0, name
    for name in of_every_dtype(1):
        assert_same_bits(staged.pop(name), expected.pop(name), name)
    assert_same(staged, expected)


def test_a_staged_state_keeps_what_cannot_be_saved_for_the_error_that_says_so(tmp_path):
    kept = {"sparse": torch.eye(3).to_sparse(), "meta": torch.empty(3, device="meta")}
    staged = StorageWriter(tmp_path / "c").stage(kept)
    for name, value in kept.items():
        assert staged[name].layout == value.layout and staged[name].is_meta == value.is_meta
        with pytest.raises(CheckpointException, match=f"`{name}` is sparse, quantized or on the meta device"):
            dcp.save({name: value}, storage_writer=StorageWriter(tmp_path / "c"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_state_on_a_gpu_is_staged_in_pinned_memory(tmp_path):
    z = torch.randn(1000, 1000, device="cuda", dtype=torch.complex64)
    saved = {"w": z.real.clone(), "part": z.real[:, 1:3], "conj": z.conj(), "neg": z.conj().imag}
    staged = StorageWriter(tmp_path / "c").stage(saved)
    for name, value in staged.items():
        assert value.is_pinned() and torch.equal(value, saved[name].cpu()), name


def test_a_tensor_of_one_element_may_have_any_strides(tmp_path):
    saved = {
        "slice": torch.arange(4.0)[1::4],
        "column": torch.arange(4.0).reshape(1, 4)[:, 3],
        "expanded": torch.tensor(3.0).expand(1),
        "part": torch.arange(12).reshape(3, 4)[:1, 1:2],
    }
    assert all(tensor.is_contiguous() for tensor in saved.values())
    dcp.save(saved, storage_writer=StorageWriter(tmp_path / "c"))
    loaded = {name: torch.zeros(3, 5, dtype=tensor.dtype)[:1, ::5].reshape(tensor.shape) for name, tensor in saved.items()}
    loaded["column"] = torch.zeros(1, 4)[:, 3]
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "c"))
    assert_same(loaded, saved)


def test_a_path_may_end_in_a_dot(tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    for step, (path, name) in enumerate([(".", "x"), ("./.", "x"), ("../y/.", "y"), ("z/..", "x")]):
        # The directory is another one after each save.
        monkeypatch.chdir(tmp_path / "x")
        dcp.save({"step": step}, storage_writer=StorageWriter(path))
        assert fc.load(tmp_path / name, ["step"]) == {"step": step}


def test_a_reader_lets_go_of_a_checkpoint_whose_load_fails(tmp_path):
    dcp.save({"w": torch.ones(4)}, storage_writer=StorageWriter(tmp_path / "c"))
    data = next((tmp_path / "c").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    reader = StorageReader(tmp_path / "c")
    with pytest.raises(CheckpointException):
        dcp.load({"w": torch.zeros(4)}, storage_reader=reader)
    # The error itself refers to it.
    gc.collect()
    dcp.save({"w": torch.zeros(4)}, storage_writer=StorageWriter(tmp_path / "c"))
    assert os.listdir(tmp_path) == ["c"]


def test_a_conjugate_that_is_not_computed_yet_is_saved_as_what_it_is(tmp_path):
    lazy = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert lazy.is_conj()
    dcp.save({"z": lazy}, storage_writer=StorageWriter(tmp_path / "c"))
    loaded = {"z": torch.zeros(2, dtype=torch.complex64)}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "c"))
    assert loaded["z"].tolist() == [1 - 2j, 3 + 4j]


def test_a_reader_casts_as_torchs_does(tmp_path):
    dcp.save({"w": torch.tensor([1.5, 2.5])}, storage_writer=StorageWriter(tmp_path / "c"))
    loaded = {"w": torch.zeros(2, dtype=torch.bfloat16)}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "c"))
    assert loaded["w"].tolist() == [1.5, 2.5]


def test_a_reader_reads_safetensors(tmp_path):
    dcp.save(state()["model"], storage_writer=StorageWriter(tmp_path / "c"))
    fc.convert(tmp_path / "c", tmp_path / "c.safetensors", to="safetensors")
    loaded = zeroed(state()["model"])
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "c.safetensors"))
    assert_same(loaded, state()["model"])


def test_a_missing_key_is_an_error_that_names_it(tmp_path):
    dcp.save({"w": torch.ones(2)}, storage_writer=StorageWriter(tmp_path / "c"))
    with pytest.raises(CheckpointException, match="other"):
        dcp.load({"other": torch.ones(2)}, storage_reader=StorageReader(tmp_path / "c"))


class Attack:
    def __reduce__(self):
        return os.system, ("echo executed > executed",)


class Plain:
    """A harmless object that only its class can build."""

    def __init__(self):
        self.count = 3


def test_values_are_rebuilt_without_their_pickles(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dcp.save({"w": torch.ones(2), "bad": Attack()}, checkpoint_id=tmp_path / "bad")
    loaded = {"w": torch.zeros(2)}
    dcp.load(loaded, storage_reader=StorageReader(tmp_path / "bad"))
    assert loaded["w"].tolist() == [1, 1]
    with pytest.raises(CheckpointException, match="bad"):
        dcp.load({"w": torch.zeros(2), "bad": None}, storage_reader=StorageReader(tmp_path / "bad"))
    assert not (tmp_path / "executed").exists()

    dcp.save({"plain": Plain()}, storage_writer=StorageWriter(tmp_path / "plain"))
    trusted = {"plain": None}
    dcp.load(trusted, storage_reader=StorageReader(tmp_path / "plain", run_pickles=True))
    assert trusted["plain"].count == 3


@pytest.mark.filterwarnings("ignore:saved, but")
def test_a_refused_value_is_named_with_what_helps(tmp_path):
    dcp.save({"rng": {"python": Plain()}}, storage_writer=StorageWriter(tmp_path / "c"))
    with pytest.raises(CheckpointException, match=r"`rng\.python` is refused: .*Plain.*run_pickles=True") as raised:
        dcp.load({"rng": {"python": None}}, storage_reader=StorageReader(tmp_path / "c"))
    assert isinstance(raised.value.failures[0][0], fc.UnsafeError)


def test_why_a_checkpoint_cannot_be_opened_is_the_error(tmp_path):
    """Some versions of torch drop errors of `read_metadata`."""
    reader = StorageReader(tmp_path / "none")
    with pytest.raises(CheckpointException, match="none.* is not a committed checkpoint") as raised:
        dcp.load({"w": torch.zeros(2)}, storage_reader=reader)
    assert isinstance(raised.value.failures[0][0], fc.IncompleteError)
    with pytest.raises(fc.IncompleteError):
        reader.read_metadata()
    # The reader is none the worse for it.
    dcp.save({"w": torch.ones(2)}, storage_writer=StorageWriter(tmp_path / "none"))
    loaded = {"w": torch.zeros(2)}
    dcp.load(loaded, storage_reader=reader)
    assert loaded["w"].tolist() == [1, 1]


@pytest.mark.parametrize("wrote", ["dcp_checkpoint", "reshard", "convert"])
@pytest.mark.parametrize("reader", ["ours", "torch"])
def test_every_torch_loads_what_the_command_writes(tmp_path, dcp_checkpoint, reader, wrote):
    """Whatever torch has saved the source: a newer one notes more about each tensor."""
    path = tmp_path / "c"
    if wrote == "reshard":
        fc.reshard(dcp_checkpoint, path, 3)
    elif wrote == "convert":
        fc.convert(dcp_checkpoint, tmp_path / "m.safetensors", "safetensors", include="model.*")
        fc.convert(tmp_path / "m.safetensors", path, "dcp", world_size=2)
    else:
        path = dcp_checkpoint
        if reader == "torch":
            pytest.skip("it is a newer torch's own")
    expected = {name: value for name, value in fc.load(path, "model.*", framework="torch").items()}
    loaded = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(loaded, storage_reader=StorageReader(path) if reader == "ours" else dcp.FileSystemReader(path))
    assert_same(loaded, expected)


def caching_planner():
    """Return a planner that caches plans, under a name of its own: torch keeps plans by the name of the class."""
    if "enable_plan_caching" not in inspect.signature(dcp.DefaultSavePlanner).parameters:
        pytest.skip("this torch caches no plans")
    return type(f"Planner{os.urandom(4).hex()}", (dcp.DefaultSavePlanner,), {})(enable_plan_caching=True)


def test_saves_with_a_cached_plan_are_as_good_as_the_first(tmp_path):
    planner, once = caching_planner(), StorageWriter(tmp_path / "step-0")
    for step in range(4):
        saved = state() | {"step": step, "weight": torch.full((5,), float(step))}
        # One writer for all, or one for each, as programs have it.
        writer = once if step % 2 else StorageWriter(tmp_path / f"step-{step}")
        dcp.save(saved, storage_writer=writer, planner=planner, checkpoint_id=tmp_path / f"step-{step}")
        loaded = zeroed(saved)
        dcp.load(loaded, storage_reader=StorageReader(tmp_path / f"step-{step}"))
        assert_same(loaded, saved)
        assert fc.verify(tmp_path / f"step-{step}", "deep")["ok"]
    # Other states, and between two saves one without a cached plan, and one by torch's own writer.
    for number, saved in enumerate([{"a": torch.ones(3)}, {"a": torch.zeros(3)}, {"b": torch.ones(2), "a": torch.ones(3)}]):
        dcp.save(saved, storage_writer=StorageWriter(tmp_path / "x"), planner=planner)
        dcp.save(saved, storage_writer=StorageWriter(tmp_path / "y"))
        dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path / "z"), planner=planner)
        for name in ("x", "y", "z"):
            loaded = zeroed(saved)
            dcp.load(loaded, storage_reader=StorageReader(tmp_path / name))
            assert_same(loaded, saved, f"{name} {number}")
    assert sorted(os.listdir(tmp_path)) == ["step-0", "step-1", "step-2", "step-3", "x", "y", "z"]


def test_a_cached_plan_of_another_dtype_is_an_error(tmp_path):
    planner = caching_planner()
    dcp.save({"w": torch.ones(2)}, storage_writer=StorageWriter(tmp_path / "c"), planner=planner)
    with pytest.raises(CheckpointException, match="`w` is of dtype torch.float16, but the plan says torch.float32: a cached plan"):
        dcp.save({"w": torch.ones(2).half()}, storage_writer=StorageWriter(tmp_path / "c"), planner=planner)


def test_a_save_warns_of_values_that_only_code_can_build(tmp_path):
    with pytest.warns(UserWarning, match="run_pickles=True.*`plain` .*Plain") as raised:
        dcp.save({"plain": Plain(), "step": 3}, storage_writer=StorageWriter(tmp_path / "c"))
    [warned] = [str(warning.message) for warning in raised if "run_pickles" in str(warning.message)]
    assert "`step`" not in warned
    # It has a digest all the same: that of a description.
    assert fc.verify(tmp_path / "c", "deep")["digests"] == 2
    several = {"plain": {str(number): Plain() for number in range(6)}}
    with pytest.warns(UserWarning, match="`plain.3` .* and 2 more"):
        dcp.save(several, storage_writer=StorageWriter(tmp_path / "several"))


def test_a_save_of_plain_values_warns_of_nothing(tmp_path, recwarn):
    dcp.save(state(), storage_writer=StorageWriter(tmp_path / "c"))
    assert not [warning for warning in recwarn if "run_pickles" in str(warning.message)]


def test_a_checkpoint_without_collectives_is_refused(tmp_path):
    with pytest.raises(fc.UsageError, match="use_collectives=False"):
        StorageWriter(tmp_path / "c").set_up_storage_writer(True, rank=0, use_collectives=False)
    assert json.dumps(os.listdir(tmp_path)) == "[]"


def test_keys_that_share_memory_are_read_one_by_one(tmp_path):
    tensor = torch.arange(1000, dtype=torch.float32)
    dcp.save({"a": tensor, "b": tensor * 2, "c": tensor * 3}, storage_writer=StorageWriter(tmp_path / "step-1"))
    shared = torch.zeros(1500)
    target = {"a": shared[:1000], "b": shared[:1000], "c": shared[500:]}
    dcp.load(target, storage_reader=StorageReader(tmp_path / "step-1"))
    # One of them comes last in each place, and all of its elements are there.
    assert any(torch.equal(shared[:500], found[:500]) for found in (tensor, tensor * 2))
    opened = _native.Checkpoint(str(tmp_path / "step-1"))
    memory = bytearray(4000)
    with pytest.raises(ValueError, match="overlap in memory"):
        opened.read([("a", [0], [1000], memory), ("b", [0], [1000], memory)])


def test_a_reader_keeps_the_metadata_of_one_load_only(tmp_path):
    dcp.save({"w": torch.ones(2)}, storage_writer=StorageWriter(tmp_path / "c"))
    reader = StorageReader(tmp_path / "c")
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner({"w": torch.zeros(2)}, reader.read_metadata(), True)
    plan = planner.create_local_plan()
    with pytest.raises(fc.UsageError, match="set_up_storage_reader"):
        reader.read_data(plan, planner)
    dcp.load({"w": torch.zeros(2)}, storage_reader=reader)
    copied = pickle.loads(pickle.dumps(reader))
    reader.reset()
    for other in [copied, reader]:
        with pytest.raises(fc.UsageError, match="set_up_storage_reader"):
            other.read_data(plan, planner)


def test_each_save_and_each_load_has_an_id(tmp_path):
    writer, reader = StorageWriter(tmp_path / "c"), StorageReader(tmp_path / "c")
    ids = []
    for _ in range(2):
        dcp.save({"w": torch.ones(2)}, storage_writer=writer)
        storage_meta = reader.read_metadata().storage_meta
        assert storage_meta.checkpoint_id == str(tmp_path / "c")
        ids += [storage_meta.save_id, storage_meta.load_id]
    assert all(ids) and len(set(ids)) == 4


@pytest.mark.parametrize("folder", [b"folder", pytest.param(b"\xff", marks=not_utf8)])
def test_a_path_may_be_bytes(tmp_path, folder):
    place = os.path.join(os.fsencode(tmp_path), folder, b"c")
    dcp.save({"w": torch.ones(2)}, storage_writer=StorageWriter(place))
    loaded = {"w": torch.zeros(2)}
    dcp.load(loaded, storage_reader=StorageReader(place))
    assert loaded["w"].tolist() == [1, 1] and os.listdir(os.path.dirname(place)) == [b"c"]
    assert fc.load(place, ["w"])["w"].tolist() == [1, 1] and fc.verify(place)["ok"]


class PlannerWithAnObject(dcp.DefaultSavePlanner):
    """A planner that keeps an object of a class in the metadata."""

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = Plain()
        return plans, metadata


def test_metadata_that_no_reader_builds_is_refused_and_named(tmp_path):
    writer = StorageWriter(tmp_path / "c")
    with pytest.raises(CheckpointException, match="planner made has an object.*Plain") as raised:
        dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=PlannerWithAnObject())
    assert isinstance(raised.value.failures[0][0], fc.UsageError)
    assert os.listdir(tmp_path) == []
