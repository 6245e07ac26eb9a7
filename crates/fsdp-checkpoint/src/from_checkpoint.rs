//! Building a sharded model from a checkpoint, which decides which parameters exist. Each rank
//! reads only its own part.

use std::collections::HashMap;

use candle_core::Result as CandleResult;
use fsdp_comm::ProcessGroup;
use fsdp_formats::Location;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_nn::state::{LiveTarget, StatePrefixes};
use fsdp_nn::torch::StateDictOptions;
use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Scope};
use fsdp_state::{LoadError as _, LoadOptions, Schema, Source as _, StateError, load_state};

use crate::error::CheckpointError;
use crate::load::open;
use crate::save::with_storage_deadline;
use crate::source::CheckpointSource;
use crate::stateful::model_prefix;

const OPERATION: &str = "from_checkpoint";

/// Options of [`from_checkpoint`]; the same on every rank.
#[derive(Debug, Clone)]
pub struct FromCheckpointOptions {
    /// The names that differ between the checkpoint and the model, as pairs: a name or prefix of
    /// names in the model, and the same in the checkpoint. `("", "bert")` drops a leading `bert`.
    pub fqn_renames: Vec<(String, String)>,
    /// Options of the load. Values are converted to the model's dtype unless `cast` is turned off.
    /// Tensors that the model never requests are an error unless `strict` is turned off. `only` has
    /// no effect, since nothing but the model is loaded.
    pub load: LoadOptions,
}

impl Default for FromCheckpointOptions {
    /// Returns options that rename nothing, and that convert values to the model's dtype.
    fn default() -> Self {
        FromCheckpointOptions {
            fqn_renames: Vec::new(),
            load: LoadOptions {
                cast: true,
                ..LoadOptions::default()
            },
        }
    }
}

/// Builds a sharded model from a checkpoint of any format at `path`, a path or a URL. While the
/// model is built, the checkpoint decides which parameters exist (`contains_tensor`) and which
/// shapes they have (`get_unchecked`), as candle's own builders do for a file. No initial values
/// are computed, and each rank reads only its part of the parameters.
///
/// In a checkpoint of a training run the model is below the key `model`, and all other keys are
/// ignored. Names are otherwise the model's own, apart from
/// [`fqn_renames`](FromCheckpointOptions::fqn_renames). Collective: agreements on the checkpoint,
/// the model and the load.
///
/// # Errors
/// The same on every rank: a parameter that the checkpoint lacks, or has in another shape (the
/// model's code may handle this while it builds); the errors of [`FullyShardedDataParallel::new`]
/// and of [`load`](crate::load()).
///
/// ```
/// use std::collections::HashMap;
///
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Linear, Module, linear_no_bias};
/// use fsdp_checkpoint::{CheckpointError, FromCheckpointOptions, from_checkpoint};
/// use fsdp_nn::FsdpConfig;
///
/// let dir = tempfile::tempdir()?;
/// let path = dir.path().join("model.safetensors");
/// let weight = Tensor::arange(0f32, 6f32, &Device::Cpu)?.reshape((2, 3))?;
/// candle_core::safetensors::save(&HashMap::from([("head.weight", weight)]), &path)?;
///
/// let outputs = fsdp_comm::run_local(2, |group| {
///     let options = FromCheckpointOptions::default();
///     let model = from_checkpoint(group, FsdpConfig::default(), path.as_path(), &options, |scope| {
///         linear_no_bias(3, 2, scope.vb().pp("head"))
///     })?;
///     let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
///     Ok::<_, CheckpointError>(model.forward(|head| head.forward(&x))?.to_vec2::<f32>()?)
/// })?;
/// assert_eq!(*outputs[1].as_ref().unwrap(), [[3., 12.]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn from_checkpoint<M>(
    group: ProcessGroup,
    config: FsdpConfig,
    path: impl Into<Location>,
    options: &FromCheckpointOptions,
    build: impl FnOnce(&Scope) -> CandleResult<M>,
) -> Result<FullyShardedDataParallel<M>, CheckpointError> {
    let storage_group = with_storage_deadline(&group, options.load.deadline);
    let checkpoint = open(OPERATION, &path.into(), &storage_group, &options.load)?;
    from_open_checkpoint(group, config, &*checkpoint, options, build)
}

/// Builds a model from a checkpoint that every rank has opened.
fn from_open_checkpoint<M>(
    group: ProcessGroup,
    config: FsdpConfig,
    checkpoint: &dyn Checkpoint,
    options: &FromCheckpointOptions,
    build: impl FnOnce(&Scope) -> CandleResult<M>,
) -> Result<FullyShardedDataParallel<M>, CheckpointError> {
    let storage_group = with_storage_deadline(&group, options.load.deadline);
    let mut source = CheckpointSource::new(checkpoint);
    let name_options = StateDictOptions {
        fqn_renames: options.fqn_renames.clone(),
        ..StateDictOptions::default()
    };
    let prefix = model_prefix(source.schema());
    let found_shapes = model_shapes(source.schema(), &prefix, &name_options);
    let shapes = CheckpointError::agree(&storage_group, OPERATION, None, found_shapes)?;
    let model = FullyShardedDataParallel::empty(group, config, shapes, build)?;
    let prefixes = StatePrefixes {
        model: Some(prefix),
        optim: None,
    };
    let live = LiveTarget::new(model.parameters(), Vec::new(), prefixes);
    let mut target = CheckpointError::or_refuse(&storage_group, OPERATION, live)?
        .with_names(|name| name_options.name_in_model(name), str::to_owned);
    load_state::<_, _, CheckpointError>(
        OPERATION,
        &storage_group,
        &mut source,
        &mut target,
        &options.load,
    )?;
    drop(target);
    Ok(model)
}

/// Returns the shapes of a checkpoint's tensors below a prefix by the names that they have in the
/// model.
///
/// # Errors
/// Two tensors that have one name in the model.
fn model_shapes(
    schema: &Schema,
    prefix: &[String],
    name_options: &StateDictOptions,
) -> Result<HashMap<String, Vec<usize>>, CheckpointError> {
    let mut shapes = HashMap::new();
    for (path, leaf) in schema.iter() {
        let (Some(name), Some((_, shape))) = (path.below(prefix), leaf.tensor()) else {
            continue;
        };
        let fqn = name_options.name_in_model(&name.flat_key());
        if shapes.insert(fqn.clone(), shape.to_vec()).is_some() {
            return Err(StateError::DuplicateKey { key: fqn }.into());
        }
    }
    Ok(shapes)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};
    use fsdp_comm::run_local;
    use fsdp_formats::reader::CheckpointReader;
    use fsdp_state::StateDict;

    use super::*;
    use crate::save::{SaveOptions, save};

    #[test]
    fn each_rank_reads_only_its_part() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model");
        const BYTES: u64 = 4 * 512 * 1024;
        run_local(1, |group| {
            let mut state = StateDict::new();
            state.insert(
                "weight",
                Tensor::ones((512, 1024), DType::F32, &Device::Cpu).unwrap(),
            );
            save(path.as_path(), &state, &group, &SaveOptions::default()).unwrap();
        })
        .unwrap();
        let read = run_local(4, |group| {
            let reader = CheckpointReader::open(&path).unwrap();
            let options = FromCheckpointOptions::default();
            let model =
                from_open_checkpoint(group, FsdpConfig::default(), &reader, &options, |scope| {
                    scope.vb().get((512, 1024), "weight")
                });
            drop(model.unwrap());
            reader.bytes_read()
        })
        .unwrap();
        for read in read {
            assert!(read <= BYTES / 4 + BYTES / 80, "{read} of {BYTES}");
        }
    }
}
