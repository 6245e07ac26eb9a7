//! A LoRA adapter, as the library PEFT saves it, merged into its base.
//!
//! The weight of a module becomes `W + scale · B · A`, where `scale` is `lora_alpha / r`, or
//! `lora_alpha / √r` for an adapter with `use_rslora`. The products are computed in `f64` and the
//! sum is rounded once.

use std::collections::{HashMap, HashSet};

use fsdp_formats::checkpoint::{Change, Checkpoint};
use fsdp_formats::internals::{Layer, LayerSource, LayerView, Origin, check_expansion, tensor_of};
use fsdp_formats::metadata::{Entry, Metadata, TensorEntry};
use fsdp_formats::reader::Slot;
use fsdp_formats::storage::{CheckedDirectory, Links};
use fsdp_formats::{FileError, FormatError, Location};
use fsdp_layout::TensorBox;
use indexmap::IndexMap;
use serde::Deserialize;
use serde_json::Value;

use super::base_model::{BaseModel, are_equal, layer_name};
use super::numbers::{fill_slots, write_numbers};
use super::pattern::Patterns;
use crate::convert::{CASTABLE, Losses, unsupported};
use crate::elements::for_each_number;

/// The file in which PEFT keeps the settings of an adapter.
const ADAPTER_CONFIG_FILE: &str = "adapter_config.json";
/// The content of that file, for messages.
const SETTINGS: &str = "settings of an adapter";
/// The longest such file that is read.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// The prefix that PEFT puts before the keys of the base.
const KEY_PREFIX: &str = "base_model.model.";

/// The settings of an adapter.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct LoraConfig {
    lora_alpha: f64,
    #[serde(rename = "r")]
    rank: Option<f64>,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    fan_in_fan_out: bool,
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
    ensure_weight_tying: bool,
    /// All other settings.
    #[serde(flatten)]
    others: IndexMap<String, Value>,
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
    fn scale(&self, module: &str, a_key: &str, rank: usize) -> Result<f64, FileError> {
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

/// Returns `true` for the key of a factor of an adapter.
pub(super) fn is_factor(fqn: &str) -> bool {
    Factor::parse(fqn).is_some()
}

/// Checks that adapters whose settings are beside them have the same scales, so that an average of
/// their factors has a scale.
///
/// # Errors
/// One has other scales than the first; its settings cannot be read.
pub(super) fn check_same_scales(adapters: &[&dyn Checkpoint]) -> Result<(), FileError> {
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

/// The update of one weight.
#[derive(Debug, Clone)]
struct Update {
    /// The adapter's key of the factor `A`, which is `[rank, in]`.
    a_key: String,
    /// The adapter's key of the factor `B`, which is `[out, rank]`.
    b_key: String,
    rank: usize,
    /// The number by which the product of the factors is multiplied.
    scale: f64,
    /// `true` if the weight is `[in, out]`, `false` if it is `[out, in]`, `None` if it is square
    /// and [`orient`] has to decide.
    is_transposed: Option<bool>,
}

/// A base with an adapter merged into it.
#[derive(Debug)]
pub struct Lora<'a> {
    /// The base, and the adapter.
    view: LayerView<'a>,
    /// The updates, by the key of the weight in the base.
    updates: IndexMap<String, Update>,
    /// The adapter's keys of tensors that replace tensors of the base, by the key in the base. If a
    /// weight is both replaced and updated, the update is added to the replacement.
    replaced: HashMap<String, String>,
    losses: Losses,
}

impl<'a> Lora<'a> {
    /// Merges an adapter into its base.
    ///
    /// # Errors
    /// Keys of the adapter that the base does not have, shapes that do not fit, and unsupported
    /// adapters: with `lora_bias`, convolutions, or DoRA.
    pub fn new(
        base: &'a dyn Checkpoint,
        adapter: &'a dyn Checkpoint,
        config: &LoraConfig,
    ) -> Result<Self, FileError> {
        let mut preparation = Preparation {
            base,
            adapter,
            config,
            model: BaseModel::read(base.directory())?,
            metadata: base.metadata().clone(),
            updates: IndexMap::new(),
            replaced: HashMap::new(),
            tied_copies: Vec::new(),
        };
        // Replicas in the base are not replicas of the result.
        preparation.metadata.replicas.clear();
        for (fqn, tensor) in adapter.metadata().tensors() {
            let name = fqn
                .strip_prefix(KEY_PREFIX)
                .ok_or_else(|| unsupported(fqn, "a key that is not of an adapter of PEFT"))?;
            match Factor::parse(name) {
                Some(factor) => preparation.add_factor(fqn, &factor)?,
                None if name.contains("lora_") || name.contains("trainable_tokens") => {
                    return Err(unsupported(
                        fqn,
                        "this part of an adapter (merge it with PEFT)",
                    ));
                }
                None => preparation.add_tensor(fqn, name, tensor)?,
            }
        }
        preparation.finish()
    }

    /// Returns the source and the key in it of the weight to which an update is added.
    fn weight_origin<'o>(&'o self, fqn: &'o str) -> (usize, &'o str) {
        self.replaced
            .get(fqn)
            .map_or((0, fqn), |key| (1, key.as_str()))
    }

    /// Checks that what the configuration in `model_directory` says of weights that layers share is
    /// true of the result, for a copy of that configuration beside it.
    ///
    /// # Errors
    /// It would not be true; the configuration cannot be read.
    pub fn check_configuration(&self, model_directory: &Location) -> Result<(), FileError> {
        let directory = CheckedDirectory::open(model_directory, false, Links::Follow)?;
        let model = BaseModel::read(&directory)?;
        model.check_names_of_one(self.source(0), self, |key| {
            self.updates.contains_key(key) || self.replaced.contains_key(key)
        })?;
        self.losses.forget();
        Ok(())
    }

    /// Returns the keys of the tensors that the adapter changes.
    pub fn changed(&self) -> impl Iterator<Item = &str> {
        let only_replaced = self
            .replaced
            .keys()
            .filter(|key| !self.updates.contains_key(*key));
        self.updates.keys().chain(only_replaced).map(String::as_str)
    }
}

/// A merge while the keys of the adapter are looked at, one after the other.
struct Preparation<'a, 'c> {
    base: &'a dyn Checkpoint,
    adapter: &'a dyn Checkpoint,
    config: &'c LoraConfig,
    model: BaseModel,
    /// The metadata of the result.
    metadata: Metadata,
    updates: IndexMap<String, Update>,
    replaced: HashMap<String, String>,
    /// The changes of layers whose weight the base has under another name.
    tied_copies: Vec<TiedCopy>,
}

/// A change of a layer whose weight the base has under another name only. With
/// `ensure_weight_tying`, PEFT saves the same once for each of the two layers.
enum TiedCopy {
    /// The factors of an update.
    Update {
        /// The module, and the keys of its factors `A` and `B`.
        module: String,
        a_key: String,
        b_key: String,
        stored_name: String,
    },
    /// A tensor that replaces the weight.
    Tensor { key: String, stored_name: String },
}

impl<'a> Preparation<'a, '_> {
    /// Adds the update to which a factor belongs. A factor B is taken together with its factor A.
    ///
    /// # Errors
    /// A factor without the other one; an update that cannot be added to the base.
    fn add_factor(&mut self, fqn: &str, factor: &Factor<'_>) -> Result<(), FileError> {
        let other_key = factor.other_key(fqn);
        if self.adapter.metadata().tensor(&other_key).is_none() {
            return Err(unsupported(fqn, "a factor without the other one"));
        }
        if !factor.is_a {
            return Ok(());
        }
        let key = format!("{}.weight", factor.module);
        if let Some(stored_name) = self.name_of_tied(fqn, &key)? {
            self.tied_copies.push(TiedCopy::Update {
                module: factor.module.to_owned(),
                a_key: fqn.to_owned(),
                b_key: other_key,
                stored_name,
            });
            return Ok(());
        }
        self.refuse_shared(fqn, &key)?;
        let (base, adapter) = (self.base, self.adapter);
        let update = Update::new(base, adapter, self.config, factor, [fqn, &other_key])?;
        if let Some(Update {
            a_key: first_key, ..
        }) = self.updates.insert(key, update)
        {
            let what = format!("a second update, after `{first_key}`, of one weight");
            return Err(unsupported(fqn, what));
        }
        Ok(())
    }

    /// Adds a tensor that replaces one of the base. It was trained whole, or is the weight below an
    /// update, which PEFT calls `MODULE.base_layer.weight`. It saves that of an embedding, which
    /// may have grown.
    ///
    /// # Errors
    /// A tensor that cannot take the place of one of the base.
    fn add_tensor(&mut self, fqn: &str, name: &str, tensor: &TensorEntry) -> Result<(), FileError> {
        let is_base_layer = name.contains(BASE_LAYER);
        let key = match name.rsplit_once(BASE_LAYER) {
            Some((module, parameter)) => format!("{module}.{parameter}"),
            None => name.to_owned(),
        };
        if let Some(stored_name) = self.name_of_tied(fqn, &key)? {
            self.tied_copies.push(TiedCopy::Tensor {
                key: fqn.to_owned(),
                stored_name,
            });
            return Ok(());
        }
        let shape = &tensor_of(self.base.metadata(), &key)?.shape;
        if *shape != tensor.shape {
            let what = format!(
                "a tensor of shape {:?} in place of one of shape {shape:?}",
                tensor.shape
            );
            return Err(unsupported(fqn, what));
        }
        // The weight below an update is that of all layers that share it.
        if !is_base_layer {
            self.refuse_shared(fqn, &key)?;
        }
        self.metadata
            .entries
            .insert(key.clone(), Entry::Tensor(tensor.clone()));
        if let Some(first_key) = self.replaced.insert(key, fqn.to_owned()) {
            let what = format!("a second tensor, after `{first_key}`, in place of one of the base");
            return Err(unsupported(fqn, what));
        }
        Ok(())
    }

    /// Returns the name of a weight that the base has under another name only, if the adapter ties
    /// the layers that share it; `None` if the base has it under this name.
    ///
    /// # Errors
    /// The base does not have the weight.
    fn name_of_tied(&self, fqn: &str, key: &str) -> Result<Option<String>, FileError> {
        if self.base.metadata().tensor(key).is_some() {
            return Ok(None);
        }
        let what = match self.model.stored_name(self.base, key) {
            Some(name) if self.config.ensure_weight_tying => return Ok(Some(name.to_owned())),
            Some(name) => format!(
                "an adapter to a base without `{key}`, a layer that shares the weight of `{name}`: merge it with PEFT, which \
                 makes two weights of it,"
            ),
            None => format!("an adapter to a base without `{key}`"),
        };
        Err(unsupported(fqn, what))
    }

    /// Refuses a change of a weight that several layers share, unless `ensure_weight_tying` says
    /// that the adapter changes them all alike.
    fn refuse_shared(&self, fqn: &str, key: &str) -> Result<(), FileError> {
        if self.config.ensure_weight_tying || !self.model.is_shared(self.base, key) {
            return Ok(());
        }
        let what = format!(
            "a change of `{key}` alone, whose weight another layer of the base shares: merge it with PEFT, which makes two \
             weights of it (if no other layer shares it, `\"tie_word_embeddings\": false` in the base's `config.json` says \
             so),"
        );
        Err(unsupported(fqn, what))
    }

    /// Returns the merge, once all keys of the adapter have been added.
    ///
    /// # Errors
    /// Updates that cannot be computed; layers that no longer have one weight; an adapter without
    /// tensors.
    fn finish(mut self) -> Result<Lora<'a>, FileError> {
        // All updates must be known: the shape of one may tell how a square one is oriented.
        let model_type = self.model.model_type.as_deref();
        orient(&mut self.updates, model_type, self.config.fan_in_fan_out)?;
        for key in self.updates.keys() {
            let dtype = tensor_of(&self.metadata, key)?.properties.dtype;
            if !CASTABLE.contains(&dtype) {
                return Err(unsupported(key, format!("an update of dtype `{dtype}`")));
            }
        }
        if self.updates.is_empty() && self.replaced.is_empty() {
            return Err(FileError::Merge {
                reason: "the adapter has no tensors".to_owned(),
            });
        }
        for copy in &self.tied_copies {
            self.check_copy(copy)?;
        }
        let merged = Lora {
            view: LayerView {
                sources: vec![
                    LayerSource::Lent(self.base),
                    LayerSource::Lent(self.adapter),
                ],
                metadata: self.metadata,
                structure: self.base.structure().cloned(),
                digests: None,
            },
            updates: self.updates,
            replaced: self.replaced,
            losses: Losses::default(),
        };
        self.model.check_names_of_one(self.base, &merged, |key| {
            merged.updates.contains_key(key) || merged.replaced.contains_key(key)
        })?;
        merged.losses.forget();
        Ok(merged)
    }

    /// Checks that what the adapter has for a layer is the same as what it has for the layer whose
    /// weight this one shares.
    fn check_copy(&self, copy: &TiedCopy) -> Result<(), FileError> {
        let (fqn, stored_name, is_same) = match copy {
            TiedCopy::Tensor { key, stored_name } => {
                let is_same = match self.replaced.get(stored_name) {
                    Some(other_key) => are_equal(self.adapter, key, other_key)?,
                    None => false,
                };
                (key, stored_name, is_same)
            }
            TiedCopy::Update {
                module,
                a_key,
                b_key,
                stored_name,
            } => {
                let is_same = match self.updates.get(stored_name) {
                    Some(update) => {
                        // An embedding is `[in, out]`, an output layer `[out, in]`.
                        self.config.scale(module, a_key, update.rank)? == update.scale
                            && is_transposed(self.adapter, a_key, &update.b_key)?
                            && is_transposed(self.adapter, b_key, &update.a_key)?
                    }
                    None => false,
                };
                (a_key, stored_name, is_same)
            }
        };
        if is_same {
            return Ok(());
        }
        let what =
            format!("another change than that of `{stored_name}`, which is the same weight,");
        Err(unsupported(fqn, what))
    }
}

/// The most numbers of a matrix that are compared at a time.
const COMPARED_NUMBERS: usize = 1 << 20;

/// Returns `true` if one matrix of an adapter is another one transposed.
fn is_transposed(adapter: &dyn Checkpoint, first: &str, second: &str) -> Result<bool, FileError> {
    let first_shape = &tensor_of(adapter.metadata(), first)?.shape;
    let second_shape = &tensor_of(adapter.metadata(), second)?.shape;
    let [rows, columns] = first_shape[..] else {
        return Ok(false);
    };
    if second_shape[..] != [columns, rows] {
        return Ok(false);
    }
    let row_count = (COMPARED_NUMBERS / columns.max(1)).max(1);
    for start in (0..rows).step_by(row_count) {
        let count = row_count.min(rows - start);
        let first_box = TensorBox::new(vec![start, 0], vec![count, columns]);
        let second_box = TensorBox::new(vec![0, start], vec![columns, count]);
        let first_numbers = read_numbers(adapter, first, &first_box)?;
        let second_numbers = read_numbers(adapter, second, &second_box)?;
        for (index, number) in first_numbers.into_iter().enumerate() {
            let (row, column) = (index / columns, index % columns);
            if number != second_numbers[column * count + row] {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// The text that PEFT inserts into the key of a weight that has an update.
const BASE_LAYER: &str = ".base_layer.";

/// The types of models whose layers are `Conv1D`, with weights of shape `[in, out]`, except the
/// output layer.
const CONV1D_MODELS: [&str; 4] = ["decision_transformer", "gpt2", "imagegpt", "openai-gpt"];
/// The names of `Conv1D` layers in those models. In other models, layers of these names may be of
/// another kind.
const CONV1D_LAYERS: [&str; 3] = ["c_attn", "c_fc", "c_proj"];
/// Decides for each update of a square weight whether the weight is `[in, out]`. The other
/// weights of layers of the same name tell, or the type of the model. PEFT's setting
/// `fan_in_fan_out` is the last resort, because PEFT records it for the last layer only.
///
/// # Errors
/// A weight of a layer that may be a `Conv1D`, if none of these tells.
fn orient(
    updates: &mut IndexMap<String, Update>,
    model_type: Option<&str>,
    fan_in_fan_out: bool,
) -> Result<(), FileError> {
    let layers: HashSet<&str> = updates.keys().map(|key| layer_name(key)).collect();
    let is_one_kind = layers.len() <= 1;
    let known_layers: HashMap<String, bool> = updates
        .iter()
        .filter_map(|(key, update)| Some((layer_name(key).to_owned(), update.is_transposed?)))
        .collect();
    for (key, update) in updates {
        if update.is_transposed.is_some() {
            continue;
        }
        let layer = layer_name(key);
        let may_be_conv1d = CONV1D_LAYERS.contains(&layer);
        update.is_transposed = Some(match (known_layers.get(layer), model_type) {
            (Some(is_transposed), _) => *is_transposed,
            (None, Some(model)) if may_be_conv1d => CONV1D_MODELS.contains(&model),
            (None, None) if may_be_conv1d && !is_one_kind => {
                let what = "an update of a square weight that may or may not be transposed: put the model's \
                            `config.json` into the base's directory;";
                return Err(unsupported(&update.a_key, what));
            }
            _ => fan_in_fan_out,
        });
    }
    Ok(())
}

/// The parsed key of a factor of an update.
struct Factor<'k> {
    module: &'k str,
    is_a: bool,
    is_embedding: bool,
}

impl<'k> Factor<'k> {
    /// Parses `MODULE.lora_A.weight`, `MODULE.lora_A.NAME.weight` or `MODULE.lora_embedding_A`;
    /// returns `None` for other keys.
    fn parse(name: &'k str) -> Option<Self> {
        for (word, is_a, is_embedding) in [
            (".lora_A", true, false),
            (".lora_B", false, false),
            (".lora_embedding_A", true, true),
            (".lora_embedding_B", false, true),
        ] {
            let Some((module, ending)) = name.split_once(word) else {
                continue;
            };
            // An adapter may have a name, which stands before `weight`.
            let is_weight = match ending.strip_suffix(".weight") {
                _ if is_embedding => !ending.contains(".."),
                Some("") => true,
                Some(name) => name.len() > 1 && name.rfind('.') == Some(0),
                None => false,
            };
            return is_weight.then_some(Factor {
                module,
                is_a,
                is_embedding,
            });
        }
        None
    }

    /// Returns the key of the other factor of the same update.
    fn other_key(&self, fqn: &str) -> String {
        let start = if self.is_embedding {
            ".lora_embedding_"
        } else {
            ".lora_"
        };
        let (own_letter, other_letter) = if self.is_a { ("A", "B") } else { ("B", "A") };
        fqn.replacen(
            &format!("{start}{own_letter}"),
            &format!("{start}{other_letter}"),
            1,
        )
    }
}

/// Reads a box of a matrix, and returns its elements as numbers.
fn read_numbers(
    source: &dyn Checkpoint,
    fqn: &str,
    bounds: &TensorBox,
) -> Result<Vec<f64>, FileError> {
    let dtype = tensor_of(source.metadata(), fqn)?.properties.dtype;
    let length = bounds.numel() * dtype.size_in_bytes() as usize;
    check_expansion(source, fqn, length as u64)?;
    let mut bytes = vec![0; length];
    source.read_box(fqn, bounds, &mut bytes)?;
    let mut numbers = Vec::with_capacity(bounds.numel());
    for_each_number(dtype, &bytes, &mut |number| numbers.push(number));
    Ok(numbers)
}

impl Update {
    /// Makes the update of a weight by two factors, whose keys in the adapter are `a_key` and
    /// `b_key`.
    ///
    /// # Errors
    /// A base without the weight; factors that are no matrices, or do not fit the weight or each
    /// other; their dtypes.
    fn new(
        base: &dyn Checkpoint,
        adapter: &dyn Checkpoint,
        config: &LoraConfig,
        factor: &Factor<'_>,
        [a_key, b_key]: [&str; 2],
    ) -> Result<Self, FileError> {
        let key = format!("{}.weight", factor.module);
        let a_tensor = tensor_of(adapter.metadata(), a_key)?;
        let b_tensor = tensor_of(adapter.metadata(), b_key)?;
        let weight = base
            .metadata()
            .tensor(&key)
            .ok_or_else(|| unsupported(a_key, format!("an adapter to a base without `{key}`")))?;
        let ([rank, inputs], [outputs, b_rank]) =
            (a_tensor.shape.as_slice(), b_tensor.shape.as_slice())
        else {
            return Err(unsupported(
                a_key,
                "an update that is no product of two matrices",
            ));
        };
        // The weight of an embedding is `[in, out]`, that of a layer may be either.
        let fits_transposed = weight.shape == [*inputs, *outputs];
        let fits_plain = weight.shape == [*outputs, *inputs] && !factor.is_embedding;
        if rank != b_rank || *rank == 0 || !(fits_plain || fits_transposed) {
            let what = format!(
                "factors of shapes {:?} and {:?} for a weight of shape {:?}",
                a_tensor.shape, b_tensor.shape, weight.shape
            );
            return Err(unsupported(a_key, what));
        }
        for dtype in [a_tensor, b_tensor].map(|factor| factor.properties.dtype) {
            if !CASTABLE.contains(&dtype) {
                return Err(unsupported(a_key, format!("an update of dtype `{dtype}`")));
            }
        }
        Ok(Update {
            a_key: a_key.to_owned(),
            b_key: b_key.to_owned(),
            rank: *rank,
            scale: config.scale(factor.module, a_key, *rank)?,
            is_transposed: (fits_plain != fits_transposed).then_some(fits_transposed),
        })
    }

    /// Adds the update to `sums`, the numbers of a box of the weight.
    fn add_to(
        &self,
        sums: &mut [f64],
        part: &TensorBox,
        adapter: &dyn Checkpoint,
    ) -> Result<(), FileError> {
        let rows = part.sizes[0];
        let columns = part.sizes[1];
        // Rows of the weight are outputs, and its columns inputs, or the other way round.
        let is_transposed = self
            .is_transposed
            .expect("every update was oriented when the merge was made");
        let (inputs, outputs) = if is_transposed { (0, 1) } else { (1, 0) };
        // All of the rank, for the inputs and the outputs of the box.
        let width = part.sizes[inputs];
        let a_box = TensorBox::new(vec![0, part.offsets[inputs]], vec![self.rank, width]);
        let b_box = TensorBox::new(
            vec![part.offsets[outputs], 0],
            vec![part.sizes[outputs], self.rank],
        );
        let a_numbers = read_numbers(adapter, &self.a_key, &a_box)?;
        let b_numbers = read_numbers(adapter, &self.b_key, &b_box)?;
        for row in 0..rows {
            let sums = &mut sums[row * columns..(row + 1) * columns];
            for rank_index in 0..self.rank {
                for (column, sum) in sums.iter_mut().enumerate() {
                    let (input, output) = if is_transposed {
                        (row, column)
                    } else {
                        (column, row)
                    };
                    *sum += self.scale
                        * b_numbers[output * self.rank + rank_index]
                        * a_numbers[rank_index * width + input];
                }
            }
        }
        Ok(())
    }
}

impl Layer for Lora<'_> {
    fn view(&self) -> &LayerView<'_> {
        &self.view
    }

    fn own_changes(&self) -> Vec<Change> {
        self.losses.changes()
    }

    fn origin<'o>(&'o self, fqn: &'o str) -> Origin<'o> {
        if self.updates.contains_key(fqn) {
            return Origin::Made;
        }
        let (source, key) = self.weight_origin(fqn);
        Origin::Source(source, key)
    }

    fn inputs_of_made(&self, fqn: &str) -> Vec<(usize, String)> {
        let update = &self.updates[fqn];
        let (source, key) = self.weight_origin(fqn);
        vec![
            (source, key.to_owned()),
            (1, update.a_key.clone()),
            (1, update.b_key.clone()),
        ]
    }

    fn read_made(&self, fqn: &str, slots: &mut [Slot<'_>]) -> Result<(), FileError> {
        let update = &self.updates[fqn];
        let adapter = self.source(1);
        let (source, key) = self.weight_origin(fqn);
        let dtype = tensor_of(&self.view.metadata, fqn)?.properties.dtype;
        fill_slots(slots, dtype, |part: &TensorBox, bytes: &mut [u8]| {
            self.source(source).read_box(key, part, bytes)?;
            let mut sums = Vec::with_capacity(part.numel());
            // Add the update in f64, and round the sum once.
            for_each_number(dtype, bytes, &mut |number| sums.push(number));
            let was_finite: Vec<bool> = sums.iter().map(|number| number.is_finite()).collect();
            update.add_to(&mut sums, part, adapter)?;
            let lost = write_numbers(dtype, &sums, &was_finite, bytes);
            self.losses.note(fqn, part, lost);
            Ok(())
        })
    }
}
