//! Access to a job: every connection begins with a handshake that only ranks of the job can
//! complete.
//!
//! Both ports of a job, that of the store and those of the ranks, are open to every process that
//! can reach them. The [acceptor] therefore knows nothing about a connection, and keeps nothing for
//! it but a few bytes, until the [handshake] has shown that the other side has the job's [`Key`].

mod acceptor;
mod handshake;
mod key;
mod nonce;
mod port;
mod secret;

pub(crate) use self::handshake::{Hello, Refusal, handshake_as_client, wrong_protocol_error};
pub(crate) use self::key::{Key, VERSION};
pub(crate) use self::nonce::{nonce, nonce_text};
pub(crate) use self::port::Port;
pub use self::secret::Secret;
