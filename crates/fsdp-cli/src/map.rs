//! The options `--map`, `--map-reverse` and `--set` of the commands that change or compare keys.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use fsdp_formats::Location;
use fsdp_layout::DType;
use fsdp_tools::map::{BUILTIN, Map, Values};

use crate::failure::usage_error;

/// The most bytes of a map, and of a model's configuration.
const MAX_BYTES: u64 = 16 << 20;

/// The names in a model's `config.json` from which a map's values are taken, unless they are given.
const CONFIG_KEYS: [(&str, &str); 4] = [
    ("heads", "num_attention_heads"),
    ("heads", "n_head"),
    ("kv_heads", "num_key_value_heads"),
    ("kv_heads", "num_attention_heads"),
];

/// The map of a command.
#[derive(Debug, Args)]
pub(crate) struct MapArguments {
    /// Change keys and shapes by the rules in this file, or by those built in: llama-to-hf,
    /// nanogpt-to-hf, megatron-to-hf, fused-to-hf, qwen3-moe-to-hf, deepseek-v3-to-hf,
    /// mixtral-to-hf, gpt-oss-to-hf, and the other way: hf-to-llama, hf-to-nanogpt, ...
    #[arg(long, value_name = "FILE")]
    map: Option<String>,
    /// Apply the rules of --map from right to left
    #[arg(long, requires = "map")]
    map_reverse: bool,
    /// Set a name in the map, or in a rule for `convert --tp`, to a number, such as heads=32. May
    /// be given more than once [default: from config.json beside the checkpoint, or in the
    /// directory of `convert --with`]
    #[arg(long, value_name = "NAME=N", value_parser = parse_setting)]
    set: Vec<(String, usize)>,
}

/// Parses a setting of a map, such as `heads=8`.
fn parse_setting(text: &str) -> Result<(String, usize), String> {
    let (name, number) = text.split_once('=').ok_or("a setting is NAME=N")?;
    match number.parse() {
        Ok(value) => Ok((name.to_owned(), value)),
        Err(_) => Err(format!("`{number}` is no number")),
    }
}

impl MapArguments {
    /// Returns `true` if a map is to be applied.
    pub(crate) const fn is_given(&self) -> bool {
        self.map.is_some()
    }

    /// Reads the map; returns `None` if none is asked for. A name that was given no value has the
    /// one in the first of these places that has a configuration.
    ///
    /// # Errors
    /// The file cannot be read, or is no map.
    pub(crate) fn read_map(&self, places: &[&Location]) -> Result<Option<Map>> {
        let Some(name) = &self.map else {
            return Ok(None);
        };
        // A map names sizes that differ from model to model, such as the number of heads.
        let values = self.values(places);
        let map = match Map::builtin(name, &values) {
            Some(map) => map,
            None => {
                let text = read_text(Path::new(name)).map_err(|error| {
                    let names: Vec<&str> = BUILTIN.iter().map(|(name, _)| *name).collect();
                    let names = names.join(", ");
                    usage_error(
                        format!(
                            "cannot read the map `{name}`: {error}, and it is none of those that \
                             are built in: {names}"
                        ),
                        "name a file of rules, or a map that is built in",
                    )
                })?;
                Map::parse(&text, &values)
            }
        };
        let map = map.with_context(|| format!("cannot use the map `{name}`"))?;
        if self.map_reverse {
            return Ok(Some(map.reversed()));
        }
        Ok(Some(map))
    }

    /// Returns the values of names: those in the first place that has a configuration. Values that
    /// were given take precedence.
    pub(crate) fn values(&self, places: &[&Location]) -> Values {
        // Only one configuration is used, because values of different models must not be mixed.
        let mut values = Values::new();
        for place in places {
            values = config_values(place);
            if !values.is_empty() {
                break;
            }
        }
        values.extend(self.set.iter().cloned());
        values
    }

    /// Checks that `--set` is given only if something can use it: a map, or `--tp` if
    /// `tensor_parallel` is `Some(true)`. `None` stands for a command without `--tp`.
    ///
    /// # Errors
    /// `--set` is given, but nothing uses it.
    pub(crate) fn check_set(&self, tensor_parallel: Option<bool>) -> Result<()> {
        if self.set.is_empty() || self.map.is_some() || tensor_parallel == Some(true) {
            return Ok(());
        }
        let (users, hint) = match tensor_parallel {
            Some(_) => (
                "`--map` or `--tp`",
                "leave it out, or give the `--map` or `--tp` whose names it is for",
            ),
            None => (
                "`--map`",
                "leave it out, or give the `--map` whose names it is for",
            ),
        };
        bail!(usage_error(
            format!("`--set` has no effect without {users}"),
            hint
        ))
    }
}

/// Reads the text of a map file.
///
/// # Errors
/// It cannot be read, or is longer than [`MAX_BYTES`].
fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    // A device or a pipe has no length, and may never end. One byte more tells that it is longer.
    File::open(path)?
        .take(MAX_BYTES + 1)
        .read_to_string(&mut text)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(io::Error::other("it is too large"));
    }
    Ok(text)
}

/// The names of the part of a `config.json` that is about the text model, in a model of text and
/// something else.
const TEXT_CONFIGS: [&str; 3] = ["decoder", "generator", "text_config"];

/// Returns the part of a configuration that is about the text model: all of it, if there is no such
/// part. `None` if there are several, as transformers' `get_text_config` chooses none then.
fn find_text_config(config: &serde_json::Value) -> Option<&serde_json::Value> {
    let mut parts = TEXT_CONFIGS
        .iter()
        .filter_map(|name| config.get(name))
        .filter(|part| part.is_object());
    match (parts.next(), parts.next()) {
        (None, _) => Some(config),
        (part, None) => part,
        (Some(_), Some(_)) => None,
    }
}

/// Reads the values of names from a model's `config.json`, if there is one in this directory, or
/// beside this file.
fn config_values(source: &Location) -> Values {
    let mut values = Values::new();
    let config = read_config(source);
    let Some(config) = config.as_ref().and_then(find_text_config) else {
        return values;
    };
    // Architectures have different names for the same size. The first that is there counts.
    for (name, key) in CONFIG_KEYS {
        // A key that is missing, or is no size, leaves the name without a value.
        if let Some(number) = config.get(key).and_then(serde_json::Value::as_u64)
            && let Ok(number) = usize::try_from(number)
        {
            values.entry(name.to_owned()).or_insert(number);
        }
    }
    values
}

/// The form in which a model's weights are stored, as its `config.json` says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct StoredWeights {
    /// The dtype to compute with.
    pub(crate) dtype: Option<DType>,
    /// The number of rows and of columns that share a scale.
    pub(crate) block: Option<[usize; 2]>,
}

impl StoredWeights {
    /// Reads it from the first of these places that has a configuration. What is not said there, or
    /// makes no sense, is `None`.
    pub(crate) fn of_places(places: &[&Location]) -> Self {
        let Some(config) = places.iter().find_map(|place| read_config(place)) else {
            return StoredWeights::default();
        };
        let text_config = find_text_config(&config).unwrap_or(&config);
        let dtype = ["dtype", "torch_dtype"].iter().find_map(|key| {
            let name = text_config.get(key).or_else(|| config.get(key))?.as_str()?;
            DType::from_torch_name(name.strip_prefix("torch.").unwrap_or(name))
        });
        let quantization = ["quantization_config", "compression_config"]
            .iter()
            .find_map(|key| text_config.get(key).or_else(|| config.get(key)));
        StoredWeights {
            // Only these can be written.
            dtype: dtype.filter(|dtype| {
                matches!(dtype, DType::BF16 | DType::F16 | DType::F32 | DType::F64)
            }),
            block: quantization.and_then(find_block),
        }
    }
}

/// Returns the number of rows and of columns that share a scale, by the description of quantized
/// weights in a `config.json`: of DeepSeek and transformers, or of compressed-tensors. `None` if it
/// does not say it, or has several.
fn find_block(quantization: &serde_json::Value) -> Option<[usize; 2]> {
    let size_of = |size: &serde_json::Value| {
        let size = usize::try_from(size.as_u64()?).ok()?;
        (size > 0).then_some(size)
    };
    let pair_of = |sizes: &serde_json::Value| {
        let [rows, columns] = sizes.as_array()?.as_slice() else {
            return None;
        };
        Some([size_of(rows)?, size_of(columns)?])
    };
    if let Some(sizes) = quantization.get("weight_block_size") {
        return pair_of(sizes);
    }
    let groups = quantization.get("config_groups")?.as_object()?.values();
    let mut blocks = groups.filter_map(|group| {
        let weights = group.get("weights")?;
        pair_of(&weights["block_structure"]).or_else(|| Some([1, size_of(&weights["group_size"])?]))
    });
    let first_block = blocks.next()?;
    blocks
        .all(|block| block == first_block)
        .then_some(first_block)
}

/// Reads the `config.json` in a directory, or beside a file; `None` if there is none that can be
/// read.
fn read_config(source: &Location) -> Option<serde_json::Value> {
    let directory = if source.is_file().ok()? {
        source.split().ok()?.0
    } else {
        source.clone()
    };
    let text = directory.join("config.json").read_file(MAX_BYTES).ok()?;
    serde_json::from_slice(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(
        clippy::disallowed_methods,
        reason = "a configuration is no checkpoint"
    )]
    fn the_heads_of_a_model_of_several_parts_are_those_of_its_text_model() {
        let directory = tempfile::tempdir().unwrap();
        for (config, expected) in [
            (
                r#"{"num_attention_heads": 8, "num_key_value_heads": 2}"#,
                &[("heads", 8), ("kv_heads", 2)][..],
            ),
            (
                r#"{"text_config": {"num_attention_heads": 40, "num_key_value_heads": 8},
                    "vision_config": {"num_attention_heads": 16}, "num_attention_heads": 3}"#,
                &[("heads", 40), ("kv_heads", 8)],
            ),
            (
                r#"{"text_config": {"model_type": "gemma3_text"}, "vision_config": {"num_attention_heads": 16}}"#,
                &[],
            ),
            (
                r#"{"text_config": {"num_attention_heads": 4}, "decoder": {"num_attention_heads": 8}}"#,
                &[],
            ),
        ] {
            std::fs::write(directory.path().join("config.json"), config).unwrap();
            let expected: Values = expected
                .iter()
                .map(|&(name, number)| (name.to_owned(), number))
                .collect();
            assert_eq!(
                config_values(&Location::from(directory.path().to_owned())),
                expected,
                "{config}"
            );
        }
    }
}
