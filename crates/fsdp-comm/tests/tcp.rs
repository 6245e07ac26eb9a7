//! The `tcp` backend does what every backend must do, between real processes, and what only
//! processes can: die.
//!
//! A test starts this very program again for each rank, where `rank_process` finds out from its
//! environment what to do.

#![expect(clippy::unwrap_used, reason = "these are tests, and their helpers")]

mod conformance;
mod processes;

use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};

use conformance::{Case, DEADLINE, cases};
use fsdp_comm::{
    BLAME_DIR, CommError, Environment, ProcessGroup, ReduceOp, Secret, StoreOptions, TcpOptions,
    TcpStore,
};
use processes::{Ranks, SHORT_DEADLINE, free_port};
use rustix::process::Signal;

/// Returns `true` for a case in which a rank ends badly, so that it needs processes of its own.
fn is_fatal(case: &Case) -> bool {
    case.casualty.is_some() || case.name.contains("leaves") || case.name.contains("that left")
}

/// The program of each rank.
#[test]
fn rank_process() {
    let variable = |name: &str| std::env::var(name).ok();
    let Some(what) = variable("FSDP_TEST") else {
        return;
    };
    if what == "a rank ends in the rendezvous" {
        let environment = Environment::from_env().unwrap();
        if variable("FSDP_TEST_VICTIM") == Some(environment.rank.to_string()) {
            join_and_end(&environment);
        } else {
            let options = TcpOptions {
                deadline: DEADLINE,
                ..TcpOptions::default()
            };
            println!("{}", options.connect(&environment).unwrap_err());
        }
        return;
    }
    let memory = variable("FSDP_TEST_MEMORY");
    let shared_memory = memory.as_deref() == Some("shared");
    let mut options = TcpOptions {
        deadline: DEADLINE,
        shared_memory,
        ..TcpOptions::default()
    };
    if memory.as_deref() == Some("on demand") {
        options.connect_all_up_to = 1;
    }
    let group = options.connect(&Environment::from_env().unwrap()).unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = maps
        .lines()
        .filter(|line| line.contains("memfd:fsdp"))
        .count();
    assert_eq!(
        mapped,
        if shared_memory { group.world_size() } else { 0 },
        "{maps}"
    );
    if let Some(len) = what.strip_prefix("until it fails, of ") {
        let len: usize = len.parse().unwrap();
        let victim: usize = variable("FSDP_TEST_VICTIM").unwrap().parse().unwrap();
        let deadline =
            Duration::from_secs(variable("FSDP_TEST_DEADLINE").unwrap().parse().unwrap());
        // Only for the operations: processes may take long to start.
        let group = group.with_deadline(deadline);
        let error = loop {
            let mut buffer = vec![group.rank() as f32; len];
            match group
                .all_reduce(&mut buffer, ReduceOp::Sum)
                .and_then(|()| group.agree("save", Ok::<_, String>(())))
            {
                Ok(()) => std::fs::OpenOptions::new()
                    .append(true)
                    .open(variable("FSDP_TEST_LOG").unwrap())
                    .unwrap()
                    .set_modified(std::time::SystemTime::now())
                    .unwrap(),
                Err(error) => break error,
            }
        };
        println!("{error}");
        assert!(
            matches!(error, CommError::RankLeft { rank, .. } if rank == victim),
            "{error:?}"
        );
        assert_eq!(group.barrier(), Err(error));
        return;
    }
    match &what[..] {
        "the ranks of a large group agree" => return agree_in_a_large_group(&group),
        "the ranks of a large job connect when they need to" => return connect_when_needed(&group),
        "a rank of a large job ends" => return lose_a_rank_of_a_large_job(&group),
        "a rank of a large job aborts" => return abort_in_a_large_job(&group),
        _ => {}
    }
    let mut chosen: Vec<Case> = cases()
        .into_iter()
        .filter(|case| case.name.starts_with(&what))
        .collect();
    chosen.retain(|case| {
        case.worlds.contains(&group.world_size()) && (case.name == what || !is_fatal(case))
    });
    let last = chosen.pop().expect("there is such a case");
    for case in chosen {
        case.run(group.clone());
    }
    last.run(group);
}

/// Exchanges numbers with all other ranks, and then fails on one rank.
fn agree_in_a_large_group(group: &ProcessGroup) {
    let ranks: Vec<u64> = (0..group.world_size() as u64).collect();
    for _ in 0..3 {
        let mut gathered = vec![0; ranks.len()];
        group
            .all_gather_into(&mut gathered, &[group.rank() as u64])
            .unwrap();
        assert_eq!(gathered, ranks);
        group.barrier().unwrap();
    }
    let own = if group.rank() == 7 {
        Err("the disk is full")
    } else {
        Ok(())
    };
    let outcome = group.agree("save", own);
    let Err(CommError::RankFailed { failures, .. }) = &outcome else {
        panic!("{outcome:?}")
    };
    assert_eq!(
        failures
            .iter()
            .map(|failure| failure.rank)
            .collect::<Vec<_>>(),
        [7],
        "{outcome:?}"
    );
}

/// The ranks of a large job, and the other ranks to which each of them is connected at first: those
/// that are 1, 2, 4, 8 or 16 places before or after it.
const LARGE: usize = 36;
#[cfg(target_os = "linux")]
const NEIGHBOURS: usize = 10;

/// Returns the number of connections of this process to other ranks, beside those of the store.
#[cfg(target_os = "linux")]
fn connections() -> usize {
    let store: u16 = std::env::var("MASTER_PORT").unwrap().parse().unwrap();
    let links = std::fs::read_dir("/proc/self/fd").unwrap();
    let links = links.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    let own: Vec<String> = links
        .filter_map(|link| link.to_str().map(str::to_owned))
        .collect();
    let port = |address: &str| u16::from_str_radix(address.split_once(':').unwrap().1, 16).unwrap();
    let mut connections = BTreeSet::new();
    // The system's list may lack a socket, or have it twice, if others are made or closed while it
    // is read.
    for _ in 0..5 {
        for line in std::fs::read_to_string("/proc/self/net/tcp")
            .unwrap()
            .lines()
            .skip(1)
        {
            let words: Vec<&str> = line.split_whitespace().collect();
            let socket = format!("socket:[{}]", words[9]);
            // The state 01 is that of a connection.
            let is_connection =
                words[3] == "01" && ![port(words[1]), port(words[2])].contains(&store);
            if is_connection && own.contains(&socket) {
                connections.insert(socket);
            }
        }
    }
    connections.len()
}

/// Checks that the number of connections of this process to other ranks is in a range.
#[cfg(target_os = "linux")]
fn assert_connections(expected: std::ops::Range<usize>) {
    let found = connections();
    assert!(
        expected.contains(&found),
        "{found} connections, and not {expected:?}"
    );
}

/// Works with neighbours first, then with one other rank, and then with all, and counts the
/// connections.
fn connect_when_needed(group: &ProcessGroup) {
    let rank = group.rank();
    for _ in 0..3 {
        group.barrier().unwrap();
        let mut gathered = vec![0; LARGE];
        group
            .all_gather_into(&mut gathered, &[rank as u64])
            .unwrap();
        assert_eq!(gathered, (0..LARGE as u64).collect::<Vec<_>>());
    }
    #[cfg(target_os = "linux")]
    assert_eq!(connections(), NEIGHBOURS);
    // Nobody makes more before all have counted.
    group.barrier().unwrap();
    // Both ranks of each pair begin to send at the same time.
    let pairs: Vec<_> = (0..LARGE / 2)
        .filter_map(|first| group.subgroup(&[first, first + LARGE / 2]).unwrap())
        .collect();
    let [pair] = &pairs[..] else {
        panic!("{} pairs", pairs.len())
    };
    for number in 0..20 {
        let mut buffer = vec![rank as u32 + number; 10_000];
        pair.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(
            buffer,
            vec![(2 * (rank % (LARGE / 2)) + LARGE / 2) as u32 + 2 * number; 10_000]
        );
    }
    #[cfg(target_os = "linux")]
    assert_connections(NEIGHBOURS + 1..NEIGHBOURS + 3);
    group.barrier().unwrap();
    // More than fits in the records, so each rank sends to each other.
    let mut gathered = vec![0; LARGE * 3000];
    for number in 0..3 {
        group
            .all_gather_into(&mut gathered, &vec![(rank + number) as u64; 3000])
            .unwrap();
        assert!(
            gathered
                .iter()
                .enumerate()
                .all(|(at, &value)| value == (at / 3000 + number) as u64)
        );
    }
    #[cfg(target_os = "linux")]
    assert_connections(LARGE - 1..2 * LARGE);
    // Nobody leaves before all have counted.
    group.barrier().unwrap();
}

/// Ends one rank in between. All others must name it, also those that are not connected to it.
fn lose_a_rank_of_a_large_job(group: &ProcessGroup) {
    const VICTIM: usize = 20;
    let pair = group.subgroup(&[3, VICTIM]).unwrap();
    // In a large group too, in which its neighbours are others.
    let most: Vec<usize> = (0..LARGE).filter(|rank| rank % 12 != 5).collect();
    let most = group.subgroup(&most).unwrap();
    group.barrier().unwrap();
    if group.rank() == VICTIM {
        // Without a goodbye.
        std::process::exit(101);
    }
    let is_named = |error: CommError| {
        assert!(
            matches!(error, CommError::RankLeft { rank: VICTIM, .. }),
            "{error:?}"
        )
    };
    if let Some(pair) = pair {
        is_named(pair.barrier().unwrap_err());
    }
    if let Some(most) = most {
        is_named(most.barrier().unwrap_err());
    }
    is_named(group.barrier().unwrap_err());
}

/// Aborts the group of all on a rank while others wait in it.
fn abort_in_a_large_job(group: &ProcessGroup) {
    if group.rank() == 20 {
        group.barrier().unwrap();
        group.abort("cannot go on");
    }
    // Some hear of it while they are still in the barrier.
    let error = group.barrier().and_then(|()| group.barrier()).unwrap_err();
    assert_eq!(
        error,
        CommError::Aborted {
            rank: 20,
            message: "cannot go on".to_owned()
        }
    );
}

/// Joins the store of a job, and ends once all other ranks wait for the address of this one.
fn join_and_end(environment: &Environment) {
    let &Environment {
        rank, world_size, ..
    } = environment;
    let options = StoreOptions {
        job: environment.job.clone(),
        rank,
        world_size,
        deadline: DEADLINE,
        ..StoreOptions::default()
    };
    let join = if rank == 0 {
        TcpStore::host
    } else {
        TcpStore::connect
    };
    let store = join(&environment.master(), &options).unwrap();
    for other in (0..world_size).filter(|&other| other != rank) {
        let begun = Instant::now();
        while store
            .get(&format!("tcp/address/{other}"))
            .unwrap()
            .is_none()
        {
            assert!(begun.elapsed() < DEADLINE);
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Starts ranks that do `what`, all with the same variables.
fn start_alike(world_size: usize, what: &str, variables: &[(&str, &str)]) -> Ranks {
    Ranks::start(world_size, what, |_| variables.to_vec())
}

/// Runs all cases of one file in all their worlds.
fn run_all(prefix: &str, memory: &str) {
    for world_size in 1..=5 {
        let fits = |case: &Case| case.name.starts_with(prefix) && case.worlds.contains(&world_size);
        let cases: Vec<Case> = cases().into_iter().filter(fits).collect();
        if cases.iter().any(|case| !is_fatal(case)) {
            start_alike(world_size, prefix, &[("FSDP_TEST_MEMORY", memory)]).assert_casualties(&[]);
        }
        for case in cases.iter().filter(|case| is_fatal(case)) {
            let ranks = start_alike(world_size, &case.name, &[("FSDP_TEST_MEMORY", memory)]);
            ranks.assert_casualties(case.casualty.as_slice());
        }
    }
}

macro_rules! conformance_tests {
    ($($name:ident: $prefix:literal,)*) => {
        mod shared_memory {
            $(#[test] fn $name() { super::run_all($prefix, "shared"); })*
        }
        mod sockets {
            $(#[test] fn $name() { super::run_all($prefix, "none"); })*
        }
        // Ranks connect when they need to, as they do in jobs of more than 32.
        mod connections_on_demand {
            $(#[test] fn $name() { super::run_all($prefix, "on demand"); })*
        }
    };
}

conformance_tests! {
    operations: "operations",
    reductions: "reductions",
    groups: "groups",
    objects: "objects",
    invalid_arguments: "invalid",
    traffic: "traffic",
    mismatches: "mismatch",
    ranks_that_leave: "faults: a rank leaves",
    ranks_that_panic: "faults: a rank panics",
    ranks_that_are_late: "faults: a rank is late",
    other_faults: "faults: others",
}

#[test]
fn ranks_agree_in_a_large_group() {
    start_alike(
        36,
        "the ranks of a large group agree",
        &[("FSDP_TEST_MEMORY", "none")],
    )
    .assert_casualties(&[]);
}

#[test]
fn the_ranks_of_a_large_job_connect_when_they_need_to() {
    let variables = [("FSDP_TEST_MEMORY", "none")];
    start_alike(
        LARGE,
        "the ranks of a large job connect when they need to",
        &variables,
    )
    .assert_casualties(&[]);
}

#[test]
fn a_rank_of_a_large_job_that_ends_is_named_at_once_by_ranks_that_are_not_connected_to_it() {
    for memory in ["none", "shared"] {
        let mut ranks = start_alike(
            LARGE,
            "a rank of a large job ends",
            &[("FSDP_TEST_MEMORY", memory)],
        );
        let survivors: Vec<usize> = (0..LARGE).filter(|&rank| rank != 20).collect();
        ranks.wait_for(&survivors, DEADLINE / 2);
    }
}

#[test]
fn all_ranks_of_a_large_job_hear_of_an_abort_at_once() {
    for memory in ["none", "shared"] {
        let mut ranks = start_alike(
            LARGE,
            "a rank of a large job aborts",
            &[("FSDP_TEST_MEMORY", memory)],
        );
        ranks.wait_for(&(0..LARGE).collect::<Vec<_>>(), DEADLINE / 2);
    }
}

/// Sends a signal to a rank while all exchange numbers; the others must end by themselves, with an
/// error that names it.
fn hit(signal: Signal, victim: usize, len: usize, memory: &str, reason: &str) {
    let log = tempfile::NamedTempFile::new().unwrap();
    // A rank that stops is noticed at the deadline, and one that dies long before it.
    let (deadline, limit) = if signal == Signal::STOP {
        (SHORT_DEADLINE, DEADLINE)
    } else {
        (DEADLINE, DEADLINE / 2)
    };
    let (victim_variable, seconds) = (victim.to_string(), deadline.as_secs().to_string());
    let blame = tempfile::tempdir().unwrap();
    let variables = [
        ("FSDP_TEST_MEMORY", memory),
        (BLAME_DIR, blame.path().to_str().unwrap()),
        ("FSDP_TEST_VICTIM", &victim_variable),
        ("FSDP_TEST_DEADLINE", &seconds),
        ("FSDP_TEST_LOG", log.path().to_str().unwrap()),
    ];
    let started = log.path().metadata().unwrap().modified().unwrap();
    let mut ranks = start_alike(3, &format!("until it fails, of {len}"), &variables);
    // Under way, and then a little further.
    ranks.wait_until(|| log.path().metadata().unwrap().modified().unwrap() > started);
    std::thread::sleep(Duration::from_millis(30));
    ranks.signal(victim, signal);
    let survivors: Vec<usize> = (0..3).filter(|&rank| rank != victim).collect();
    for (rank, output) in ranks.wait_for(&survivors, limit) {
        assert!(
            output.contains(reason) && output.contains(&format!("rank {victim}")),
            "rank {rank}: {output}"
        );
        let blamed = std::fs::read_to_string(blame.path().join(rank.to_string())).unwrap();
        assert_eq!(blamed, victim.to_string(), "rank {rank}");
    }
    if signal == Signal::STOP && len == 5 {
        // It goes on long after the deadline, and blames nobody else. Its program checks that.
        ranks.signal(victim, Signal::CONT);
        ranks.wait_for(&[victim], limit);
        assert!(!blame.path().join(victim.to_string()).exists());
    }
}

#[test]
fn a_rank_that_is_killed_is_named() {
    for memory in ["shared", "none", "on demand"] {
        for victim in [0, 2] {
            for len in [5, 3_000_000] {
                hit(Signal::KILL, victim, len, memory, "exited without leaving");
            }
        }
    }
}

#[test]
fn a_rank_that_is_stopped_is_named() {
    // Side by side, as each takes a whole deadline.
    std::thread::scope(|scope| {
        for memory in ["shared", "none", "on demand"] {
            for (victim, len) in [(0, 5), (1, 3_000_000)] {
                scope.spawn(move || hit(Signal::STOP, victim, len, memory, "heartbeat"));
            }
        }
    });
}

fn environment(rank: usize, world_size: usize, port: u16, job: &str) -> Environment {
    let variables = [
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", world_size.to_string()),
        ("MASTER_ADDR", "127.0.0.1".to_owned()),
        ("MASTER_PORT", port.to_string()),
        ("FSDP_JOB_ID", job.to_owned()),
    ];
    Environment::from_variables(|name| {
        variables
            .iter()
            .find(|variable| variable.0 == name)
            .map(|variable| variable.1.clone())
    })
    .unwrap()
}

fn meet(environment: Environment, milliseconds: u64) -> Result<fsdp_comm::ProcessGroup, CommError> {
    let options = TcpOptions {
        deadline: Duration::from_millis(milliseconds),
        ..TcpOptions::default()
    };
    options.connect(&environment)
}

/// Returns an address of this host that only hosts on one of its links reach, with its zone, which
/// is the name or the number of the device of that link; `None` if there is none.
#[cfg(target_os = "linux")]
fn link_local() -> Option<[String; 2]> {
    let table = std::fs::read_to_string("/proc/net/if_inet6").ok()?;
    table.lines().find_map(|line| {
        let [address, number, _, "20", _, device] = line.split_whitespace().collect::<Vec<_>>()[..]
        else {
            return None;
        };
        let address = std::net::Ipv6Addr::from(u128::from_str_radix(address, 16).ok()?);
        let number = u32::from_str_radix(number, 16).ok()?;
        Some([
            format!("{address}%{device}"),
            format!("[{address}%{number}]"),
        ])
    })
}

#[test]
#[cfg(target_os = "linux")]
fn ranks_meet_at_an_address_of_one_link() {
    for master in link_local().into_iter().flatten() {
        let port = free_port();
        let join = &|rank| {
            let mut environment = environment(rank, 3, port, "job");
            environment.master_addr.clone_from(&master);
            environment.secret = Some(Secret::new("a secret of this test").unwrap());
            meet(environment, 5_000).and_then(|group| group.barrier())
        };
        std::thread::scope(|scope| {
            let ranks = [0, 1, 2].map(|rank| scope.spawn(move || join(rank)));
            ranks
                .into_iter()
                .for_each(|rank| assert_eq!(rank.join().unwrap(), Ok(()), "{master}"));
        });
    }
}

#[test]
fn a_rank_learns_from_its_launcher_how_many_ranks_are_on_its_host() {
    let port = free_port();
    let on_host = |rank: usize, local_world_size: Option<usize>| {
        let mut place = environment(rank, 3, port, "job");
        place.local_world_size = local_world_size;
        meet(place, 60_000).unwrap().ranks_on_host()
    };
    let found = std::thread::scope(|scope| {
        let ranks = [Some(2), Some(2), None].into_iter().enumerate();
        let ranks: Vec<_> = ranks
            .map(|(rank, local)| scope.spawn(move || on_host(rank, local)))
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap())
            .collect::<Vec<_>>()
    });
    assert_eq!(found, [2, 2, 1]);
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let port = free_port();
    let (first, second) = std::thread::scope(|scope| {
        let first = scope.spawn(|| meet(environment(0, 3, port, "job"), 3_000));
        // The first to give up does so for all.
        (
            meet(environment(2, 3, port, "job"), 60_000),
            first.join().unwrap(),
        )
    });
    for error in [first.unwrap_err(), second.unwrap_err()] {
        let CommError::Rendezvous {
            joined,
            missing,
            address,
            ..
        } = &error
        else {
            panic!("{error:?}")
        };
        assert_eq!(
            (&joined[..], &missing[..]),
            (&[0, 2][..], &[1][..]),
            "{error}"
        );
        assert_eq!(*address, format!("127.0.0.1:{port}"));
    }
}

#[test]
fn a_rank_that_ends_in_the_rendezvous_is_named_at_once() {
    for victim in [0, 2] {
        let blame = tempfile::tempdir().unwrap();
        let victim_variable = victim.to_string();
        let variables = [
            (BLAME_DIR, blame.path().to_str().unwrap()),
            ("FSDP_TEST_VICTIM", &victim_variable),
        ];
        let mut ranks = start_alike(3, "a rank ends in the rendezvous", &variables);
        let others: Vec<usize> = (0..3).filter(|&rank| rank != victim).collect();
        for (rank, output) in ranks.wait_for(&others, DEADLINE / 2) {
            assert!(
                output.contains(&format!("(missing: rank {victim})")),
                "rank {rank}: {output}"
            );
            let blamed = std::fs::read_to_string(blame.path().join(rank.to_string())).unwrap();
            assert_eq!(blamed, victim_variable, "rank {rank}");
        }
    }
}

#[test]
#[cfg(target_os = "linux")]
fn ranks_meet_although_rank_0_does_not_know_the_address_of_its_own_name() {
    let port = free_port();
    let join = |rank, master: &str| {
        let mut environment = environment(rank, 3, port, "job");
        master.clone_into(&mut environment.master_addr);
        environment.secret = Some(Secret::new("a secret of this test").unwrap());
        meet(environment, 20_000).and_then(|group| group.barrier())
    };
    // The others reach it at addresses of their own.
    std::thread::scope(|scope| {
        let ranks = [(0, "job-0.job.invalid"), (1, "127.0.0.1"), (2, "127.0.1.1")];
        let ranks = ranks.map(|(rank, master)| scope.spawn(move || join(rank, master)));
        for rank in ranks {
            assert_eq!(rank.join().unwrap(), Ok(()));
        }
    });
}

#[test]
fn the_longest_deadline_is_one() {
    let port = free_port();
    let connect = |rank| {
        let options = TcpOptions {
            deadline: Duration::MAX,
            ..TcpOptions::default()
        };
        options.connect(&environment(rank, 2, port, "job")).unwrap()
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(move || connect(1).barrier());
        connect(0).barrier().unwrap();
        other.join().unwrap().unwrap();
    });
}

#[test]
fn nobody_at_the_address_is_an_error() {
    let error = meet(environment(1, 2, free_port(), "job"), 300).unwrap_err();
    assert!(
        matches!(&error, CommError::Rendezvous { message, .. } if message.contains("could not reach rank 0")),
        "{error:?}"
    );
    assert!(
        matches!(&error, CommError::Rendezvous { missing, .. } if missing[..] == [0]),
        "{error:?}"
    );
    let elsewhere = Environment::from_variables(|name| match name {
        "RANK" => Some("0".to_owned()),
        "WORLD_SIZE" => Some("2".to_owned()),
        "FSDP_SECRET" => Some("a secret of this test".to_owned()),
        // An address for documentation, which no host has.
        "MASTER_ADDR" => Some("192.0.2.1".to_owned()),
        _ => None,
    });
    let error = meet(elsewhere.unwrap(), 300).unwrap_err();
    assert!(
        matches!(&error, CommError::Rendezvous { message, .. } if message.contains("MASTER_ADDR")),
        "{error:?}"
    );
}

#[test]
fn a_taken_port_is_an_error() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = meet(environment(0, 2, port, "job"), 500).unwrap_err();
    assert!(
        matches!(&error, CommError::Rendezvous { message, .. } if message.contains("MASTER_PORT")),
        "{error:?}"
    );
    // The process that has taken the port does not answer.
    let error = meet(environment(1, 2, port, "job"), 500).unwrap_err();
    assert!(matches!(&error, CommError::Rendezvous { .. }), "{error:?}");
}

#[test]
fn jobs_without_a_name_or_a_secret_do_not_meet() {
    for job in ["", "none"] {
        for rank in [0, 1] {
            let error = meet(environment(rank, 2, free_port(), job), 300).unwrap_err();
            assert!(
                matches!(&error, CommError::Environment { variable, .. } if variable == "FSDP_JOB_ID"),
                "{error:?}"
            );
        }
    }
}

#[test]
fn two_jobs_on_one_port_never_pair() {
    let port = free_port();
    std::thread::scope(|scope| {
        let first =
            scope.spawn(|| meet(environment(0, 2, port, "one"), 5000).map(|group| group.barrier()));
        let refused = [
            ("two", 1, 2, "another job"),
            ("one", 1, 3, "world size is 3"),
            ("one", 0, 2, "MASTER_PORT"),
        ];
        for (job, rank, world_size, reason) in refused {
            // The port must be open by then.
            while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {}
            let error = meet(environment(rank, world_size, port, job), 3000).unwrap_err();
            assert!(
                matches!(&error, CommError::Rendezvous { message, .. } if message.contains(reason)),
                "{error:?}"
            );
        }
        let second = meet(environment(1, 2, port, "one"), 5000).unwrap();
        let error = meet(environment(1, 2, port, "one"), 3000).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("another process has already joined as rank 1"),
            "{error}"
        );
        second.barrier().unwrap();
        assert_eq!(first.join().unwrap(), Ok(Ok(())));
    });
}
