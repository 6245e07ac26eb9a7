//! The model's own state in the files of model states: frozen parameters, buffers, and all else
//! that no optimizer has.

use std::collections::{HashMap, HashSet};

use fsdp_layout::{KeyPath, PathPart, PlainValue};

use super::alike::check_alike;
use super::state::{model_path, shapes_below, shared_parameters};
use crate::error::FileError;
use crate::formats::assembled::{Assembler, Held};
use crate::storage::checked_directory::CheckedDirectory;
use crate::torch::flat::{FlatFile, Leaf};
use crate::torch::read::add_leaf;

/// The key of the model's state dict. Trained parameters have their 16-bit copies in it, or empty
/// tensors in their places.
const MODULE: &str = "module";

/// The type of the opaque value that stands for a parameter which is in no file.
const NOT_STORED: &str = "parameter that ZeRO 3 has left empty";

/// The files of model states.
pub(super) struct ModelFiles {
    /// The files, in the order of the ranks.
    pub(super) files: Vec<FlatFile>,
    /// `true` for the files of ZeRO 3, one for each rank, which cuts frozen parameters too.
    pub(super) are_cut: bool,
}

impl ModelFiles {
    /// Checks that all files are of the same step of the training.
    pub(super) fn check_step(&self, directory: &CheckedDirectory) -> Result<(), FileError> {
        check_alike(
            directory,
            &self.files,
            |path| matches!(&path.0[..], [PathPart::Key(key)] if key == "global_steps"),
        )
    }

    /// Returns `true` if the model's state dict has something of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        let mut files = self.files.iter();
        files.any(|file| file.found.contains_key(&format!("{MODULE}.{name}")))
    }

    /// Adds frozen parameters, and what else of the model's state dict is not there yet. It comes
    /// last, as the 16-bit copies of trained parameters are in the state dict too.
    ///
    /// # Errors
    /// A frozen parameter that is listed, but is not there.
    pub(super) fn add_untrained(&self, assembler: &mut Assembler) -> Result<(), FileError> {
        let Some(model) = self.files.first() else {
            return Ok(());
        };
        self.add_frozen(assembler, model)?;
        let aliases: HashMap<&str, &str> = shared_parameters(model).into_iter().collect();
        let buffers: HashSet<&str> = match model.found.get("buffer_names") {
            Some((_, Leaf::Value(Held::Plain(PlainValue::List(names))))) => {
                names.iter().filter_map(PlainValue::as_str).collect()
            }
            _ => HashSet::new(),
        };
        let model_prefix = [PathPart::Key("model".to_owned())];
        for (path, leaf) in model.found.values() {
            let [PathPart::Key(top_key), below @ ..] = &path.0[..] else {
                continue;
            };
            let path = KeyPath([&model_prefix[..], below].concat());
            if top_key != MODULE || below.is_empty() || assembler.has(&path) {
                continue;
            }
            let name = KeyPath(below.to_vec()).flat_key();
            let is_empty = matches!(leaf, Leaf::Tensor(tensor, _) if tensor.shape == [0]);
            // ZeRO 3 frees the memory of parameters.
            let is_freed = self.are_cut && is_empty && !buffers.contains(name.as_str());
            if !is_freed {
                add_leaf(assembler, model, &path, leaf)?;
            } else if !aliases.contains_key(name.as_str()) {
                // It is neither the optimizer's nor frozen, so its elements are lost.
                let lost = Held::Opaque(NOT_STORED.to_owned(), PlainValue::None);
                assembler.add_value(&path, &model.name, lost)?;
            }
        }
        Ok(())
    }

    /// Adds the frozen parameters that `model` lists, also under the names of those that share
    /// their elements. ZeRO 1 lists none.
    fn add_frozen(&self, assembler: &mut Assembler, model: &FlatFile) -> Result<(), FileError> {
        let mut aliases: HashMap<&str, Vec<&str>> = HashMap::new();
        for (alias, stored_name) in shared_parameters(model) {
            aliases.entry(stored_name).or_default().push(alias);
        }
        for (name, shape) in shapes_below(model, "frozen_param_shapes")? {
            let key = format!("frozen_param_fragments.{name}");
            let sharing_names = aliases.get(name.as_str()).into_iter().flatten().copied();
            for path in std::iter::once(name.as_str())
                .chain(sharing_names)
                .map(model_path)
            {
                if self.are_cut {
                    self.add_frozen_parts(assembler, &path, &key, &shape)?;
                    continue;
                }
                let Some((_, leaf)) = model.found.get(&key) else {
                    return Err(model.malformed(format!("it has no `{name}`")));
                };
                add_leaf(assembler, model, &path, leaf)?;
            }
        }
        Ok(())
    }

    /// Adds a parameter that is not trained from the equal parts into which ZeRO 3 has cut it, one
    /// for each rank.
    fn add_frozen_parts(
        &self,
        assembler: &mut Assembler,
        path: &KeyPath,
        key: &str,
        shape: &[usize],
    ) -> Result<(), FileError> {
        let numel: usize = shape.iter().product();
        let part_length = numel.div_ceil(self.files.len());
        for (rank, file) in self.files.iter().enumerate() {
            let range = (rank * part_length).min(numel)..((rank + 1) * part_length).min(numel);
            let tensor = file
                .tensor(key)
                .ok_or_else(|| file.malformed(format!("it has no `{key}`")))?;
            let pieces = file.pieces(tensor, 0, shape, range)?;
            assembler.add_tensor(path, &file.name, tensor.dtype, shape, pieces)?;
        }
        Ok(())
    }
}
