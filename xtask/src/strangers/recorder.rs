//! A recorder between a rank and the store of its job: it passes everything on, and keeps what the
//! rank says.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Result;

/// The most bytes that are kept.
const MAX_RECORDED_BYTES: usize = 64 << 10;

/// The pause before another attempt to reach the store.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// The bytes that a rank has said to the store.
#[derive(Debug, Clone, Default)]
pub(super) struct Recording {
    /// The bytes before it had an answer.
    pub(super) greeting: Vec<u8>,
    /// All that it said, the greeting included.
    pub(super) all: Vec<u8>,
}

/// A port that leads to a store.
#[derive(Debug)]
pub(super) struct Recorder {
    listener: TcpListener,
    heard: Arc<Mutex<Recording>>,
}

impl Recorder {
    pub(super) fn open() -> Result<Self> {
        Ok(Recorder {
            listener: TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?,
            heard: Arc::default(),
        })
    }

    pub(super) fn port(&self) -> Result<u16> {
        Ok(self.listener.local_addr()?.port())
    }

    /// Passes connections on to the store, in the background, for as long as this program runs.
    pub(super) fn lead_to(&self, store: u16) -> Result<()> {
        let listener = self.listener.try_clone()?;
        let heard = Arc::clone(&self.heard);
        thread::spawn(move || {
            for rank in listener.incoming().flatten() {
                let heard = Arc::clone(&heard);
                thread::spawn(move || pass_on(rank, store, &heard));
            }
        });
        Ok(())
    }

    /// Returns what has been said so far.
    pub(super) fn recording(&self) -> Recording {
        lock(&self.heard).clone()
    }
}

fn lock(heard: &Mutex<Recording>) -> MutexGuard<'_, Recording> {
    heard.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Connects a rank with the store, until one of them ends the connection. The rank tries again if
/// there is no store yet.
fn pass_on(mut rank: TcpStream, store: u16, heard: &Mutex<Recording>) {
    let Ok(mut store) = TcpStream::connect((Ipv4Addr::LOCALHOST, store)) else {
        return thread::sleep(RETRY_INTERVAL);
    };
    let (Ok(mut answers), Ok(mut to_rank)) = (store.try_clone(), rank.try_clone()) else {
        return;
    };
    thread::spawn(move || {
        std::io::copy(&mut answers, &mut to_rank).ok();
        to_rank.shutdown(Shutdown::Both).ok();
    });
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = rank.read(&mut buffer) {
        let said = &buffer[..count];
        let mut heard = lock(heard);
        // A rank waits for the answer to its greeting, so that is all that comes at first.
        if heard.all.is_empty() {
            heard.greeting = said.to_vec();
        }
        if heard.all.len() + count <= MAX_RECORDED_BYTES {
            heard.all.extend_from_slice(said);
        }
        drop(heard);
        if store.write_all(said).is_err() {
            break;
        }
    }
    store.shutdown(Shutdown::Both).ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorder_passes_both_sides_on_and_keeps_what_the_first_one_says() {
        let store = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let recorder = Recorder::open().unwrap();
        recorder
            .lead_to(store.local_addr().unwrap().port())
            .unwrap();
        let mut rank = TcpStream::connect((Ipv4Addr::LOCALHOST, recorder.port().unwrap())).unwrap();
        let (mut there, _) = store.accept().unwrap();
        let mut buffer = [0; 5];
        rank.write_all(b"hello").unwrap();
        there.read_exact(&mut buffer).unwrap();
        assert_eq!(&buffer, b"hello");
        there.write_all(b"there").unwrap();
        rank.read_exact(&mut buffer).unwrap();
        assert_eq!(&buffer, b"there");
        rank.write_all(b"again").unwrap();
        there.read_exact(&mut buffer).unwrap();
        let Recording { greeting, all } = recorder.recording();
        assert_eq!(
            (&greeting[..], &all[..]),
            (&b"hello"[..], &b"helloagain"[..])
        );
        // The end of one side is the end of the other.
        drop(rank);
        assert_eq!(there.read(&mut buffer).unwrap(), 0);
    }
}
