//! Random numbers that nobody can guess.

use std::io;

const NONCE_BYTES: usize = 32;

/// A number that is used once.
pub(crate) type Nonce = [u8; NONCE_BYTES];

/// Returns a new nonce.
pub(crate) fn nonce() -> io::Result<Nonce> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(nonce)
}

/// Returns a new nonce as a text of hexadecimal digits.
pub(crate) fn nonce_text() -> io::Result<String> {
    Ok(nonce()?.iter().map(|byte| format!("{byte:02x}")).collect())
}
