//! Strangers at the port of the store: they learn nothing, take nothing, and keep nobody out.

#![expect(clippy::unwrap_used, reason = "these are tests, and their helpers")]

use std::io::Write;
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use fsdp_comm::{CommError, Secret, StoreOptions, TcpStore};

const DEADLINE: Duration = Duration::from_secs(10);

const WORLD_SIZE: usize = 4;

fn options(job: &str, rank: usize) -> StoreOptions {
    StoreOptions {
        job: job.to_owned(),
        rank,
        world_size: WORLD_SIZE,
        deadline: DEADLINE,
        ..StoreOptions::default()
    }
}

fn host() -> TcpStore {
    TcpStore::host("127.0.0.1:0", &options("host-4711", 0)).unwrap()
}

fn refusal(joined: Result<TcpStore, CommError>) -> String {
    match joined {
        Err(CommError::Rendezvous { message, .. }) => message,
        other => panic!("{other:?}"),
    }
}

fn stranger(store: &TcpStore) -> TcpStream {
    let stream = TcpStream::connect(store.address()).unwrap();
    stream.set_write_timeout(Some(DEADLINE)).unwrap();
    stream
}

#[test]
fn a_refusal_tells_nothing_about_the_job() {
    let store = host();
    let reason = refusal(TcpStore::connect(store.address(), &options("other", 1)));
    assert!(
        !reason.replace(store.address(), "").contains("4711"),
        "{reason}"
    );
    // Nor does it take a seat.
    TcpStore::connect(store.address(), &options("host-4711", 1)).unwrap();
}

#[test]
fn a_seat_is_for_those_who_know_the_secret() {
    fn with_secret(secret: Option<&str>, rank: usize) -> StoreOptions {
        let secret = secret.map(|text| Secret::new(text).unwrap());
        StoreOptions {
            secret,
            ..options("job", rank)
        }
    }
    let secret = Some("a secret of this test");
    let store = TcpStore::host("127.0.0.1:0", &with_secret(secret, 0)).unwrap();
    for wrong in [
        None,
        Some("a secret of this tesT"),
        Some("another, longer, secret of this test"),
    ] {
        let reason = refusal(TcpStore::connect(store.address(), &with_secret(wrong, 1)));
        assert!(
            reason.contains("FSDP_SECRET") && reason.contains(env!("CARGO_PKG_VERSION")),
            "{reason}"
        );
        assert!(!reason.contains("a secret"), "{reason}");
    }
    TcpStore::connect(store.address(), &with_secret(secret, 1)).unwrap();
}

#[test]
fn without_a_secret_only_this_host_reaches_the_store() {
    let everywhere = "0.0.0.0:0";
    let reason = refusal(TcpStore::host(everywhere, &options("job", 0)));
    assert!(
        reason.contains("FSDP_SECRET") && reason.contains("FSDP_INSECURE"),
        "{reason}"
    );
    let insecure = StoreOptions {
        insecure: true,
        ..options("job", 0)
    };
    TcpStore::host(everywhere, &insecure).unwrap();
    let secret = Some(Secret::random().unwrap());
    TcpStore::host(
        everywhere,
        &StoreOptions {
            secret,
            ..options("job", 0)
        },
    )
    .unwrap();
}

/// Checks that a store is reached by ranks of other hosts even if the name of its host leads to a
/// loopback address there, as on Debian, or nowhere yet, as in Kubernetes.
#[test]
#[cfg(target_os = "linux")]
fn a_store_at_a_name_is_reached_at_every_address_of_its_host() {
    let secret = Some(Secret::random().unwrap());
    let with_secret = |rank| StoreOptions {
        secret: secret.clone(),
        ..options("job", rank)
    };
    let store = TcpStore::host("job-0.job.invalid:0", &with_secret(0)).unwrap();
    let (name, port) = store.address().rsplit_once(':').unwrap();
    assert_eq!(name, "job-0.job.invalid");
    for (rank, host) in [(1, "127.0.0.1"), (2, "127.0.1.1")] {
        TcpStore::connect(&format!("{host}:{port}"), &with_secret(rank)).unwrap();
    }
}

#[test]
fn a_rank_beyond_the_world_is_refused() {
    let store = host();
    for rank in [WORLD_SIZE, 1_000_000] {
        let reason = refusal(TcpStore::connect(
            store.address(),
            &options("host-4711", rank),
        ));
        assert!(reason.contains(&format!("rank {rank}")), "{reason}");
    }
}

#[test]
fn a_stranger_cannot_make_the_store_take_in_bytes() {
    let store = host();
    let claim: u32 = 64 << 20;
    for said in [
        claim.to_le_bytes().to_vec(),
        b"fsdp\0kv\x03".to_vec(),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
    ] {
        let mut stream = stranger(&store);
        stream.write_all(&said).unwrap();
        // Only a stranger whose bytes are read can send them all.
        let sent = stream.write_all(&vec![0; claim as usize]);
        assert!(sent.is_err(), "{said:?}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn silent_connections_are_dropped_and_keep_no_rank_out() {
    let store = host();
    let silent: Vec<TcpStream> = (0..300).map(|_| stranger(&store)).collect();
    let rank = TcpStore::connect(store.address(), &options("host-4711", 1)).unwrap();
    rank.set("key", b"value").unwrap();
    // The store is in this process, and so are its ends of the connections that it holds.
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count();
    assert!(open < silent.len() + 100, "{open} open files");
}

#[test]
fn ranks_that_come_all_at_once_are_all_let_in() {
    const RANKS: usize = 300;
    let place = |rank: usize| StoreOptions {
        world_size: RANKS,
        ..options("job", rank)
    };
    let store = TcpStore::host("127.0.0.1:0", &place(0)).unwrap();
    thread::scope(|scope| {
        for rank in 1..RANKS {
            let (store, place) = (&store, place(rank));
            scope.spawn(move || {
                TcpStore::connect(store.address(), &place)
                    .unwrap()
                    .set(&format!("came/{}", place.rank), b"")
                    .unwrap()
            });
        }
    });
    assert!((1..RANKS).all(|rank| store.get(&format!("came/{rank}")).unwrap().is_some()));
}

#[test]
fn a_store_takes_no_more_than_its_share_of_memory() {
    let store = host();
    let value = vec![7; 16 << 20];
    let full = (0..60)
        .find_map(|number| store.set(&format!("key {number}"), &value).err())
        .unwrap();
    assert!(full.to_string().contains("full"), "{full}");
    // Other requests go on, and so does replacing a value.
    assert_eq!(store.get("key 0").unwrap().unwrap(), value);
    store.set("key 0", b"small").unwrap();
    store.set("another key", b"small").unwrap();
}
