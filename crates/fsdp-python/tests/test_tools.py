"""The functions that are commands, and the command."""

import http.server
import importlib.metadata
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
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


def test_a_place_may_be_bytes(dcp_checkpoint, tmp_path):
    place = os.fsencode(dcp_checkpoint)
    assert fc.inspect(place)["format"] == "dcp"
    assert fc.load(place, ["epoch"]) == fc.load(dcp_checkpoint, ["epoch"])
    fc.reshard(place, os.fsencode(tmp_path / "copy"), 1)
    assert fc.diff(place, tmp_path / "copy")["equal"]


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
        for number, (include, exclude) in enumerate([("model.*", "*.bias"), (["model.*"], ["*.bias"]), ((b"model.*",), {b"*.bias"})])
    ]
    assert reports[0]["tensors"] == reports[1]["tensors"] == reports[2]["tensors"] > 0
    assert reports[0]["values"] == reports[1]["values"] == reports[2]["values"] == 0


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


def test_merge_writes_the_average(tmp_path):
    for name, number in [("a", 1), ("b", 4)]:
        np.savez(tmp_path / f"{name}.npz", weight=np.full(3, number, np.float32), count=np.array([number]))
    sources = [tmp_path / "a.npz", os.fsencode(tmp_path / "b.npz")]
    report = fc.merge(sources, tmp_path / "mean", "dcp", world_size=2)
    assert (report["to"], report["tensors"]) == ("dcp", 2)
    mean = fc.load(tmp_path / "mean")
    assert mean["weight"].tolist() == [2.5] * 3 and mean["count"].tolist() == [1]
    fc.merge(sources, tmp_path / "mean", "dcp", weights=[2, -1], include="weight", overwrite=True)
    assert {name: array.tolist() for name, array in fc.load(tmp_path / "mean").items()} == {"weight": [-2.0] * 3}
    np.savez(tmp_path / "other.npz", weight=np.zeros(3, np.float32))
    with pytest.raises(fc.DifferenceError, match="count"):
        fc.merge([*sources, tmp_path / "other.npz"], tmp_path / "none", "torch")
    with pytest.raises(fc.UsageError, match="1 weight for 2 checkpoints"):
        fc.merge(sources, tmp_path / "none", "torch", weights=[1])
    with pytest.raises(fc.UsageError, match="--from"):
        fc.merge([], tmp_path / "none", "torch")
    with pytest.raises(TypeError):
        fc.merge([*sources, None], tmp_path / "none", "torch")
    assert fc.merge(sources, tmp_path / "none", "hf", dry_run=True)["dry_run"]
    assert not (tmp_path / "none").exists()


def test_merge_adds_an_adapter_to_its_base(tmp_path):
    np.savez(tmp_path / "base.npz", **{"up.weight": np.ones((2, 1), np.float32)})
    factors = {"A": np.full((1, 1), 3, np.float32), "B": np.array([[1], [2]], np.float32)}
    names = {name: f"base_model.model.up.lora_{name}.weight" for name in factors}
    np.savez(tmp_path / "factors.npz", **{names[name]: factor for name, factor in factors.items()})
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 2}')
    fc.convert(tmp_path / "factors.npz", adapter / "adapter_model.safetensors", to="safetensors")
    fc.merge(tmp_path / "base.npz", tmp_path / "merged.safetensors", "safetensors", lora=adapter)
    assert fc.load(tmp_path / "merged.safetensors")["up.weight"].tolist() == [[7.0], [13.0]]


@pytest.fixture
def run_folder(dcp_checkpoint, tmp_path):
    """The folder of a run with checkpoints of three steps."""
    for step in (1, 2, 3):
        fc.reshard(dcp_checkpoint, tmp_path / "run" / f"step-{step}", step)
    return tmp_path / "run"


def test_ls_lists_the_checkpoints_of_a_run(run_folder, tmp_path):
    (run_folder / "step-4").mkdir()
    report = fc.ls(run_folder)
    assert [found["step"] for found in report["checkpoints"]] == [1, 2, 3, 4]
    assert [found["format"] for found in report["checkpoints"]] == ["dcp", "dcp", "dcp", None]
    assert report["checkpoints"][0]["hashed"] and report["checkpoints"][3]["error"]
    assert fc.ls(tmp_path)["checkpoints"] == []
    with pytest.raises(fc.IncompleteError):
        fc.ls(tmp_path / "none")


def test_log_returns_the_chain_of_a_run(run_folder, tmp_path, monkeypatch):
    report = fc.log(run_folder)
    assert report["whole"] is True
    assert [found["name"] for found in report["checkpoints"]] == ["step-3", "step-2", "step-1"]
    assert {found["digest"] for found in report["checkpoints"]} == {fc.digest(run_folder / "step-1")["digest"]}
    with pytest.raises(fc.IncompleteError):
        fc.log(tmp_path / "none")
    # Damage is raised.
    metadata = run_folder / "step-3" / ".metadata"
    metadata.write_bytes(b"damaged")
    with pytest.raises(fc.CorruptError):
        fc.log(run_folder)
    metadata.unlink()
    with pytest.raises(fc.IncompleteError):
        fc.log(run_folder)
    # A chain that is broken is a report.
    broken = json.dumps(report | {"whole": False}), fc.DifferenceError("the chain is broken")
    monkeypatch.setattr("fsdp_checkpoint._native.report", lambda _: broken)
    assert fc.log(run_folder)["whole"] is False


def test_prune_removes_old_checkpoints_only_if_told(run_folder):
    report = fc.prune(run_folder, 1, keep_every=2)
    assert (report["dry_run"], report["removed"], report["stay"]) == (True, ["step-1"], [])
    assert len(list(run_folder.iterdir())) == 3
    (run_folder / "step-1" / "mine.txt").write_text("mine")
    report = fc.prune(run_folder, 1, yes=True)
    assert (report["dry_run"], report["removed"]) == (False, ["step-2"])
    assert [found["name"] for found in report["stay"]] == ["step-1"] and "mine.txt" in report["stay"][0]["reason"]
    assert sorted(path.name for path in run_folder.iterdir()) == ["step-1", "step-3"]
    (run_folder / "step-3" / ".metadata").unlink()
    with pytest.raises(fc.UsageError, match="nothing was removed"):
        fc.prune(run_folder, 1, yes=True)
    with pytest.raises(fc.UsageError):
        fc.prune(run_folder, 0)
    assert sorted(path.name for path in run_folder.iterdir()) == ["step-1", "step-3"]


def test_what_is_signed_is_verified(dcp_checkpoint, keys, tmp_path):
    signed, key = tmp_path / "signed", keys / "key.pem"
    shutil.copytree(dcp_checkpoint, signed)
    report = fc.sign(signed, key)
    assert report["signature"] == str(signed / "model.sig")
    assert report["signed"]["files"] == len(list(dcp_checkpoint.rglob("*")))
    public = keys / "key.pub.pem"
    assert fc.verify(signed, signature=signed / "model.sig", public_key=public)["ok"]
    with pytest.raises(fc.UsageError, match="exists already"):
        fc.sign(signed, key)
    assert fc.sign(signed, key, overwrite=True, threads=1)["signed"] == report["signed"]
    assert fc.sign(signed, key, signature=tmp_path / "apart.sig")["signature"] == str(tmp_path / "apart.sig")
    with pytest.raises(fc.UsageError, match="key"):
        fc.sign(signed, public, overwrite=True)
    with pytest.raises(fc.IncompleteError):
        fc.sign(tmp_path / "none", key)
    with pytest.raises(fc.UnsafeError, match="another key"):
        fc.verify(signed, signature=signed / "model.sig", public_key=keys / "other.pub.pem")
    (signed / "mine.txt").write_text("mine")
    report = fc.verify(signed, signature=signed / "model.sig", public_key=public)
    assert not report["ok"] and "mine.txt" in report["problems"][0]["error"]
    (signed / "mine.txt").unlink()
    (signed / "__1_0.distcp").unlink()
    with pytest.raises(fc.IncompleteError, match="__1_0.distcp"):
        fc.verify(signed, signature=signed / "model.sig", public_key=public)


def test_cat_returns_one_tensor_or_value(tmp_path):
    weight = np.array([[1.5, np.nan], [0, 2]], np.float32)
    arrays = {"weight": weight, "-z": np.array([1 - 2j]), "large": np.zeros(2**20 + 1)}
    np.savez(tmp_path / "arrays.npz", **arrays)
    report = fc.cat(tmp_path / "arrays.npz", "weight")
    assert (report["dtype"], report["shape"], report["elements"]) == ("float32", [2, 2], [1.5, "NaN", 0, 2])
    assert fc.cat(tmp_path / "arrays.npz", "-z")["elements"] == ["1.0-2.0j"]
    stats = fc.cat(tmp_path / "arrays.npz", "weight", stats=True)["stats"]
    assert (stats["count"], stats["nan"], stats["max"]) == (4, 1, 2)
    with pytest.raises(fc.UsageError, match="1048577 elements"):
        fc.cat(tmp_path / "arrays.npz", "large")
    report = fc.cat(tmp_path / "arrays.npz", "large", npy=tmp_path / "large.npy")
    assert report["npy"] == str(tmp_path / "large.npy")
    assert np.array_equal(np.load(tmp_path / "large.npy"), arrays["large"])
    with pytest.raises(fc.UsageError, match="exists already"):
        fc.cat(tmp_path / "arrays.npz", "weight", npy=tmp_path / "large.npy")
    with pytest.raises(fc.DifferenceError, match="weigth"):
        fc.cat(tmp_path / "arrays.npz", "weigth")


def test_cat_returns_values(dcp_checkpoint):
    assert fc.cat(dcp_checkpoint, "epoch")["value"] == fc.load(dcp_checkpoint, ["epoch"])["epoch"]


def test_a_dry_run_writes_nothing(dcp_checkpoint, tmp_path):
    assert fc.convert(dcp_checkpoint, tmp_path / "new", to="hf", max_shard_size="1MB", dry_run=True)["dry_run"]
    assert not list(tmp_path.iterdir())


class EmptyBucket(http.server.BaseHTTPRequestHandler):
    """A server that speaks enough of S3's protocol to say that there is nothing."""

    def do_GET(self):
        self.server.asked.append(self.path)
        is_list = "list-type=2" in self.path
        body = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>" if is_list else b""
        self.send_response(200 if is_list else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


def test_a_url_is_read_from_its_object_store(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), EmptyBucket)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = {"ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "REGION": "x", "ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x"}
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    try:
        for call in [fc.inspect, fc.verify, fc.load]:
            with pytest.raises(fc.IncompleteError, match="s3://bucket/step-20"):
                call("s3://bucket/step-20")
    finally:
        server.shutdown()
    assert any("step-20" in path for path in server.asked)


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


def test_the_command_imports_no_library_and_little_else():
    """What it imports is what it takes to start."""
    heavy = ["numpy", "torch", "json", "importlib.metadata", "pathlib", "asyncio", "multiprocessing"]
    code = f"import sys; old = set(sys.modules); import fsdp_checkpoint._command; print(set({heavy}) & set(sys.modules) - old)"
    done = subprocess.run([sys.executable, "-S", "-c", paths_of_this_python() + code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def paths_of_this_python() -> str:
    """Return code that finds the packages that are installed here, in a Python that begins without them."""
    return f"import sys; sys.path[:] = {sys.path!r}; "


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
    assert fc.__version__ == importlib.metadata.version("fsdp-checkpoint")
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
