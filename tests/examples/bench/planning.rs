//! The work that grows with ranks and tensors, and not with bytes.

use std::time::Instant;

use anyhow::{Result, anyhow};
use fsdp::formats::metadata::{decode, encode};
use fsdp::formats::plan::{Deduplicate, LocalPlan, plan_save, validate_metadata};
use fsdp::layout::shard::chunk_range;
use fsdp::layout::{DType, TensorBox};

use crate::figures::{Case, Figures, median};

const RANKS: usize = 1024;
const TENSORS: usize = 1024;
const MANY_TENSORS: usize = 100_000;

/// The plan of one of `ranks` ranks that share each tensor along its rows.
fn plan(tensors: usize, rank: usize, ranks: usize) -> LocalPlan {
    let mut plan = LocalPlan::default();
    for tensor in 0..tensors {
        let shape = vec![4 * RANKS, 16];
        let rows = chunk_range(shape[0], ranks, rank);
        let bounds = TensorBox::new(vec![rows.start, 0], vec![rows.len(), shape[1]]);
        plan.add_tensor(
            format!("model.layers.{tensor}.weight"),
            None,
            DType::F32,
            shape,
            vec![bounds],
        );
    }
    plan
}

pub(crate) fn run(runs: usize, figures: &mut Figures) -> Result<()> {
    let plans: Vec<LocalPlan> = (0..RANKS).map(|rank| plan(TENSORS, rank, RANKS)).collect();
    let mut planning = Vec::new();
    for _ in 0..runs {
        let start = Instant::now();
        let global = plan_save(&plans, Deduplicate::default())?;
        validate_metadata(&global.metadata).map_err(|(fqn, error)| anyhow!("`{fqn}`: {error}"))?;
        planning.push(start.elapsed().as_secs_f64());
    }
    let entries = (RANKS * TENSORS) as u64;
    figures.push(case("plan and validate", RANKS, entries, median(planning)));

    let global = plan_save(&[plan(MANY_TENSORS, 0, 1)], Deduplicate::default())?;
    let bytes = encode(&global.metadata);
    let mut decoding = Vec::new();
    for _ in 0..runs {
        let start = Instant::now();
        let metadata = decode(&bytes)?;
        decoding.push(start.elapsed().as_secs_f64());
        drop(std::hint::black_box(metadata));
    }
    figures.push(case(
        "read metadata, 100k tensors",
        1,
        bytes.len() as u64,
        median(decoding),
    ));
    Ok(())
}

/// `bytes` are boxes, or bytes of metadata.
fn case(name: &str, ranks: usize, bytes: u64, seconds: f64) -> Case {
    Case {
        name: name.to_owned(),
        size: "-".to_owned(),
        ranks,
        place: "memory".to_owned(),
        bytes,
        seconds,
        limit: None,
        peak_bytes: None,
        read_ratio: None,
    }
}
