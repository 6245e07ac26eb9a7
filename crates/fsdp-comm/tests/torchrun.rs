//! Ranks that torchrun starts meet through the store that its agent keeps. The agent here is a
//! thread that speaks as much of torch's protocol as torch's own agent was seen to; the real one is
//! met by `tests/interop/torchrun.py`.

#![expect(clippy::unwrap_used, reason = "these are tests, and their helpers")]

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use fsdp_comm::{
    CommError, Environment, ProcessGroup, ReduceOp, Secret, StoreOptions, TcpOptions, TcpStore,
};

/// Longer than anything takes that succeeds.
const LONG: Duration = Duration::from_secs(10);
/// For what must fail.
const SHORT: Duration = Duration::from_millis(600);
/// The time that a failure may take beyond its deadline, on a busy machine.
const SLACK: Duration = Duration::from_secs(2);

const KEY: &str = "fsdp/job/address";

/// torchrun's agent, as far as its store goes.
#[derive(Default)]
struct Agent {
    values: Mutex<HashMap<String, String>>,
    changed: Condvar,
}

impl Agent {
    fn start() -> (Arc<Agent>, u16) {
        let agent = Arc::new(Agent::default());
        let served = Arc::clone(&agent);
        // A client that leaves is no failure.
        let port = listen(move |stream| drop(served.serve(stream)));
        (agent, port)
    }

    fn serve(&self, mut stream: TcpStream) -> io::Result<()> {
        loop {
            match read::<1>(&mut stream)? {
                [0] => assert_eq!(read(&mut stream)?, 0x3C85_F7CE_u32.to_le_bytes()),
                [1] => {
                    let (key, value) = (string(&mut stream)?, string(&mut stream)?);
                    self.values.lock().unwrap().insert(key, value);
                    self.changed.notify_all();
                }
                [3] => {
                    let key = string(&mut stream)?;
                    // As torch's, which does not survive the question for a key that is not set.
                    let value = self.values.lock().unwrap()[&key].clone();
                    stream.write_all(
                        &[&(value.len() as u64).to_le_bytes(), value.as_bytes()].concat(),
                    )?;
                }
                [6] => {
                    let keys =
                        (0..u64::from_le_bytes(read(&mut stream)?)).map(|_| string(&mut stream));
                    let keys = keys.collect::<io::Result<Vec<String>>>()?;
                    let values = self.values.lock().unwrap();
                    let missing = |values: &mut HashMap<_, _>| {
                        !keys.iter().all(|key| values.contains_key(key))
                    };
                    drop(self.changed.wait_while(values, missing).unwrap());
                    stream.write_all(&[0])?;
                }
                [other] => panic!("{other} is no request that the agent was seen to get"),
            }
        }
    }

    fn address(&self) -> Option<SocketAddr> {
        // A nonce follows it.
        self.values
            .lock()
            .unwrap()
            .get(KEY)
            .map(|value| value.split(' ').next().unwrap().parse().unwrap())
    }
}

fn read<const N: usize>(stream: &mut TcpStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).map(|()| bytes)
}

fn string(stream: &mut TcpStream) -> io::Result<String> {
    let mut bytes = vec![0; u64::from_le_bytes(read(stream)?) as usize];
    stream.read_exact(&mut bytes)?;
    Ok(String::from_utf8(bytes).unwrap())
}

/// Listens on a port, serves each connection in a thread of its own, and returns the port.
fn listen(serve: impl Fn(TcpStream) + Clone + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let serve = serve.clone();
            thread::spawn(move || serve(stream.unwrap()));
        }
    });
    port
}

fn environment(rank: usize, world_size: usize, port: u16) -> Environment {
    let variables = [
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", world_size.to_string()),
        ("MASTER_ADDR", "127.0.0.1".to_owned()),
        ("MASTER_PORT", port.to_string()),
        ("TORCHELASTIC_RUN_ID", "job".to_owned()),
        ("TORCHELASTIC_USE_AGENT_STORE", "True".to_owned()),
        // An agent counts its own restarts only.
        ("TORCHELASTIC_RESTART_COUNT", (rank % 2).to_string()),
    ];
    Environment::from_variables(|name| {
        variables
            .iter()
            .find(|variable| variable.0 == name)
            .map(|variable| variable.1.clone())
    })
    .unwrap()
}

fn meet(
    rank: usize,
    world_size: usize,
    port: u16,
    deadline: Duration,
) -> Result<ProcessGroup, CommError> {
    let options = TcpOptions {
        deadline,
        ..TcpOptions::default()
    };
    options.connect(&environment(rank, world_size, port))
}

/// Lets all ranks meet, the others a little before rank 0, and add up.
fn attempt(world_size: usize, port: u16) -> Vec<ProcessGroup> {
    thread::scope(|scope| {
        let rank = |rank: usize| {
            scope.spawn(move || {
                let group = meet(rank, world_size, port, LONG).unwrap();
                let mut sum = [rank as f32, 1.0];
                group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                assert_eq!(
                    sum,
                    [(0..world_size).sum::<usize>() as f32, world_size as f32]
                );
                group
            })
        };
        let others: Vec<_> = (1..world_size).map(rank).collect();
        thread::sleep(Duration::from_millis(150));
        let first = rank(0);
        [first]
            .into_iter()
            .chain(others)
            .map(|rank| rank.join().unwrap())
            .collect()
    })
}

/// Lets rank `rank` of 2 fail in a rendezvous at this port, in time, and returns the error's
/// message.
fn failure(rank: usize, port: u16) -> String {
    let started = Instant::now();
    let error = meet(rank, 2, port, SHORT).unwrap_err();
    assert!(
        started.elapsed() < SHORT + SLACK,
        "{:?}: {error}",
        started.elapsed()
    );
    match &error {
        CommError::Rendezvous {
            address, message, ..
        } => {
            assert_eq!(*address, format!("127.0.0.1:{port}"), "{error}");
            assert!(message.contains(&format!("rank {rank}")), "{error}");
            message.clone()
        }
        _ => panic!("{error:?}"),
    }
}

#[test]
fn ranks_meet_through_the_agents_store() {
    for world_size in 1..=4 {
        let (agent, port) = Agent::start();
        let groups = attempt(world_size, port);
        assert_eq!(groups.len(), world_size);
        let address = agent.address().unwrap();
        assert!(
            address.ip().is_loopback() && address.port() != port,
            "{address}"
        );
    }
}

#[test]
fn rank_0_beside_the_agent_is_reached_where_the_agent_is() {
    let (agent, port) = Agent::start();
    thread::scope(|scope| {
        for rank in 0..3 {
            scope.spawn(move || {
                let mut environment = environment(rank, 3, port);
                environment.secret = Some(Secret::new("a secret of this test").unwrap());
                let options = TcpOptions {
                    deadline: LONG,
                    ..TcpOptions::default()
                };
                options.connect(&environment).unwrap().barrier().unwrap();
            });
        }
    });
    // The loopback address at which rank 0 has reached the agent would be of no use to other hosts.
    assert!(agent.address().unwrap().ip().is_unspecified());
}

#[test]
fn a_second_attempt_does_not_take_the_address_of_the_first() {
    let (agent, port) = Agent::start();
    let first = attempt(3, port);
    let first_address = agent.address().unwrap();
    // Not all of the first attempt have ended when the second begins.
    let second = attempt(3, port);
    let second_address = agent.address().unwrap();
    assert_ne!(first_address, second_address);
    drop((first, second));
    // Nobody is left at the old address.
    attempt(2, port);
    assert_ne!(agent.address().unwrap(), second_address);
}

#[test]
fn an_address_that_a_stranger_has_now_is_asked_for_again() {
    let hangs_up = listen(drop);
    let is_mute = listen(|mut stream| drop(io::copy(&mut stream, &mut io::sink())));
    for stranger in [hangs_up, is_mute] {
        let (agent, port) = Agent::start();
        agent
            .values
            .lock()
            .unwrap()
            .insert(KEY.to_owned(), format!("127.0.0.1:{stranger}"));
        attempt(2, port);
    }
}

#[test]
fn an_address_that_another_job_of_the_same_name_has_now_is_asked_for_again() {
    let options = StoreOptions {
        job: "job".to_owned(),
        world_size: 2,
        deadline: LONG,
        ..StoreOptions::default()
    };
    let other_job = TcpStore::host("127.0.0.1:0", &options).unwrap();
    let (agent, port) = Agent::start();
    agent
        .values
        .lock()
        .unwrap()
        .insert(KEY.to_owned(), other_job.address().to_owned());
    attempt(2, port);
}

#[test]
fn an_agent_that_is_not_there_is_an_error() {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    for rank in [0, 1] {
        let message = failure(rank, port);
        assert!(
            message.contains("could not connect to the store of torchrun's agent"),
            "{message}"
        );
        assert!(
            message.contains("refused") && message.contains("TORCHELASTIC_USE_AGENT_STORE"),
            "{message}"
        );
    }
}

#[test]
fn an_agent_that_never_answers_is_an_error() {
    let port = listen(|mut stream| drop(io::copy(&mut stream, &mut io::sink())));
    for rank in [0, 1] {
        let message = failure(rank, port);
        assert!(message.contains("it did not answer"), "{message}");
    }
}

#[test]
fn an_agent_that_hangs_up_is_an_error() {
    let port = listen(|mut stream| drop(read::<1>(&mut stream)));
    for rank in [0, 1] {
        let message = failure(rank, port);
        assert!(message.contains("it hung up"), "{message}");
    }
}

#[test]
fn an_agent_that_answers_nonsense_is_an_error() {
    let len = |len: u64| [&[0][..], &len.to_le_bytes()].concat();
    let value = |value: &str| [&len(value.len() as u64), value.as_bytes()].concat();
    let answers = [
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
            "another protocol",
        ),
        (vec![1; 64], "another protocol"),
        (len(u64::MAX), "18446744073709551615 bytes"),
        (len(161), "161 bytes"),
        (value(""), "no address"),
        (value("127.0.0.1"), "no address"),
        (value("\u{7}node0:1\n"), "no address"),
    ];
    for (answer, expected) in answers {
        let port = listen(move |mut stream| {
            stream.write_all(&answer).ok();
            io::copy(&mut stream, &mut io::sink()).ok();
        });
        for rank in [0, 1] {
            let message = failure(rank, port);
            assert!(message.contains(expected), "{message}");
            assert!(!message.contains('\u{7}'), "{message}");
        }
    }
}

#[test]
fn a_rank_0_that_does_not_come_is_an_error() {
    let (agent, port) = Agent::start();
    let message = failure(1, port);
    assert!(
        message.contains("where rank 0 is") && message.contains("see what rank 0 says"),
        "{message}"
    );
    // Nor does one come to where the last one was.
    let old = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    agent
        .values
        .lock()
        .unwrap()
        .insert(KEY.to_owned(), old.to_string());
    let message = failure(1, port);
    assert!(
        message.contains(&old.to_string()) && message.contains("--local-addr"),
        "{message}"
    );
}

#[test]
fn two_ranks_0_are_an_error() {
    let theirs = "127.0.0.1:9";
    let answer = [
        &[0][..],
        &(theirs.len() as u64).to_le_bytes(),
        theirs.as_bytes(),
    ]
    .concat();
    let port = listen(move |mut stream| {
        stream.write_all(&answer).ok();
        io::copy(&mut stream, &mut io::sink()).ok();
    });
    let message = failure(0, port);
    assert!(
        message.contains(theirs) && message.contains("another rank 0"),
        "{message}"
    );
}
