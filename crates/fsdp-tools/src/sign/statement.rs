//! The statement that is signed: the files of a model, and their hashes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::error::SignError;

/// The SHA-256 of a file.
pub(super) type Sha256Hash = [u8; 32];

const STATEMENT_TYPE: &str = "https://in-toto.io/Statement/v1";
const PREDICATE_TYPE: &str = "https://model_signing/signature/v1.0";
/// The only way of hashing that is known here: each file by itself.
const METHOD: &str = "files";
const HASH: &str = "sha256";

/// A statement of in-toto about a model. Fields that are not known do not count, as the format
/// says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Statement {
    #[serde(rename = "_type")]
    kind: String,
    subject: [Subject; 1],
    predicate_type: String,
    predicate: Predicate,
}

#[derive(Debug, Serialize, Deserialize)]
struct Subject {
    name: String,
    digest: SubjectDigest,
}

#[derive(Debug, Serialize, Deserialize)]
struct SubjectDigest {
    sha256: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Predicate {
    serialization: Serialization,
    resources: Vec<Resource>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Serialization {
    method: String,
    hash_type: String,
    allow_symlinks: bool,
    #[serde(default)]
    ignore_paths: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Resource {
    name: String,
    algorithm: String,
    digest: String,
}

/// The parts of a statement that say of what kind it is. They are read first, so that a statement
/// of another kind is not called broken.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct StatementKind {
    #[serde(rename = "_type")]
    kind: String,
    predicate_type: String,
}

impl Statement {
    /// Makes the statement about a model's files.
    pub(super) fn new(
        name: String,
        hashes: &BTreeMap<String, Sha256Hash>,
        ignore_paths: Vec<String>,
    ) -> Self {
        let mut files: Vec<(&String, &Sha256Hash)> = hashes.iter().collect();
        // Sort by the parts of the paths, as the Python tool does, so that both make the same root.
        files.sort_by(|(path, _), (other_path, _)| path.split('/').cmp(other_path.split('/')));
        Statement {
            kind: STATEMENT_TYPE.to_owned(),
            subject: [Subject {
                name,
                digest: SubjectDigest {
                    sha256: hash_of_hashes(files.iter().map(|(_, hash)| *hash)),
                },
            }],
            predicate_type: PREDICATE_TYPE.to_owned(),
            predicate: Predicate {
                serialization: Serialization {
                    method: METHOD.to_owned(),
                    hash_type: HASH.to_owned(),
                    allow_symlinks: false,
                    ignore_paths,
                },
                resources: files
                    .into_iter()
                    .map(|(name, hash)| Resource {
                        name: name.clone(),
                        algorithm: HASH.to_owned(),
                        digest: base16ct::lower::encode_string(hash),
                    })
                    .collect(),
            },
        }
    }

    /// Parses a statement whose signature has been checked.
    pub(super) fn parse(payload: &[u8]) -> Result<Self, SignError> {
        let StatementKind {
            kind,
            predicate_type,
        } = serde_json::from_slice(payload).map_err(SignError::malformed)?;
        if kind != STATEMENT_TYPE || predicate_type != PREDICATE_TYPE {
            return Err(SignError::unsupported(format!(
                "it states `{kind}` about `{predicate_type}`, not `{PREDICATE_TYPE}`"
            )));
        }
        let statement: Statement = serde_json::from_slice(payload).map_err(SignError::malformed)?;
        let Serialization {
            method, hash_type, ..
        } = &statement.predicate.serialization;
        if method != METHOD || hash_type != HASH {
            return Err(SignError::unsupported(format!(
                "it hashes by `{method}` with `{hash_type}`, not by `{METHOD}` with `{HASH}`"
            )));
        }
        Ok(statement)
    }

    /// Returns the hash of all files' hashes that the statement has, as hexadecimal digits.
    pub(super) fn root(&self) -> &str {
        &self.subject[0].digest.sha256
    }

    /// Returns the files' hashes by their paths.
    ///
    /// # Errors
    /// A path that stands there twice, what is no hash, a root that is not that of the hashes.
    pub(super) fn hashes(&self) -> Result<BTreeMap<String, Sha256Hash>, SignError> {
        let mut hashes = BTreeMap::new();
        let mut ordered_hashes = Vec::new();
        for Resource {
            name,
            algorithm,
            digest,
        } in &self.predicate.resources
        {
            if algorithm != HASH {
                return Err(SignError::unsupported(format!(
                    "`{name}` has a hash of `{algorithm}`, not `{HASH}`"
                )));
            }
            // A longer text is refused by the decoder.
            let mut hash = Sha256Hash::default();
            let decoded =
                base16ct::mixed::decode(digest, &mut hash).map_err(SignError::malformed)?;
            if decoded.len() != hash.len() {
                return Err(SignError::malformed(format!(
                    "the hash of `{name}` is cut short"
                )));
            }
            ordered_hashes.push(hash);
            if hashes.insert(name.clone(), hash).is_some() {
                return Err(SignError::malformed(format!("`{name}` stands twice in it")));
            }
        }
        if hash_of_hashes(ordered_hashes.iter()) != self.root() {
            return Err(SignError::malformed(
                "the hash of all files is not that of their hashes",
            ));
        }
        Ok(hashes)
    }
}

/// Returns the hash of these hashes, as hexadecimal digits.
fn hash_of_hashes<'a>(hashes: impl Iterator<Item = &'a Sha256Hash>) -> String {
    let mut hasher = Sha256::new();
    hashes.for_each(|hash| hasher.update(hash));
    base16ct::lower::encode_string(&hasher.finalize())
}
