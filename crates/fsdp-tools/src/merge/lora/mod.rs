//! A LoRA adapter, as the library PEFT saves it, merged into its base.
//!
//! The weight of a module becomes `W + scale · B · A`, where `scale` is `lora_alpha / r`, or
//! `lora_alpha / √r` for an adapter with `use_rslora`. The products are computed in `f64` and the
//! sum is rounded once.

mod config;
mod factor;
mod preparation;
mod update;

use std::collections::HashMap;

use fsdp_formats::checkpoint::{Change, Checkpoint};
use fsdp_formats::internals::{Layer, LayerSource, LayerView, Origin, tensor_of};
use fsdp_formats::reader::Slot;
use fsdp_formats::storage::{CheckedDirectory, Links};
use fsdp_formats::{FileError, Location};
use fsdp_layout::TensorBox;
use indexmap::IndexMap;

use self::preparation::Preparation;
use self::update::Update;
use super::base_model::BaseModel;
use super::numbers::{fill_slots, write_numbers};
use crate::convert::Losses;
use crate::elements::for_each_number;

pub use self::config::LoraConfig;
pub(super) use self::config::check_same_scales;
pub(super) use self::factor::is_factor;

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
    /// The keys of weights that the settings name, and that have no update.
    unchanged: Vec<String>,
    losses: Losses,
}

impl<'a> Lora<'a> {
    /// Merges an adapter into its base.
    ///
    /// # Errors
    /// Keys of the adapter that the base does not have, shapes that do not fit, a module that is
    /// saved whole by the settings and is not there, and unsupported adapters: with `lora_bias`,
    /// convolutions, or DoRA.
    pub fn new(
        base: &'a dyn Checkpoint,
        adapter: &'a dyn Checkpoint,
        config: &LoraConfig,
    ) -> Result<Self, FileError> {
        let prepared = Preparation::of_adapter(base, adapter, config)?;
        let unchanged = prepared.find_unchanged();
        let merged = Lora {
            view: LayerView {
                sources: vec![LayerSource::Lent(base), LayerSource::Lent(adapter)],
                metadata: prepared.metadata,
                structure: base.structure().cloned(),
                digests: None,
            },
            updates: prepared.updates,
            replaced: prepared.replaced,
            unchanged,
            losses: Losses::default(),
        };
        prepared.model.check_names_of_one(base, &merged, |key| {
            merged.updates.contains_key(key) || merged.replaced.contains_key(key)
        })?;
        merged.losses.forget();
        Ok(merged)
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

impl Layer for Lora<'_> {
    fn view(&self) -> &LayerView<'_> {
        &self.view
    }

    fn own_changes(&self) -> Vec<Change> {
        let mut changes = self.losses.changes();
        changes.extend(Change::new(
            "weight",
            "got no update: the adapter has none, although its settings name the layer",
            self.unchanged.clone(),
        ));
        changes
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
