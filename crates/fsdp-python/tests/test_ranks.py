"""The storage of torch.distributed.checkpoint over several ranks: processes with gloo."""

import multiprocessing
import os
import shutil
import time

import fsdp_checkpoint as fc
import pytest

pytest.importorskip("torch")

import ranks as job  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from fsdp_checkpoint.torch import StorageWriter  # noqa: E402

SECONDS = 240


@pytest.fixture(scope="module")
def processes():
    """Processes that begin with torch imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks"])
    return context


def start(processes, tmp_path, ranks, verbs, rows=64, name="last"):
    """Start the ranks of a job, and return them and the queue of what they tell."""
    outcomes = processes.Queue()
    store = tmp_path / f"store-{time.monotonic_ns()}"
    arguments = [(rank, ranks, store, outcomes, tmp_path / name, verbs, rows) for rank in range(ranks)]
    job_ranks = [processes.Process(target=job.run, args=of_rank, daemon=True) for of_rank in arguments]
    for rank in job_ranks:
        rank.start()
    return job_ranks, outcomes


def run(processes, tmp_path, ranks, verbs, **others):
    """Run a job, and return how each verb ended, by rank."""
    job_ranks, outcomes = start(processes, tmp_path, ranks, verbs, **others)
    ended = {verb: {} for verb, _ in verbs}
    while any(len(of_verb) < ranks for of_verb in ended.values()):
        rank, verb, outcome = outcomes.get(timeout=SECONDS)
        if outcome != "begins":
            ended[verb][rank] = outcome
    for rank in job_ranks:
        rank.join(SECONDS)
    return ended


def names(tmp_path):
    """Return what lies in the directory of the checkpoint."""
    return [name for name in os.listdir(tmp_path) if not name.startswith("store-")]


def test_an_error_of_one_rank_is_an_error_of_all_and_the_old_one_stays(processes, tmp_path):
    ended = run(processes, tmp_path, 3, [("save", 5), ("fail", 6), ("load", 5)])
    assert set(ended["save"].values()) == set(ended["load"].values()) == {"done"}
    for outcome in ended["fail"].values():
        assert "rank 2 has no data" in outcome
    assert names(tmp_path) == ["last"]
    report = fc.verify(tmp_path / "last", "deep")
    # The digests are of whole tensors, from the parts of all ranks.
    assert report["ok"] and report["digests"] == report["tensors"] + report["values"]
    assert sorted(os.listdir(tmp_path / "last")) == [
        ".integrity", ".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"
    ]  # fmt: skip
    # Another number of ranks.
    assert run(processes, tmp_path, 2, [("load", 5)]) == {"load": {0: "done", 1: "done"}}


def test_ranks_that_find_different_checkpoints_load_none(processes, tmp_path):
    for rank, value in [(0, 5), (1, 5), (2, 6)]:
        run(processes, tmp_path, 3, [("save", value)], name=f"host-{rank}")
    ended = run(processes, tmp_path, 3, [("load", 5)], name="host-RANK")
    # Even two saves of the same values are two checkpoints.
    for outcome in ended["load"].values():
        assert "rank 1 reads another checkpoint" in outcome and "host-0" in outcome
    shutil.rmtree(tmp_path / "host-1")
    shutil.rmtree(tmp_path / "host-2")
    for rank in (1, 2):
        shutil.copytree(tmp_path / "host-0", tmp_path / f"host-{rank}")
    assert set(run(processes, tmp_path, 3, [("load", 5)], name="host-RANK")["load"].values()) == {"done"}


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.2])
def test_a_kill_in_the_middle_of_an_overwrite_keeps_one_whole(processes, tmp_path, delay):
    path = tmp_path / "last"
    dcp.save({"plain": job.whole(1, 4), "step": 1}, storage_writer=StorageWriter(path))
    job_ranks, outcomes = start(processes, tmp_path, 2, [("save", 2)], rows=200_000)
    outcomes.get(timeout=SECONDS)
    # From the moment on that the new one begins to grow.
    while job_ranks[0].is_alive() and not any(name.startswith(".last.tmp-") for name in os.listdir(tmp_path)):
        time.sleep(0.001)
    time.sleep(delay)
    for rank in job_ranks:
        rank.kill()
        rank.join()
    report = fc.verify(path)
    assert report["ok"] and report["hashed"]
    assert fc.load(path, ["step"])["step"] in (1, 2)
    # The next save removes what is left of the killed one.
    dcp.save({"plain": job.whole(3, 4), "step": 3}, storage_writer=StorageWriter(path))
    assert names(tmp_path) == ["last"]
