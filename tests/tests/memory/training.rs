//! The memory that a sharded model takes between steps and inside them.

use candle_core::{Device, Tensor};
use candle_nn::{Linear, Module, linear};
use fsdp_nn::algorithm::{Algorithm, SgdOptions};
use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer, Unit};
use fsdp_tests::counting_allocator::{live_bytes, peak_bytes, reset_peak};

const RANKS: usize = 4;
const UNITS: usize = 12;
const WIDTH: usize = 512;
/// One unit: a square weight and a bias.
const UNIT_BYTES: usize = 4 * (WIDTH * WIDTH + WIDTH);
/// The memory of a rank besides parameters: names, layouts, graph nodes, activations of one row
/// (about 12 KiB a unit).
const BOOKKEEPING: usize = 256 << 10;

#[test]
fn only_shards_live_between_steps_and_two_units_at_most_inside_them() {
    let _alone = crate::alone();
    let total = UNITS * UNIT_BYTES;
    let shard = total / RANKS + UNITS * 2 * 16;
    fsdp_comm::run_local(RANKS, |group| {
        // The matrix product keeps a buffer for each thread, from its first use on.
        let x = Tensor::ones((1, WIDTH), candle_core::DType::F32, &Device::Cpu).unwrap();
        let square = Tensor::ones((WIDTH, WIDTH), candle_core::DType::F32, &Device::Cpu).unwrap();
        x.matmul(&square.t().unwrap())
            .unwrap()
            .t()
            .unwrap()
            .matmul(&x)
            .unwrap()
            .matmul(&square)
            .unwrap();
        drop(square);
        group.barrier().unwrap();
        let before = live_bytes();
        group.barrier().unwrap();
        let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
            let units =
                (0..UNITS).map(|i| scope.pp(i).unit(|scope| linear(WIDTH, WIDTH, scope.vb())));
            units.collect::<candle_core::Result<Vec<Unit<Linear>>>>()
        })
        .unwrap();
        let sgd = Algorithm::Sgd(SgdOptions::default());
        let mut optimizer = Optimizer::new(model.parameters(), sgd).unwrap();
        // All ranks' bytes are counted together, so limits are those of one rank times their
        // number.
        let within = |bytes: usize, per_rank: usize, when: &str| {
            let limit = RANKS * (per_rank + BOOKKEEPING);
            assert!(
                bytes <= before + limit,
                "{when}: {} bytes, limit {limit}",
                bytes.saturating_sub(before)
            );
        };
        let forward = || {
            let run = |units: &Vec<Unit<Linear>>| {
                units
                    .iter()
                    .try_fold(x.clone(), |h, unit| unit.forward(&h)?.tanh())
            };
            model
                .forward(|units| run(units)?.sqr()?.mean_all())
                .unwrap()
        };
        for step in 0..2 {
            group.barrier().unwrap();
            within(live_bytes(), shard, "between steps");
            group.barrier().unwrap();
            reset_peak();
            group.barrier().unwrap();
            let loss = forward();
            group.barrier().unwrap();
            within(peak_bytes(), shard + 2 * UNIT_BYTES, "during forward");
            within(live_bytes(), shard, "after forward");
            group.barrier().unwrap();
            model.backward(&loss).unwrap();
            drop(loss);
            group.barrier().unwrap();
            // Beside parameters, a backward holds reduced gradients (as large as the shards), and
            // of the unit that it is in: the unsharded gradient, and what candle makes to
            // accumulate one (three copies).
            within(
                peak_bytes(),
                2 * shard + 2 * UNIT_BYTES + 4 * UNIT_BYTES,
                "during backward",
            );
            assert!(
                model.parameters().peak_parameter_bytes() <= shard + 2 * UNIT_BYTES,
                "step {step}"
            );
            optimizer.step().unwrap();
            model.parameters().zero_grad();
            group.barrier().unwrap();
        }
    })
    .unwrap();
}
