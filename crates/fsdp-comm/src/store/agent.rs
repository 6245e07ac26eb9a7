//! The rendezvous under torchrun, whose agent listens at the job's address with torch's own
//! `TCPStore`.
//!
//! All ranks are clients of the agent's store. Rank 0, which may be on another host than the agent,
//! hosts the job's store on a free port and publishes its address under a key of the agent's store.
//! That key outlives the ranks: if torchrun starts them again, it holds the old address until the
//! new rank 0 has set it. A rank whose connection is refused therefore reads the key again and
//! retries.
//!
//! A nonce follows the address. It is part of the job's name for as long as this rank 0 lives, so
//! no rank mistakes another job at an old address for its own.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use super::client::{NotJoined, TcpStore, connect_once, connect_until, retry_pause};
use super::listening::{Name, address_in_zone};
use super::protocol::{StoreOptions, invalid_data_error};
use crate::access::nonce_text;
use crate::blocking::{is_end, read_exact, write_all};
use crate::deadline::deadline_after;
use crate::error::CommError;

/// The first request. Without it the agent's store closes the connection.
const VALIDATE: u8 = 0;
const SET: u8 = 1;
const GET: u8 = 3;
const WAIT: u8 = 6;

/// The argument of `VALIDATE`.
const MAGIC: u32 = 0x3C85_F7CE;

/// The answer to `WAIT`: all keys are set.
const STOP_WAITING: u8 = 0;

/// The longest value that is read: longer than any address with a nonce.
const MAX_ADDRESS_BYTES: u64 = 160;

/// The time that a refused rank waits before it reads the key again. It is long because all ranks
/// ask one agent.
const ASK_INTERVAL: Duration = Duration::from_millis(100);

/// The number of addresses that a rank can try within the deadline. An address without a greeting
/// may be an old one, at which another program listens now, or that of a process that is stopped.
const ADDRESSES: u32 = 4;

impl TcpStore {
    /// Joins the job's store through the store of torchrun's agent at `agent` (`host:port`), in
    /// which `key` holds the address of rank 0. With `one_host`, all ranks are on this one.
    pub(crate) fn through_agent(
        agent: &str,
        key: &str,
        one_host: bool,
        options: &StoreOptions,
    ) -> Result<TcpStore, CommError> {
        let &StoreOptions {
            rank,
            deadline: timeout,
            ..
        } = options;
        let failed = |message| CommError::rendezvous(agent, &[], message);
        let mut connection = Agent::connect(agent, deadline_after(timeout), retry_pause(options))
            .map_err(|error| {
                failed(format!(
                    "rank {rank} could not connect to the store of torchrun's agent within {timeout:?}: {error}; \
                     is torchrun running there, and does this host reach it? its `--local-addr` chooses another address; \
                     if it keeps no store, unset TORCHELASTIC_USE_AGENT_STORE"
                ))
            })?;
        if rank != 0 {
            return connection.join(key, options).map_err(failed);
        }
        let local_ip = connection.local.ip();
        let ip = if one_host {
            // No other host needs to reach rank 0 if no other host has ranks.
            Ipv4Addr::LOCALHOST.into()
        } else if local_ip.is_loopback() && (options.secret.is_some() || options.insecure) {
            // The agent is on this host, and other hosts reach this host at the address at which
            // they reach the agent.
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            local_ip
        };
        let nonce = nonce_text()
            .map_err(|error| failed(format!("rank 0 found no random number: {error}")))?;
        let store = TcpStore::host(
            &address_in_zone(connection.local, ip, 0).to_string(),
            &options_with_nonce(options, &nonce),
        )?;
        let address = store
            .address()
            .parse()
            .map_err(|_| failed(format!("`{}` is no address", store.address())))?;
        connection.publish(key, &PublishedAddress { address, nonce }).map_err(|error| {
            failed(format!(
                "rank 0 could not tell its address to the store of torchrun's agent within {timeout:?}: {}; \
                 is what listens there torchrun's agent? if it keeps no store, unset TORCHELASTIC_USE_AGENT_STORE",
                describe_error(&error)
            ))
        })?;
        Ok(store)
    }
}

/// The value under the key of rank 0's address.
#[derive(Debug, PartialEq, Eq)]
struct PublishedAddress {
    /// The address. It is unspecified (0.0.0.0) for the host of the agent.
    address: SocketAddr,
    nonce: String,
}

impl fmt::Display for PublishedAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.address, self.nonce)
    }
}

/// Returns options for the job while its rank 0 has this nonce.
fn options_with_nonce(options: &StoreOptions, nonce: &str) -> StoreOptions {
    StoreOptions {
        job: format!("{}/{nonce}", options.job),
        ..options.clone()
    }
}

/// A client of the agent's store. In its protocol integers are little-endian, and strings follow
/// their length.
struct Agent {
    stream: TcpStream,
    /// The address of this end of the connection.
    local: SocketAddr,
    /// The address of the agent.
    peer: SocketAddr,
    deadline: Instant,
}

impl Agent {
    /// Connects to the agent's store, with the greeting of torch's clients.
    fn connect(address: &str, deadline: Instant, pause: Duration) -> io::Result<Agent> {
        let stream = connect_until(&Name(address), deadline, pause)?;
        let mut agent = Agent {
            local: stream.local_addr()?,
            peer: stream.peer_addr()?,
            stream,
            deadline,
        };
        agent.send(&[&[VALIDATE], &MAGIC.to_le_bytes()])?;
        Ok(agent)
    }

    /// Joins the store of rank 0 at the address under the key. Retries until the deadline, and
    /// returns the reason if that was not possible.
    fn join(&mut self, key: &str, options: &StoreOptions) -> Result<TcpStore, String> {
        let &StoreOptions {
            rank,
            deadline: timeout,
            ..
        } = options;
        let mut last_reason = None;
        loop {
            let PublishedAddress {
                address: published_address,
                nonce,
            } = self.wait_for_address(key).map_err(|error| {
                format!(
                    "rank {rank} did not learn from the store of torchrun's agent within {timeout:?} where rank 0 is: \
                     {}; see what rank 0 says",
                    describe_error(&error)
                )
            })?;
            let ip = if published_address.ip().is_unspecified() {
                self.peer.ip()
            } else {
                published_address.ip()
            };
            let address = address_in_zone(self.local, ip, published_address.port());
            let joined = match connect_once(address, self.deadline) {
                Ok(stream) => {
                    let deadline = self.deadline.min(deadline_after(timeout / ADDRESSES));
                    TcpStore::join(
                        stream,
                        &published_address.to_string(),
                        &options_with_nonce(options, &nonce),
                        deadline,
                    )
                }
                Err(error) => Err(NotJoined::Lost(error)),
            };
            match joined.map_err(|reason| reason.unless_cut_off(last_reason.take())) {
                // Another attempt would not end in time.
                Err(reason) if Instant::now() + 2 * ASK_INTERVAL >= self.deadline => {
                    return Err(format!(
                        "{}{}",
                        reason.message(&address.to_string(), options),
                        hint_for_address(published_address.ip())
                    ));
                }
                Err(reason) => {
                    tracing::debug!(%address, ?reason, "not let in; rank 0 may have a new address soon");
                    last_reason = Some(reason);
                    thread::sleep(ASK_INTERVAL);
                }
                Ok(store) => return Ok(store),
            }
        }
    }

    /// Sets the key to this rank's address, and reads it back, which may wait until the deadline.
    ///
    /// # Errors
    /// The store holds another address, which means that another process is rank 0 too.
    fn publish(&mut self, key: &str, own_address: &PublishedAddress) -> io::Result<()> {
        self.send(&[
            &[SET],
            &encode_string(key)[..],
            &encode_string(&own_address.to_string()),
        ])?;
        let found_address = self.wait_for_address(key)?;
        if found_address == *own_address {
            return Ok(());
        }
        Err(invalid_data_error(format!(
            "`{key}` is {} after it was set to {}: is there another rank 0?",
            found_address.address, own_address.address
        )))
    }

    /// Waits until the key is set, and returns the address under it. Reading a key that is not set
    /// is an error of the agent's store, so waiting comes first.
    fn wait_for_address(&mut self, key: &str) -> io::Result<PublishedAddress> {
        self.send(&[&[WAIT], &1_u64.to_le_bytes()[..], &encode_string(key)])?;
        let [answer] = self.read()?;
        if answer != STOP_WAITING {
            return Err(invalid_data_error(format!(
                "what answers there speaks another protocol: {answer:#04x} to a wait"
            )));
        }
        self.send(&[&[GET], &encode_string(key)[..]])?;
        let value_bytes = u64::from_le_bytes(self.read()?);
        if value_bytes > MAX_ADDRESS_BYTES {
            return Err(invalid_data_error(format!(
                "`{key}` has {value_bytes} bytes, but an address has at most {MAX_ADDRESS_BYTES}"
            )));
        }
        let mut value = vec![0; value_bytes as usize];
        read_exact(&self.stream, &mut value, self.deadline)?;
        let text = String::from_utf8_lossy(&value);
        // An address without a nonce is that of a rank 0 of another version. Its store refuses this
        // rank.
        let (address, nonce) = text.split_once(' ').unwrap_or((&text, ""));
        Ok(PublishedAddress {
            address: address.parse().map_err(|_| {
                invalid_data_error(format!("`{key}` is `{}`, no address", text.escape_debug()))
            })?,
            nonce: nonce.to_owned(),
        })
    }

    /// Sends the fields of a request, one after the other.
    fn send(&mut self, fields: &[&[u8]]) -> io::Result<()> {
        write_all(&self.stream, &fields.concat(), self.deadline)
    }

    /// Reads `N` bytes of an answer.
    fn read<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        read_exact(&self.stream, &mut bytes, self.deadline)?;
        Ok(bytes)
    }
}

/// Returns a string as the agent's protocol has it: its length, and its bytes.
fn encode_string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// Describes an error by what the agent did. The system's message speaks of the connection only.
fn describe_error(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => "it did not answer".to_owned(),
        _ if is_end(error) => format!("it hung up ({error})"),
        _ => error.to_string(),
    }
}

/// Returns a hint for a message: what may help if the address that a rank has published cannot be
/// reached.
fn hint_for_address(ip: IpAddr) -> &'static str {
    if ip.is_loopback() {
        "; only its own host reaches it there: on several hosts, give torchrun `--local-addr`"
    } else {
        "; is rank 0 running, and does this host reach it?"
    }
}
