#!/usr/bin/env python3
"""The figures of `bench.sh`, each run in a line.

  figures.py steps RUN NAME TOKENS MEMORY    a run of `fsdp train`: its median step without start-up, its first
                                             step, and its saves
  figures.py load NAME TRACE...              the traces of a run that has loaded a checkpoint: the time of the load
  figures.py kernels FILE                    the CSV file of `ncu`: the kernels that take longest
"""
import collections
import csv
import json
import re
import statistics
import sys
from pathlib import Path

# The first steps load kernels and fill pools.
WARM_UP = 5
UNITS = {"ns": 1, "nsecond": 1, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6}


def read_lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def print_steps(run, name, tokens, memory):
    steps = read_lines(Path(run) / "metrics.jsonl")
    seconds = [after["time"] - before["time"] for before, after in zip(steps, steps[1:])][WARM_UP:]
    if not seconds:
        print(f"OURS {name}: only {len(steps)} steps were done")
        return
    step = statistics.median(seconds)
    figures = [f"step {step * 1e3:.1f} ms", f"{float(tokens) / step:.0f} tokens/s", f"loss {steps[-1]['loss']:.4f}"]
    # The first step also loads the kernels that a step needs.
    figures.append(f"first step {float(tokens) / steps[0]['tokens_per_s']:.2f} s")
    used = [int(number) for number in re.findall(r"\d+", Path(memory).read_text())]
    if used:
        figures.append(f"peak {max(used)} MiB")
    for event in read_lines(Path(run) / "events.jsonl"):
        if event["event"] == "checkpoint":
            figures.append(f"save {event['seconds']:.3f} s, of which steps waited {event['stall_seconds']:.3f}")
    print(f"OURS {name}: {'; '.join(figures)}")


def print_load(name, *traces):
    seconds = []
    for trace in traces:
        begun = {}
        for event in json.loads(Path(trace).read_text()):
            if event["name"] == "load" and event["ph"] == "B":
                begun[event["tid"]] = event["ts"]
            elif event["name"] == "load" and event["ph"] == "E" and event["tid"] in begun:
                seconds.append((event["ts"] - begun.pop(event["tid"])) / 1e6)
    print(f"OURS {name}: load {max(seconds):.3f} s" if seconds else f"OURS {name}: there is no load in the trace")


def print_kernels(file):
    times, counts = collections.Counter(), collections.Counter()
    path = Path(file)
    lines = path.read_text().splitlines() if path.is_file() else []
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        kernel = re.sub(r"<.*", "", row["Kernel Name"])[:60]
        times[kernel] += float(row["Metric Value"].replace(",", "")) * UNITS[row.get("Metric Unit", "ns")]
        counts[kernel] += 1
    print(f"KERNELS {sum(counts.values())} in {sum(times.values()) / 1e6:.1f} ms")
    for kernel, time in times.most_common(25):
        count = counts[kernel]
        print(f"  {time / 1e6:8.2f} ms {count:6} x {time / count / 1e3:8.1f} us  {kernel}")


if __name__ == "__main__":
    {"steps": print_steps, "load": print_load, "kernels": print_kernels}[sys.argv[1]](*sys.argv[2:])
