"""How fast gloo's collectives are, as the example beside this file measures ours."""
import json
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = [4, 1 << 20, 16 << 20, 256 << 20]
ROUNDS = 5
ROUND = 0.15


def measure(call):
    call()
    start = time.perf_counter()
    call()
    once = [time.perf_counter() - start]
    dist.broadcast_object_list(once)
    calls = max(1, min(20_000, int(ROUND / once[0])))
    best = float("inf")
    for _ in range(ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        taken = [None] * dist.get_world_size()
        dist.all_gather_object(taken, time.perf_counter() - start)
        best = min(best, max(taken) / calls)
    return best


def rank(rank, ranks, port, style):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    if rank == 0 and style == "table":
        print(f"{ranks} ranks, gloo (torch {torch.__version__})")
    for size in SIZES:
        numel = max(size // 4, ranks) // ranks * ranks
        whole, piece = torch.ones(numel), torch.zeros(numel // ranks)
        calls = {
            "all-gather": lambda: dist.all_gather_into_tensor(whole, piece),
            "reduce-scatter": lambda: dist.reduce_scatter_tensor(piece, whole),
            "all-reduce": lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX),
        }
        for name, call in calls.items():
            seconds = measure(call)
            if rank == 0 and style == "json":
                line = {"backend": "gloo", "ranks": ranks, "operation": name, "bytes": numel * 4, "seconds": seconds}
                print(json.dumps({**line, "gb_per_s": numel * 4 / seconds / 1e9}), flush=True)
            elif rank == 0:
                print(f"{numel * 4:>12} {name:>15} {seconds * 1e6:>9.1f} µs {numel * 4 / seconds / 1e9:>10.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks, style = int(sys.argv[1]), sys.argv[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # `python -c` has no file that new processes could import, so they are forks.
    mp.start_processes(rank, (ranks, port, style), nprocs=ranks, start_method="fork")
