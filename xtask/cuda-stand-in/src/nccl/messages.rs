//! Messages between ranks: files of a directory that all ranks of a communicator know.
//!
//! A file gets its final name when it is whole, and its receiver deletes it. So a rank that is
//! killed holds up the others only as NCCL's would: those that wait for its next message.

#![expect(clippy::disallowed_methods, reason = "messages are no checkpoints")]

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use crate::memory::Address;

/// The time for which a wait does not sleep.
const EAGER: Duration = Duration::from_millis(1);
/// The time between two looks at the directory after that.
const NAP: Duration = Duration::from_micros(100);

/// One rank's end of a communicator's messages.
#[derive(Debug)]
pub(super) struct Messages {
    directory: PathBuf,
    rank: usize,
    /// The number of messages to and from each rank so far.
    sent: Vec<u64>,
    received: Vec<u64>,
}

/// A message of a rank.
pub(super) enum Received {
    Message(Vec<u8>),
    /// The rank has aborted. NCCL's kernels then count as sent what others wait for, and these end
    /// with whatever is in their buffers.
    Undefined,
}

/// The reason for which a wait ended before its time: nobody wants the result any more.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Aborted;

impl Messages {
    /// Joins the ranks of a communicator, which all name the same directory. `place` tells where
    /// this rank's GPU is.
    ///
    /// # Errors
    /// The file system's, other numbers of ranks, and ranks with the same place.
    pub(super) fn join(
        directory: PathBuf,
        (rank, ranks): (usize, usize),
        place: &str,
        is_aborted: impl Fn() -> bool,
    ) -> Result<Result<Messages, Aborted>, String> {
        fs::create_dir_all(&directory)
            .map_err(|error| format!("{}: {error}", directory.display()))?;
        let messages = Messages {
            directory,
            rank,
            sent: vec![0; ranks],
            received: vec![0; ranks],
        };
        messages.write(
            &format!("joined-{rank}"),
            format!("{ranks} {place}").as_bytes(),
        )?;
        let mut places = Vec::new();
        for other in 0..ranks {
            match messages.wait_for(&format!("joined-{other}"), &is_aborted)? {
                Ok(text) => places.push(text),
                Err(Aborted) => return Ok(Err(Aborted)),
            }
        }
        let own = places[rank].clone();
        for (other, place) in places
            .iter()
            .enumerate()
            .filter(|&(other, _)| other != rank)
        {
            if !place.starts_with(format!("{ranks} ").as_bytes()) {
                return Err(format!("rank {other} was told another number of ranks"));
            }
            if *place == own {
                return Err(format!(
                    "Duplicate GPU detected: ranks {rank} and {other} both use the same one"
                ));
            }
        }
        Ok(Ok(messages))
    }

    /// Returns the number of ranks.
    pub(super) fn ranks(&self) -> usize {
        self.sent.len()
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), String> {
        let whole = self.directory.join(name);
        let partial = self.directory.join(format!("partial-{name}"));
        fs::write(&partial, bytes)
            .and_then(|()| fs::rename(&partial, &whole))
            .map_err(|error| format!("{}: {error}", whole.display()))
    }

    /// Returns the content of a file, if it is there.
    fn read(&self, name: &str) -> Result<Option<Vec<u8>>, String> {
        let path = self.directory.join(name);
        match fs::read(&path) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(format!("{}: {error}", path.display())),
        }
    }

    /// Waits for a file.
    fn wait_for(
        &self,
        name: &str,
        is_aborted: &impl Fn() -> bool,
    ) -> Result<Result<Vec<u8>, Aborted>, String> {
        wait(|| self.read(name), is_aborted)
    }

    /// Sends a message to a rank, which may be this one.
    pub(super) fn send(&mut self, to: usize, bytes: &[u8]) -> Result<(), String> {
        let number = self
            .sent
            .get_mut(to)
            .ok_or_else(|| format!("there is no rank {to}"))?;
        *number += 1;
        let name = format!("{}-{to}-{number}", self.rank);
        self.write(&name, bytes)
    }

    /// Receives the next message of a rank.
    pub(super) fn receive(
        &mut self,
        from: usize,
        is_aborted: &impl Fn() -> bool,
    ) -> Result<Result<Received, Aborted>, String> {
        let number = self
            .received
            .get_mut(from)
            .ok_or_else(|| format!("there is no rank {from}"))?;
        *number += 1;
        let name = format!("{from}-{}-{number}", self.rank);
        let of_abort = aborted(from);
        let received = wait(
            || {
                // The abort is looked for first, so that no message from before it is missed.
                let has_aborted = self.read(&of_abort)?.is_some();
                let message = self.read(&name)?.map(Received::Message);
                Ok(message.or(has_aborted.then_some(Received::Undefined)))
            },
            is_aborted,
        )?;
        fs::remove_file(self.directory.join(name)).ok();
        Ok(received)
    }

    /// Sends bytes to all ranks, this one included, and returns what each of them has sent.
    ///
    /// # Errors
    /// The file system's; a rank that makes another call.
    pub(super) fn exchange(
        &mut self,
        call: &str,
        bytes: &[u8],
        is_aborted: &impl Fn() -> bool,
    ) -> Result<Result<Vec<Vec<u8>>, Aborted>, String> {
        let header = header(call, 0, bytes.len());
        for to in 0..self.ranks() {
            self.send(to, &[header.as_slice(), bytes].concat())?;
        }
        let mut received = Vec::new();
        for from in 0..self.ranks() {
            match self.receive(from, is_aborted)? {
                Ok(Received::Message(message)) => {
                    received.push(content(&message, &header, from)?.to_vec());
                }
                Ok(Received::Undefined) | Err(Aborted) => return Ok(Err(Aborted)),
            }
        }
        Ok(Ok(received))
    }

    /// Says that this rank has aborted.
    pub(super) fn abort(&self) {
        // The directory may be gone, if all others have left.
        self.write(&aborted(self.rank), b"").ok();
    }

    /// Says that this rank leaves.
    pub(super) fn leave(&self) -> Result<(), String> {
        self.write(&format!("left-{}", self.rank), b"")
    }

    /// Returns `true` if all ranks have left. Rank 0 deletes the directory then.
    pub(super) fn have_all_left(&self) -> bool {
        if !self.directory.exists() {
            return true;
        }
        let have_left =
            (0..self.ranks()).all(|rank| self.directory.join(format!("left-{rank}")).exists());
        if have_left && self.rank == 0 {
            fs::remove_dir_all(&self.directory).ok();
        }
        have_left
    }
}

/// Waits until there is a value.
fn wait<T>(
    find: impl Fn() -> Result<Option<T>, String>,
    is_aborted: &impl Fn() -> bool,
) -> Result<Result<T, Aborted>, String> {
    let eager = Instant::now() + EAGER;
    loop {
        if let Some(found) = find()? {
            return Ok(Ok(found));
        }
        if is_aborted() {
            return Ok(Err(Aborted));
        }
        if Instant::now() < eager {
            thread::yield_now()
        } else {
            thread::sleep(NAP)
        }
    }
}

/// Returns the name of the file that says that a rank has aborted.
fn aborted(rank: usize) -> String {
    format!("aborted-{rank}")
}

/// Returns the directory of the messages of a communicator.
pub(super) fn directory(communicator: &str) -> PathBuf {
    let all =
        std::env::var_os("CUDA_STAND_IN_DIRECTORY").map_or_else(std::env::temp_dir, PathBuf::from);
    all.join(format!("nccl-stand-in-{communicator}"))
}

/// Returns the place of a GPU: ranks with the same one cannot be in the same communicator, unless
/// it is allowed.
pub(super) fn place(number: usize) -> String {
    let is_shared = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1");
    let shared = if is_shared {
        std::process::id().to_string()
    } else {
        String::new()
    };
    format!(
        "{} {number} {shared}",
        std::env::var("NCCL_HOSTID").unwrap_or_default()
    )
}

/// The description of a message, at its start, so that ranks that call different functions find
/// out.
pub(super) fn header(call: &str, dtype: i32, count: usize) -> Vec<u8> {
    let mut header = format!("{call} {dtype} {count}").into_bytes();
    header.resize(HEADER, b' ');
    header
}

/// The bytes of a header.
pub(super) const HEADER: usize = 64;

/// Splits a message, and checks its header.
pub(super) fn content<'m>(
    message: &'m [u8],
    expected: &[u8],
    from: usize,
) -> Result<&'m [u8], String> {
    let (header, content) = message
        .split_at_checked(HEADER)
        .ok_or("a message is too short")?;
    if header != expected {
        return Err(format!(
            "rank {from} called `{}`, and not `{}`",
            String::from_utf8_lossy(header).trim(),
            String::from_utf8_lossy(expected).trim()
        ));
    }
    Ok(content)
}

/// Returns the address `bytes` behind another.
pub(super) fn behind(address: Address, bytes: usize) -> Address {
    address + bytes as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Joins two ranks, as threads.
    fn join(test: &str, places: [&str; 2]) -> [Result<Messages, String>; 2] {
        let directory = std::env::temp_dir().join(format!("{test}-{}", std::process::id()));
        let join = |rank: usize| {
            Messages::join(directory.clone(), (rank, 2), places[rank], || false)
                .map(|joined| joined.unwrap())
        };
        let joined = thread::scope(|scope| {
            [0, 1]
                .map(|rank| {
                    scope.spawn({
                        let join = &join;
                        move || join(rank)
                    })
                })
                .map(|rank| rank.join().unwrap())
        });
        if joined.iter().any(Result::is_err) {
            fs::remove_dir_all(directory).unwrap();
        }
        joined
    }

    #[test]
    fn messages_arrive_in_order_and_nothing_is_left() {
        let [mut first, mut second] = join("order", ["0", "1"]).map(Result::unwrap);
        first.send(1, b"a").unwrap();
        first.send(1, b"b").unwrap();
        let mut receive = |expected: &[u8]| match second.receive(0, &|| false).unwrap().unwrap() {
            Received::Message(message) => assert_eq!(message, expected),
            Received::Undefined => panic!("nobody has aborted"),
        };
        receive(b"a");
        receive(b"b");
        assert!(matches!(second.receive(0, &|| true), Ok(Err(Aborted))));
        first.leave().unwrap();
        assert!(!first.have_all_left());
        second.leave().unwrap();
        assert!(second.have_all_left() && first.have_all_left());
        assert!(!first.directory.exists());
    }

    #[test]
    fn what_a_rank_sent_before_it_aborted_arrives_and_then_nothing_is_waited_for() {
        let [mut first, mut second] = join("aborted", ["0", "1"]).map(Result::unwrap);
        first.send(1, b"a").unwrap();
        first.abort();
        let received = [(); 2].map(|()| second.receive(0, &|| false).unwrap().unwrap());
        assert!(matches!(
            received,
            [Received::Message(_), Received::Undefined]
        ));
        fs::remove_dir_all(&first.directory).unwrap();
    }

    #[test]
    fn two_ranks_on_one_gpu_are_refused() {
        for error in join("one-gpu", ["0", "0"]).map(Result::unwrap_err) {
            assert!(error.starts_with("Duplicate GPU detected"), "{error}");
        }
    }

    #[test]
    fn another_call_is_found_by_its_header() {
        let sent = header("ncclAllGather", 7, 3);
        let expected = header("ncclAllReduce", 7, 3);
        let message = [&sent[..], b"xyz"].concat();
        assert_eq!(content(&message, &sent, 1).unwrap(), b"xyz");
        assert!(
            content(&message, &expected, 1)
                .unwrap_err()
                .contains("rank 1 called `ncclAllGather 7 3`")
        );
        assert!(content(b"x", &expected, 1).is_err());
    }
}
