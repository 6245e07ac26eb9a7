//! A merge while the keys of the adapter are looked at.

use std::collections::HashMap;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::internals::tensor_of;
use fsdp_formats::metadata::{Entry, Metadata, TensorEntry};
use indexmap::IndexMap;

use super::config::{LoraConfig, names_in};
use super::factor::Factor;
use super::update::{Update, is_transposed, orient};
use crate::convert::{CASTABLE, parent_of, unsupported};
use crate::merge::base_model::{BaseModel, are_equal};

/// The prefix that PEFT puts before the keys of the base.
const KEY_PREFIX: &str = "base_model.model.";
/// The text that PEFT inserts into the key of a weight that has an update.
const BASE_LAYER: &str = ".base_layer.";

/// A merge while the keys of the adapter are looked at, one after the other.
pub(super) struct Preparation<'a, 'c> {
    base: &'a dyn Checkpoint,
    adapter: &'a dyn Checkpoint,
    config: &'c LoraConfig,
    pub(super) model: BaseModel,
    /// The metadata of the result.
    pub(super) metadata: Metadata,
    pub(super) updates: IndexMap<String, Update>,
    pub(super) replaced: HashMap<String, String>,
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

impl<'a, 'c> Preparation<'a, 'c> {
    /// Looks at all keys of an adapter, and checks that it can be merged into its base.
    ///
    /// # Errors
    /// A key that is not of an adapter, or not of one that can be merged; the errors of
    /// [`Self::add_factor`], [`Self::add_tensor`] and [`Self::check`].
    pub(super) fn of_adapter(
        base: &'a dyn Checkpoint,
        adapter: &'a dyn Checkpoint,
        config: &'c LoraConfig,
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
        preparation.check()?;
        Ok(preparation)
    }

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

    /// Checks what has been added, once all keys of the adapter have been.
    ///
    /// # Errors
    /// Updates that cannot be computed; an adapter without tensors, or without some that it must
    /// have.
    fn check(&mut self) -> Result<(), FileError> {
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
            self.check_tied_copy(copy)?;
        }
        for module in names_in(self.config.others.get("modules_to_save")) {
            self.check_is_saved(module)?;
        }
        Ok(())
    }

    /// Checks that the adapter has tensors of a module that it saves whole by its settings, if the
    /// base has any.
    fn check_is_saved(&self, module: &str) -> Result<(), FileError> {
        let has_any = |checkpoint: &dyn Checkpoint| {
            let mut tensors = checkpoint.metadata().tensors();
            tensors.any(|(key, _)| parent_of(key).split('.').any(|part| part == module))
        };
        if has_any(self.base) && !has_any(self.adapter) {
            return Err(FileError::Merge {
                reason: format!(
                    "the adapter's settings save the module `{module}` whole, and no tensor of it is there"
                ),
            });
        }
        Ok(())
    }

    /// Returns the keys of the weights of those layers that the settings name, and that the adapter
    /// does not change. Where the settings choose among the layers, none is missing.
    pub(super) fn find_unchanged(&self) -> Vec<String> {
        const CHOICES: [&str; 3] = ["layers_to_transform", "layers_pattern", "exclude_modules"];
        let is_choice = |setting: &&str| {
            let value = self.config.others.get(*setting);
            value.is_some_and(|value| !value.is_null())
        };
        if CHOICES.iter().any(is_choice) {
            return Vec::new();
        }
        let targets: Vec<&str> = names_in(self.config.others.get("target_modules")).collect();
        let is_target = |key: &str| {
            let module = key.strip_suffix(".weight").unwrap_or_default();
            targets.iter().any(|target| {
                module
                    .strip_suffix(target)
                    .is_some_and(|start| start.is_empty() || start.ends_with('.'))
            })
        };
        let keys = self.base.metadata().tensors().map(|(key, _)| key);
        keys.filter(|key| {
            is_target(key) && !self.updates.contains_key(*key) && !self.replaced.contains_key(*key)
        })
        .map(str::to_owned)
        .collect()
    }

    /// Checks that what the adapter has for a layer is the same as what it has for the layer whose
    /// weight this one shares.
    fn check_tied_copy(&self, copy: &TiedCopy) -> Result<(), FileError> {
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
