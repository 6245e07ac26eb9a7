//! How the state-dict functions grow with the number of parameters: tiny ones, so that bytes do not matter.

use std::time::Duration;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_nn::Init;
use fsdp::checkpoint::{load_in_place, save};
use fsdp::nn::torch::{
    OptimLoadOptions, StateDictOptions, StateDictSettings, StateDictType, full_optim_state_dict, get_state_dict,
    load_state_dict, optim_state_dict, optim_state_dict_to_load, scatter_full_optim_state_dict, set_model_state_dict,
    set_state_dict, state_dict,
};
use fsdp::prelude::*;
use tempfile::TempDir;

use crate::figures::{Case, Figures, median};
use crate::model::{on_ranks, timed};

/// Numbers of parameters, each twice the one before.
const PARAMETERS: [usize; 4] = [2000, 4000, 8000, 16000];
const RANKS: usize = 2;
/// Parameters of one unit, as a transformer's block has them.
const UNIT: usize = 16;

type Model = FullyShardedDataParallel<Vec<Unit<Vec<Tensor>>>>;

/// A function and the time that it takes, by its name.
type Times = Vec<(&'static str, f64)>;

pub(crate) fn run(runs: usize, figures: &mut Figures) -> Result<()> {
    for count in PARAMETERS {
        let directory = TempDir::new()?;
        let times = on_ranks(RANKS, |group| {
            let (model, mut optimizer) = build(group, count)?;
            let mut all: Vec<Times> = Vec::new();
            for run in 0..runs {
                all.push(times(&model, &mut optimizer, &directory.path().join(run.to_string()))?);
            }
            Ok(all)
        })?;
        for (index, (name, _)) in times[0].iter().enumerate() {
            let seconds = median(times.iter().map(|times| times[index].1).collect());
            figures.push(Case {
                name: format!("scale: {name}"),
                size: count.to_string(),
                ranks: RANKS,
                place: "memory".to_owned(),
                bytes: (count * 16 * 3) as u64,
                seconds,
                limit: None,
                peak_bytes: None,
                read_ratio: None,
            });
        }
    }
    Ok(())
}

/// A model of tiny parameters that has done one step.
fn build(group: ProcessGroup, count: usize) -> Result<(Model, Optimizer)> {
    let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| {
        (0..count / UNIT)
            .map(|unit| {
                scope.pp(format!("layers.{unit}")).unit(|scope| {
                    let weight = |index| scope.vb().get_with_hints(4, &format!("p{index}"), Init::Const(0.5));
                    (0..UNIT).map(weight).collect::<candle_core::Result<Vec<_>>>()
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
    let (parameters, group) = (model.parameters(), model.group());
    let mut times = Times::new();
    let mut note = |name, time: Duration| times.push((name, time.as_secs_f64()));
    let sharded = StateDictOptions::default();
    let full = StateDictOptions { full_state_dict: true, cpu_offload: true, ..StateDictOptions::default() };
    let broadcast =
        StateDictOptions { full_state_dict: true, broadcast_from_rank0: true, ..StateDictOptions::default() };

    let got = timed(group, || Ok(get_state_dict(parameters, &[optimizer], &sharded)?))?;
    note("get_state_dict", got.time);
    let (m, o) = &got.value;
    note("set_state_dict", timed(group, || Ok(set_state_dict(m, o, parameters, &mut [optimizer], &sharded)?))?.time);
    note("set_model_state_dict", timed(group, || Ok(set_model_state_dict(m, parameters, &sharded)?))?.time);
    let whole = timed(group, || Ok(get_state_dict(parameters, &[optimizer], &full)?))?;
    note("get_state_dict, full", whole.time);
    let (m, o) = &whole.value;
    let set = timed(group, || Ok(set_state_dict(m, o, parameters, &mut [optimizer], &broadcast)?))?;
    note("set_state_dict, broadcast", set.time);

    parameters.state_dict_type(StateDictSettings::of(StateDictType::Sharded), || -> Result<()> {
        let model = timed(group, || Ok(state_dict(parameters)?))?;
        note("state_dict, sharded", model.time);
        note("load_state_dict", timed(group, || Ok(load_state_dict(&model.value, parameters, true)?))?.time);
        let optim = timed(group, || Ok(optim_state_dict(None, parameters, optimizer)?))?;
        note("optim_state_dict, sharded", optim.time);
        let options = OptimLoadOptions::default();
        let local = timed(group, || Ok(optim_state_dict_to_load(&optim.value, parameters, optimizer, &options)?))?;
        note("optim_state_dict_to_load", local.time);
        note("Optimizer::load_state_dict", timed(group, || Ok(optimizer.load_state_dict(&local.value)?))?.time);
        Ok(())
    })?;
    let optim = timed(group, || Ok(full_optim_state_dict(None, parameters, optimizer, true)?))?;
    note("full_optim_state_dict", optim.time);
    let on_root = (group.rank() == 0).then_some(&optim.value);
    let scattered = timed(group, || Ok(scatter_full_optim_state_dict(on_root, parameters, optimizer)?))?;
    note("scatter_full_optim_state_dict", scattered.time);

    let mut run = StateDict::new();
    let views = StateDictOptions { share_storage: true, ..StateDictOptions::default() };
    let (m, o) = get_state_dict(parameters, &[optimizer], &views)?;
    run.insert("model", m);
    run.insert("optim", o);
    note("save", timed(group, || Ok(save(path, &run, group, &SaveOptions::default())?))?.time);
    let load = LoadOptions::default();
    note("load in place", timed(group, || Ok(load_in_place(path, &mut run, group, &load)?))?.time);
    Ok(times)
}
