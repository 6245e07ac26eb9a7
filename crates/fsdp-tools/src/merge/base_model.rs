//! The configuration of a base model, and which of the model's layers share a weight by it.

use std::path::PathBuf;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::internals::{check_expansion, tensor_of};
use fsdp_formats::storage::CheckedDirectory;
use fsdp_layout::boxes::saturating_bytes;
use serde_json::Value;

use crate::convert::{CONFIG_FILE, digest_tensor, read_config};

/// The parts of a configuration that are about the text model, in a model of text and something
/// else.
const TEXT_CONFIGS: [&str; 5] = [
    "text_config",
    "language_config",
    "llm_config",
    "decoder",
    "generator",
];

/// The layers that hold a vector for each token and come first.
const EMBEDDINGS: [&str; 10] = [
    "embed_in",
    "embed_tokens",
    "embedding",
    "embeddings",
    SHARED,
    "tok_embeddings",
    "tokens_embed",
    "word_embedding",
    "word_embeddings",
    "wte",
];
/// The layers that hold a vector for each token and come last, which may share the weight of the
/// embedding.
const OUTPUTS: [&str; 5] = [
    "embed_out",
    "generator_lm_head",
    "lm_head",
    "output_layer",
    "vocab_projector",
];
/// Further names of such layers. Other models have other layers of these names, which the number of
/// tokens tells apart.
const FURTHER_OUTPUTS: [&str; 5] = ["decoder", "head", "output", "output_projection", "proj_out"];
/// The embedding that the encoder and the decoder of a model share, whatever its configuration
/// says about the output layer.
const SHARED: &str = "shared";

/// The settings in the configuration of a base model that a merge needs.
#[derive(Debug, Default)]
pub(super) struct BaseModel {
    pub(super) model_type: Option<String>,
    /// `true` if the output layer shares the weight of the embedding; `None` if it is the default
    /// of the model's type.
    is_tied: Option<bool>,
    /// The classes of the model; empty if they are unknown.
    architectures: Vec<String>,
    vocabulary_size: Option<usize>,
    /// The directory of the configuration; `None` if there is none.
    directory: Option<PathBuf>,
}

impl BaseModel {
    /// Reads the configuration in a directory. Without one, all settings are unknown.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn read(directory: &CheckedDirectory) -> Result<Self, FileError> {
        let Some(config) = read_config(directory)? else {
            return Ok(BaseModel::default());
        };
        Ok(BaseModel {
            directory: Some(directory.path().to_owned()),
            ..Self::parse(&Value::Object(config))
        })
    }

    /// Takes the settings out of a configuration. What the part about the text model says counts
    /// before what is said for the whole.
    fn parse(config: &Value) -> Self {
        let parts = TEXT_CONFIGS.iter().filter_map(|name| config.get(name));
        let parts: Vec<&Value> = parts.chain([config]).collect();
        let names = config["architectures"].as_array();
        let names = names.into_iter().flatten().filter_map(Value::as_str);
        let size = |part: &&Value| part["vocab_size"].as_u64()?.try_into().ok();
        BaseModel {
            model_type: config["model_type"].as_str().map(str::to_owned),
            is_tied: parts
                .iter()
                .find_map(|part| part["tie_word_embeddings"].as_bool()),
            architectures: names.map(str::to_owned).collect(),
            vocabulary_size: parts.iter().find_map(size),
            directory: None,
        }
    }

    /// Returns `true` if a tensor of the base is the weight of several layers of the model, of
    /// which the base has one name only.
    pub(super) fn is_shared(&self, base: &dyn Checkpoint, key: &str) -> bool {
        let metadata = base.metadata();
        let is_table = metadata
            .tensor(key)
            .is_some_and(|tensor| self.is_token_table(key, &tensor.shape));
        if !is_table || self.tables_like(base, key).next().is_some() {
            return false;
        }
        let layer = layer_name(key);
        if OUTPUTS.contains(&layer) || FURTHER_OUTPUTS.contains(&layer) {
            // A base without an embedding may be a part of a model.
            return self.is_tied == Some(true);
        }
        layer == SHARED || (self.is_tied != Some(false) && self.has_output_layer())
    }

    /// Returns the name in the base of the weight that it has under this name too, by the
    /// configuration; `None` if the base has this name itself, or the weight is not shared.
    pub(super) fn stored_name<'b>(&self, base: &'b dyn Checkpoint, key: &str) -> Option<&'b str> {
        let layer = layer_name(key);
        let is_named = [&EMBEDDINGS[..], &OUTPUTS, &FURTHER_OUTPUTS]
            .iter()
            .any(|names| names.contains(&layer));
        if !is_named || base.metadata().tensor(key).is_some() {
            return None;
        }
        let mut names = base.metadata().tensors().map(|(name, _)| name);
        names.find(|name| self.is_shared(base, name))
    }

    /// Checks that the tensors of the base that may hold one weight under several names are equal
    /// in what is merged of it, if they were equal in the base or its configuration says that they
    /// are one. `is_changed` tells which tensors the merge changes. Only tensors of which that
    /// cannot be known otherwise are read.
    ///
    /// # Errors
    /// A configuration that would not be true of the merged weights; the errors of reads.
    pub(super) fn check_names_of_one(
        &self,
        base: &dyn Checkpoint,
        merged: &dyn Checkpoint,
        is_changed: impl Fn(&str) -> bool,
    ) -> Result<(), FileError> {
        // Without a configuration nothing is said about them.
        let Some(directory) = &self.directory else {
            return Ok(());
        };
        if self.is_tied == Some(false) {
            return Ok(());
        }
        for (key, tensor) in base.metadata().tensors() {
            if !is_changed(key) || !self.is_token_table(key, &tensor.shape) {
                continue;
            }
            for other_key in self.tables_like(base, key) {
                if are_equal(merged, key, other_key)? {
                    continue;
                }
                // Where the configuration says nothing, the base tells whether it has two weights.
                if self.is_tied.is_none() && !are_equal(base, key, other_key)? {
                    continue;
                }
                let reason = format!(
                    "`{key}` and `{other_key}` are one weight by `{}`, and would differ after the merge: set \
                     `tie_word_embeddings` to false there, as `{}` has both",
                    directory.join(CONFIG_FILE).display(),
                    base.path().display()
                );
                return Err(FileError::Merge { reason });
            }
        }
        Ok(())
    }

    /// Returns the keys of the other tensors of a base that may be the same weight as that of a
    /// key.
    pub(super) fn tables_like<'b>(
        &'b self,
        base: &'b dyn Checkpoint,
        key: &'b str,
    ) -> impl Iterator<Item = &'b str> {
        let metadata = base.metadata();
        let shape = metadata.tensor(key).map(|tensor| &tensor.shape);
        metadata
            .tensors()
            .filter(move |(other_key, other_tensor)| {
                *other_key != key
                    && Some(&other_tensor.shape) == shape
                    && self.is_token_table(other_key, &other_tensor.shape)
            })
            .map(|(other_key, _)| other_key)
    }

    /// Returns `true` for the weight of an embedding of tokens or of an output layer over them.
    fn is_token_table(&self, key: &str, shape: &[usize]) -> bool {
        let (layer, [rows, _]) = (layer_name(key), shape) else {
            return false;
        };
        let is_named = EMBEDDINGS.contains(&layer) || OUTPUTS.contains(&layer);
        // The layers of a block, which has a number, may have as many rows as there are tokens.
        let is_in_block = key
            .split('.')
            .any(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()));
        match self.vocabulary_size {
            // A table may have more rows than there are tokens, for the sake of speed.
            Some(size) if *rows > size => is_named || FURTHER_OUTPUTS.contains(&layer),
            Some(size) => *rows == size && (is_named || !is_in_block),
            None => is_named,
        }
    }

    /// Returns `true` if a model has an output layer over the tokens, or if that is not known.
    fn has_output_layer(&self) -> bool {
        const ENDINGS: [&str; 3] = ["LM", "ConditionalGeneration", "PreTraining"];
        self.architectures.is_empty()
            || self.architectures.iter().any(|name| {
                name.contains("LMHead") || ENDINGS.iter().any(|ending| name.ends_with(ending))
            })
    }
}

/// Returns the name of a weight's layer: `c_attn` for `h.0.attn.c_attn.weight`.
pub(super) fn layer_name(key: &str) -> &str {
    let module = key.strip_suffix(".weight").unwrap_or(key);
    module.rsplit_once('.').map_or(module, |(_, layer)| layer)
}

/// Returns `true` if two tensors have the same dtype, shape and bytes.
pub(super) fn are_equal(
    checkpoint: &dyn Checkpoint,
    first: &str,
    second: &str,
) -> Result<bool, FileError> {
    for fqn in [first, second] {
        let tensor = tensor_of(checkpoint.metadata(), fqn)?;
        let length = saturating_bytes(&tensor.shape, tensor.properties.dtype);
        check_expansion(checkpoint, fqn, length)?;
    }
    Ok(digest_tensor(checkpoint, first)? == digest_tensor(checkpoint, second)?)
}
