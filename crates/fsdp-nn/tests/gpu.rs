//! Operations of `fsdp_ops` in the graph of a sharded model, on a GPU. `cargo xtask gpu` runs this
//! where a GPU is.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::Init;
use fsdp_comm::run_local;
use fsdp_nn::algorithm::{AdafactorOptions, AdamOptions};
use fsdp_nn::{Algorithm, FsdpConfig, FullyShardedDataParallel, Optimizer};
use fsdp_ops::{add, linear, linear_add};

/// The parameters, with their shapes.
const PARAMETERS: [(&str, &[usize]); 5] = [
    ("first", &[4, 4]),
    ("second", &[4, 4]),
    ("bias", &[4]),
    ("third", &[2, 2]),
    ("positions", &[2, 2]),
];

/// Computes sums with outputs of layers: of views that are not contiguous, of a weight that is
/// transposed, of a tensor with itself, and of one that lacks the first dimension.
fn output(parameters: &[Tensor], x: &Tensor) -> Result<Tensor> {
    let [first, second, bias, third, positions] = parameters else {
        candle_core::bail!("a model of five parameters");
    };
    let first = linear(x, first, None)?;
    let second = linear_add(&first, &second.t()?, Some(bias), &first)?;
    if x.elem_count() == 0 {
        // On a GPU candle makes no copy of a view without elements.
        return add(&add(&second, &second)?, bias);
    }
    let turned = second.reshape((x.dim(0)?, 2, 2))?.transpose(1, 2)?;
    let third = linear_add(&turned, third, None, &turned)?;
    add(&add(&third, &third)?, positions)
}

/// Returns the output for an input of so many rows on a device, and the gradients of all
/// parameters if there are rows.
fn run(device: &Device, rows: usize) -> Vec<Tensor> {
    let outcomes = run_local(1, |group| {
        let config = FsdpConfig {
            device: device.clone(),
            ..FsdpConfig::default()
        };
        let model = FullyShardedDataParallel::new(group, config, |scope| {
            let parameters = PARAMETERS.iter();
            parameters
                .map(|(name, shape)| {
                    let normal = Init::Randn {
                        mean: 0.0,
                        stdev: 0.5,
                    };
                    scope.vb().get_with_hints(*shape, name, normal)
                })
                .collect::<Result<Vec<Tensor>>>()
        })
        .unwrap();
        let x = Tensor::arange(0f32, 20., &Device::Cpu).unwrap();
        let x = (x.reshape((5, 4)).unwrap() / 20.).unwrap();
        let x = x.narrow(0, 0, rows).unwrap().to_device(device).unwrap();
        let y = model.forward(|parameters| output(parameters, &x)).unwrap();
        let mut results = vec![y.clone()];
        if rows > 0 {
            model
                .backward(&y.sqr().unwrap().sum_all().unwrap())
                .unwrap();
            results.extend(PARAMETERS.iter().map(|(name, _)| {
                let gradient = model.parameters().gradient(name).unwrap();
                gradient.unwrap().to_whole().unwrap()
            }));
        }
        // Another thread would have to wait for the GPU's work on behalf of this one.
        let on_host = |result: &Tensor| result.to_device(&Device::Cpu).unwrap();
        results.iter().map(on_host).collect::<Vec<Tensor>>()
    });
    outcomes.unwrap().remove(0)
}

/// Compares `add` and `linear_add` on a GPU with the CPU, in a model's forward and backward. An
/// input without rows is one of the cases, because no kernel can be launched for it.
#[test]
fn sums_in_the_graph_of_a_model_are_those_of_the_cpu() {
    let gpu = Device::new_cuda(0).unwrap();
    for rows in [0, 1, 5] {
        let (found, expected) = (run(&gpu, rows), run(&Device::Cpu, rows));
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found.dims(), expected.dims(), "{rows} rows");
            let values = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            for (found, expected) in values(found).iter().zip(values(expected)) {
                let difference = (found - expected).abs();
                assert!(
                    difference <= 1e-5 * expected.abs().max(1.0),
                    "{rows} rows: {found} for {expected}"
                );
            }
        }
    }
}

/// Returns which elements of a parameter of `f64`, whose updates are composed of candle's
/// operations on GPUs too, are finite after each of two steps. Of the first gradient one element is
/// NaN.
fn finite_after_nan(device: &Device, algorithm: &Algorithm) -> Vec<Vec<bool>> {
    let outcomes = run_local(1, |group| {
        let config = FsdpConfig {
            device: device.clone(),
            dtype: DType::F64,
            ..FsdpConfig::default()
        };
        let model = FullyShardedDataParallel::new(group, config, |scope| {
            let init = Init::Const(0.5);
            scope.vb().get_with_hints((4, 3), "weight", init)
        })
        .unwrap();
        let mut optimizer = Optimizer::new(model.parameters(), algorithm.clone()).unwrap();
        [f64::NAN, 0.1].map(|element| {
            let mut factors = vec![0.25; 12];
            factors[4] = element;
            let factors = Tensor::from_vec(factors, (4, 3), device).unwrap();
            let loss = model.forward(|weight| (weight * &factors)?.sum_all());
            model.backward(&loss.unwrap()).unwrap();
            optimizer.step().unwrap();
            model.parameters().zero_grad();
            let value = model.parameters().parameter("weight").unwrap();
            let value = value.to_whole().unwrap().to_device(&Device::Cpu).unwrap();
            let elements = value.flatten_all().unwrap().to_vec1::<f64>().unwrap();
            elements.into_iter().map(f64::is_finite).collect()
        })
    });
    outcomes.unwrap().remove(0).to_vec()
}

#[test]
fn a_gradient_that_is_nan_reaches_what_it_reaches_on_the_cpu() {
    let gpu = Device::new_cuda(0).unwrap();
    let amsgrad = AdamOptions {
        amsgrad: true,
        ..AdamOptions::adamw()
    };
    for algorithm in [
        Algorithm::Adafactor(AdafactorOptions::default()),
        Algorithm::AdamW(amsgrad),
    ] {
        let expected = finite_after_nan(&Device::Cpu, &algorithm);
        assert!(expected[0].contains(&false));
        assert_eq!(
            finite_after_nan(&gpu, &algorithm),
            expected,
            "{algorithm:?}"
        );
    }
}
