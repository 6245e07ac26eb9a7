//! The key-value store, between threads that each have their own client.

#![expect(clippy::unwrap_used, reason = "these are tests, and their helpers")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use fsdp_comm::{CommError, StoreOptions, TcpStore};
use fsdp_comm::{MAX_KEY_BYTES, MAX_VALUE_BYTES};

const DEADLINE: Duration = Duration::from_secs(10);

fn options(rank: usize) -> StoreOptions {
    StoreOptions {
        job: "job".to_owned(),
        rank,
        world_size: 4,
        deadline: DEADLINE,
        ..StoreOptions::default()
    }
}

fn host() -> TcpStore {
    TcpStore::host("127.0.0.1:0", &options(0)).unwrap()
}

/// Returns a store of another rank, connected to the host's.
fn client(host: &TcpStore, rank: usize) -> TcpStore {
    TcpStore::connect(host.address(), &options(rank)).unwrap()
}

#[test]
fn what_one_sets_all_get() {
    let host = host();
    let other = client(&host, 1);
    assert_eq!(host.get("key").unwrap(), None);
    other.set("key", b"value").unwrap();
    assert_eq!(host.get("key").unwrap().unwrap(), b"value");
    host.set("key", b"").unwrap();
    assert_eq!(other.get("key").unwrap().unwrap(), b"");
    let large = vec![7; 3 << 20];
    other.set("large", &large).unwrap();
    assert_eq!(host.get("large").unwrap().unwrap(), large);
}

#[test]
fn the_longest_deadline_is_one() {
    let longest = |rank| StoreOptions {
        deadline: Duration::MAX,
        ..options(rank)
    };
    let host = TcpStore::host("127.0.0.1:0", &longest(0)).unwrap();
    let other = TcpStore::connect(host.address(), &longest(1)).unwrap();
    host.set("key", b"value").unwrap();
    assert_eq!(
        other
            .wait(&["key".to_owned()], Duration::MAX)
            .unwrap()
            .unwrap(),
        [b"value"]
    );
    // So many milliseconds do not fit in 64 bits. The lowest 64 are 384 of them.
    let long = Duration::from_secs(18_446_744_073_709_552);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| other.wait(&["late".to_owned()], long).unwrap());
        thread::sleep(Duration::from_millis(600));
        host.set("late", b"value").unwrap();
        assert_eq!(waiting.join().unwrap().unwrap(), [b"value"]);
    });
}

#[test]
fn waiting_ends_when_the_last_key_is_set() {
    let host = host();
    let keys = ["a", "b", "c"].map(str::to_owned);
    thread::scope(|scope| {
        let waiters = [1, 2].map(|rank| {
            let (store, keys) = (client(&host, rank), &keys);
            scope.spawn(move || store.wait(keys, DEADLINE).unwrap().unwrap())
        });
        for key in ["c", "a", "b"] {
            thread::sleep(Duration::from_millis(10));
            host.set(key, key.as_bytes()).unwrap();
        }
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), [b"a", b"b", b"c"]);
        }
    });
}

#[test]
fn waiting_in_vain_names_the_keys_and_the_store_goes_on() {
    let host = host();
    host.set("there", b"").unwrap();
    let keys = ["here", "there", "nowhere"].map(str::to_owned);
    let missing = host
        .wait(&keys, Duration::from_millis(50))
        .unwrap()
        .unwrap_err();
    assert_eq!(missing, ["here", "nowhere"]);
    assert_eq!(host.add("n", 1).unwrap(), 1);
}

#[test]
fn additions_of_all_add_up() {
    let host = host();
    thread::scope(|scope| {
        for rank in 1..4 {
            let store = client(&host, rank);
            scope.spawn(move || {
                for _ in 0..100 {
                    store.add("sum", rank as i64 - 2).unwrap();
                }
            });
        }
    });
    assert_eq!(host.add("sum", 0).unwrap(), 0);
    assert_eq!(host.add("sum", -5).unwrap(), -5);
    host.set("text", b"text").unwrap();
    assert!(
        matches!(host.add("text", 1), Err(CommError::Store { message, .. }) if message.contains("no number"))
    );
}

#[test]
fn exactly_one_sets_what_was_not_set() {
    let host = host();
    let values: Vec<Vec<u8>> = thread::scope(|scope| {
        let setters = [1u8, 2, 3].map(|rank| {
            let store = client(&host, rank.into());
            scope.spawn(move || store.compare_and_set("nonce", None, &[rank]).unwrap())
        });
        setters
            .into_iter()
            .map(|setter| setter.join().unwrap())
            .collect()
    });
    assert!(
        values
            .iter()
            .all(|value| *value == values[0] && value.len() == 1),
        "{values:?}"
    );
    assert_eq!(
        host.compare_and_set("nonce", Some(b"other"), b"x").unwrap(),
        values[0]
    );
    assert_eq!(
        host.compare_and_set("nonce", Some(&values[0]), b"x")
            .unwrap(),
        b"x"
    );
    assert_eq!(host.get("nonce").unwrap().unwrap(), b"x");
}

#[test]
fn a_rank_that_is_started_again_waits_for_the_store_of_its_own_attempt() {
    let old = host();
    let address = old.address().to_owned();
    drop(client(&old, 1));
    thread::scope(|scope| {
        let again = scope.spawn(|| TcpStore::connect(&address, &options(1)).unwrap());
        // Rank 0 of the attempt before has not ended yet.
        thread::sleep(Duration::from_millis(300));
        assert!(!again.is_finished());
        drop(old);
        let new = TcpStore::host(&address, &options(0)).unwrap();
        new.set("attempt", b"2").unwrap();
        let store = again.join().unwrap();
        assert_eq!(store.get("attempt").unwrap().unwrap(), b"2");
    });
}

#[test]
fn a_second_process_of_a_rank_is_refused_at_the_deadline() {
    let host = host();
    let _first = client(&host, 1);
    let deadline = Duration::from_millis(200);
    let error = TcpStore::connect(
        host.address(),
        &StoreOptions {
            deadline,
            ..options(1)
        },
    )
    .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("another process has already joined as rank 1"),
        "{error}"
    );
    assert!(error.to_string().contains("within 200ms"), "{error}");
}

#[test]
fn limits_are_errors_and_not_lost_connections() {
    let host = host();
    let long = "k".repeat(MAX_KEY_BYTES + 1);
    assert!(matches!(host.set(&long, b""), Err(CommError::Store { .. })));
    assert!(matches!(
        host.set("key", &vec![0; MAX_VALUE_BYTES + 1]),
        Err(CommError::Store { .. })
    ));
    host.set(&long[1..], b"value").unwrap();
    // A request or a reply may be too long as a whole.
    host.set("large", &vec![0; MAX_VALUE_BYTES]).unwrap();
    let refused = [
        host.compare_and_set("key", Some(&vec![0; MAX_VALUE_BYTES + 1]), b"")
            .map(drop),
        host.wait(&vec!["large".to_owned(); 5], DEADLINE).map(drop),
        host.wait(&vec![long[1..].to_owned(); 20_000], DEADLINE)
            .map(drop),
    ];
    for refused in refused {
        assert!(
            matches!(refused, Err(CommError::Store { .. })),
            "{refused:?}"
        );
        assert_eq!(host.get(&long[1..]).unwrap().unwrap(), b"value");
    }
}

#[test]
fn a_store_that_is_gone_is_an_error() {
    let host = host();
    let other = client(&host, 1);
    drop(host);
    assert!(matches!(other.get("key"), Err(CommError::Store { .. })));
    assert!(
        matches!(other.set("key", b""), Err(CommError::Store { message, .. }) if message.contains("lost"))
    );
}

#[test]
fn strangers_are_not_served() {
    let host = host();
    for said in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &u32::MAX.to_le_bytes(),
        &[8, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8],
    ] {
        let mut stranger = TcpStream::connect(host.address()).unwrap();
        stranger.set_read_timeout(Some(DEADLINE)).unwrap();
        stranger.write_all(said).unwrap();
        // The store may have hung up already.
        stranger.shutdown(std::net::Shutdown::Write).ok();
        let mut answer = Vec::new();
        // Hung up on, politely or not.
        stranger.read_to_end(&mut answer).ok();
        assert!(answer.is_empty(), "{answer:?}");
    }
    assert_eq!(host.add("n", 1).unwrap(), 1);
}
