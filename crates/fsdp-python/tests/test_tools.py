"""inspect, verify, diff, digest, convert and reshard, and the command."""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsdp_checkpoint as fc
import numpy as np
import pytest


def test_inspect_returns_the_commands_json(dcp_checkpoint):
    report = fc.inspect(dcp_checkpoint)
    assert (report["schema"], report["format"], report["committed"]) == (1, "dcp", True)
    assert report["bytes"] == sum(tensor["bytes"] for tensor in report["tensors"])
    assert {box["rank"] for tensor in report["tensors"] for box in tensor["boxes"]} == {0, 1}


def test_a_place_may_begin_with_a_dash(dcp_checkpoint, tmp_path, monkeypatch):
    shutil.copytree(dcp_checkpoint, tmp_path / "--json")
    monkeypatch.chdir(tmp_path)
    assert fc.inspect("--json")["format"] == "dcp"


def test_nothing_at_a_place_is_incomplete_and_file_not_found(tmp_path):
    with pytest.raises(fc.IncompleteError, match="is not a committed checkpoint") as raised:
        fc.inspect(tmp_path / "none")
    assert isinstance(raised.value, FileNotFoundError)
    assert raised.value.exit_code == 11
    assert raised.value.hint
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (type(copy), str(copy), copy.hint) == (type(raised.value), str(raised.value), raised.value.hint)


def test_verify_reports_damage_and_does_not_raise(dcp_checkpoint, tmp_path):
    fc.reshard(dcp_checkpoint, tmp_path / "sealed", 2)
    assert fc.verify(tmp_path / "sealed")["ok"]
    data = tmp_path / "sealed" / "__1_0.distcp"
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    report = fc.verify(tmp_path / "sealed", threads=1)
    assert not report["ok"]
    assert report["problems"][0]["file"] == "__1_0.distcp"
    assert fc.verify(tmp_path / "sealed", "structure")["ok"]


def test_verify_raises_where_there_is_nothing_to_verify(dcp_checkpoint, tmp_path):
    (tmp_path / "empty").mkdir()
    for place in [tmp_path / "none", tmp_path / "empty"]:
        with pytest.raises(fc.IncompleteError):
            fc.verify(place)
    with pytest.raises(fc.CheckpointError, match="regular file"):
        fc.verify("/dev/null")
    # A file that is missing from a checkpoint is damage.
    copy = tmp_path / "copy"
    shutil.copytree(dcp_checkpoint, copy)
    next(copy.glob("*.distcp")).unlink()
    assert not fc.verify(copy)["ok"]


def test_diff_lists_what_differs(dcp_checkpoint, bf16_checkpoint, tmp_path):
    fc.convert(dcp_checkpoint, tmp_path / "copy", to="dcp", world_size=3)
    assert fc.diff(dcp_checkpoint, tmp_path / "copy") == fc.diff(dcp_checkpoint, tmp_path / "copy") | {"equal": True}
    report = fc.diff(dcp_checkpoint, bf16_checkpoint)
    assert not report["equal"]
    assert "dtype" in {difference["kind"] for difference in report["differences"]}


def test_the_digest_does_not_depend_on_the_layout(dcp_checkpoint, tmp_path):
    fc.reshard(dcp_checkpoint, tmp_path / "three", 3)
    assert fc.digest(dcp_checkpoint)["digest"] == fc.digest(tmp_path / "three")["digest"]


def test_convert_selects_renames_and_casts(dcp_checkpoint, tmp_path):
    report = fc.convert(
        dcp_checkpoint,
        tmp_path / "model.safetensors",
        to="safetensors",
        include=["model.*"],
        rename={"model.": ""},
        dtype="bfloat16",
    )
    inspected = fc.inspect(tmp_path / "model.safetensors")
    assert report["tensors"] == len(inspected["tensors"]) > 0
    assert {tensor["dtype"] for tensor in inspected["tensors"]} == {"bfloat16"}
    assert not any(tensor["name"].startswith("model.") for tensor in inspected["tensors"])


def test_a_prefix_with_an_equals_sign_is_refused(dcp_checkpoint, tmp_path):
    with pytest.raises(fc.UsageError, match="cannot contain"):
        fc.convert(dcp_checkpoint, tmp_path / "m.safetensors", to="safetensors", rename={"a=b.": "x."})


def test_one_glob_is_a_string_or_a_list(dcp_checkpoint, tmp_path):
    reports = [
        fc.convert(dcp_checkpoint, tmp_path / str(number), to="torch", include=include, exclude=exclude)
        for number, (include, exclude) in enumerate([("model.*", "*.bias"), (["model.*"], ["*.bias"])])
    ]
    assert reports[0]["tensors"] == reports[1]["tensors"] > 0
    assert reports[0]["values"] == reports[1]["values"] == 0


def test_what_cannot_be_done_changes_nothing(dcp_checkpoint, tmp_path):
    (tmp_path / "there").write_text("mine")
    with pytest.raises(fc.UsageError, match="exists already"):
        fc.convert(dcp_checkpoint, tmp_path / "there", to="torch")
    with pytest.raises(ValueError, match="has no effect"):
        fc.convert(dcp_checkpoint, tmp_path / "new", to="torch", world_size=2)
    with pytest.raises(fc.UsageError, match="invalid value"):
        fc.convert(dcp_checkpoint, tmp_path / "new", to="pickle")
    with pytest.raises(fc.UsageError, match="select no key"):
        fc.convert(dcp_checkpoint, tmp_path / "new", to="torch", include=["none.*"])
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").read_text() == "mine"


def test_a_dry_run_writes_nothing(dcp_checkpoint, tmp_path):
    assert fc.convert(dcp_checkpoint, tmp_path / "new", to="hf", max_shard_size="1MB", dry_run=True)["dry_run"]
    assert not list(tmp_path.iterdir())


def test_a_variable_of_the_command_changes_no_report(dcp_checkpoint, monkeypatch):
    monkeypatch.setenv("FSDP_LEVEL", "structure")
    assert fc.verify(dcp_checkpoint)["bytes_read"] > 0


def command(*arguments: object, **options: object) -> subprocess.CompletedProcess:
    fsdp = "import sys; from fsdp_checkpoint._command import main; sys.argv[0] = 'fsdp'; main()"
    line = [sys.executable, "-c", fsdp, *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False, **options)


def test_the_command_has_its_exit_codes(dcp_checkpoint, tmp_path):
    done = command("inspect", dcp_checkpoint, "--tensors")
    assert (done.returncode, done.stderr) == (0, "")
    assert "model." in done.stdout
    assert command("inspect", tmp_path / "none").returncode == 11
    assert command("inspect").returncode == 2
    assert command("diff", dcp_checkpoint, dcp_checkpoint).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file with a hole")
def test_ctrl_c_stops_a_conversion_and_leaves_nothing(tmp_path):
    source, target = tmp_path / "large.npz.safetensors", tmp_path / "copy.safetensors"
    size = 3 << 30
    header = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
    with source.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    code = f"import fsdp_checkpoint as fc; print('begin', flush=True); fc.convert({str(source)!r}, {str(target)!r}, to='safetensors')"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    while process.poll() is None and not any(".tmp-" in name for name in os.listdir(tmp_path)):
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


def test_every_function_says_what_it_does():
    for name in fc.__all__:
        if name != "Framework":
            assert getattr(fc, name).__doc__, name
    assert Path(fc.__file__).with_name("py.typed").exists()
    assert np.__version__


def test_values_keep_the_types_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    values = {
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "size": torch.Size([2, 3]),
        "frozen": frozenset([1]),
        "array": bytearray(b"x"),
        "path": Path("/a/b"),
    }
    torch.save(values, tmp_path / "values.pt")
    fc.convert(tmp_path / "values.pt", tmp_path / "copy.pt", to="torch")
    copy = torch.load(tmp_path / "copy.pt", weights_only=False)
    loaded = fc.load(tmp_path / "values.pt", framework="torch")
    for name, value in values.items():
        assert (type(copy[name]), copy[name]) == (type(value), value)
        assert (type(loaded[name]), loaded[name]) == (type(value), value)
    loaded = fc.load(tmp_path / "values.pt")
    assert (loaded["dtype"], loaded["size"], loaded["frozen"]) == ("torch.bfloat16", (2, 3), frozenset([1]))


def test_convert_has_the_options_of_the_command(tmp_path):
    heads = {f"self_attn.{name}_proj.weight": np.zeros((8, 4), np.float32) for name in "qkv"}
    np.savez(tmp_path / "model.npz", **heads)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text('{"num_attention_heads": 4, "num_key_value_heads": 4}')
    source = tmp_path / "model.npz"
    report = fc.convert(source, tmp_path / "two", to="hf", tp=2, with_=tmp_path / "config")
    assert report["tensors"] == 3
    assert (tmp_path / "two" / "config.json").exists()
    fc.convert(source, tmp_path / "whole", to="hf", tp=2, tp_rule="q_proj=replicate", set={"kv_heads": 4})
    with pytest.raises(fc.UsageError, match="needs the number `heads`"):
        fc.convert(source, tmp_path / "none", to="hf", tp=2)
    (tmp_path / "rules").write_text("self_attn.{x}_proj.weight -> {x}.weight\n")
    fc.convert(source, tmp_path / "mapped", to="safetensors", map=tmp_path / "rules")
    assert fc.diff(source, tmp_path / "mapped", map=tmp_path / "rules")["equal"]
    assert fc.diff(tmp_path / "mapped", source, map=tmp_path / "rules", map_reverse=True, full=True)["equal"]
    assert fc.diff(source, tmp_path / "mapped", include="q.*", map=tmp_path / "rules")["compared"] == 1


def test_the_other_tools_have_the_options_of_their_commands(dcp_checkpoint, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(dcp_checkpoint, copy)
    assert fc.verify(copy, seal=True)["hashed"]
    with pytest.raises(fc.CheckpointError):
        fc.verify(copy, signature=copy / "none.sig", public_key=copy / "none.pem")
    fc.reshard(dcp_checkpoint, tmp_path / "dry", 3, dry_run=True)
    assert not (tmp_path / "dry").exists()
    fc.reshard(dcp_checkpoint, tmp_path / "three", 3)
    assert fc.digest(tmp_path / "three", recorded=True)["from"] == "recorded"
