//! Strangers at the ports of a job: many connections that are refused leave no memory behind.

#![cfg(target_os = "linux")]

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::common::program;

/// Nothing takes longer than this.
const HANG: Duration = Duration::from_secs(60);

/// The strangers that come at a time.
const STRANGERS: usize = 4;

/// The connections until the process has all buffers that it needs for strangers.
const WARM_UP: usize = 2000;

/// The connections during which the process must not grow.
const CONNECTIONS: usize = 40_000;

/// The most bytes by which the process may grow. A thread that listens uses the memory by which its
/// heap grows at a time, 16 MiB, before it uses any of it again.
const GROWTH: u64 = 20 << 20;

/// A process that is killed when this is dropped.
struct Waiting(Child);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Starts rank 0 of a job whose other rank never comes.
fn start_rank_0(port: u16, out: &TempDir) -> Waiting {
    let child = Command::new(program())
        .args([
            "train",
            "--backend",
            "tcp",
            "--steps",
            "1",
            "--sample",
            "0",
            "--timeout",
            "600",
            "--out",
        ])
        .arg(out.path().join("out"))
        .env("FSDP_SECRET", "the secret of this test")
        .envs([
            ("RANK", "0"),
            ("LOCAL_RANK", "0"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
        ])
        .env("MASTER_PORT", port.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    Waiting(child.unwrap())
}

/// Waits until the port is open.
fn wait_for_port(port: u16) {
    let until = Instant::now() + HANG;
    while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
        assert!(Instant::now() < until, "the port does not open");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Makes many connections at once, none of which says what a rank says, and returns the number that
/// were refused.
fn bother(port: u16, connections: usize) -> usize {
    fn one_by_one(port: u16, connections: usize) -> usize {
        let mut refused = 0;
        for _ in 0..connections {
            let Ok(mut stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) else {
                continue;
            };
            stream.set_read_timeout(Some(HANG)).unwrap();
            // The other side may end the connection at any time.
            stream.write_all(&[7; 100]).ok();
            if !matches!(stream.read(&mut [0]), Ok(1..)) {
                refused += 1;
            }
        }
        refused
    }
    thread::scope(|scope| {
        let strangers: Vec<_> = (0..STRANGERS)
            .map(|_| scope.spawn(move || one_by_one(port, connections / STRANGERS)))
            .collect();
        strangers
            .into_iter()
            .map(|stranger| stranger.join().unwrap())
            .sum()
    })
}

/// Returns the bytes of memory that a process uses.
fn resident_bytes(process: &Waiting) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", process.0.id())).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim()
        .strip_suffix(" kB")
        .unwrap()
        .parse::<u64>()
        .unwrap()
        << 10
}

#[test]
fn refused_connections_leave_no_memory_behind() {
    let out = TempDir::new().unwrap();
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let mut rank = start_rank_0(port, &out);
    wait_for_port(port);
    bother(port, WARM_UP);
    let before = resident_bytes(&rank);
    assert_eq!(bother(port, CONNECTIONS), CONNECTIONS);
    assert!(rank.0.try_wait().unwrap().is_none(), "the rank has ended");
    let grown = resident_bytes(&rank).saturating_sub(before);
    assert!(grown < GROWTH, "the rank has grown by {grown} bytes");
}
