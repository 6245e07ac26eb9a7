//! Checkpoints in an object store: the same calls with a URL. Needs the feature `object-store` of
//! `fsdp`, and the store's usual variables for its credentials.
//!
//! ```console
//! export AWS_REGION=eu-central-1 AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=…
//! cargo run -p fsdp-examples --bin object-store -- s3://bucket/runs/example
//! ```

use anyhow::{Context as _, Result};
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::linear;
use fsdp::checkpoint::{Location, list_checkpoints};
use fsdp::formats::checkpoint;
use fsdp::prelude::*;
use fsdp::tools::verify::{Level, VerifyOptions, verify};

/// Takes five steps on every rank, and saves each in the background while the next one is computed.
fn train(group: &ProcessGroup, place: &Location) -> Result<u64> {
    let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
        linear(64, 8, scope.vb())
    })?;
    let optimizer = Optimizer::new(model.parameters(), Algorithm::AdamW(AdamOptions::adamw()))?;
    let mut run = TrainState::new(model, vec![optimizer]);
    let mut checkpointer = Checkpointer::new(place.clone(), group, CheckpointerOptions::default())?;
    let done = checkpointer
        .load_latest(&mut run)?
        .map_or(0, |(checkpoint, _)| checkpoint.step);
    let x = Tensor::ones((2, 64), DType::F32, &Device::Cpu)?;
    for step in 1..=5 {
        let loss = run
            .model
            .forward(|layer| layer.forward(&x)?.sqr()?.mean_all())?;
        run.model.backward(&loss)?;
        run.optimizers[0].step()?;
        run.model.parameters().zero_grad();
        // Each rank uploads its shards. The checkpoint is there once its last object is, and not
        // before.
        checkpointer.save_async(done + step, &run)?;
    }
    checkpointer.wait()?;
    Ok(done)
}

fn main() -> Result<()> {
    let url = std::env::args().nth(1).context("usage: object-store URL")?;
    let place = Location::from(url);
    let began: Vec<u64> = run_local(2, |group| train(&group, &place))?
        .into_iter()
        .collect::<Result<_>>()?;
    println!("went on from step {}", began[0]);
    // The last one is read again, and checked against its hashes.
    let checkpoints = list_checkpoints(&place)?;
    let newest = checkpoints.last().context("no checkpoint is there")?;
    let opened = checkpoint::open(&newest.path, Default::default())?;
    let report = verify(&*opened, Level::Hashes, VerifyOptions::default())?;
    println!(
        "step {} of {}: {}",
        newest.step,
        checkpoints.len(),
        if report.is_ok() { "ok" } else { "damaged" }
    );
    anyhow::ensure!(report.is_ok(), "{:?}", report.problems);
    Ok(())
}
