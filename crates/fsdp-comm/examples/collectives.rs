//! The speed of collectives, beside plain copies of the same memory in the same run.
//!
//! `cargo run --release -p fsdp-comm --example collectives -- [--json] [BACKEND [RANKS]] [--torch
//! PYTHON]`: the backend (`local`, `tcp`, `sockets` for `tcp` without shared memory, or `mpi` under
//! `mpirun` where it is compiled in) and the number of ranks; without them, `local` and `tcp` on 2
//! and 4 ranks. Under a launcher, `tcp` joins the ranks that it started. `--torch` names a Python
//! with torch, whose gloo does the same after each `tcp`.
//!
//! Printed for each size (that of the whole tensor on one rank) are the time of one operation, the
//! size divided by it, and the ratio to the memory bound: the time in which all ranks at once copy
//! as many bytes as they must read and write.
#![expect(clippy::print_stdout, reason = "its output is a table")]

use std::hint::black_box;
use std::net::TcpListener;
use std::process::Command;
use std::time::{Duration, Instant};

use fsdp_comm::{
    CommError, Environment, ProcessGroup, ReduceOp, TcpOptions, init_process_group, run_local,
};

const SIZES: [usize; 4] = [4, 1 << 20, 16 << 20, 256 << 20];
/// Each figure is the best of this many rounds,
const ROUNDS: usize = 5;
/// each of which takes about this long.
const ROUND: Duration = Duration::from_millis(150);

/// gloo's side of the comparison.
const GLOO: &str = include_str!("collectives_gloo.py");

fn main() -> Result<(), CommError> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let json = take(&mut arguments, "--json", 1).is_some();
    let torch = take(&mut arguments, "--torch", 2).and_then(|option| option.into_iter().nth(1));
    let runs = match &arguments[..] {
        [] => [("local", 2), ("tcp", 2), ("local", 4), ("tcp", 4)]
            .map(|(name, ranks)| (name.to_owned(), ranks))
            .to_vec(),
        [backend] => vec![(backend.clone(), 2)],
        [backend, ranks, ..] => vec![(backend.clone(), ranks.parse().unwrap_or(2))],
    };
    for (backend, ranks) in runs {
        run(&backend, ranks, json)?;
        if let Some(python) = torch.as_ref().filter(|_| backend == "tcp") {
            gloo(python, ranks, json)?;
        }
    }
    Ok(())
}

/// Takes an option and what belongs to it out of the arguments.
fn take(arguments: &mut Vec<String>, option: &str, words: usize) -> Option<Vec<String>> {
    let at = arguments.iter().position(|argument| argument == option)?;
    Some(
        arguments
            .drain(at..arguments.len().min(at + words))
            .collect(),
    )
}

fn run(backend: &str, ranks: usize, json: bool) -> Result<(), CommError> {
    match backend {
        "local" => run_local(ranks, |group| bench(group, json))?
            .into_iter()
            .collect(),
        "tcp" | "sockets" if std::env::var_os("RANK").is_none() => launch(backend, ranks, json),
        "tcp" | "sockets" => {
            let options = TcpOptions {
                shared_memory: backend == "tcp",
                ..TcpOptions::default()
            };
            bench(options.connect(&Environment::from_env()?)?, json)
        }
        _ => bench(init_process_group(backend.parse()?)?, json),
    }
}

fn gloo(python: &str, ranks: usize, json: bool) -> Result<(), CommError> {
    let status = Command::new(python)
        .args([
            "-c",
            GLOO,
            &ranks.to_string(),
            if json { "json" } else { "table" },
        ])
        .status();
    match status {
        Ok(status) if status.success() => Ok(()),
        other => Err(CommError::Start {
            rank: 0,
            message: format!("`{python}` with torch: {other:?}"),
        }),
    }
}

/// Starts this program again as each rank.
fn launch(backend: &str, ranks: usize, json: bool) -> Result<(), CommError> {
    let failed = |rank: usize, error: String| CommError::Start {
        rank,
        message: error,
    };
    let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let port = port.map_err(|error| failed(0, error.to_string()))?.port();
    let start = |rank: usize| {
        let program = std::env::current_exe().map_err(|error| failed(rank, error.to_string()))?;
        let mut command = Command::new(program);
        command
            .args([backend, &ranks.to_string()])
            .args(json.then_some("--json"))
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string());
        command.env("FSDP_JOB_ID", format!("collectives-{port}"));
        command
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string());
        command
            .spawn()
            .map_err(|error| failed(rank, error.to_string()))
    };
    let processes = (0..ranks).map(start).collect::<Result<Vec<_>, _>>()?;
    for (rank, mut process) in processes.into_iter().enumerate() {
        let status = process
            .wait()
            .map_err(|error| failed(rank, error.to_string()))?;
        if !status.success() {
            return Err(failed(rank, status.to_string()));
        }
    }
    Ok(())
}

fn bench(group: ProcessGroup, json: bool) -> Result<(), CommError> {
    let ranks = group.world_size();
    let say = |line: String| {
        if group.rank() == 0 {
            println!("{line}");
        }
    };
    let table = |line: String| {
        if !json {
            say(line)
        }
    };
    table(format!("{} ranks, {}", ranks, group.backend_name()));
    table(format!(
        "{:>12} {:>15} {:>12} {:>10} {:>8}",
        "bytes", "operation", "time", "GB/s", "bound"
    ));
    for bytes in SIZES {
        // At least one element for each rank.
        let numel = (bytes / 4).max(ranks) / ranks * ranks;
        let bytes = numel * 4;
        let mut whole = vec![1f32; numel];
        let mut piece = vec![0f32; numel / ranks];
        let mut copied = vec![0f32; numel];
        let copy = time(&group, || {
            copied.copy_from_slice(black_box(&whole));
            black_box(&mut copied);
            Ok(())
        })?;
        drop(copied);
        let gather = time(&group, || group.all_gather_into(&mut whole, &piece))?;
        let scatter = time(&group, || {
            group.reduce_scatter(&mut piece, &whole, ReduceOp::Sum)
        })?;
        let reduce = time(&group, || group.all_reduce(&mut whole, ReduceOp::Max))?;
        // A copy reads and writes the whole; a reduce-scatter reads it and writes a piece; an
        // all-reduce does that, and then an all-gather.
        let part = (1.0 + 1.0 / ranks as f64) / 2.0;
        for (name, time, copies) in [
            ("all-gather", gather, 1.0),
            ("reduce-scatter", scatter, part),
            ("all-reduce", reduce, 1.0 + part),
        ] {
            let (seconds, bound) = (
                time.as_secs_f64(),
                copies * copy.as_secs_f64() / time.as_secs_f64(),
            );
            let rate = bytes as f64 / seconds / 1e9;
            table(format!(
                "{bytes:>12} {name:>15} {:>9.1} µs {rate:>10.3} {bound:>8.2}",
                seconds * 1e6
            ));
            if json {
                let backend = group.backend_name();
                say(format!(
                    "{{\"backend\":\"{backend}\",\"ranks\":{ranks},\"operation\":\"{name}\",\"bytes\":{bytes},\
                     \"seconds\":{seconds:e},\"gb_per_s\":{rate},\"of_memory_bound\":{bound}}}"
                ));
            }
        }
        table(format!(
            "{bytes:>12} {:>15} {:>9.1} µs",
            "copy",
            copy.as_secs_f64() * 1e6
        ));
    }
    Ok(())
}

/// Returns the time of one call on the slowest rank, in the best of some rounds.
fn time(
    group: &ProcessGroup,
    mut call: impl FnMut() -> Result<(), CommError>,
) -> Result<Duration, CommError> {
    call()?;
    let started = Instant::now();
    call()?;
    let once = group.broadcast_object(Some(&started.elapsed()), 0)?;
    let calls = (ROUND.as_nanos() / once.as_nanos().max(1)).clamp(1, 20_000) as u32;
    let mut best = Duration::MAX;
    for _ in 0..ROUNDS {
        group.barrier()?;
        let started = Instant::now();
        for _ in 0..calls {
            call()?;
        }
        let slowest = group
            .all_gather_object(&started.elapsed())?
            .into_iter()
            .max()
            .unwrap_or_default();
        best = best.min(slowest / calls);
    }
    Ok(best)
}
