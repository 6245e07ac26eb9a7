//! Full state dicts: gathered on rank 0, broadcast from it; and the optimizer's, sharded, which
//! moves nothing.

use std::time::Duration;

use anyhow::Result;
use fsdp::nn::torch::{
    OptimLoadOptions, StateDictOptions, StateDictSettings, StateDictType, get_state_dict,
    optim_state_dict, optim_state_dict_to_load, set_state_dict,
};
use fsdp::prelude::*;

use crate::figures::{Case, Figures, Pairs};
use crate::load::total;
use crate::model::{Training, on_ranks, state_bytes, timed};
use crate::{Bench, limits};

pub(crate) fn run(bench: &Bench<'_>, ranks: usize, figures: &mut Figures) -> Result<()> {
    let cases = on_ranks(ranks, |group| {
        let mut training = Training::new(group, bench.size, FsdpConfig::default())?;
        Ok([
            gather_and_broadcast(bench, &mut training)?,
            optimizer(bench, &mut training)?,
        ]
        .concat())
    })?;
    cases.into_iter().for_each(|case| figures.push(case));
    Ok(())
}

/// A copy of `bytes` on rank 0, while the others wait.
fn copy(group: &ProcessGroup, source: &[u8]) -> Result<Duration> {
    let copied = timed(group, || {
        Ok(if source.is_empty() {
            Duration::ZERO
        } else {
            limits::copy_fresh(source)
        })
    })?;
    Ok(copied.time)
}

fn gather_and_broadcast(bench: &Bench<'_>, training: &mut Training) -> Result<Vec<Case>> {
    let own = state_bytes(&training.state()?);
    let TrainState {
        model, optimizers, ..
    } = &mut training.run;
    let parameters = model.parameters();
    let group = model.group();
    let optimizer = &mut optimizers[0];
    let ranks = group.world_size();
    let total = total(group, own)?;
    let source = if group.rank() == 0 {
        vec![1u8; total as usize]
    } else {
        Vec::new()
    };
    let gather = StateDictOptions {
        full_state_dict: true,
        cpu_offload: true,
        ..StateDictOptions::default()
    };
    let load = StateDictOptions {
        full_state_dict: true,
        broadcast_from_rank0: true,
        ..StateDictOptions::default()
    };
    let mut gathers = Pairs::default();
    let mut broadcasts = Pairs::default();
    let mut gather_peak = 0;
    let mut broadcast_peak = 0;
    for _ in 0..bench.runs {
        let limit = copy(group, &source)?;
        let gathered = timed(group, || {
            Ok(get_state_dict(parameters, &[&*optimizer], &gather)?)
        })?;
        gathers.push(gathered.time, limit);
        gather_peak = gathered.peak.saturating_sub(total).max(gather_peak);
        let limit = copy(group, &source)?;
        let (model, optim) = gathered.value;
        let optimizers: &mut [&mut Optimizer] = &mut [optimizer];
        let set = timed(group, || {
            Ok(set_state_dict(
                &model, &optim, parameters, optimizers, &load,
            )?)
        })?;
        broadcasts.push(set.time, limit);
        broadcast_peak = set.peak.max(broadcast_peak);
    }
    let case = |name: &str, pairs: &Pairs, peak| Case {
        peak_bytes: Some(peak),
        ..bench.case(
            name,
            ranks,
            total,
            pairs.seconds(),
            pairs.limit("memcpy, fresh memory"),
        )
    };
    Ok(vec![
        case("full gather to rank 0", &gathers, gather_peak),
        // The ranks' new shards are beside the old ones until all have been checked.
        case(
            "broadcast from rank 0",
            &broadcasts,
            broadcast_peak / ranks as u64,
        ),
    ])
}

fn optimizer(bench: &Bench<'_>, training: &mut Training) -> Result<Vec<Case>> {
    let TrainState {
        model, optimizers, ..
    } = &mut training.run;
    let parameters = model.parameters();
    let group = model.group();
    let optimizer = &mut optimizers[0];
    let ranks = group.world_size();
    let mut saves = Pairs::default();
    let mut loads = Pairs::default();
    let mut bytes = 0;
    parameters.state_dict_type(
        StateDictSettings::from(StateDictType::Sharded),
        || -> Result<()> {
            let own = state_bytes(&optim_state_dict(None, parameters, optimizer)?);
            bytes = total(group, own)?;
            let source = vec![1u8; own];
            for _ in 0..bench.runs {
                let limit = timed(group, || Ok(limits::copy_fresh(&source)))?.time;
                let saved = timed(group, || Ok(optim_state_dict(None, parameters, optimizer)?))?;
                saves.push(saved.time, limit);
                let options = OptimLoadOptions::default();
                let loaded = timed(group, || {
                    Ok(optim_state_dict_to_load(
                        &saved.value,
                        parameters,
                        optimizer,
                        &options,
                    )?)
                })?;
                loads.push(loaded.time, limit);
            }
            Ok(())
        },
    )?;
    let case = |name: &str, pairs: &Pairs| {
        bench.case(
            name,
            ranks,
            bytes,
            pairs.seconds(),
            pairs.limit("memcpy, fresh memory"),
        )
    };
    Ok(vec![
        case("optim_state_dict", &saves),
        case("optim_state_dict_to_load", &loads),
    ])
}
