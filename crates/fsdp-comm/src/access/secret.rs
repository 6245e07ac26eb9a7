//! The secret of a job.

use std::{fmt, io};

use super::nonce::nonce_text;

/// The fewest bytes of a secret. Whoever listens to a handshake can try guesses for as long as they
/// like.
const MIN_BYTES: usize = 16;

/// A text that all ranks of a job know, and no other process.
///
/// Every connection between ranks begins with a proof that both sides know it; the secret itself is
/// never sent. It is not shown by `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Makes a secret of this text.
    ///
    /// # Errors
    /// The text is shorter than 16 bytes, which a stranger could guess. The error is the reason.
    pub fn new(text: impl Into<String>) -> Result<Secret, String> {
        let text = text.into();
        // Length is all that can be checked: whether a text can be guessed depends on who chose it.
        if text.len() < MIN_BYTES {
            return Err(format!(
                "has {} bytes, but a secret has at least {MIN_BYTES}",
                text.len()
            ));
        }
        Ok(Secret(text))
    }

    /// Makes a secret that nobody can guess.
    ///
    /// # Errors
    /// The operating system has no random numbers.
    pub fn random() -> io::Result<Secret> {
        nonce_text().map(Secret)
    }

    /// Returns the text, for the environment of a process that is to be a rank.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_long_random_and_not_shown() {
        let (one, other) = (Secret::random().unwrap(), Secret::random().unwrap());
        assert_ne!(one, other);
        assert_eq!(Secret::new(one.text()), Ok(one.clone()));
        assert!(!format!("{one:?}").contains(one.text()));
        assert!(
            Secret::new("fifteen bytes..")
                .unwrap_err()
                .contains("15 bytes")
        );
    }
}
