//! The key-value store, between threads that each have their own client.

#![expect(clippy::unwrap_used, reason = "these are tests, and their helpers")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use fsdp_comm::{CommError, MAX_STORE_BYTES, StoreOptions, TcpStore};

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
    let deadline = Duration::from_secs(2);
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
    assert!(error.to_string().contains("within 2s"), "{error}");
}

#[test]
fn limits_are_errors_and_not_lost_connections() {
    let host = host();
    host.set("key", b"value").unwrap();
    let much = vec![0; MAX_STORE_BYTES + 1];
    let long = "k".repeat(MAX_STORE_BYTES);
    let refused = [
        host.set("large", &much),
        host.set(&long, b""),
        host.get(&long).map(drop),
    ];
    for refused in refused {
        assert!(
            matches!(refused, Err(CommError::Store { .. })),
            "{refused:?}"
        );
        assert_eq!(host.get("key").unwrap().unwrap(), b"value");
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
    host.set("key", b"value").unwrap();
}
