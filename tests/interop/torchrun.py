#!/usr/bin/env python3
"""Ranks that the real torchrun starts meet, and train to the same losses as the ranks of one process.

  torchrun.py FSDP_BINARY DATA WORK_DIRECTORY

Run by `cargo xtask interop`. Prints a line for each case; exits 1 at the first failure.
"""
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

MODEL = ["--layers", "1", "--heads", "2", "--hidden", "16", "--seq", "16", "--batch", "4", "--sample", "0",
         "--steps", "3", "--timeout", "20"]
LIMIT = 120
# Each rank: notes what torchrun told it, and fails once if it is the one that is to.
WORKER = """
echo "$RANK $TORCHELASTIC_USE_AGENT_STORE $TORCHELASTIC_RESTART_COUNT" >> "$1/started"
if [ "$RANK" = "$2" ] && [ ! -e "$1/failed" ]; then touch "$1/failed"; exit 7; fi
shift 2
exec "$@"
"""


def losses(out):
    return [json.loads(line)["loss"] for line in open(out / "metrics.jsonl")]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run(case, out, commands, environment):
    """Runs torchrun on each node, all at once, until all have ended or one has failed."""
    logs = [open(out / f"agent-{node}.log", "w+") for node in range(len(commands))]
    agents = [subprocess.Popen([str(part) for part in command], stdout=log, stderr=log, env=environment)
              for command, log in zip(commands, logs)]
    until = time.monotonic() + LIMIT
    while any(agent.poll() is None for agent in agents) and not any(agent.poll() for agent in agents):
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    ended = [agent.poll() for agent in agents]
    for agent in agents:
        # Its ranks end with it, unless it is killed.
        agent.terminate()
        agent.wait()
    if any(ended) or None in ended:
        for log in logs:
            log.seek(0)
        sys.exit(f"{case}: exit codes {ended} within {LIMIT} s\n" + "\n".join(log.read() for log in logs))


def check(case, work, expected, train, nodes, *, shared=True, fails=""):
    """`nodes` has the arguments of each node's torchrun. Without `shared`, its agents keep no store for the ranks."""
    out = work / case.replace(" ", "-")
    out.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
    if not shared:
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    worker = ["--no-python", "sh", "-c", WORKER, "sh", out, fails, *train, "--out", out / "run"]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    run(case, out, [[*torchrun, *arguments, *worker] for arguments in nodes], environment)
    started = sorted(line.split() for line in open(out / "started"))
    if {rank for rank, _, _ in started} != {"0", "1"} or {kept for _, kept, _ in started} != {str(shared)}:
        sys.exit(f"{case}: other ranks started than there are to be (rank, agent's store, restarts): {started}")
    if bool(fails) != (len(started) > 2):
        sys.exit(f"{case}: other restarts than there are to be: {started}")
    if losses(out / "run") != expected:
        sys.exit(f"{case}: losses {losses(out / 'run')}, expected {expected}")
    print(f"ok: {case}", flush=True)


def main():
    binary, data, work = (pathlib.Path(argument).resolve() for argument in sys.argv[1:])
    work.mkdir(parents=True)
    train = [binary, "train", "--data", data, *MODEL]
    alone = work / "alone"
    subprocess.run([*map(str, train), "--nproc", "2", "--out", str(alone)], check=True, timeout=LIMIT,
                   capture_output=True)
    expected = losses(alone)

    def case(name, nodes, **more):
        check(name, work, expected, train, nodes, **more)

    def two(*arguments):
        endpoint = f"127.0.0.1:{free_port()}"
        return [["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "demo",
                 "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1", *arguments]] * 2

    case("torchrun standalone", [["--standalone", "--nproc-per-node", "2"]])
    case("torchrun on one node", [["--nproc-per-node", "2"]])
    case("torchrun standalone without a shared store", [["--standalone", "--nproc-per-node", "2"]], shared=False)
    case("torchrun on two nodes", two())
    case("torchrun on two nodes without a shared store", two(), shared=False)
    # One agent counts a restart, the other follows and does not.
    case("torchrun on two nodes with a restart", two("--max-restarts", "1"), fails="1")
    port = str(free_port())
    static = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
    case("torchrun on two nodes at a fixed address", [[*static, "--node-rank", str(node)] for node in range(2)])


if __name__ == "__main__":
    main()
