//! The memory that a step takes whose activations are not kept.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear};
use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Recomputed, Scope, Unit};
use fsdp_tests::counting_allocator::{live_bytes, peak_bytes, reset_peak};

const RANKS: usize = 2;
const UNITS: usize = 10;
const WIDTH: usize = 16;
const ROWS: usize = 4096;
/// One activation of a layer.
const ACTIVATION: usize = 4 * ROWS * WIDTH;
/// Activations that a layer keeps for its backward: its input, and what each of its operations
/// gives.
const KEPT: usize = 8;

struct Layer(Linear);

impl Module for Layer {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let h = self.0.forward(x)?.tanh()?.sqr()?.tanh()?;
        x + (h * 0.5)?
    }
}

/// Returns the most memory of a rank's forward and backward.
fn peak(is_recomputed: bool) -> usize {
    let peaks = fsdp_comm::run_local(RANKS, |group| {
        let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
            let layer = |scope: &Scope| {
                Ok(Recomputed::when(
                    is_recomputed,
                    Layer(linear(WIDTH, WIDTH, scope.vb())?),
                ))
            };
            let units = (0..UNITS).map(|i| scope.pp(i).unit(layer));
            units.collect::<candle_core::Result<Vec<Unit<Recomputed<Layer>>>>>()
        })
        .unwrap();
        let x = Tensor::ones((ROWS, WIDTH), DType::F32, &Device::Cpu).unwrap();
        let mut before = 0;
        for _ in 0..2 {
            group.barrier().unwrap();
            before = live_bytes();
            group.barrier().unwrap();
            reset_peak();
            group.barrier().unwrap();
            let run = |units: &Vec<Unit<Recomputed<Layer>>>| {
                units.iter().try_fold(x.clone(), |h, unit| unit.forward(&h))
            };
            let loss = model
                .forward(|units| run(units)?.sqr()?.mean_all())
                .unwrap();
            model.backward(&loss).unwrap();
            model.parameters().zero_grad();
            group.barrier().unwrap();
        }
        peak_bytes() - before
    });
    peaks.unwrap()[0] / RANKS
}

#[test]
fn a_step_holds_one_activation_of_each_layer_and_those_of_the_layer_that_it_computes() {
    let _alone = crate::alone();
    let kept = peak(false);
    assert!(
        kept > UNITS * KEPT * ACTIVATION,
        "{kept} bytes: the comparison is not one"
    );
    // The output of each unit, which its hook copies; and of one unit what it keeps, each with a
    // gradient, a sum of those, and what is added to it.
    let limit = (2 * UNITS + 4 * KEPT) * ACTIVATION;
    let recomputed = peak(true);
    assert!(
        recomputed < limit,
        "{recomputed} bytes, limit {limit}, {kept} where all are kept"
    );
}
