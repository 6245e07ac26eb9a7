//! Strangers at the ports of jobs. They know no secret, only what a rank was heard to say.

use std::collections::VecDeque;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, RngExt as _, SeedableRng as _};

use super::ports::{PortKind, Target};
use super::recorder::Recording;

/// The connections that each stranger keeps open at most.
const MAX_OPEN: usize = 100;
/// The connections of a burst.
const BURST: usize = 200;
/// The most bytes of noise.
const NOISE_BYTES: usize = 64 << 10;
/// The most bits that are flipped in a recording.
const FLIPS: usize = 8;
/// The time that the other side has to let a connection in.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// The time that it has to take bytes.
const WRITE_TIMEOUT: Duration = Duration::from_millis(200);
/// The time that it has to answer.
const READ_TIMEOUT: Duration = Duration::from_millis(20);
/// The pause after a port had closed, and while none is open.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// A use that a stranger makes of a connection.
#[derive(Debug, Clone, Copy)]
enum Trick {
    /// Random bytes.
    Noise,
    /// A greeting that breaks off.
    Truncated,
    /// Everything that a rank has said, with some bits flipped.
    Flipped,
    /// Everything that a rank has said.
    Replayed,
    /// The part of it up to some byte, and then noise.
    Changed,
    /// A greeting, and a claim of much to come.
    Huge,
    /// A greeting, and the other side's own answer sent back.
    Reflected,
    /// Nothing: the connection stays open.
    Silent,
    /// A recording, of which a byte is sent from time to time.
    Slow,
    /// A greeting with some bits flipped, and the end of what this side sends. The connection stays
    /// open.
    HalfClosed,
    /// Many connections, opened and closed at once.
    Burst,
}

const TRICKS: [Trick; 11] = [
    Trick::Noise,
    Trick::Truncated,
    Trick::Flipped,
    Trick::Replayed,
    Trick::Changed,
    Trick::Huge,
    Trick::Reflected,
    Trick::Silent,
    Trick::Slow,
    Trick::HalfClosed,
    Trick::Burst,
];

/// The count of connections to the ports of one kind.
#[derive(Debug, Default)]
pub(super) struct Visits {
    pub(super) connections: AtomicU64,
    /// The connections that were not let in: the port had closed, or its queue was full.
    pub(super) refused: AtomicU64,
    /// The connections that got an answer, which only a right greeting gets.
    pub(super) answered: AtomicU64,
}

impl Visits {
    /// Returns the counts as a text.
    pub(super) fn summary_text(&self) -> String {
        format!(
            "{} connections ({} refused, {} answered)",
            self.connections.load(Ordering::Relaxed),
            self.refused.load(Ordering::Relaxed),
            self.answered.load(Ordering::Relaxed)
        )
    }
}

/// The state that strangers share with those who watch the jobs.
#[derive(Debug, Default)]
pub(super) struct Field {
    /// The open ports of each job.
    targets: [Mutex<Vec<Target>>; 2],
    pub(super) store: Visits,
    pub(super) rank: Visits,
    end: AtomicBool,
}

impl Field {
    /// Sets the open ports of a job.
    pub(super) fn set_targets(&self, job: usize, targets: Vec<Target>) {
        *self.targets[job]
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = targets;
    }

    /// Tells all strangers, and all who watch, to end.
    pub(super) fn end(&self) {
        self.end.store(true, Ordering::Relaxed);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.end.load(Ordering::Relaxed)
    }

    /// Chooses an open port, a store's as often as a rank's; `None` if none is open.
    fn target(&self, random: &mut StdRng) -> Option<Target> {
        let mut stores = Vec::new();
        let mut ranks = Vec::new();
        for targets in &self.targets {
            for target in &*targets.lock().unwrap_or_else(PoisonError::into_inner) {
                match target.kind {
                    PortKind::Store => stores.push(*target),
                    PortKind::Rank => ranks.push(*target),
                }
            }
        }
        // There are more ranks than stores: chosen among all, a store would see few strangers.
        if random.random_bool(0.5) {
            std::mem::swap(&mut stores, &mut ranks);
        }
        let list = if stores.is_empty() { ranks } else { stores };
        list.choose(random).copied()
    }

    fn visits(&self, kind: PortKind) -> &Visits {
        match kind {
            PortKind::Store => &self.store,
            PortKind::Rank => &self.rank,
        }
    }
}

/// Bothers open ports until the end.
pub(super) fn bother(field: &Field, recording: &Recording, seed: u64) {
    let random = StdRng::seed_from_u64(seed);
    let mut stranger = Stranger {
        field,
        recording,
        random,
        open: VecDeque::new(),
    };
    while !field.has_ended() {
        let Some(target) = field.target(&mut stranger.random) else {
            thread::sleep(RETRY_INTERVAL);
            continue;
        };
        // The other side may end a connection at any time. The port may also have closed.
        if stranger
            .visit(target)
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        {
            thread::sleep(RETRY_INTERVAL);
        }
        stranger.send_slowly();
    }
}

/// A connection that stays open, and what is still to be sent on it.
struct OpenConnection {
    stream: TcpStream,
    rest: VecDeque<u8>,
}

struct Stranger<'a> {
    field: &'a Field,
    recording: &'a Recording,
    random: StdRng,
    open: VecDeque<OpenConnection>,
}

impl Stranger<'_> {
    /// Makes a connection that does its worst, or many.
    fn visit(&mut self, target: Target) -> io::Result<()> {
        let trick = TRICKS
            .choose(&mut self.random)
            .expect("there are several tricks");
        if matches!(trick, Trick::Burst) {
            return (0..BURST).try_for_each(|_| self.connect(target).map(drop));
        }
        let mut stream = self.connect(target)?;
        let Recording { greeting, all } = self.recording;
        match trick {
            Trick::Noise => stream.write_all(&self.noise())?,
            Trick::Truncated => {
                stream.write_all(&greeting[..self.random.random_range(0..greeting.len())])?
            }
            Trick::Flipped => stream.write_all(&flipped(all, &mut self.random))?,
            Trick::Replayed => stream.write_all(all)?,
            Trick::Changed => {
                let same = self.random.random_range(0..all.len());
                stream.write_all(&[&all[..same], &self.noise()].concat())?;
            }
            Trick::Huge => {
                let claim = if self.random.random_bool(0.5) {
                    vec![0xff; 256]
                } else {
                    i64::MAX.to_le_bytes().repeat(32)
                };
                stream.write_all(&[greeting, &claim[..], &vec![0; NOISE_BYTES]].concat())?;
            }
            Trick::Reflected => {
                stream.write_all(greeting)?;
                let mut answer = [0; 256];
                let count = self.answer(target, &mut stream, &mut answer)?;
                stream.write_all(&answer[..count])?;
            }
            Trick::Silent => return self.keep(stream, VecDeque::new()),
            Trick::Slow => return self.keep(stream, all.iter().copied().collect()),
            Trick::HalfClosed => {
                stream.write_all(&flipped(greeting, &mut self.random))?;
                stream.shutdown(Shutdown::Write)?;
                return self.keep(stream, VecDeque::new());
            }
            Trick::Burst => {}
        }
        self.answer(target, &mut stream, &mut [0; 256])?;
        Ok(())
    }

    /// Makes a connection, and counts it.
    fn connect(&self, target: Target) -> io::Result<TcpStream> {
        let visits = self.field.visits(target.kind);
        visits.connections.fetch_add(1, Ordering::Relaxed);
        let address = (Ipv4Addr::LOCALHOST, target.port).into();
        let stream = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT).inspect_err(|_| {
            visits.refused.fetch_add(1, Ordering::Relaxed);
        })?;
        stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        Ok(stream)
    }

    /// Reads an answer, if there is one, and counts it.
    fn answer(
        &self,
        target: Target,
        stream: &mut TcpStream,
        answer: &mut [u8],
    ) -> io::Result<usize> {
        let count = stream.read(answer)?;
        self.field
            .visits(target.kind)
            .answered
            .fetch_add(u64::from(count > 0), Ordering::Relaxed);
        Ok(count)
    }

    fn noise(&mut self) -> Vec<u8> {
        let mut noise = vec![0; self.random.random_range(0..NOISE_BYTES)];
        self.random.fill_bytes(&mut noise);
        noise
    }

    /// Keeps a connection open. The oldest one ends if there are too many.
    fn keep(&mut self, stream: TcpStream, rest: VecDeque<u8>) -> io::Result<()> {
        // A byte that cannot be sent at once is lost.
        stream.set_nonblocking(true)?;
        self.open.push_back(OpenConnection { stream, rest });
        if self.open.len() > MAX_OPEN {
            self.open.pop_front();
        }
        Ok(())
    }

    /// Sends the next byte of one of the slow connections.
    fn send_slowly(&mut self) {
        if self.open.is_empty() {
            return;
        }
        let at = self.random.random_range(0..self.open.len());
        let OpenConnection { stream, rest } = &mut self.open[at];
        if let Some(byte) = rest.pop_front() {
            stream.write_all(&[byte]).ok();
        }
    }
}

/// Returns bytes with one or more bits flipped.
fn flipped(bytes: &[u8], random: &mut StdRng) -> Vec<u8> {
    let mut flipped = bytes.to_vec();
    for _ in 0..random.random_range(1..=FLIPS) {
        let at = random.random_range(0..flipped.len());
        flipped[at] ^= 1 << random.random_range(0..8);
    }
    flipped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_most_a_few_bits_are_flipped() {
        let mut random = StdRng::seed_from_u64(1);
        for _ in 0..100 {
            let bits: u32 = flipped(&[0; 40], &mut random)
                .iter()
                .map(|byte| byte.count_ones())
                .sum();
            assert!(bits <= FLIPS as u32);
        }
    }

    #[test]
    fn ports_of_stores_and_of_ranks_are_chosen_of_all_jobs_while_they_are_open() {
        let field = Field::default();
        let mut random = StdRng::seed_from_u64(1);
        assert_eq!(field.target(&mut random), None);
        let store = Target {
            port: 1,
            kind: PortKind::Store,
        };
        field.set_targets(0, vec![store]);
        assert_eq!(field.target(&mut random), Some(store));
        let ranks = [2, 3, 4].map(|port| Target {
            port,
            kind: PortKind::Rank,
        });
        field.set_targets(1, ranks.to_vec());
        let chosen: Vec<Target> = (0..200).filter_map(|_| field.target(&mut random)).collect();
        assert!(
            ranks
                .iter()
                .chain([&store])
                .all(|target| chosen.contains(target))
        );
        field.set_targets(0, Vec::new());
        assert!((0..200).all(|_| field.target(&mut random) != Some(store)));
    }
}
