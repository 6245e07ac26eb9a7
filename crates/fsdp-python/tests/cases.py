"""The cases of `test_storage.py`, which four ranks run one after the other: those of torch's own tests of storage."""

import inspect
import io
import itertools
import os
import traceback

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_checkpoint.torch import StorageReader, StorageWriter
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as ShardOfOld
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

RANKS = 4
CASES = {}


def case(function):
    """Add a function to the cases. It gets a directory that all ranks share, and that is its own."""
    CASES[function.__name__] = function
    return function


def run(rank, store, outcomes, path):
    """Run all cases on one rank, and tell of each how it ended."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for name, function in CASES.items():
        place = os.path.join(path, name)
        if rank == 0:
            os.mkdir(place)
        dist.barrier()
        try:
            function(place)
        except BaseException:
            outcomes.put((rank, name, traceback.format_exc()))
        else:
            outcomes.put((rank, name, "done"))
        dist.barrier()
    dist.destroy_process_group()


def save(state, place, **options):
    dcp.save(state, storage_writer=StorageWriter(os.path.join(place, "c")), **options)


def load(state, place, **options):
    dcp.load(state, storage_reader=StorageReader(os.path.join(place, "c")), **options)


def failing_ranks(call):
    """Return the ranks that an error of `call` names."""
    try:
        call()
    except CheckpointException as error:
        return sorted(error.failures)
    return None


@case
def one_dimension_to_the_other_and_back(place):
    mesh = init_device_mesh("cpu", (RANKS,))
    tensor = torch.arange(16.0).reshape(4, 4)
    for index, (source, target) in enumerate([(Replicate(), Shard(0)), (Shard(0), Replicate()), (Shard(1), Shard(0))]):
        here = os.path.join(place, str(index))
        dist.barrier()
        if dist.get_rank() == 0:
            os.mkdir(here)
        dist.barrier()
        save({"t": distribute_tensor(tensor, mesh, [source])}, here)
        loaded = {"t": distribute_tensor(torch.zeros(4, 4), mesh, [target])}
        load(loaded, here)
        assert torch.equal(loaded["t"].full_tensor(), tensor)


@case
def any_placement_on_two_dimensions_to_any(place):
    mesh = init_device_mesh("cpu", (2, 2))
    tensor = torch.arange(16.0).reshape(4, 4)
    choices = list(itertools.product([Replicate(), Shard(0)], [Replicate(), Shard(1)]))
    for source, placements in enumerate(choices):
        here = os.path.join(place, str(source))
        if dist.get_rank() == 0:
            os.mkdir(here)
        dist.barrier()
        save({"t": distribute_tensor(tensor, mesh, placements)}, here)
        for target in choices:
            loaded = {"t": distribute_tensor(torch.zeros(4, 4), mesh, target)}
            load(loaded, here)
            assert torch.equal(loaded["t"].full_tensor(), tensor), (placements, target)


@case
def sharded_tensors_that_change_while_they_are_saved(place):
    line, square = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2))
    tensor = torch.arange(5.0 * 7).reshape(5, 7)
    state = {
        "rows": distribute_tensor(tensor, line, [Shard(0)]),
        "square": distribute_tensor(tensor, square, [Replicate(), Shard(1)]),
        "one": distribute_tensor(torch.tensor([7.0]), line, [Shard(0)]),
        "scalar": distribute_tensor(torch.tensor(3.0), line, [Replicate()]),
    }
    expected = {name: value.full_tensor().clone() for name, value in state.items()}
    # One of the first FSDP.
    rank = dist.get_rank()
    part = torch.full((2, 3), float(rank))
    shard = ShardOfOld(part, ShardMetadata([2 * rank, 0], [2, 3], f"rank:{rank}/cpu"))
    old = init_from_local_shards([shard], 2 * RANKS, 3)
    saving = dcp.async_save(state | {"old": old}, storage_writer=StorageWriter(os.path.join(place, "c")))
    for value in [*(value.to_local() for value in state.values()), part]:
        value.fill_(-1)
    saving.result()
    load(state | {"old": old}, place)
    for name, value in state.items():
        assert torch.equal(value.full_tensor(), expected[name]), name
    assert part.unique().tolist() == [rank]


@case
def shards_that_are_empty(place):
    line, square = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2))
    tensor = torch.tensor([7.0])
    save({"t": distribute_tensor(tensor, line, [Shard(0)])}, place)
    loaded = {"t": distribute_tensor(torch.zeros(1), square, [Shard(0), Shard(0)])}
    load(loaded, place)
    assert torch.equal(loaded["t"].full_tensor(), tensor)


@case
def shards_of_unequal_length(place):
    line, square = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2))
    tensor = torch.arange(5.0 * 7).reshape(5, 7)
    save({"t": distribute_tensor(tensor, line, [Shard(0)])}, place)
    loaded = {"t": distribute_tensor(torch.zeros(5, 7), square, [Shard(1), Shard(0)])}
    load(loaded, place)
    assert torch.equal(loaded["t"].full_tensor(), tensor)


@case
def values_and_keys_in_another_order_on_each_rank(place):
    rank = dist.get_rank()
    entries = [("b", io.BytesIO(b"bytes")), ("number", 3), ("nest", {"list": [1, "two"]}), ("t", torch.ones(3))]
    save(dict(entries[rank:] + entries[:rank]), place)
    loaded = {"number": 0, "nest": {"list": [0, ""]}, "t": torch.zeros(3)}
    load(loaded, place)
    assert loaded["number"] == 3 and loaded["nest"] == {"list": [1, "two"]} and loaded["t"].tolist() == [1, 1, 1]


class Counter:
    """A trainer's object with state of its own."""

    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count, "t": torch.full((2,), float(self.count))}

    def load_state_dict(self, state):
        self.count = state["count"]
        assert state["t"].tolist() == [self.count, self.count]


@case
def objects_with_state(place):
    save({"counter": Counter(5)}, place)
    loaded = Counter(0)
    load({"counter": loaded}, place)
    assert loaded.count == 5


@case
def a_key_that_is_missing_is_an_error_on_every_rank(place):
    save({"t": torch.ones(2)}, place)
    failed = failing_ranks(lambda: load({"t": torch.zeros(2), "more": torch.zeros(2)}, place))
    assert failed == list(range(RANKS)), failed
    loaded = {"t": torch.zeros(2), "more": torch.zeros(2)}
    load(loaded, place, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert loaded["t"].tolist() == [1, 1] and loaded["more"].tolist() == [0, 0]


@case
def another_shape_is_an_error_on_every_rank(place):
    save({"t": torch.ones(2, 2)}, place)
    failed = failing_ranks(lambda: load({"t": torch.zeros(3, 2)}, place))
    assert failed == list(range(RANKS)), failed


@case
def another_coordinator(place):
    mesh = init_device_mesh("cpu", (RANKS,))
    tensor = torch.arange(8.0)
    path = os.path.join(place, "c")
    dcp.state_dict_saver._save_state_dict(
        {"t": distribute_tensor(tensor, mesh, [Shard(0)])}, StorageWriter(path), coordinator_rank=1
    )
    loaded = {"t": distribute_tensor(torch.zeros(8), mesh, [Shard(0)])}
    load(loaded, place)
    assert torch.equal(loaded["t"].full_tensor(), tensor)


@case
def an_overwrite_that_is_not_wanted_is_an_error_on_every_rank(place):
    path = os.path.join(place, "c")
    dcp.save({"t": torch.ones(2)}, storage_writer=StorageWriter(path))
    again = StorageWriter(path, overwrite=False)
    failed = failing_ranks(lambda: dcp.save({"t": torch.zeros(2)}, storage_writer=again))
    assert failed, "it was replaced"
    loaded = {"t": torch.zeros(2)}
    load(loaded, place)
    assert loaded["t"].tolist() == [1, 1]


def failing(inner, method, ranks):
    """Return a writer or a reader whose method fails on some ranks."""

    def fail(*args, **kwargs):
        raise RuntimeError(f"{method} fails on rank {dist.get_rank()}")

    if dist.get_rank() in ranks:
        setattr(inner, method, fail)
    return inner


@case
def a_save_that_fails_on_some_ranks_fails_on_all_and_keeps_the_old_one(place):
    mesh = init_device_mesh("cpu", (RANKS,))
    path = os.path.join(place, "c")

    def state(value):
        return {"t": distribute_tensor(torch.full((8,), value), mesh, [Shard(0)]), "step": int(value)}

    dcp.save(state(1.0), storage_writer=StorageWriter(path))
    for method, ranks in [
        ("set_up_storage_writer", [0]),
        ("prepare_local_plan", [1, 3]),
        ("prepare_global_plan", [0]),
        ("write_data", [2]),
        ("write_data", [0, 1, 2, 3]),
        ("finish", [0]),
    ]:
        writer = failing(StorageWriter(path), method, ranks)
        failed = failing_ranks(lambda writer=writer: dcp.save(state(2.0), storage_writer=writer))
        assert failed == ranks, (method, ranks, failed)
        writer.reset()
        dist.barrier()
        assert os.listdir(place) == ["c"], (method, os.listdir(place))
        loaded = state(0.0)
        load(loaded, place)
        assert loaded["step"] == 1 and loaded["t"].full_tensor().tolist() == [1] * 8, method


class CachingPlanner(dcp.DefaultSavePlanner):
    """A planner of its own name: torch keeps plans by the name of the class."""


@case
def cached_plans_are_written_to_the_place_of_each_save(place):
    if "enable_plan_caching" not in inspect.signature(dcp.DefaultSavePlanner).parameters:
        return
    mesh = init_device_mesh("cpu", (RANKS,))
    planner = CachingPlanner(enable_plan_caching=True)
    writer = StorageWriter(os.path.join(place, "first"))
    for step in range(5):
        tensor = torch.arange(16.0) + step
        state = {"t": distribute_tensor(tensor, mesh, [Shard(0)]), "step": step}
        if step >= 3 and dist.get_rank() == 2:
            # From here on the plan of this rank is another one.
            state["more"] = torch.full((3,), float(step))
        path = os.path.join(place, f"step-{step}")
        if step == 2:
            # A save that fails between two others.
            failed = failing(StorageWriter(path), "write_data", [1])
            assert failing_ranks(lambda: dcp.save(state, storage_writer=failed, planner=planner)) == [1]
            failed.reset()
            dist.barrier()
        dcp.save(state, storage_writer=writer if step % 2 else StorageWriter(path), planner=planner, checkpoint_id=path)
        loaded = {"t": distribute_tensor(torch.zeros(16), mesh, [Shard(0)]), "step": None}
        if step >= 3:
            loaded["more"] = torch.zeros(3)
        dcp.load(loaded, storage_reader=StorageReader(path))
        assert torch.equal(loaded["t"].full_tensor(), tensor) and loaded["step"] == step
        assert step < 3 or loaded["more"].tolist() == [step] * 3
        dist.barrier()
    assert sorted(os.listdir(place)) == [f"step-{step}" for step in range(5)]


@case
def a_load_that_fails_on_some_ranks_fails_on_all(place):
    save({"t": torch.ones(4)}, place)
    path = os.path.join(place, "c")
    for method, ranks in [
        ("read_metadata", [0, 1, 2, 3]),
        ("set_up_storage_reader", [1]),
        ("prepare_local_plan", [2, 3]),
        ("read_data", [3]),
    ]:
        reader = failing(StorageReader(path), method, ranks)
        failed = failing_ranks(lambda reader=reader: dcp.load({"t": torch.zeros(4)}, storage_reader=reader))
        assert failed == ranks, (method, ranks, failed)
