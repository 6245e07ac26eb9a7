#!/usr/bin/env python3
"""Both ways between `fsdp` and the real PyTorch: what one saved, the other goes on with, to the same losses.

  interop.py FSDP_BINARY DATA WORK_DIRECTORY

Run by `cargo xtask interop`, which makes the environment. Prints a line for each case; exits 1 at the first difference.
"""
import json
import pathlib
import subprocess
import sys

import torch
import torch.distributed.checkpoint as dcp

HERE = pathlib.Path(__file__).resolve().parent
MODEL = ["--layers", "2", "--heads", "2", "--hidden", "32", "--batch", "12", "--seq", "32", "--lr", "0.001"]
MODES = {"fsdp1": 2, "fsdp1-flat": 3, "fsdp2": 2, "plain": 1}
# Relative; what is seen is about 1e-7.
TOLERANCE = 1e-5
SAVED, END = 20, 40


def losses(out):
    lines = (json.loads(line) for line in open(out / "metrics.jsonl"))
    return {line["step"]: line["loss"] for line in lines}


def ours(binary, data, out, nproc, steps, *more):
    run(binary, "train", "--data", data, "--nproc", nproc, "--steps", steps, "--save-every", SAVED, "--out", out,
        "--sample", 0, *MODEL, *more)


def theirs(data, out, mode, nproc, steps, *more):
    run(sys.executable, HERE / "gpt_fsdp.py", "--data", data, "--mode", mode, "--nproc", nproc, "--steps", steps,
        "--save-every", SAVED, "--out", out, *MODEL, *more)


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        sys.exit(f"failed: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def compare(case, found, expected):
    for step in range(SAVED, END):
        difference = abs(found[step] - expected[step]) / abs(expected[step])
        if not difference <= TOLERANCE:
            sys.exit(f"{case}: step {step}: loss {found[step]}, expected {expected[step]}")
    print(f"ok: {case}", flush=True)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same_tensors(case, a, b):
    """Every tensor of two checkpoints, read by torch, bit for bit."""
    states = []
    for path in (a, b):
        metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        state = {key: torch.empty(entry.size, dtype=entry.properties.dtype)
                 for key, entry in metadata.items() if hasattr(entry, "size")}
        dcp.load(state, checkpoint_id=path, no_dist=True)
        states.append(state)
    first, second = states
    if first.keys() != second.keys():
        sys.exit(f"{case}: other keys: {sorted(first.keys() ^ second.keys())[:4]}")
    for key, tensor in first.items():
        if not torch.equal(bits(tensor), bits(second[key])):
            sys.exit(f"{case}: `{key}` differs")
    print(f"ok: {case}: {len(first)} tensors", flush=True)


def main():
    binary, data, work = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
    step = f"step-{SAVED:08}"
    for nproc in (1, 2, 3, 4):
        ours(binary, data, work / f"ours-{nproc}", nproc, END)
    for mode, nproc in MODES.items():
        source = work / f"ours-{nproc + 1}"
        theirs(data, work / f"on-{mode}", mode, nproc, END, "--init-from", source / step)
        compare(f"saved by fsdp on {nproc + 1} ranks, continued by torch {mode} on {nproc}",
                losses(work / f"on-{mode}"), losses(source))
    for mode, nproc in MODES.items():
        source = work / f"theirs-{mode}"
        theirs(data, source, mode, nproc, END)
        out = work / f"init-{mode}"
        ours(binary, data, out, 2, END, "--init-from", source / step)
        compare(f"saved by torch {mode} on {nproc}, --init-from of fsdp on 2 ranks", losses(out), losses(source))
        for ranks in (1, 3):
            out = work / f"from-{mode}-{ranks}"
            out.mkdir()
            (out / step).symlink_to((source / step).resolve())
            ours(binary, data, out, ranks, END, "--resume")
            compare(f"saved by torch {mode} on {nproc}, continued by fsdp on {ranks} ranks", losses(out), losses(source))
            # No step at all: what was loaded is what is saved.
            again = work / f"copy-{mode}-{ranks}"
            run(binary, "reshard", source / step, again, "--world-size", ranks)
            same_tensors(f"torch {mode} resharded to {ranks}", source / step, again)


main()
