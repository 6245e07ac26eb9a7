//! The settings of a model's `config.json` that say how its weights are stored. When the weights
//! change, a copy of the file must not say what no longer holds: loaders believe it.

use std::collections::BTreeMap;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Change;
use fsdp_formats::internals::read_file;
use fsdp_formats::metadata::Metadata;
use fsdp_formats::storage::CheckedDirectory;
use fsdp_layout::DType;
use fsdp_layout::boxes::saturating_bytes;
use serde_json::{Map, Value};

use super::cast::CASTABLE;

/// The settings that a copied `config.json` gets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConfigEdits {
    /// The dtype that it gives, where it gives one; `None` to leave it.
    pub dtype: Option<DType>,
    /// `true` to remove the description of quantized weights.
    pub is_dequantized: bool,
}

/// The name of the file.
pub(crate) const CONFIG_FILE: &str = "config.json";

/// The most bytes of such a file. Real ones have a few thousand.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// The keys that give the dtype: since version 4.56 of transformers, and before.
const DTYPE_KEYS: [&str; 2] = ["dtype", "torch_dtype"];

/// The keys that describe quantized weights.
const QUANTIZATION_KEYS: [&str; 2] = ["quantization_config", "compression_config"];

/// Reads the `config.json` in a directory; `None` if there is none, or it is something else than an
/// object of JSON.
///
/// # Errors
/// A file that cannot be read, or is too long.
pub(crate) fn read_config(
    directory: &CheckedDirectory,
) -> Result<Option<Map<String, Value>>, FileError> {
    if !directory.has(CONFIG_FILE)? {
        return Ok(None);
    }
    let file = directory.extra_file(CONFIG_FILE)?;
    let bytes = read_file(&file, MAX_CONFIG_BYTES)
        .map_err(|source| directory.file_error(CONFIG_FILE, source))?;
    Ok(serde_json::from_slice(&bytes).ok())
}

impl ConfigEdits {
    /// Returns the new contents of the `config.json` among files that are copied beside `weights`,
    /// and adds to `changes` what changes in it; `None` if nothing does, or there is none. One that
    /// cannot be understood stays as it is, which is added too, and so is a dtype in it that most
    /// weights do not have.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn apply(
        &self,
        files: &BTreeMap<String, &CheckedDirectory>,
        weights: &Metadata,
        changes: &mut Vec<Change>,
    ) -> Result<Option<(String, Vec<u8>)>, FileError> {
        let Some(directory) = files.get(CONFIG_FILE) else {
            return Ok(None);
        };
        let mut settings = Vec::new();
        let edited = match read_config(directory)? {
            Some(mut config) => {
                self.edit(&mut config, "", &mut settings);
                let text = serde_json::to_string_pretty(&config);
                changes.extend(self.other_dtype(&config, weights));
                text.expect("a JSON value can be written as JSON") + "\n"
            }
            None if *self == ConfigEdits::default() => return Ok(None),
            None => {
                let what = format!(
                    "could not be understood, and still describes the weights as they were: set `dtype` in it{}",
                    if self.is_dequantized {
                        ", and remove `quantization_config`"
                    } else {
                        ""
                    }
                );
                changes.extend(Change::new("file", what, vec![CONFIG_FILE.to_owned()]));
                return Ok(None);
            }
        };
        if settings.is_empty() {
            return Ok(None);
        }
        let what = format!("of `{CONFIG_FILE}` changed with the weights");
        changes.extend(Change::new("setting", what, settings));
        Ok(Some((CONFIG_FILE.to_owned(), edited.into_bytes())))
    }

    /// Returns the change that tells a dtype in a configuration which most of the weights beside it
    /// do not have; `None` if there is none, or if it has been changed to that of the weights.
    fn other_dtype(&self, config: &Map<String, Value>, weights: &Metadata) -> Option<Change> {
        if self.dtype.is_some() {
            return None;
        }
        let mut bytes_by_dtype: BTreeMap<DType, u64> = BTreeMap::new();
        for (_, tensor) in weights.tensors() {
            let dtype = tensor.properties.dtype;
            // Loaders compute with quantized weights in the dtype of the configuration.
            if dtype.is_float() && !CASTABLE.contains(&dtype) {
                return None;
            }
            if CASTABLE.contains(&dtype) {
                let bytes = bytes_by_dtype.entry(dtype).or_default();
                *bytes = bytes.saturating_add(saturating_bytes(&tensor.shape, dtype));
            }
        }
        let (main_dtype, _) = bytes_by_dtype.into_iter().max_by_key(|(_, bytes)| *bytes)?;
        let (key, name) = DTYPE_KEYS
            .iter()
            .find_map(|key| Some((key, config.get(*key)?.as_str()?)))?;
        let dtype = DType::from_torch_name(name.strip_prefix("torch.").unwrap_or(name))?;
        let setting = format!("{key}: {dtype}, though most weights are {main_dtype}");
        let settings = if dtype == main_dtype {
            Vec::new()
        } else {
            vec![setting]
        };
        Change::new(
            "setting",
            format!("of `{CONFIG_FILE}` differed from the weights"),
            settings,
        )
    }

    /// Changes the settings of a configuration and of the parts in it, and adds each to `settings`.
    /// `path` is that of the part, with a dot at its end.
    fn edit(&self, config: &mut Map<String, Value>, path: &str, settings: &mut Vec<String>) {
        if self.is_dequantized {
            for key in QUANTIZATION_KEYS {
                if config.shift_remove(key).is_some() {
                    settings.push(format!("{path}{key}: removed"));
                }
            }
        }
        for (key, value) in config.iter_mut() {
            match value {
                Value::String(text) if DTYPE_KEYS.contains(&key.as_str()) => {
                    // Old files have `torch.float16`.
                    let start = if text.starts_with("torch.") {
                        "torch."
                    } else {
                        ""
                    };
                    let old_dtype = DType::from_torch_name(&text[start.len()..]);
                    if let (Some(old_dtype), Some(dtype)) = (old_dtype, self.dtype)
                        && old_dtype.is_float()
                        && old_dtype != dtype
                    {
                        settings.push(format!("{path}{key}: {old_dtype} -> {dtype}"));
                        *text = format!("{start}{dtype}");
                    }
                }
                // A model of several parts has a configuration for each.
                Value::Object(part) if !QUANTIZATION_KEYS.contains(&key.as_str()) => {
                    self.edit(part, &format!("{path}{key}."), settings);
                }
                _ => {}
            }
        }
    }
}
