//! The memory that a resume takes.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear_no_bias};
use fsdp::prelude::*;
use fsdp_tests::counting_allocator::{live_bytes, peak_bytes, reset_peak};

const RANKS: usize = 2;
const UNITS: usize = 16;
const WIDTH: usize = 1024;
/// Bytes of the parameters.
const MODEL: usize = UNITS * 4 * WIDTH * WIDTH;
/// Names, plans, and what a rank reads ahead.
const BOOKKEEPING: usize = 4 << 20;

fn build(group: &ProcessGroup) -> TrainState<Vec<Unit<Linear>>> {
    let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
        let units = (0..UNITS).map(|i| {
            scope
                .pp(i)
                .unit(|scope| linear_no_bias(WIDTH, WIDTH, scope.vb()))
        });
        units.collect::<candle_core::Result<Vec<Unit<Linear>>>>()
    });
    let model = model.unwrap();
    let optimizer =
        Optimizer::new(model.parameters(), Algorithm::AdamW(AdamOptions::adamw())).unwrap();
    TrainState::new(model, vec![optimizer])
}

#[test]
fn a_resume_in_place_takes_the_optimizer_s_state_and_nothing_else() {
    let _alone = crate::alone();
    let dir = tempfile::tempdir().unwrap();
    run_local(RANKS, |group| {
        let mut run = build(&group);
        let x = Tensor::ones((1, WIDTH), DType::F32, &Device::Cpu).unwrap();
        let forward = |units: &Vec<Unit<Linear>>| {
            units
                .iter()
                .try_fold(x.clone(), |h, unit| unit.forward(&h)?.tanh())
        };
        run.model
            .backward(
                &run.model
                    .forward(|units| forward(units)?.sqr()?.mean_all())
                    .unwrap(),
            )
            .unwrap();
        run.optimizers[0].step().unwrap();
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        checkpointer.save(1, &run).unwrap();
    })
    .unwrap();
    run_local(RANKS, |group| {
        let mut run = build(&group);
        group.barrier().unwrap();
        let before = live_bytes();
        group.barrier().unwrap();
        reset_peak();
        group.barrier().unwrap();
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let (loaded, report) = checkpointer.load_latest(&mut run).unwrap().unwrap();
        assert!(loaded.step == 1 && report.is_clean(), "{report:?}");
        group.barrier().unwrap();
        // All ranks' bytes are counted together.
        let peak = peak_bytes() - before;
        let limit = 2 * MODEL + RANKS * BOOKKEEPING;
        assert!(peak <= limit, "{peak} bytes, limit {limit}");
        // The state of AdamW is there.
        assert!(peak >= 2 * MODEL, "{peak} bytes");
        group.barrier().unwrap();
    })
    .unwrap();
}
