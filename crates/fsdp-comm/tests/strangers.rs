//! Strangers at every port of a job that is open while its ranks meet and while it runs: they send
//! greetings with a few bytes changed, recorded ones, nothing, or noise. The job must not notice,
//! and must not grow.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fsdp_comm::{Environment, ProcessGroup, ReduceOp, Secret, StoreOptions, TcpOptions, TcpStore};

const RANKS: usize = 3;
const DEADLINE: Duration = Duration::from_secs(60);
/// Connections while ranks meet, and while they work.
const CONNECTIONS: usize = 1500;
/// The most that the process may grow by.
const GROWTH: u64 = 64 << 20;

/// Random numbers: the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self, below: usize) -> usize {
        // The constants are those of a common generator of this kind.
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below.max(1)
    }
}

fn environment(rank: usize, port: u16) -> Environment {
    let variables = |name: &str| {
        let value = match name {
            "RANK" => rank.to_string(),
            "WORLD_SIZE" => RANKS.to_string(),
            "MASTER_ADDR" => Ipv4Addr::LOCALHOST.to_string(),
            "MASTER_PORT" => port.to_string(),
            _ => return None,
        };
        Some(value)
    };
    let mut environment = Environment::from_variables(variables).unwrap();
    environment.secret = Some(Secret::new("the secret of this test").unwrap());
    environment
}

/// Returns the ports on which this process listens.
fn listening() -> Vec<u16> {
    let links = fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    let own: Vec<String> = links
        .filter_map(|link| link.to_str().map(str::to_owned))
        .collect();
    let table = fs::read_to_string("/proc/self/net/tcp").unwrap();
    let port = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        // The state 0A is that of a listener.
        let is_own =
            words.get(3) == Some(&"0A") && own.contains(&format!("socket:[{}]", words.get(9)?));
        is_own.then(|| u16::from_str_radix(words[1].split_once(':').unwrap().1, 16).unwrap())
    };
    table.lines().filter_map(port).collect()
}

/// Waits until this process listens on so many ports, and returns them.
fn wait_for_ports(count: usize) -> Vec<u16> {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let ports = listening();
        if ports.len() >= count {
            return ports;
        }
        assert!(Instant::now() < deadline, "ports {ports:?} are open");
        thread::sleep(Duration::from_millis(10));
    }
}

fn resident_bytes() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// Returns what a rank says first, as a listener hears it.
fn greeting() -> Vec<u8> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::scope(|scope| {
        let rank = scope.spawn(move || {
            let options = StoreOptions {
                job: "job".to_owned(),
                secret: Some(Secret::new("the secret of this test").unwrap()),
                rank: 1,
                world_size: RANKS,
                deadline: Duration::from_secs(2),
                ..StoreOptions::default()
            };
            TcpStore::connect(&address, &options).err().unwrap()
        });
        let (mut stream, _) = listener.accept().unwrap();
        stream
            .set_read_timeout(Some(Duration::from_millis(300)))
            .unwrap();
        let mut heard = Vec::new();
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = stream.read(&mut buffer) {
            heard.extend_from_slice(&buffer[..count]);
        }
        drop((stream, listener));
        rank.join().unwrap();
        heard
    })
}

/// Makes one connection that does its worst.
fn bother(port: u16, greeting: &[u8], random: &mut Random) -> Option<TcpStream> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()?;
    stream
        .set_write_timeout(Some(Duration::from_millis(200)))
        .unwrap();
    stream
        .set_read_timeout(Some(Duration::from_millis(5)))
        .unwrap();
    let mut said = greeting.to_vec();
    for _ in 0..random.next(4) {
        if !said.is_empty() {
            let at = random.next(said.len());
            said[at] = random.next(256) as u8;
        }
    }
    match random.next(6) {
        // A greeting that breaks off, one that goes on, noise, a claim of much to come, or nothing.
        0 => said.truncate(random.next(said.len())),
        1 => said.extend((0..random.next(4096)).map(|_| random.next(256) as u8)),
        2 => {
            said = (0..random.next(1 << 16))
                .map(|_| random.next(256) as u8)
                .collect()
        }
        3 => said.extend((u32::MAX - random.next(1 << 20) as u32).to_le_bytes()),
        4 => said.clear(),
        _ => {}
    }
    // The other side may have closed the connection already.
    stream.write_all(&said).ok();
    let mut answer = [0; 256];
    if let Ok(count @ 1..) = stream.read(&mut answer) {
        // Its own challenge, sent back to it.
        stream.write_all(&answer[..count]).ok();
    }
    match random.next(3) {
        0 => Some(stream),
        1 => {
            stream.shutdown(Shutdown::Write).ok();
            None
        }
        _ => None,
    }
}

/// Bothers ports, all that are open when it begins, until it has made so many connections.
fn bother_all(ports: &[u16], connections: usize, greeting: &[u8], seed: u64) {
    let mut random = Random(seed);
    let mut kept = Vec::new();
    for _ in 0..connections {
        kept.extend(bother(
            ports[random.next(ports.len())],
            greeting,
            &mut random,
        ));
        // Some stay open and silent.
        if kept.len() > 100 {
            kept.clear();
        }
    }
}

/// Works until it is told to end, and returns the number of operations.
fn work(group: &ProcessGroup, end: &AtomicBool) -> usize {
    let mut count = 0;
    loop {
        let mut buffer = [
            group.rank() as f32 + 1.0,
            f32::from(u8::from(end.load(Ordering::Relaxed))),
        ];
        group.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(buffer[0], 6.0);
        count += 1;
        // All ranks end after the same operation.
        if buffer[1] > 0.0 {
            return count;
        }
        thread::sleep(Duration::from_micros(200));
    }
}

/// Lets strangers bother a job. The ports of its ranks stay open if it has more ranks than connect
/// at the start.
fn bother_a_job(connect_all_up_to: usize) {
    let greeting = greeting();
    assert!(!greeting.is_empty());
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let end = AtomicBool::new(false);
    thread::scope(|scope| {
        let join = |rank: usize| {
            let end = &end;
            scope.spawn(move || {
                let options = TcpOptions {
                    deadline: DEADLINE,
                    connect_all_up_to,
                    ..TcpOptions::default()
                };
                let group = options.connect(&environment(rank, port)).unwrap();
                work(&group, end)
            })
        };
        let mut ranks: Vec<_> = (0..RANKS - 1).map(join).collect();
        // The ports of the store and of each rank are open while the last rank has not come.
        let ports = wait_for_ports(RANKS);
        let before = resident_bytes();
        bother_all(&ports, CONNECTIONS, &greeting, 1);
        ranks.push(join(RANKS - 1));
        let ports = if connect_all_up_to < RANKS {
            wait_for_ports(1 + RANKS)
        } else {
            vec![port]
        };
        bother_all(&ports, CONNECTIONS, &greeting, 2);
        let grown = resident_bytes().saturating_sub(before);
        end.store(true, Ordering::Relaxed);
        let counts: Vec<usize> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        assert!(
            counts[0] > 0 && counts.iter().all(|count| *count == counts[0]),
            "{counts:?}"
        );
        assert!(grown < GROWTH, "the process grew by {grown} bytes");
    });
}

#[test]
fn a_job_neither_notices_strangers_at_its_ports_nor_grows() {
    // One after the other, as the ports are those of this process.
    bother_a_job(RANKS);
    bother_a_job(1);
}
