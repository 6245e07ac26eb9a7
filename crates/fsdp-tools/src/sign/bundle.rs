//! The file of a signature: Sigstore's bundle around an envelope of DSSE.

use base64ct::{Base64, Encoding as _};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::SignError;
use super::key::{PrivateKey, PublicKey};
use super::statement::Statement;

/// The most bytes of a signature's file. The signature of a million files takes about 200 MB.
pub(super) const MAX_SIGNATURE_BYTES: u64 = 256 << 20;

const MEDIA_TYPE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";
/// The beginning of the media types of all bundles.
const BUNDLES: &str = "application/vnd.dev.sigstore.bundle";
const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Bundle {
    media_type: String,
    verification_material: Material,
    dsse_envelope: Option<Envelope>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Material {
    public_key: Option<KeyName>,
    #[serde(default)]
    tlog_entries: Vec<Value>,
}

#[derive(Serialize, Deserialize)]
struct KeyName {
    /// The hash of the key. Signatures of before 1.0 have none.
    hint: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope {
    payload: String,
    payload_type: String,
    #[serde(default)]
    signatures: Vec<Signature>,
}

#[derive(Serialize, Deserialize)]
struct Signature {
    sig: String,
    #[serde(default)]
    keyid: String,
}

/// Signs a statement, and returns the bundle as JSON.
pub(super) fn write_bundle(statement: &Statement, key: &PrivateKey) -> Result<String, SignError> {
    // The bytes that are signed are those that are stored, so the order of fields does not matter.
    let payload = serde_json::to_vec(statement).map_err(SignError::malformed)?;
    let signature = Base64::encode_string(&key.sign(&signed_bytes(&payload)));
    let bundle = Bundle {
        media_type: MEDIA_TYPE.to_owned(),
        verification_material: Material {
            public_key: Some(KeyName {
                hint: Some(key.public_key()?.hash().to_owned()),
            }),
            tlog_entries: Vec::new(),
        },
        dsse_envelope: Some(Envelope {
            payload: Base64::encode_string(&payload),
            payload_type: PAYLOAD_TYPE.to_owned(),
            signatures: vec![Signature {
                sig: signature,
                keyid: String::new(),
            }],
        }),
    };
    serde_json::to_string(&bundle).map_err(SignError::malformed)
}

/// Returns `true` if these bytes are a bundle of Sigstore's, of whatever version.
pub(super) fn is_bundle(bytes: &[u8]) -> bool {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Typed {
        media_type: String,
    }
    let typed = serde_json::from_slice::<Typed>(bytes);
    typed.is_ok_and(|typed| typed.media_type.starts_with(BUNDLES))
}

/// Reads a bundle, checks that its signature is the key's, and returns the statement that was
/// signed.
pub(super) fn read_bundle(bytes: &[u8], key: &PublicKey) -> Result<Statement, SignError> {
    if bytes.len() as u64 > MAX_SIGNATURE_BYTES {
        return Err(SignError::malformed(format!(
            "it has more than {MAX_SIGNATURE_BYTES} bytes"
        )));
    }
    // Step 1: what kind of signature is it?
    let bundle: Bundle = serde_json::from_slice(bytes).map_err(SignError::malformed)?;
    if bundle.media_type != MEDIA_TYPE {
        return Err(SignError::unsupported(format!(
            "it is a bundle of type `{}`, not `{MEDIA_TYPE}`",
            bundle.media_type
        )));
    }
    let Some(key_name) = bundle.verification_material.public_key else {
        return Err(SignError::unsupported(
            "it was signed with a certificate, not with a key",
        ));
    };
    let Some(envelope) = bundle.dsse_envelope else {
        return Err(SignError::unsupported("it holds no envelope"));
    };
    if envelope.payload_type != PAYLOAD_TYPE {
        return Err(SignError::unsupported(format!(
            "its payload is of type `{}`, not `{PAYLOAD_TYPE}`",
            envelope.payload_type
        )));
    }
    let [signature] = envelope.signatures.as_slice() else {
        return Err(SignError::SignatureCount {
            found: envelope.signatures.len(),
        });
    };
    // This only gives a better message, and is no protection: whoever forges a signature writes the
    // right name.
    if let Some(signed) = key_name.hint.filter(|hint| hint != key.hash()) {
        return Err(SignError::WrongKey {
            signed,
            given: key.hash().to_owned(),
        });
    }
    // Step 2: is it one of this key, over this payload?
    let payload = Base64::decode_vec(&envelope.payload).map_err(SignError::malformed)?;
    let signature = Base64::decode_vec(&signature.sig).map_err(SignError::malformed)?;
    if !key.verifies(&signed_bytes(&payload), &signature) {
        return Err(SignError::InvalidSignature);
    }
    Statement::parse(&payload)
}

/// Returns the bytes that are signed for a payload: DSSE puts its type and the lengths before it.
fn signed_bytes(payload: &[u8]) -> Vec<u8> {
    let head = format!(
        "DSSEv1 {} {PAYLOAD_TYPE} {} ",
        PAYLOAD_TYPE.len(),
        payload.len()
    );
    [head.as_bytes(), payload].concat()
}
