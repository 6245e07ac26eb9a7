//! Turns the declarations of a model into the handles of its units.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use fsdp_comm::{CommError, ProcessGroup};
use fsdp_flat::storage::{HostBytes, HostSliceMut, zeros};
use fsdp_flat::{FlatParameter, with_float};
use fsdp_layout::FlatLayout;
use fsdp_layout::flat::aligned_numel;
use indexmap::IndexMap;

use super::init::InitialValues;
use super::registry::{DeclaredParameter, ROOT, Registry, is_running_statistic};
use crate::config::{FsdpConfig, MixedPrecision, ShardingStrategy};
use crate::error::{BuildError, NnError, Result};
use crate::exchange::{Groups, Overlap, Shared};
use crate::unit::{FlatParamHandle, Parameter, UnitSpec};

/// The units of a model that have parameters, and their shared state.
#[derive(Debug)]
pub(crate) struct BuiltUnits {
    pub(crate) groups: Groups,
    pub(crate) strategy: ShardingStrategy,
    pub(crate) handles: Vec<Arc<FlatParamHandle>>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) overlap: Option<Arc<Overlap>>,
    /// The groups of the units' collectives.
    unit_groups: Groups,
}

/// Makes the units of a model from its declarations: lays out their parameters, computes this
/// rank's initial values, and fills the slots by which the model's modules find their units.
///
/// Collectives: for `HybridShard` the creation of two subgroups; with prefetching, the creation of
/// one more for each group that the model is sharded or replicated over.
pub(crate) fn build_units(
    group: &ProcessGroup,
    config: &FsdpConfig,
    registry: &Registry,
) -> Result<BuiltUnits> {
    let groups = shard_and_replicate_groups(group, config)?;
    // As in torch, a single rank has nothing to shard.
    let strategy = if groups.shard.is_some() {
        config.strategy
    } else {
        ShardingStrategy::NoShard
    };
    // Sort the parameters by the units that they belong to, in the order in which they were
    // declared.
    let mut declared_by_unit: Vec<Vec<(&String, &DeclaredParameter)>> =
        registry.units.iter().map(|_| Vec::new()).collect();
    for (fqn, declared) in &registry.params {
        declared_by_unit[declared.unit].push((fqn, declared));
    }
    let shared = Arc::new(Shared::default());
    let (unit_groups, overlap) = if config.prefetches() && !groups.is_empty() {
        // Collectives that overlap with the computation run in groups of their own, so that other
        // collectives in the model's groups do not mix with them.
        let unit_groups = groups.duplicate()?;
        let overlap = Overlap::start(config, unit_groups.shard.clone(), Arc::clone(&shared))?;
        (unit_groups, Some(Arc::new(overlap)))
    } else {
        (groups.clone(), None)
    };
    let mut built = BuiltUnits {
        groups,
        strategy,
        handles: Vec::new(),
        shared,
        overlap,
        unit_groups,
    };
    for (index, (unit, declared)) in registry.units.iter().zip(&declared_by_unit).enumerate() {
        if declared.is_empty() {
            continue;
        }
        // Without `use_orig_params` a FlatParameter is named after its unit, so that two units
        // cannot have one name.
        if !config.use_orig_params && built.handles.iter().any(|other| other.name() == unit.name) {
            return Err(BuildError::DuplicateUnit {
                unit: unit.name.clone(),
            }
            .into());
        }
        let handle = Arc::new(built.build_unit(index, registry, declared, config)?);
        // From now on the model's tensors and modules find their unit.
        for (param, (_, declared)) in declared.iter().enumerate() {
            declared.slot.set_place(&handle, param);
        }
        unit.slot
            .set(Arc::downgrade(&handle))
            .expect("each unit has one handle");
        built.handles.push(handle);
    }
    let units = built.handles.iter();
    built
        .shared
        .complete(units.map(|handle| Arc::clone(&handle.exchange)).collect());
    Ok(built)
}

impl BuiltUnits {
    /// Lays out the parameters of one unit, and makes its handle with this rank's initial values.
    fn build_unit(
        &self,
        index: usize,
        registry: &Registry,
        declared: &[(&String, &DeclaredParameter)],
        config: &FsdpConfig,
    ) -> Result<FlatParamHandle> {
        let unit = &registry.units[index];
        let dtype = check_unit(declared, config.use_orig_params)?;
        let MixedPrecision {
            param,
            reduce,
            output,
            ..
        } = unit.precision;
        for (dtype, operation) in [
            (param, "MixedPrecision::param"),
            (reduce, "reduction of gradients"),
            (output, "MixedPrecision::output"),
        ] {
            if let Some(dtype) = dtype {
                check_is_computable(dtype, operation)?;
            }
        }
        let alignment = if config.use_orig_params {
            aligned_numel(file_dtype(dtype)?)
        } else {
            0
        };
        let shapes = declared
            .iter()
            .map(|(fqn, param)| ((*fqn).clone(), param.tensor.dims().to_vec()))
            .collect();
        let layout = FlatLayout::new(shapes, alignment, self.groups.shard_count())?;
        // Initial values are computed on the host, so that they are the same for all devices.
        let rank = self.groups.shard.as_ref().map_or(0, ProcessGroup::rank);
        let shard = zeros(&[layout.sharded_numel()], dtype)?;
        let flat = FlatParameter::new(layout, rank, shard)?;
        if registry.computes_initial_values() {
            initialize(&flat, declared, config.seed)?;
        }
        let params = declared.iter().map(|(fqn, param)| {
            let tensor = param.tensor.clone();
            Parameter::new(
                (*fqn).clone(),
                tensor,
                param.requires_grad,
                param.is_in_graph,
            )
        });
        let spec = UnitSpec {
            name: unit.name.clone(),
            unit_number: self.handles.len(),
            is_root: index == ROOT,
            params: params.collect(),
            flat,
            precision: unit.precision,
            strategy: self.strategy,
            groups: self.unit_groups.clone(),
            cpu_offload: config.cpu_offload,
        };
        FlatParamHandle::new(spec, Arc::clone(&self.shared), self.overlap.clone())
    }
}

/// Describes a model, its options and its declarations, in lines that the ranks compare.
pub(crate) fn describe_model(
    config: &FsdpConfig,
    registry: &Registry,
    aliases: &IndexMap<String, String>,
) -> Vec<String> {
    let mut lines = vec![
        format!("the strategy {}", config.strategy),
        format!("use_orig_params {}", config.use_orig_params),
        format!("the seed {}", config.seed),
        format!("cpu_offload {}", config.cpu_offload),
        format!("allow_tf32 {}", config.allow_tf32),
        format!(
            "backward_prefetch {:?}, forward_prefetch {}, limit_all_gathers {}",
            config.backward_prefetch, config.forward_prefetch, config.limit_all_gathers
        ),
        match &config.mesh {
            Some(mesh) => format!("a mesh of {:?} {:?}", mesh.names(), mesh.shape()),
            None => "no mesh".to_owned(),
        },
    ];
    // The precision of the model, and then that of each unit that has one of its own.
    lines.push(format!("{:?}", config.mixed_precision));
    lines.extend(
        registry
            .units
            .iter()
            .skip(1)
            .map(|unit| match unit.precision {
                precision if precision == config.mixed_precision.for_inner_units() => {
                    format!("the unit `{}`", unit.name)
                }
                precision => format!("the unit `{}` with {precision:?}", unit.name),
            }),
    );
    lines.extend(registry.params.iter().map(|(fqn, param)| {
        let unit = if param.unit == ROOT {
            "no unit".to_owned()
        } else {
            let name = &registry.units[param.unit].name;
            format!("unit `{name}`, number {} of the model,", param.unit)
        };
        let trained = if param.requires_grad {
            "trained"
        } else {
            "frozen"
        };
        format!(
            "the parameter `{fqn}` in {unit} {trained}, {} {:?} of {}, from {:?}",
            param.tensor.dtype().as_str(),
            param.tensor.dims(),
            param.dtype.as_str(),
            param.init
        )
    }));
    // Ties and buffers too: a state dict has them, so the ranks must have the same.
    lines.extend(
        aliases
            .iter()
            .map(|(alias, fqn)| format!("`{alias}` tied to `{fqn}`")),
    );
    lines.extend(registry.buffers.iter().map(|(name, (value, persistent))| {
        let kept = if *persistent {
            format!("saved{}", describe_values(name, value))
        } else {
            "not saved".to_owned()
        };
        format!(
            "the buffer `{name}`, {kept}, {} {:?}",
            value.dtype().as_str(),
            value.dims()
        )
    }));
    lines
}

/// Returns words that tell the values of a buffer apart from others, of which a checkpoint has
/// those of one rank. They are empty for running statistics, which are those of each rank's own
/// batches, and for values that the host cannot read without waiting.
fn describe_values(name: &str, value: &Tensor) -> String {
    if is_running_statistic(name) || !value.device().is_cpu() {
        return String::new();
    }
    hash_elements(value).map_or_else(
        |_| String::new(),
        |hash| format!(" with values of hash {hash:016x}"),
    )
}

/// Returns a hash of a tensor's elements.
pub(super) fn hash_elements(value: &Tensor) -> Result<u64> {
    let value = value.contiguous()?;
    Ok(twox_hash::XxHash3_64::oneshot(&HostBytes::read(&value)?))
}

/// Returns the shard group and the replicate group of this rank. Collectives: for `HybridShard` the
/// creation of two subgroups.
fn shard_and_replicate_groups(group: &ProcessGroup, config: &FsdpConfig) -> Result<Groups> {
    match (config.strategy, &config.mesh) {
        (ShardingStrategy::NoShard, _) => Ok(Groups {
            shard: None,
            replicate: some_if_several_ranks(group.clone()),
        }),
        // The rows of the mesh are replicas, and the ranks of a row hold one copy together.
        (ShardingStrategy::HybridShard, Some(mesh))
            if mesh.shape().len() == 2 && mesh.size() == group.world_size() =>
        {
            let replicate = some_if_several_ranks(group.mesh_group(mesh, 0)?);
            Ok(Groups {
                shard: some_if_several_ranks(group.mesh_group(mesh, 1)?),
                replicate,
            })
        }
        (ShardingStrategy::HybridShard, mesh) => Err(BuildError::Mesh {
            shape: mesh
                .as_ref()
                .map_or_else(Vec::new, |mesh| mesh.shape().to_vec()),
            world_size: group.world_size(),
        }
        .into()),
        _ => Ok(Groups {
            shard: some_if_several_ranks(group.clone()),
            replicate: None,
        }),
    }
}

/// Returns the group, or `None` if it has a single rank.
fn some_if_several_ranks(group: ProcessGroup) -> Option<ProcessGroup> {
    Some(group).filter(|group| group.world_size() > 1)
}

/// Returns the dtype of `fsdp_layout` that corresponds to one of candle's.
fn file_dtype(dtype: DType) -> Result<fsdp_layout::DType> {
    fsdp_flat::dtype::from_candle(dtype).ok_or(NnError::Candle(
        candle_core::Error::UnsupportedDTypeForOp(dtype, "FlatParameter"),
    ))
}

/// Checks that there is arithmetic of a dtype: files know 8-bit floats too.
fn check_is_computable(dtype: DType, operation: &'static str) -> Result<()> {
    match dtype {
        DType::F32 | DType::F64 | DType::BF16 | DType::F16 => Ok(()),
        _ => Err(candle_core::Error::UnsupportedDTypeForOp(dtype, operation).into()),
    }
}

/// Checks that parameters can share a unit, and returns the dtype of their shards. All shards must
/// have one dtype, which holds floats, and the model must compute with all in one dtype. Without
/// `use_orig_params` all must be trained, or none.
fn check_unit(declared: &[(&String, &DeclaredParameter)], use_orig_params: bool) -> Result<DType> {
    let (_, first_param) = declared[0];
    for (fqn, param) in declared {
        let dtype = file_dtype(param.dtype)?;
        if !dtype.is_float() {
            return Err(fsdp_flat::FlatError::IntegerDType {
                fqn: (*fqn).clone(),
                dtype,
            }
            .into());
        }
        check_is_computable(param.dtype, "FlatParameter")?;
        // One flat tensor holds all parameters of a unit, and one operation casts it.
        for (expected, found) in [
            (first_param.dtype, param.dtype),
            (first_param.tensor.dtype(), param.tensor.dtype()),
        ] {
            if found != expected {
                return Err(fsdp_flat::FlatError::MixedDType {
                    fqn: (*fqn).clone(),
                    expected: file_dtype(expected)?,
                    found: file_dtype(found)?,
                }
                .into());
            }
        }
        if !use_orig_params && param.requires_grad != first_param.requires_grad {
            return Err(fsdp_flat::FlatError::MixedRequiresGrad {
                fqn: (*fqn).clone(),
            }
            .into());
        }
    }
    Ok(first_param.dtype)
}

/// Writes this rank's part of each parameter's initial values.
fn initialize(
    flat: &FlatParameter,
    declared: &[(&String, &DeclaredParameter)],
    seed: u64,
) -> Result<()> {
    let infos = flat.layout().shard_param_infos(flat.rank());
    with_float!(flat.shard().dtype(), T => {
        let mut shard = HostSliceMut::<T>::write(flat.shard())?;
        for (info, (fqn, param)) in infos.iter().zip(declared) {
            if let Some(info) = info {
                let target = &mut shard[info.shard_range()];
                let shape = param.tensor.dims();
                let initial_values = InitialValues { init: &param.init, seed, fqn, shape };
                initial_values.fill(info.param_range(), target);
            }
        }
    });
    Ok(())
}

/// The operation that makes a model.
pub(crate) const NEW_OPERATION: &str = "FullyShardedDataParallel::new";

/// Turns one rank's error into an error on every rank, and checks that all ranks describe their
/// models by the same lines. Collectives: one agreement; if the lines differ, a binary search for
/// the first difference, with one all-gather of a number for each of its steps, and one all-gather
/// of a line.
pub(crate) fn agree_on_model<T>(
    group: &ProcessGroup,
    operation: &str,
    outcome: Result<T>,
    describe: impl FnOnce(&T) -> Vec<String>,
) -> Result<T> {
    let lines = outcome.as_ref().map_or_else(|_| Vec::new(), describe);
    match group.agree_on(operation, hash_lines(&lines), outcome.as_ref().map(|_| ())) {
        // This rank's own error keeps its type.
        Err(CommError::RankFailed { .. }) if outcome.is_err() => outcome,
        Err(CommError::SchemaMismatch { .. }) => Err(first_difference(group, &lines)?),
        Err(error) => Err(error.into()),
        Ok(()) => outcome,
    }
}

/// Returns a hash of lines.
fn hash_lines(lines: &[String]) -> u64 {
    twox_hash::XxHash3_64::oneshot(lines.join("\n").as_bytes())
}

/// Finds the first line that is not the same on all ranks, and returns it as an error. At least one
/// line must differ. Collectives: all-gathers, of hashes and of one line.
fn first_difference(group: &ProcessGroup, lines: &[String]) -> Result<NnError> {
    // Search by halves. The first `same_count` lines are the same on all ranks, and the first
    // `different_count` lines are not. Some rank may have fewer lines than that, and then lacks the
    // last of them. All ranks see the same hashes, so they take the same turns.
    let longest = group
        .all_gather_object(&lines.len())?
        .into_iter()
        .max()
        .expect("a group has ranks");
    let mut same_count = 0;
    let mut different_count = longest;
    while same_count + 1 < different_count {
        let middle = same_count.midpoint(different_count);
        let hashes = group.all_gather_object(&hash_lines(&lines[..middle.min(lines.len())]))?;
        if hashes.iter().all(|hash| *hash == hashes[0]) {
            same_count = middle;
        } else {
            different_count = middle;
        }
    }
    // Show each other the line that differs, and list which ranks have which.
    let rank_lines = group.all_gather_object(&lines.get(same_count).cloned())?;
    let mut ranks_by_line: Vec<(Option<String>, Vec<usize>)> = Vec::new();
    for (line, &rank) in rank_lines.into_iter().zip(group.global_ranks()) {
        match ranks_by_line.iter_mut().find(|(other, _)| *other == line) {
            Some((_, ranks)) => ranks.push(rank),
            None => ranks_by_line.push((line, vec![rank])),
        }
    }
    let differences = ranks_by_line.into_iter().map(|(line, ranks)| {
        format!(
            "{} {}",
            describe_ranks(&ranks),
            line.as_deref().unwrap_or("nothing more")
        )
    });
    Ok(NnError::DifferentModels {
        differences: differences.collect(),
    })
}

/// Returns the subject and the verb of a sentence about ranks: `rank 3 has`.
fn describe_ranks(ranks: &[usize]) -> String {
    match ranks {
        [rank] => format!("rank {rank} has"),
        ranks => format!("ranks {ranks:?} have"),
    }
}
