//! How the state-dict functions grow with the number of parameters: tiny ones, so that bytes do not
//! matter.
//!
//! Time is processor time of the whole process, which other programs on the machine do not change
//! much.

use std::collections::HashMap;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_nn::Init;
use fsdp::checkpoint::{load_in_place, save};
use fsdp::nn::torch::{
    OptimLoadOptions, StateDictOptions, StateDictSettings, StateDictType, full_optim_state_dict,
    get_state_dict, load_state_dict, optim_state_dict, optim_state_dict_to_load,
    scatter_full_optim_state_dict, set_model_state_dict, set_state_dict, state_dict,
};
use fsdp::prelude::*;
use rustix::time::{ClockId, clock_gettime};
use tempfile::TempDir;

use crate::figures::{Case, Figures, Limit, median};
use crate::model::on_ranks;

/// Numbers of parameters, each twice the one before.
const PARAMETERS: [usize; 4] = [2000, 4000, 8000, 16000];
const RANKS: usize = 2;
/// Parameters of one unit, as a transformer's block has them.
const UNIT: usize = 16;

type Model = FullyShardedDataParallel<Vec<Unit<Vec<Tensor>>>>;

/// The limit of a case: the same function with half as many parameters. Linear growth is half as
/// fast.
const HALF: &str = "half as many";

/// A function and the time that it takes, by its name.
type Times = Vec<(&'static str, f64)>;

pub(crate) fn run(runs: usize, figures: &mut Figures) -> Result<()> {
    let mut half: Vec<f64> = Vec::new();
    for count in PARAMETERS {
        let directory = TempDir::new()?;
        let times = on_ranks(RANKS, |group| {
            let (model, mut optimizer) = build(group, count)?;
            let mut all: Vec<Times> = Vec::new();
            for run in 0..runs {
                all.push(times(
                    &model,
                    &mut optimizer,
                    &directory.path().join(run.to_string()),
                )?);
            }
            Ok(all)
        })?;
        let mut medians = Vec::new();
        for (index, (name, _)) in times[0].iter().enumerate() {
            let seconds = median(times.iter().map(|times| times[index].1).collect());
            let of_half = half.get(index).copied();
            let limit = of_half.map(|half| Limit {
                name: HALF.to_owned(),
                seconds: half,
                ratio: half / seconds,
            });
            figures.push(Case {
                name: format!("scale: {name}"),
                size: count.to_string(),
                ranks: RANKS,
                place: "memory".to_owned(),
                bytes: (count * 16 * 3) as u64,
                seconds,
                limit,
                peak_bytes: None,
                read_ratio: None,
            });
            medians.push(seconds);
        }
        half = medians;
    }
    Ok(())
}

/// A model of tiny parameters that has done one step.
fn build(group: ProcessGroup, count: usize) -> Result<(Model, Optimizer)> {
    let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| {
        (0..count / UNIT)
            .map(|unit| {
                scope.pp(format!("layers.{unit}")).unit(|scope| {
                    let weight = |index| {
                        scope
                            .vb()
                            .get_with_hints(4, &format!("p{index}"), Init::Const(0.5))
                    };
                    (0..UNIT)
                        .map(weight)
                        .collect::<candle_core::Result<Vec<_>>>()
                })
            })
            .collect()
    })?;
    let mut optimizer = Optimizer::new(model.parameters(), Algorithm::AdamW(AdamOptions::adamw()))?;
    let x = Tensor::ones(4, DType::F32, &Device::Cpu)?;
    let loss = model.forward(|units: &Vec<Unit<Vec<Tensor>>>| {
        let mut sum = x.clone();
        for unit in units {
            sum = unit.run(|weights| {
                let mut sum = sum.clone();
                for weight in weights {
                    sum = (sum + weight)?;
                }
                Ok(sum)
            })?;
        }
        sum.mean_all()
    })?;
    model.backward(&loss)?;
    optimizer.step()?;
    model.parameters().zero_grad();
    Ok((model, optimizer))
}

/// Times each function once.
fn times(model: &Model, optimizer: &mut Optimizer, path: &std::path::Path) -> Result<Times> {
    let parameters = model.parameters();
    let group = model.group();
    let mut times = Times::new();
    let mut note = |name, seconds: f64| times.push((name, seconds));
    let sharded = StateDictOptions::default();
    let full = StateDictOptions {
        full_state_dict: true,
        cpu_offload: true,
        ..StateDictOptions::default()
    };
    let broadcast = StateDictOptions {
        full_state_dict: true,
        broadcast_from_rank0: true,
        ..StateDictOptions::default()
    };

    // This uses nothing of the library, and shows how much of the growth comes from the allocator
    // and the caches.
    let plain: Vec<(String, Tensor)> = (0..parameters.fqns().count())
        .map(|index| {
            Ok((
                format!("layers.{index}"),
                Tensor::zeros(4, DType::F32, &Device::Cpu)?,
            ))
        })
        .collect::<Result<_>>()?;
    let copied = worked(group, || {
        let copies = plain
            .iter()
            .map(|(name, tensor)| Ok((name.clone(), tensor.copy()?)));
        Ok(copies.collect::<Result<HashMap<String, Tensor>>>()?.len())
    })?;
    note("candle tensors, copied into a map", copied.seconds);
    drop(plain);

    let got = worked(group, || {
        Ok(get_state_dict(parameters, &[optimizer], &sharded)?)
    })?;
    note("get_state_dict", got.seconds);
    let (m, o) = &got.value;
    note(
        "set_state_dict",
        worked(group, || {
            Ok(set_state_dict(
                m,
                o,
                parameters,
                &mut [optimizer],
                &sharded,
            )?)
        })?
        .seconds,
    );
    note(
        "set_model_state_dict",
        worked(group, || Ok(set_model_state_dict(m, parameters, &sharded)?))?.seconds,
    );
    let whole = worked(group, || {
        Ok(get_state_dict(parameters, &[optimizer], &full)?)
    })?;
    note("get_state_dict, full", whole.seconds);
    let (m, o) = &whole.value;
    let set = worked(group, || {
        Ok(set_state_dict(
            m,
            o,
            parameters,
            &mut [optimizer],
            &broadcast,
        )?)
    })?;
    note("set_state_dict, broadcast", set.seconds);

    parameters.state_dict_type(
        StateDictSettings::from(StateDictType::Sharded),
        || -> Result<()> {
            let model = worked(group, || Ok(state_dict(parameters)?))?;
            note("state_dict, sharded", model.seconds);
            note(
                "load_state_dict",
                worked(group, || {
                    Ok(load_state_dict(&model.value, parameters, true)?)
                })?
                .seconds,
            );
            let optim = worked(group, || Ok(optim_state_dict(None, parameters, optimizer)?))?;
            note("optim_state_dict, sharded", optim.seconds);
            let options = OptimLoadOptions::default();
            let local = worked(group, || {
                Ok(optim_state_dict_to_load(
                    &optim.value,
                    parameters,
                    optimizer,
                    &options,
                )?)
            })?;
            note("optim_state_dict_to_load", local.seconds);
            note(
                "Optimizer::load_state_dict",
                worked(group, || Ok(optimizer.load_state_dict(&local.value)?))?.seconds,
            );
            Ok(())
        },
    )?;
    let optim = worked(group, || {
        Ok(full_optim_state_dict(None, parameters, optimizer, true)?)
    })?;
    note("full_optim_state_dict", optim.seconds);
    let on_root = (group.rank() == 0).then_some(&optim.value);
    let scattered = worked(group, || {
        Ok(scatter_full_optim_state_dict(
            on_root, parameters, optimizer,
        )?)
    })?;
    note("scatter_full_optim_state_dict", scattered.seconds);

    let mut run = StateDict::new();
    let views = StateDictOptions {
        share_storage: true,
        ..StateDictOptions::default()
    };
    let (m, o) = get_state_dict(parameters, &[optimizer], &views)?;
    run.insert("model", m);
    run.insert("optim", o);
    note(
        "save",
        worked(group, || {
            Ok(save(path, &run, group, &SaveOptions::default())?)
        })?
        .seconds,
    );
    let load = LoadOptions::default();
    note(
        "load in place",
        worked(group, || Ok(load_in_place(path, &mut run, group, &load)?))?.seconds,
    );
    Ok(times)
}

/// The result of a function, and the processor time of all ranks that it took.
struct Worked<T> {
    seconds: f64,
    value: T,
}

/// Runs `f` on all ranks at once.
fn worked<T>(group: &ProcessGroup, f: impl FnOnce() -> Result<T>) -> Result<Worked<T>> {
    group.barrier()?;
    let start = processor_seconds();
    group.barrier()?;
    let value = f()?;
    group.barrier()?;
    let seconds = processor_seconds() - start;
    group.barrier()?;
    Ok(Worked { seconds, value })
}

/// Returns the processor time that this process has used.
fn processor_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
