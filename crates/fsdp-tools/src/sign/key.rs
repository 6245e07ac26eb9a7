//! Keys of the curve P-256, in PEM as openssl writes them.

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

/// A private key, which signs. Its debug form, like that of [`SigningKey`], shows nothing of it.
#[derive(Debug)]
pub struct PrivateKey(SigningKey);

impl PrivateKey {
    /// Reads a key from PEM: `PRIVATE KEY` (PKCS#8), or `EC PRIVATE KEY` (SEC 1) as `openssl
    /// ecparam -genkey` writes it.
    ///
    /// # Errors
    /// [`SignError::Key`]: no such key, a key of another curve, or a key that is protected by a
    /// password.
    pub fn from_pem(pem: &[u8]) -> Result<Self, SignError> {
        let pem = pem_text(pem, PRIVATE)?;
        // Both forms of encrypted keys have this word.
        if pem.contains("ENCRYPTED") {
            return Err(key_error(
                PRIVATE,
                "it has a password, which cannot be given here",
            ));
        }
        if let Some(sec1) = find_section(pem, "EC PRIVATE KEY") {
            return SecretKey::from_sec1_pem(sec1)
                .map(|key| PrivateKey(key.into()))
                .map_err(|error| key_error(PRIVATE, error));
        }
        let pkcs8 = find_section(pem, "PRIVATE KEY")
            .ok_or_else(|| key_error(PRIVATE, "it has no section `PRIVATE KEY`"))?;
        SigningKey::from_pkcs8_pem(pkcs8)
            .map(PrivateKey)
            .map_err(|error| key_error(PRIVATE, error))
    }

    /// Returns the public key, which checks what this one signs.
    ///
    /// # Errors
    /// [`SignError::Key`], if it cannot be written as PEM.
    pub fn public_key(&self) -> Result<PublicKey, SignError> {
        PublicKey::new(*self.0.verifying_key())
    }

    /// Signs a message, and returns the signature in DER. The same message has the same signature.
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
    /// Makes a public key, and computes the hash of its PEM.
    ///
    /// # Errors
    /// [`SignError::Key`], if it cannot be written as PEM.
    fn new(key: VerifyingKey) -> Result<Self, SignError> {
        let pem = key
            .to_public_key_pem(LineEnding::LF)
            .map_err(|error| key_error(PUBLIC, error))?;
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
        let pem = pem_text(pem, PUBLIC)?;
        let section = find_section(pem, "PUBLIC KEY")
            .ok_or_else(|| key_error(PUBLIC, "it has no section `PUBLIC KEY`"))?;
        Self::new(
            VerifyingKey::from_public_key_pem(section).map_err(|error| key_error(PUBLIC, error))?,
        )
    }

    /// Returns the SHA-256 of the key's PEM, by which signatures name it.
    #[must_use]
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Returns `true` if this signature in DER was made with the private key, over this message.
    pub(super) fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        Signature::from_der(signature)
            .is_ok_and(|signature| self.key.verify(message, &signature).is_ok())
    }
}

/// Returns the text of a PEM file; one that is longer than any key is refused.
fn pem_text<'a>(pem: &'a [u8], what: &'static str) -> Result<&'a str, SignError> {
    match str::from_utf8(pem) {
        Ok(text) if pem.len() <= MAX_KEY_BYTES => Ok(text),
        _ => Err(key_error(what, "it is no text, or too long")),
    }
}

/// Returns the first section of this label, with its first and last line. Other sections may lie
/// around it: `openssl ecparam -genkey` writes the parameters of the curve first.
fn find_section<'a>(pem: &'a str, label: &str) -> Option<&'a str> {
    let begin = format!("-----BEGIN {label}-----");
    let end = format!("-----END {label}-----");
    let start = pem.find(&begin)?;
    let length = pem[start..].find(&end)? + end.len();
    Some(&pem[start..start + length])
}

/// Returns the error that a file is not the kind of key that was wanted.
fn key_error(what: &'static str, reason: impl ToString) -> SignError {
    SignError::Key {
        what,
        reason: reason.to_string(),
    }
}
