//! The key of a job, and the proofs that are made with it.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use super::secret::Secret;

/// The version of what ranks send each other after the handshake. Ranks of other versions have
/// other keys, so they are told at once that they do not belong to the job.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The length of keys and of proofs.
pub(super) const KEY_BYTES: usize = 32;

/// The key with which the two sides of a connection show each other that they belong to the same
/// job.
///
/// It is derived from the job's secret, its name, and the version of this program, so that jobs
/// with the same secret have different keys. Without a secret it still distinguishes jobs, but does
/// not keep out anybody who knows the name.
#[derive(Clone)]
pub(crate) struct Key([u8; KEY_BYTES]);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    /// Makes the key of a job.
    pub(crate) fn for_job(secret: Option<&Secret>, job: &str) -> Key {
        Key::for_version(VERSION, secret, job)
    }

    /// Makes the key that a job has in a version of this program.
    fn for_version(version: &str, secret: Option<&Secret>, job: &str) -> Key {
        // A job without a secret has the key of an empty text.
        let secret = secret.map_or("", Secret::text);
        Key(Sha256::digest(secret).into())
            .derive("version", version.as_bytes())
            .derive("job", job.as_bytes())
    }

    /// Derives another key from this one, for another use.
    pub(crate) fn derive(&self, purpose: &str, data: &[u8]) -> Key {
        Key(self.prove(purpose, &[data]))
    }

    /// Returns the proof, for `purpose`, that whoever sends `fields` has the key.
    pub(super) fn prove(&self, purpose: &str, fields: &[&[u8]]) -> [u8; KEY_BYTES] {
        self.mac(purpose, fields).finalize().into_bytes().into()
    }

    /// Returns `true` if the proof was made with this key, for `purpose` and `fields`. The
    /// time that this takes does not depend on the proof.
    pub(super) fn accepts(&self, purpose: &str, fields: &[&[u8]], proof: &[u8; KEY_BYTES]) -> bool {
        self.mac(purpose, fields).verify(&(*proof).into()).is_ok()
    }

    /// Returns the HMAC of some fields with this key, for one purpose. Different purposes give
    /// different results.
    fn mac(&self, purpose: &str, fields: &[&[u8]]) -> Hmac<Sha256> {
        // HMAC fills up a key that is shorter than a block of the hash with zeros.
        let mut padded_key = hmac::digest::Key::<Hmac<Sha256>>::default();
        padded_key[..KEY_BYTES].copy_from_slice(&self.0);
        let mut mac = <Hmac<Sha256> as KeyInit>::new(&padded_key);
        // Each field follows its length, so that no two lists of fields are the same bytes.
        for field in [&[purpose.as_bytes()], fields].concat() {
            mac.update(&(field.len() as u64).to_le_bytes());
            mac.update(field);
        }
        mac
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_its_key_purpose_and_fields_only() {
        let secret = Secret::new("0123456789abcdef").unwrap();
        let key = Key::for_job(Some(&secret), "job");
        let proof = key.prove("client", &[b"ab", b"c"]);
        assert!(key.accepts("client", &[b"ab", b"c"], &proof));
        assert!(!key.accepts("server", &[b"ab", b"c"], &proof));
        assert!(!key.accepts("client", &[b"a", b"bc"], &proof));
        let others = [
            Key::for_job(None, "job"),
            Key::for_job(Some(&secret), "other"),
            Key::for_version("0.0.1", Some(&secret), "job"),
            key.derive("ranks", b""),
        ];
        for other in others {
            assert!(!other.accepts("client", &[b"ab", b"c"], &proof));
        }
    }
}
