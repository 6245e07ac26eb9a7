//! The losses of a training with each feature are those of torch's FSDP2, which `data/features.py` has recorded.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Linear, linear};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_flat::ShardedTensor;
use fsdp_nn::algorithm::AdamOptions;
use fsdp_nn::{
    Algorithm, AveragedModel, BackwardPrefetch, ClipOptions, Decay, FsdpConfig, FullyShardedDataParallel, GradNorm,
    GradScaler, GradScalerOptions, MixedPrecision, OnNonFinite, Optimizer, Recomputed, Schedule, ShardingStrategy,
    Unit,
};
use serde_json::Value;

const STEPS: u64 = 8;
const SIZES: [(usize, usize); 3] = [(6, 8), (8, 8), (8, 6)];

type Model = FullyShardedDataParallel<Vec<Unit<Recomputed<Linear>>>>;

fn torch(feature: &str) -> Value {
    let found: Value = serde_json::from_str(include_str!("data/features.json")).unwrap();
    found[feature].clone()
}

/// The numbers of `features.py`.
fn tensor(seed: u32, shape: &[usize]) -> Tensor {
    let mut seed = seed;
    let numbers = (0..shape.iter().product()).map(|_| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (f64::from(seed >> 8) / f64::from(1 << 23) - 1.0) as f32
    });
    Tensor::from_vec(numbers.collect(), shape, &Device::Cpu).unwrap()
}

fn model(group: &ProcessGroup, feature: &str, config: FsdpConfig) -> Model {
    let config = match feature {
        "no reshard" => FsdpConfig { strategy: ShardingStrategy::ShardGradOp, ..config },
        "frozen" => FsdpConfig { requires_grad: Arc::new(|fqn| fqn != "1.weight"), ..config },
        "mixed precision" => {
            let (param, reduce) = (Some(DType::BF16), Some(DType::F32));
            let mixed_precision = MixedPrecision { param, reduce, cast_inputs: true, ..MixedPrecision::default() };
            FsdpConfig { mixed_precision, ..config }
        }
        _ => config,
    };
    let model = FullyShardedDataParallel::new(group.clone(), config, |scope| {
        let layer = |(index, (inputs, outputs)): (usize, &(usize, usize))| {
            let layer = scope.pp(index);
            layer.unit(|scope| Ok(Recomputed::when(feature == "checkpoint", linear(*inputs, *outputs, scope.vb())?)))
        };
        SIZES.iter().enumerate().map(layer).collect()
    })
    .unwrap();
    for (index, (inputs, outputs)) in SIZES.into_iter().enumerate() {
        let number = u32::try_from(index).unwrap();
        let set = |name: &str, seed: u32, shape: &[usize]| {
            let value = (tensor(seed + number, shape) * 0.5).unwrap();
            model.parameters().set_parameter(&format!("{index}.{name}"), &ShardedTensor::from_whole(&value)).unwrap();
        };
        set("weight", 10, &[outputs, inputs]);
        set("bias", 20, &[outputs]);
    }
    model
}

/// The loss of a batch.
fn loss(model: &Model, seed: u32, parts: f64) -> Tensor {
    let (x, y) = (tensor(seed, &[4, 6]), tensor(seed + 5000, &[4, 6]));
    let loss = model.forward(|layers| {
        let output = layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x)?.tanh())?;
        (output.to_dtype(DType::F32)? - &y)?.sqr()?.mean_all()? / parts
    });
    loss.unwrap()
}

fn scalar(loss: &Tensor) -> f64 {
    loss.to_scalar::<f32>().unwrap().into()
}

/// Losses of this rank, and what else the feature tells in each step.
fn train(group: &ProcessGroup, feature: &str, config: FsdpConfig) -> (Vec<f64>, Vec<f64>) {
    let model = model(group, feature, config);
    let parameters = model.parameters();
    let adamw = Algorithm::AdamW(AdamOptions { lr: 0.01, ..AdamOptions::adamw() });
    let mut optimizer = Optimizer::new(parameters, adamw).unwrap();
    let decays = [("constant", 3, Decay::Constant), ("cosine", 2, Decay::Cosine), ("linear", 2, Decay::Linear)];
    let schedule = decays.into_iter().find(|(name, ..)| *name == feature);
    let schedule = schedule.map(|(_, warmup, decay)| Schedule { decay, warmup, steps: STEPS });
    let options = GradScalerOptions { init_scale: 1024.0, growth_interval: 2, ..GradScalerOptions::default() };
    let mut scaler = (feature == "scaler").then(|| GradScaler::new(options).unwrap());
    let mut average = (feature == "average").then(|| AveragedModel::new(parameters, 0.75).unwrap());
    let rank = u32::try_from(group.rank()).unwrap();
    let (mut losses, mut told) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        if let Some(schedule) = &schedule {
            schedule.apply(&mut optimizer, step).unwrap();
        }
        let parts = if feature == "accumulate" { 2 } else { 1 };
        let mut sum = 0.0;
        for part in 0..parts {
            model.set_requires_gradient_sync(part + 1 == parts);
            let seed = 1000 + u32::try_from(step).unwrap() * 16 + rank * 4 + part;
            let loss = loss(&model, seed, parts.into());
            sum += scalar(&loss);
            let scaled = match &scaler {
                Some(scaler) if step == 4 && rank == 1 => scaler.scale(&(loss * f64::INFINITY).unwrap()).unwrap(),
                Some(scaler) => scaler.scale(&loss).unwrap(),
                None => loss,
            };
            model.backward(&scaled).unwrap();
        }
        let kind = match feature {
            "clip" => Some(GradNorm::L2),
            "clip by the largest" => Some(GradNorm::Infinity),
            _ => None,
        };
        if let Some(norm) = kind {
            let options = ClipOptions { norm, on_non_finite: OnNonFinite::Error };
            told.push(parameters.clip_grad_norm_with(0.05, options).unwrap());
        }
        match &mut scaler {
            Some(scaler) => {
                scaler.step(&mut optimizer).unwrap();
                scaler.update().unwrap();
                told.push(scaler.get_scale());
            }
            None => optimizer.step().unwrap(),
        }
        if let Some(schedule) = &schedule {
            // torch tells the rate of the next step.
            told.push(0.01 * schedule.factor(step + 1));
        }
        if let Some(average) = &mut average {
            average.update().unwrap();
        }
        parameters.zero_grad();
        losses.push(sum);
    }
    if let Some(average) = &mut average {
        average.swap().unwrap();
        told.push(scalar(&loss(&model, 9000 + rank, 1.0)));
    }
    (losses, told)
}

fn assert_near(found: &[f64], expected: &Value, limit: f64, what: &str) {
    let expected: Vec<f64> = serde_json::from_value(expected.clone()).unwrap();
    assert_eq!(found.len(), expected.len(), "{what}");
    for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert!((found - expected).abs() <= limit, "{what} in step {step}: {found}, torch {expected}");
    }
}

/// Compares the losses with torch's.
fn check(feature: &str, limit: f64, config: fn() -> FsdpConfig) {
    let expected = torch(feature);
    let ranks = run_local(2, |group| train(&group, feature, config())).unwrap();
    for (rank, (losses, told)) in ranks.iter().enumerate() {
        assert_near(losses, &expected["losses"][rank], limit, &format!("{feature} on rank {rank}"));
        assert_near(told, &expected["told"][rank], limit, &format!("what {feature} tells on rank {rank}"));
    }
}

#[test]
fn losses_are_those_of_torch_with_each_feature() {
    for feature in [
        "none",
        "no reshard",
        "accumulate",
        "clip",
        "clip by the largest",
        "frozen",
        "checkpoint",
        "constant",
        "cosine",
        "linear",
        "scaler",
        "average",
    ] {
        check(feature, 1e-5, FsdpConfig::default);
    }
}

#[test]
fn losses_of_torch_come_with_every_way_to_gather() {
    for feature in ["none", "accumulate", "checkpoint", "frozen"] {
        check(feature, 1e-5, || FsdpConfig {
            backward_prefetch: Some(BackwardPrefetch::Pre),
            forward_prefetch: true,
            ..FsdpConfig::default()
        });
        check(feature, 1e-5, || FsdpConfig { strategy: ShardingStrategy::NoShard, ..FsdpConfig::default() });
        check(feature, 1e-5, || FsdpConfig { cpu_offload: true, ..FsdpConfig::default() });
    }
}

#[test]
fn mixed_precision_is_as_far_from_f32_as_torchs() {
    // Sums of products in bf16 are rounded otherwise, by half a unit in the last of 8 bits.
    check("mixed precision", 2e-3, FsdpConfig::default);
}
