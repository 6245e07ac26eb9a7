//! Keys of the curve P-256, in PEM as openssl writes them.

use std::fmt;

use p256::SecretKey;
use p256::ecdsa::signature::{Signer as _, Verifier as _};
use p256::ecdsa::{Signature, SigningKey, VerifyingKey};
use p256::pkcs8::{DecodePrivateKey as _, DecodePublicKey as _, EncodePublicKey as _, LineEnding};
use sha2::{Digest as _, Sha256};

use super::error::SignError;

/// The most bytes of a key's file.
const MAX_KEY_BYTES: usize = 64 << 10;

const PRIVATE: &str = "private key of the curve P-256 in PEM";
const PUBLIC: &str = "public key of the curve P-256 in PEM";

/// A private key, which signs. Its debug form shows nothing of it.
pub struct PrivateKey(SigningKey);

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrivateKey").finish_non_exhaustive()
    }
}

impl PrivateKey {
    /// Reads a key from PEM: `PRIVATE KEY` (PKCS#8), or `EC PRIVATE KEY` (SEC 1) as `openssl
    /// ecparam -genkey` writes it.
    ///
    /// # Errors
    /// [`SignError::Key`]: no such key, a key of another curve, or a key that is protected by a
    /// password.
    pub fn from_pem(pem: &[u8]) -> Result<Self, SignError> {
        let pem = text(pem, PRIVATE)?;
        // Both forms of encrypted keys have this word.
        if pem.contains("ENCRYPTED") {
            return Err(refused(
                PRIVATE,
                "it has a password, which cannot be given here",
            ));
        }
        let read = if let Some(sec1) = section(pem, "EC PRIVATE KEY") {
            SecretKey::from_sec1_pem(sec1)
                .map(SigningKey::from)
                .map_err(|error| error.to_string())
        } else if let Some(pkcs8) = section(pem, "PRIVATE KEY") {
            SigningKey::from_pkcs8_pem(pkcs8).map_err(|error| error.to_string())
        } else {
            Err("it has no section `PRIVATE KEY`".to_owned())
        };
        read.map(PrivateKey)
            .map_err(|reason| refused(PRIVATE, &reason))
    }

    /// Returns the public key, which checks what this one signs.
    ///
    /// # Errors
    /// [`SignError::Key`], if it cannot be written as PEM.
    pub fn public(&self) -> Result<PublicKey, SignError> {
        PublicKey::new(*self.0.verifying_key())
    }

    /// Signs a message. The same message has the same signature.
    pub(super) fn sign(&self, message: &[u8]) -> Vec<u8> {
        let signature: Signature = self.0.sign(message);
        signature.to_der().as_bytes().to_vec()
    }
}

/// A public key, which checks signatures.
#[derive(Debug, Clone)]
pub struct PublicKey {
    key: VerifyingKey,
    hash: String,
}

impl PublicKey {
    fn new(key: VerifyingKey) -> Result<Self, SignError> {
        let pem = key
            .to_public_key_pem(LineEnding::LF)
            .map_err(|error| refused(PUBLIC, &error.to_string()))?;
        Ok(PublicKey {
            key,
            hash: base16ct::lower::encode_string(&Sha256::digest(pem)),
        })
    }

    /// Reads a key from PEM: `PUBLIC KEY`.
    ///
    /// # Errors
    /// [`SignError::Key`]: no such key, or a key of another curve.
    pub fn from_pem(pem: &[u8]) -> Result<Self, SignError> {
        let pem = text(pem, PUBLIC)?;
        let section = section(pem, "PUBLIC KEY")
            .ok_or_else(|| refused(PUBLIC, "it has no section `PUBLIC KEY`"))?;
        Self::new(
            VerifyingKey::from_public_key_pem(section)
                .map_err(|error| refused(PUBLIC, &error.to_string()))?,
        )
    }

    /// Returns the SHA-256 of the key's PEM, by which signatures name it.
    #[must_use]
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Returns `true` if this is the signature of a message.
    pub(super) fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        Signature::from_der(signature)
            .is_ok_and(|signature| self.key.verify(message, &signature).is_ok())
    }
}

/// Returns a PEM file's text.
fn text<'a>(pem: &'a [u8], what: &'static str) -> Result<&'a str, SignError> {
    let pem = Some(pem)
        .filter(|pem| pem.len() <= MAX_KEY_BYTES)
        .and_then(|pem| str::from_utf8(pem).ok());
    pem.ok_or_else(|| refused(what, "it is no text, or too long"))
}

/// Returns the first section of this label, with its first and last line. Other sections may lie
/// around it: `openssl ecparam -genkey` writes the parameters of the curve first.
fn section<'a>(pem: &'a str, label: &str) -> Option<&'a str> {
    let begin = format!("-----BEGIN {label}-----");
    let end = format!("-----END {label}-----");
    let start = pem.find(&begin)?;
    let length = pem[start..].find(&end)? + end.len();
    Some(&pem[start..start + length])
}

fn refused(what: &'static str, reason: &str) -> SignError {
    SignError::Key {
        what,
        reason: reason.to_owned(),
    }
}
