//! Measures how fast the optimizers' update loops go over memory: GB/s read and written on one
//! core.
#![expect(clippy::print_stdout, reason = "an example that reports to a person")]

use std::time::{Duration, Instant};

use fsdp_nn::algorithm::{
    AdagradOptions, AdamOptions, Algorithm, AlgorithmError, Float, SgdOptions, StateKind,
};
use half::{bf16, f16};

const ELEMENTS: usize = 1 << 22;

fn measure<T: Float>(algorithm: &Algorithm, value: fn(f32) -> T) -> Result<(), AlgorithmError> {
    let slices = algorithm
        .state_entries()
        .filter(|entry| entry.kind == StateKind::LikeParameter)
        .count();
    let wave = |scale: f32| {
        (0..ELEMENTS)
            .map(|i| value((i as f32).sin() * scale))
            .collect::<Vec<T>>()
    };
    let (mut param, grad) = (wave(1.0), wave(0.1));
    let mut state = vec![vec![value(0.0); ELEMENTS]; slices];
    let mut best = Duration::MAX;
    for step in 1..=10u8 {
        let mut state: Vec<&mut [T]> = state.iter_mut().map(Vec::as_mut_slice).collect();
        let start = Instant::now();
        algorithm.update(f32::from(step), step == 1, &mut param, &grad, &mut state)?;
        best = best.min(start.elapsed());
    }
    // The parameter and the state are read and written, the gradient is read.
    let bytes = ELEMENTS * size_of::<T>() * (3 + 2 * slices);
    let seconds = best.as_secs_f64();
    println!(
        "{:8} {slices} state slices, {:8}: {:6.2} GB/s, {:5.2} ns per element",
        algorithm.name(),
        T::DTYPE.torch_name(),
        bytes as f64 / seconds / 1e9,
        seconds * 1e9 / ELEMENTS as f64
    );
    Ok(())
}

fn main() -> Result<(), AlgorithmError> {
    let algorithms = [
        Algorithm::Sgd(SgdOptions::default()),
        Algorithm::Sgd(SgdOptions {
            momentum: 0.9,
            nesterov: true,
            weight_decay: 0.1,
            ..SgdOptions::default()
        }),
        Algorithm::Adam(AdamOptions {
            eps: 1e-4,
            ..AdamOptions::default()
        }),
        Algorithm::AdamW(AdamOptions {
            eps: 1e-4,
            ..AdamOptions::adamw()
        }),
        Algorithm::AdamW(AdamOptions {
            eps: 1e-4,
            amsgrad: true,
            ..AdamOptions::adamw()
        }),
        Algorithm::Adagrad(AdagradOptions {
            eps: 1e-4,
            ..AdagradOptions::default()
        }),
    ];
    for algorithm in &algorithms {
        measure::<f32>(algorithm, |value| value)?;
        measure::<f64>(algorithm, f64::from)?;
        measure::<bf16>(algorithm, bf16::from_f32)?;
        measure::<f16>(algorithm, f16::from_f32)?;
    }
    Ok(())
}
