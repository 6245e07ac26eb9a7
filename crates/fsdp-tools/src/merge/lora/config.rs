//! The settings of an adapter, as PEFT writes them.

use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::storage::{CheckedDirectory, Links};
use fsdp_formats::{FileError, FormatError, Location};
use indexmap::IndexMap;
use serde::Deserialize;
use serde_json::Value;

use crate::convert::unsupported;
use crate::merge::pattern::Patterns;

/// The file in which PEFT keeps the settings of an adapter.
const ADAPTER_CONFIG_FILE: &str = "adapter_config.json";
/// The content of that file, for messages.
const SETTINGS: &str = "settings of an adapter";
/// The longest such file that is read.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// The settings of an adapter.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct LoraConfig {
    lora_alpha: f64,
    #[serde(rename = "r")]
    rank: Option<f64>,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    pub(super) fan_in_fan_out: bool,
    #[serde(default)]
    use_dora: bool,
    #[serde(default)]
    alpha_pattern: Option<IndexMap<String, f64>>,
    #[serde(default)]
    rank_pattern: Option<IndexMap<String, f64>>,
    /// The compiled `alpha_pattern`.
    #[serde(skip)]
    alphas: Patterns,
    /// The compiled `rank_pattern`.
    #[serde(skip)]
    ranks: Patterns,
    /// The initialization of the factors: `true`, `false`, or the name of a method.
    #[serde(default)]
    init_lora_weights: Value,
    /// `true` if an output layer tied to an embedding uses the embedding's trained weight too.
    #[serde(default)]
    pub(super) ensure_weight_tying: bool,
    /// All other settings.
    #[serde(flatten)]
    pub(super) others: IndexMap<String, Value>,
}

/// The methods of initialization that leave the base unchanged. With the others, PEFT subtracts the
/// initial product of the factors from the base each time that it loads the adapter.
const BASE_UNCHANGED: [&str; 4] = ["gaussian", "eva", "orthogonal", "mica"];

/// The settings of kinds of adapters that are not supported: their update is computed in another
/// way, or applies to some tokens or layers only.
const UNSUPPORTED_SETTINGS: [&str; 8] = [
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "target_parameters",
    "use_bdlora",
    "use_qalora",
];

/// The settings that determine by what the product of two factors is multiplied, and which way it
/// lies.
const SCALE_SETTINGS: [&str; 6] = [
    "peft_type",
    "lora_alpha",
    "use_rslora",
    "alpha_pattern",
    "rank_pattern",
    "fan_in_fan_out",
];

impl LoraConfig {
    /// Reads the settings in an adapter's directory.
    ///
    /// # Errors
    /// There are no settings, or they are not those of a LoRA adapter.
    pub fn read(adapter: impl Into<Location>) -> Result<Self, FileError> {
        let directory = CheckedDirectory::open(&adapter.into(), false, Links::Follow)?;
        let bytes = directory.read_checked(ADAPTER_CONFIG_FILE, MAX_CONFIG_BYTES)?;
        Self::parse(&bytes).map_err(|source| directory.file_error(ADAPTER_CONFIG_FILE, source))
    }

    /// Parses the settings, and refuses those of adapters that cannot be merged.
    fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        // The settings of other kinds of adapters are others, so the kind is read first.
        let settings: Value = serde_json::from_slice(bytes)
            .map_err(|error| FormatError::malformed(SETTINGS, error))?;
        let kind = settings["peft_type"].as_str().unwrap_or("unknown");
        if kind != "LORA" {
            return Err(FormatError::unsupported(format!(
                "an adapter of type {kind}"
            )));
        }
        let mut config = LoraConfig::deserialize(settings)
            .map_err(|error| FormatError::malformed(SETTINGS, error))?;
        if config.use_dora {
            return Err(FormatError::unsupported(
                "an adapter with magnitudes (DoRA)",
            ));
        }
        if let Some(method) = config.init_lora_weights.as_str()
            && !BASE_UNCHANGED.contains(&method)
        {
            return Err(FormatError::unsupported(format!(
                "an adapter that began as a part of its base (`init_lora_weights`: `{method}`): PEFT turns it into a plain one \
                 when it is saved with `path_initial_model_for_weight_conversion`;"
            )));
        }
        for setting in UNSUPPORTED_SETTINGS {
            if let Some(value) = config.others.get(setting)
                && !matches!(value, Value::Null | Value::Bool(false))
            {
                return Err(FormatError::unsupported(format!(
                    "an adapter with `{setting}`"
                )));
            }
        }
        config.alphas = Patterns::compile(
            "alpha_pattern",
            config.alpha_pattern.take().unwrap_or_default(),
        )?;
        config.ranks = Patterns::compile(
            "rank_pattern",
            config.rank_pattern.take().unwrap_or_default(),
        )?;
        Ok(config)
    }

    /// Returns the factor of a module's update, `alpha / rank` or `alpha / √rank`, where `rank` is
    /// that of its factors. `a_key` is the key of one of them.
    ///
    /// # Errors
    /// The rank is not that of the settings; a pattern that takes too long to match.
    pub(super) fn scale(&self, module: &str, a_key: &str, rank: usize) -> Result<f64, FileError> {
        let numbers = self.alphas.number_of(module).and_then(|alpha| {
            let rank_in_settings = self.ranks.number_of(module)?;
            Ok((alpha, rank_in_settings.or(self.rank)))
        });
        let (alpha, rank_in_settings) = numbers.map_err(|source| FileError::Encode {
            fqn: a_key.to_owned(),
            source,
        })?;
        let rank = rank as f64;
        if let Some(rank_in_settings) = rank_in_settings
            && rank_in_settings != rank
        {
            let what = format!(
                "an update of rank {rank}, where the adapter's settings say {rank_in_settings},"
            );
            return Err(unsupported(a_key, what));
        }
        let alpha = alpha.unwrap_or(self.lora_alpha);
        Ok(alpha / if self.use_rslora { rank.sqrt() } else { rank })
    }
}

/// Returns the names in a setting that is a list; none if it is something else.
pub(super) fn names_in(setting: Option<&Value>) -> impl Iterator<Item = &str> {
    let names = setting.and_then(Value::as_array).into_iter().flatten();
    names.filter_map(Value::as_str)
}

/// Checks that adapters whose settings are beside them have the same scales, so that an average of
/// their factors has a scale.
///
/// # Errors
/// One has other scales than the first; its settings cannot be read.
pub(in crate::merge) fn check_same_scales(adapters: &[&dyn Checkpoint]) -> Result<(), FileError> {
    let mut first_found: Option<(&dyn Checkpoint, Value)> = None;
    for adapter in adapters {
        let directory = adapter.directory();
        if !directory.has(ADAPTER_CONFIG_FILE)? {
            continue;
        }
        let bytes = directory.read_checked(ADAPTER_CONFIG_FILE, MAX_CONFIG_BYTES)?;
        let settings: Value = serde_json::from_slice(&bytes)
            .map_err(|error| FormatError::malformed(SETTINGS, error))
            .map_err(|source| directory.file_error(ADAPTER_CONFIG_FILE, source))?;
        let Some((first, first_settings)) = &first_found else {
            first_found = Some((*adapter, settings));
            continue;
        };
        for name in SCALE_SETTINGS {
            if normalized(&settings[name]) != normalized(&first_settings[name]) {
                return Err(FileError::Merge {
                    reason: format!(
                        "the adapters `{}` and `{}` have other settings of `{name}`, so an average of their factors has no \
                         scale: merge each into the base, and average the results",
                        first.path().display(),
                        adapter.path().display()
                    ),
                });
            }
        }
    }
    Ok(())
}

/// Returns a setting in one form: older versions of PEFT leave out what newer ones write as `false`
/// or as an empty dict, and a number may be written in two ways.
fn normalized(setting: &Value) -> Option<Value> {
    match setting {
        Value::Null | Value::Bool(false) => None,
        Value::Object(items) if items.is_empty() => None,
        Value::Object(items) => {
            let items = items.iter().map(|(key, value)| {
                let value = normalized(value).unwrap_or_default();
                (key.clone(), value)
            });
            Some(Value::Object(items.collect()))
        }
        Value::Number(number) => Some(number.as_f64().into()),
        other => Some(other.clone()),
    }
}
