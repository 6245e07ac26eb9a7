//! How much memory a resume takes, measured by a counting allocator: this binary has no other test.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear_no_bias};
use fsdp::checkpoint::{get_model_state_dict, init_optimizer_state, optimizer_template};
use fsdp::dcp::reader::CheckpointReader;
use fsdp::prelude::*;
use fsdp_tests::counting_allocator::{CountingAllocator, live_bytes, peak_bytes, reset_peak};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const RANKS: usize = 2;
const UNITS: usize = 16;
const WIDTH: usize = 1024;
/// Bytes of the parameters.
const MODEL: usize = UNITS * 4 * WIDTH * WIDTH;
/// Names, plans, and what a rank reads ahead.
const BOOKKEEPING: usize = 4 << 20;

fn build(group: &ProcessGroup) -> (FullyShardedDataParallel<Vec<Unit<Linear>>>, Optimizer) {
    let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
        let units = (0..UNITS).map(|i| scope.pp(i).unit(|scope| linear_no_bias(WIDTH, WIDTH, scope.vb())));
        units.collect::<candle_core::Result<Vec<Unit<Linear>>>>()
    });
    let model = model.unwrap();
    let optimizer = Optimizer::new(model.parameters(), Algorithm::AdamW(AdamOptions::adamw())).unwrap();
    (model, optimizer)
}

#[test]
fn a_resume_in_place_takes_the_optimizer_s_state_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    let views = StateDictOptions { share_storage: true, ..StateDictOptions::default() };
    run_local(RANKS, |group| {
        let (model, mut optimizer) = build(&group);
        let x = Tensor::ones((1, WIDTH), DType::F32, &Device::Cpu).unwrap();
        let run = |units: &Vec<Unit<Linear>>| units.iter().try_fold(x.clone(), |h, unit| unit.forward(&h)?.tanh());
        model.backward(&model.forward(|units| run(units)?.sqr()?.mean_all()).unwrap()).unwrap();
        optimizer.step().unwrap();
        let (m, o) = get_state_dict(model.parameters(), &[&optimizer], &views).unwrap();
        let state: StateDict = [("model", m.into()), ("optim", o.into())].into_iter().collect();
        save(path.as_path(), &state, &group, &SaveOptions::default()).unwrap();
    })
    .unwrap();
    run_local(RANKS, |group| {
        let (model, mut optimizer) = build(&group);
        group.barrier().unwrap();
        let before = live_bytes();
        group.barrier().unwrap();
        reset_peak();
        group.barrier().unwrap();
        let checkpoint = CheckpointReader::open(&path).unwrap();
        init_optimizer_state(&checkpoint, &["optim"], &mut [&mut optimizer]).unwrap();
        let m = get_model_state_dict(model.parameters(), &views).unwrap();
        let o = optimizer_template(&checkpoint, &["optim"], &[&optimizer]).unwrap();
        let mut state: StateDict = [("model", m.into()), ("optim", o.into())].into_iter().collect();
        load_in_place(path.as_path(), &mut state, &group, &LoadOptions::default()).unwrap();
        let part = |key: &str| state.dict(key).cloned().unwrap();
        let (m, o) = (part("model"), part("optim"));
        set_state_dict(model.parameters(), &mut [&mut optimizer], &m, &o, &StateDictOptions::default()).unwrap();
        group.barrier().unwrap();
        // All ranks' bytes are counted together.
        let (peak, limit) = (peak_bytes() - before, 2 * MODEL + RANKS * BOOKKEEPING);
        assert!(peak <= limit, "{peak} bytes, limit {limit}");
        // The state of AdamW is there.
        assert!(peak >= 2 * MODEL, "{peak} bytes");
        group.barrier().unwrap();
    })
    .unwrap();
}
