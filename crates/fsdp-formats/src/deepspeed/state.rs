//! The file of model states: names and shapes of parameters, and the trainer's values.

use fsdp_layout::boxes::checked_numel;
use fsdp_layout::{KeyPath, PathPart, PlainValue};
use indexmap::IndexMap;

use crate::error::FileError;
use crate::formats::assembled::{Assembler, Held};
use crate::limits::is_sane_shape;
use crate::storage::checked_directory::CheckedDirectory;
use crate::torch::flat::{FlatFile, Leaf, Selection};
use crate::torch::read::add_leaf;

/// The keys of a file of model states that hold parameters, or describe their layout.
const PARAMETER_KEYS: [&str; 7] = [
    "module",
    "param_shapes",
    "buffer_names",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "universal_checkpoint_info",
];

/// The keys of a file of model states whose dicts are of one entry for each parameter.
const KEYS_BY_PARAMETER: [&str; 3] = ["param_shapes", "frozen_param_shapes", "shared_params"];

/// Reads a file of model states or of a rank's optimizer.
pub(super) fn read_states(directory: &CheckedDirectory, name: &str) -> Result<FlatFile, FileError> {
    let selection = Selection {
        flattened_keys: &KEYS_BY_PARAMETER,
        ..Selection::default()
    };
    FlatFile::read_with(directory, name, None, selection)
}

/// The shapes of parameters, by name.
pub(super) type Shapes = IndexMap<String, Vec<usize>>;

/// Returns the path `model.NAME`.
pub(super) fn model_path(name: &str) -> KeyPath {
    KeyPath(vec![
        PathPart::Key("model".to_owned()),
        PathPart::Key(name.to_owned()),
    ])
}

/// Returns the path `optim.state.NAME.ENTRY`.
pub(super) fn state_path(name: &str, entry: &str) -> KeyPath {
    KeyPath(
        ["optim", "state", name, entry]
            .iter()
            .map(|part| PathPart::Key((*part).to_owned()))
            .collect(),
    )
}

/// Reads the shapes of the parameters, one map for each parameter group of the optimizer. Groups
/// that are not in order are an error.
pub(super) fn param_shapes(model: &FlatFile) -> Result<Vec<Shapes>, FileError> {
    let mut groups: Vec<Shapes> = Vec::new();
    for (path, leaf) in model.found.values() {
        if let [
            PathPart::Key(top_key),
            PathPart::Index(group),
            PathPart::Key(name),
        ] = &path.0[..]
            && top_key == "param_shapes"
        {
            if *group > groups.len() {
                return Err(model.malformed("its groups of parameters are not in order"));
            }
            if *group == groups.len() {
                groups.push(Shapes::new());
            }
            groups[*group].insert(name.clone(), read_shape(model, name, leaf)?);
        }
    }
    Ok(groups)
}

/// Reads the shapes of the parameters that lie below `key`, at the top of the model states.
pub(super) fn shapes_below(model: &FlatFile, key: &str) -> Result<Shapes, FileError> {
    let mut shapes = Shapes::new();
    for (path, leaf) in model.found.values() {
        if let [PathPart::Key(top_key), PathPart::Key(name)] = &path.0[..]
            && top_key == key
        {
            shapes.insert(name.clone(), read_shape(model, name, leaf)?);
        }
    }
    Ok(shapes)
}

/// Reads the shape of a parameter from a leaf of the model states. One that no tensor can have is
/// an error.
fn read_shape(model: &FlatFile, name: &str, leaf: &Leaf) -> Result<Vec<usize>, FileError> {
    let sizes = match leaf {
        Leaf::Value(Held::Plain(value)) => match value.untyped() {
            PlainValue::Tuple(sizes) | PlainValue::List(sizes) => sizes
                .iter()
                .map(|size| usize::try_from(size.as_int()?).ok())
                .collect(),
            _ => None,
        },
        _ => None,
    };
    sizes
        .filter(|sizes: &Vec<usize>| is_sane_shape(sizes) && checked_numel(sizes).is_some())
        .ok_or_else(|| model.malformed(format!("the shape of `{name}` makes no sense")))
}

/// Adds the values that have nothing to do with the model.
pub(super) fn add_rest(assembler: &mut Assembler, model: &FlatFile) -> Result<(), FileError> {
    for (path, leaf) in model.found.values() {
        let top_key = match path.0.first() {
            Some(PathPart::Key(key)) => key.as_str(),
            _ => "",
        };
        match top_key {
            top_key if PARAMETER_KEYS.contains(&top_key) => {}
            // With ZeRO the optimizer's state is in other files.
            "optimizer" if matches!(leaf, Leaf::Value(Held::Plain(PlainValue::None))) => {}
            _ => add_leaf(assembler, model, path, leaf)?,
        }
    }
    Ok(())
}

/// Returns the shared parameters as pairs: the name of a parameter that is not stored itself, and
/// the name of the parameter with the same elements that is stored instead. (Tied weights are an
/// example.)
pub(super) fn shared_parameters(model: &FlatFile) -> Vec<(&str, &str)> {
    let mut pairs = Vec::new();
    for (path, leaf) in model.found.values() {
        if let (
            [PathPart::Key(top_key), PathPart::Key(name)],
            Leaf::Value(Held::Plain(PlainValue::Str(stored_name))),
        ) = (&path.0[..], leaf)
            && top_key == "shared_params"
        {
            pairs.push((name.as_str(), stored_name.as_str()));
        }
    }
    pairs
}
