//! Ranks as processes: this test program, started again.

use std::ffi::OsStr;
use std::io::Read;
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// For what must fail: longer than any operation takes, and short enough to wait for.
pub(crate) const SHORT_DEADLINE: Duration = Duration::from_secs(3);

/// A harness that waits longer than this has found a hang.
const HANG: Duration = Duration::from_secs(60);

/// Returns a port that nobody uses at the moment. It is none of those that systems choose for
/// programs that ask for any, as the ranks of other tests do.
pub(crate) fn free_port() -> u16 {
    static TRIED: AtomicU32 = AtomicU32::new(0);
    // Tests are processes of consecutive numbers, and each tries other ports first.
    let first = std::process::id().wrapping_mul(101);
    let ports = std::iter::repeat_with(|| {
        let tried = TRIED.fetch_add(1, Ordering::Relaxed);
        10_000 + (first.wrapping_add(tried) % 20_000) as u16
    });
    let mut ports = ports.take(20_000);
    let free = ports.find(|&port| TcpListener::bind(("127.0.0.1", port)).is_ok());
    free.expect("one of so many ports is free")
}

/// Processes that are killed when this is dropped.
pub(crate) struct Ranks {
    what: String,
    ranks: Vec<Rank>,
}

struct Rank {
    process: Child,
    outputs: Option<[JoinHandle<String>; 2]>,
}

impl Ranks {
    /// Starts `world_size` ranks that do `what`, each with variables of its own.
    pub(crate) fn start<V: AsRef<OsStr>>(
        world_size: usize,
        what: &str,
        variables_of: impl Fn(usize) -> Vec<(V, V)>,
    ) -> Ranks {
        let port = free_port().to_string();
        let start = |rank: usize| {
            let mut process = Command::new(std::env::current_exe().unwrap())
                .args(["rank_process", "--exact", "--nocapture", "--test-threads=1"])
                .env("FSDP_TEST", what)
                .env("RANK", rank.to_string())
                .env("LOCAL_RANK", rank.to_string())
                .env("WORLD_SIZE", world_size.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", &port)
                .env("FSDP_JOB_ID", format!("{}-{port}", std::process::id()))
                .envs(variables_of(rank))
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            fn collect(mut output: impl Read + Send + 'static) -> JoinHandle<String> {
                thread::spawn(move || {
                    let mut bytes = Vec::new();
                    output.read_to_end(&mut bytes).ok();
                    String::from_utf8_lossy(&bytes).into_owned()
                })
            }
            let outputs = [
                collect(process.stdout.take().unwrap()),
                collect(process.stderr.take().unwrap()),
            ];
            Rank {
                process,
                outputs: Some(outputs),
            }
        };
        Ranks {
            what: what.to_owned(),
            ranks: (0..world_size).map(start).collect(),
        }
    }

    pub(crate) fn signal(&self, rank: usize, signal: Signal) {
        kill_process(Pid::from_child(&self.ranks[rank].process), signal).unwrap();
    }

    /// Waits for something to happen while the ranks run. Panics if a rank ends before that.
    pub(crate) fn wait_until(&mut self, mut happens: impl FnMut() -> bool) {
        let started = Instant::now();
        while !happens() {
            for rank in 0..self.ranks.len() {
                if let Some(status) = self.ranks[rank].process.try_wait().unwrap() {
                    let output = self.output(rank);
                    panic!("`{}`, rank {rank}: {status}: {output}", self.what);
                }
            }
            assert!(
                started.elapsed() < HANG,
                "`{}`: the ranks do not get going",
                self.what
            );
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until all ranks have ended, and checks that exactly these have panicked.
    pub(crate) fn assert_casualties(mut self, casualties: &[usize]) {
        for rank in 0..self.ranks.len() {
            let status = self.end_of(rank, HANG);
            let expected = if casualties.contains(&rank) { 101 } else { 0 };
            if status.code() != Some(expected) {
                let outputs: Vec<String> = (0..self.ranks.len())
                    .map(|rank| {
                        self.ranks[rank].process.kill().ok();
                        format!("--- rank {rank}\n{}", self.output(rank))
                    })
                    .collect();
                panic!(
                    "`{}`, rank {rank} of {}: {status}\n{}",
                    self.what,
                    self.ranks.len(),
                    outputs.join("\n")
                );
            }
        }
    }

    /// Waits until these ranks have ended well, within this time, and returns the output of each.
    pub(crate) fn wait_for(&mut self, ranks: &[usize], limit: Duration) -> Vec<(usize, String)> {
        let deadline = Instant::now() + limit;
        ranks
            .iter()
            .map(|&rank| {
                let status = self.end_of(rank, deadline.saturating_duration_since(Instant::now()));
                let output = self.output(rank);
                assert!(
                    status.success(),
                    "`{}`, rank {rank}: {status}\n{output}",
                    self.what
                );
                (rank, output)
            })
            .collect()
    }

    fn end_of(&mut self, rank: usize, limit: Duration) -> ExitStatus {
        let started = Instant::now();
        loop {
            if let Some(status) = self.ranks[rank].process.try_wait().unwrap() {
                return status;
            }
            if started.elapsed() >= limit {
                self.ranks[rank].process.kill().ok();
                let output = self.output(rank);
                panic!("`{}`: rank {rank} hangs\n{output}", self.what);
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn output(&mut self, rank: usize) -> String {
        let outputs = self.ranks[rank].outputs.take();
        outputs
            .map(|outputs| outputs.map(|output| output.join().unwrap()).concat())
            .unwrap_or_default()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            rank.process.kill().ok();
            rank.process.wait().ok();
        }
    }
}
