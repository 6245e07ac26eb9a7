"""Loading to NumPy and torch, bit for bit what torch itself loads."""

import dataclasses
import json
import os
import pickle
import struct
import sys

import fsdp_checkpoint as fc
import numpy as np
import pytest
from conftest import assert_same_bits, of_every_dtype

torch = pytest.importorskip("torch")


def saved_by_torch(path):
    """Return the tensors of a DCP directory as torch loads them: from a copy, if a newer torch has saved it."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    target = os.path.join(os.environ["PYTEST_TMP"], "saved.pt")
    try:
        dcp_to_torch_save(path, target)
    except CheckpointException:
        copy = os.path.join(os.environ["PYTEST_TMP"], "copy")
        fc.reshard(path, copy, 3)
        dcp_to_torch_save(copy, target)
    return torch.load(target, weights_only=True)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))


def flat(state, prefix=""):
    """Return the tensors of nested dicts by their flat keys."""
    if isinstance(state, torch.Tensor):
        return {prefix: state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    found = {}
    for key, value in items:
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


@pytest.mark.parametrize("checkpoint", ["dcp_checkpoint", "bf16_checkpoint"])
def test_tensors_are_those_that_torch_loads(checkpoint, request):
    path = request.getfixturevalue(checkpoint)
    loaded = fc.load(path, framework="torch")
    expected = flat(saved_by_torch(path))
    assert {name for name, value in loaded.items() if isinstance(value, torch.Tensor)} == set(expected)
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name


def test_arrays_are_the_same_numbers(dcp_checkpoint):
    arrays, tensors = fc.load(dcp_checkpoint), fc.load(dcp_checkpoint, framework="torch")
    assert list(arrays) == list(tensors)
    for name, array in arrays.items():
        if isinstance(array, np.ndarray):
            assert np.array_equal(array, tensors[name].numpy()), name


def test_only_the_keys_that_are_asked_for(dcp_checkpoint):
    name = fc.inspect(dcp_checkpoint)["tensors"][0]["name"]
    assert list(fc.load(dcp_checkpoint, [name])) == [name]
    assert list(fc.load(dcp_checkpoint, name)) == [name]
    with pytest.raises(fc.DifferenceError, match="missing key in checkpoint: `none`"):
        fc.load(dcp_checkpoint, ["none"])


def test_a_key_may_be_a_glob(tmp_path):
    state = {"model": {"a.weight": torch.ones(1), "a.bias": torch.ones(2)}, "x[0]": torch.ones(3), "x0": torch.ones(4), "step": 5}
    torch.save(state, tmp_path / "c.pt")
    assert list(fc.load(tmp_path / "c.pt", "model.*")) == ["model.a.weight", "model.a.bias"]
    # Each key comes once, in the order in which it was asked for, and values too.
    assert list(fc.load(tmp_path / "c.pt", ["step", "*.bias", "model.*"])) == ["step", "model.a.bias", "model.a.weight"]
    assert list(fc.load(tmp_path / "c.pt", ["*.{bias,none}", "s?ep"])) == ["model.a.bias", "step"]
    # A key is what it says, also if it looks like a glob.
    assert list(fc.load(tmp_path / "c.pt", ["x[0]"])) == ["x[0]"]
    with pytest.raises(fc.DifferenceError, match=r"missing key in checkpoint: `none\.\*`"):
        fc.load(tmp_path / "c.pt", ["model.*", "none.*"])
    with pytest.raises(fc.UsageError, match=r"`a\[` is not a valid glob"):
        fc.load(tmp_path / "c.pt", ["a["])


def test_every_dtype_of_torch(tmp_path):
    state = of_every_dtype(0) | {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3)}
    torch.save(state, tmp_path / "all.pt")
    loaded = fc.load(tmp_path / "all.pt", framework="torch")
    assert set(loaded) == set(state)
    for name, tensor in state.items():
        assert_same_bits(loaded[name], tensor, name)


def test_values_keep_their_types(tmp_path):
    values = {
        "none": None,
        "flag": True,
        "step": 7,
        "large": -(10**30),
        "lr": 0.1,
        "text": "täxt",
        "bytes": b"\x00\xff",
        "pair": (1, [2.0, "three"], {"four": (5,)}),
        "set": {1, 2},
        "tensor_in_tuple": (torch.tensor([1.5, 2.5], dtype=torch.bfloat16),),
    }
    torch.save({"values": values["pair"], **{k: v for k, v in values.items()}}, tmp_path / "values.pt")
    loaded = fc.load(tmp_path / "values.pt", framework="torch")
    for name in ("none", "flag", "step", "large", "lr", "text", "bytes", "set"):
        assert loaded[name] == values[name] and type(loaded[name]) is type(values[name]), name
    assert loaded["pair"] == values["pair"]
    assert torch.equal(loaded["tensor_in_tuple"][0], values["tensor_in_tuple"][0])


class Attack:
    def __reduce__(self):
        return os.system, ("echo executed > executed",)


def test_no_pickle_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2), "bad": Attack()}, "bad.pt")
    with pytest.raises(fc.UnsafeError, match="bad"):
        fc.load("bad.pt", framework="torch")
    assert torch.equal(fc.load("bad.pt", ["w"], framework="torch")["w"], torch.ones(2))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_refusal_names_the_whole_key_and_what_helps(tmp_path, monkeypatch, framework):
    monkeypatch.chdir(tmp_path)
    state = {"rng": {"states": [{"python": Attack()}]}, "w": torch.ones(2)}
    torch.save(state, "bad.pt")
    with pytest.raises(fc.UnsafeError, match=r"`rng\.states\.0\.python` is refused: .*system.*skip_opaque=True") as raised:
        fc.load("bad.pt", framework=framework)
    assert raised.value.exit_code == 13
    with pytest.raises(fc.UnsafeError, match="skip_opaque=True"):
        fc.load("bad.pt", ["rng.*", "w"], framework=framework)
    assert not (tmp_path / "executed").exists()


def test_opaque_values_are_left_out_with_a_warning_that_counts_and_names_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {f"bad{number}": {"x": Attack()} for number in range(6)} | {"w": torch.ones(2), "step": 3}
    torch.save(state, "bad.pt")
    with pytest.warns(UserWarning, match=r"left out 6 values .*`bad0\.x`, .* and 2 more"):
        loaded = fc.load("bad.pt", skip_opaque=True)
    assert set(loaded) == {"w", "step"} and loaded["step"] == 3
    assert not (tmp_path / "executed").exists()


def test_nothing_is_said_where_nothing_is_left_out(dcp_checkpoint, recwarn):
    assert fc.load(dcp_checkpoint, skip_opaque=True).keys() == fc.load(dcp_checkpoint).keys()
    assert not list(recwarn)


def test_bfloat16_without_ml_dtypes_is_an_error_that_names_the_tensor(bf16_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(fc.UsageError, match=r"`.*` \(bfloat16\): install `ml_dtypes`"):
        fc.load(bf16_checkpoint)
    torch.save({"deep": {"pair": (torch.ones(2).bfloat16(),)}}, "deep.pt")
    with pytest.raises(fc.UsageError, match=r"`deep\.pair.*` \(bfloat16\): install `ml_dtypes`"):
        fc.load("deep.pt")
    with pytest.raises(fc.UsageError, match="no framework `jax`"):
        fc.load(bf16_checkpoint, framework="jax")


def test_damaged_bytes_are_not_returned(dcp_checkpoint, tmp_path):
    fc.reshard(dcp_checkpoint, tmp_path / "sealed", 1)
    data = tmp_path / "sealed" / "__0_0.distcp"
    bytes_ = bytearray(data.read_bytes())
    bytes_[len(bytes_) // 2] ^= 1
    data.write_bytes(bytes_)
    with pytest.raises(fc.CorruptError, match="__0_0.distcp"):
        fc.load(tmp_path / "sealed")


def test_keys_that_are_whole_come_out_of_a_damaged_checkpoint(dcp_checkpoint, tmp_path):
    fc.reshard(dcp_checkpoint, tmp_path / "cut", 2)
    with (tmp_path / "cut" / "__1_0.distcp").open("r+b") as file:
        file.truncate(20_000)
    with pytest.raises(fc.CheckpointError, match="__1_0.distcp"):
        fc.load(tmp_path / "cut")
    assert fc.load(tmp_path / "cut", ["epoch"]) == fc.load(dcp_checkpoint, ["epoch"])


def test_a_header_that_asks_for_all_memory_is_an_error(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    (tmp_path / "huge.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(fc.CheckpointError):
        fc.load(tmp_path / "huge.safetensors")


@pytest.mark.parametrize("keys", [None, ["w"]])
def test_metadata_that_asks_for_all_memory_is_an_error_and_gets_none(tmp_path, monkeypatch, keys):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    dcp.save({"w": torch.ones(2), "v": torch.ones(2)}, checkpoint_id=tmp_path / "c")
    metadata = dcp.FileSystemReader(tmp_path / "c").read_metadata()
    huge = torch.Size([1 << 40])
    tensor = metadata.state_dict_metadata["w"]
    tensor.size, tensor.chunks = huge, [dataclasses.replace(tensor.chunks[0], sizes=huge)]
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert fc.load(tmp_path / "c", ["v"])["v"].tolist() == [1, 1]

    def refuse(*_):
        raise AssertionError("memory was allocated")

    monkeypatch.setattr(np, "empty", refuse)
    with pytest.raises(fc.CheckpointError, match="__0_0.distcp"):
        fc.load(tmp_path / "c", keys)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_values_of_numpy_are_numpys_whatever_the_framework(framework, tmp_path):
    path = tmp_path / "rng.pt"
    state = np.random.RandomState(3).get_state()
    big_endian = np.arange(3, dtype=">i4")
    torch.save({"rng": state, "loss": np.float32(1.5), "dtype": np.dtype("<f4"), "big": big_endian}, path)
    loaded = fc.load(path, framework=framework)
    restored = np.random.RandomState()
    restored.set_state(loaded["rng"])
    assert restored.random() == np.random.RandomState(3).random()
    assert type(loaded["loss"]) is np.float32 and loaded["loss"] == 1.5
    assert loaded["dtype"] == np.dtype("<f4")
    assert np.array_equal(loaded["big"], big_endian)
