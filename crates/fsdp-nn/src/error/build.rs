//! The errors of models that cannot be built.

use thiserror::Error;

/// A model that cannot be built as it was declared.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A parameter is requested twice, with different shapes or dtypes.
    #[error("parameter `{fqn}` is requested as {asked}, but it exists as {existing}")]
    Conflict {
        /// The parameter.
        fqn: String,
        /// The shape and dtype asked for.
        asked: String,
        /// The shape and dtype that are there.
        existing: String,
    },
    /// `HybridShard` needs to know which ranks are replicas.
    #[error(
        "HybridShard needs a mesh of replicas and shards over all {world_size} ranks, but {}: set \
         `FsdpConfig::mesh`, for two replicas to \
         `DeviceMesh::new(&[2, {}], &[\"replicate\", \"shard\"], {world_size})`",
        describe_mesh(shape),
        world_size.div_ceil(2)
    )]
    Mesh {
        /// The mesh's shape; empty if there is none.
        shape: Vec<usize>,
        /// Ranks of the process group.
        world_size: usize,
    },
    /// Two units ask for one parameter, and neither runs inside the other.
    #[error(
        "parameter `{fqn}` of {} is requested by {} too: request it outside of units, or in a unit \
         around both",
        unit_name(first),
        unit_name(second)
    )]
    SharedBetweenUnits {
        /// The parameter.
        fqn: String,
        /// The unit that asked first.
        first: String,
        /// The other unit.
        second: String,
    },
    /// A model that is built from a checkpoint asks for a parameter that is not in it.
    #[error("the checkpoint has no parameter `{fqn}`")]
    NotInCheckpoint {
        /// The parameter.
        fqn: String,
    },
    /// A model that is built from a checkpoint asks for another shape than is in it.
    #[error(
        "parameter `{fqn}` is requested with shape {asked:?}, but has {found:?} in the checkpoint"
    )]
    OtherShape {
        /// The parameter.
        fqn: String,
        /// The shape asked for.
        asked: Vec<usize>,
        /// The shape in the checkpoint.
        found: Vec<usize>,
    },
    /// A buffer is registered under a name that the model has already, or after the model has been
    /// built.
    #[error("buffer `{name}` is registered {problem}")]
    Buffer {
        /// The buffer.
        name: String,
        /// The circumstance that is wrong.
        problem: &'static str,
    },
    /// A model is complete once it has been sharded.
    #[error("parameter `{fqn}` is requested after the model has been built")]
    LateParameter {
        /// The parameter.
        fqn: String,
    },
    /// The model had asked for a name before it was tied to another.
    #[error(
        "`{alias}` is a separate parameter already: tie it to `{fqn}` before the model requests it"
    )]
    LateTie {
        /// The name.
        alias: String,
        /// The parameter that it should be another name of.
        fqn: String,
    },
    /// One name is tied to two others.
    #[error("`{alias}` is tied to `{first}` and to `{second}`")]
    TiedTwice {
        /// The name.
        alias: String,
        /// A name that it is tied to.
        first: String,
        /// Another.
        second: String,
    },
    /// Ties that lead to no parameter.
    #[error(
        "{} are tied to each other in a circle: tie each to a parameter",
        quote_names(names)
    )]
    TieCircle {
        /// The names in it.
        names: Vec<String>,
    },
    /// FlatParameters have their units' names, so two of one name cannot be told apart.
    #[error(
        "two units were made at the scope `{unit}`, so their FlatParameters have the same name: \
         set `use_orig_params`, or make each unit at its own scope"
    )]
    DuplicateUnit {
        /// The scope.
        unit: String,
    },
}

/// Returns the names in backticks, with commas between them.
fn quote_names(names: &[String]) -> String {
    names
        .iter()
        .map(|name| format!("`{name}`"))
        .collect::<Vec<_>>()
        .join(", ")
}

/// Returns a unit for messages.
pub(super) fn unit_name(unit: &str) -> String {
    if unit.is_empty() {
        "the root unit".to_owned()
    } else {
        format!("unit `{unit}`")
    }
}

/// Returns a text on the mesh that there is.
fn describe_mesh(shape: &[usize]) -> String {
    if shape.is_empty() {
        "there is none".to_owned()
    } else {
        format!("its shape is {shape:?}")
    }
}
