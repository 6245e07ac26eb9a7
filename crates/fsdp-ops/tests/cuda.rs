//! Operations on a GPU against the same on the CPU in f64: odd sizes, strides, empty tensors, and
//! all dtypes, forward and backward. `cargo xtask gpu` runs them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "other test programs ask for the rest")]
#[path = "../../fsdp-comm/tests/stand_in/mod.rs"]
mod stand_in;

use candle_core::{D, DType, Device, IndexOp as _, Result, Tensor, Var};
use fsdp_ops::{
    DropoutMasks, cross_entropy, dropout, embedding, gelu, gelu_erf, layer_norm, linear,
    linear_add, linear_gelu_erf, packed_attention, rms_norm, rope, rope_i,
    scaled_dot_product_attention, softmax_last_dim,
};

/// An operation of several tensors.
type Operation = dyn Fn(&[Tensor]) -> Result<Tensor>;

/// Returns numbers that need no random generator, from -2 to 2.
fn values(shape: &[usize], seed: usize) -> Tensor {
    let count: usize = shape.iter().product();
    let value = |index: usize| 2.0 * (seed as f64 + 1.7 * index as f64).sin();
    let values: Vec<f64> = (0..count).map(value).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// Returns the output of an operation and the gradients of its inputs, all as f64 on the CPU.
fn run(operation: &Operation, inputs: &[Tensor], weight: &Tensor) -> Result<(Vec<Tensor>, DType)> {
    let vars: Vec<Var> = inputs.iter().map(Var::from_tensor).collect::<Result<_>>()?;
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let output = operation(&tensors)?;
    let weighted = (&output * weight)?;
    // candle cannot sum a scalar on GPUs.
    let gradients = match weighted.rank() {
        0 => weighted.backward()?,
        _ => weighted.sum_all()?.backward()?,
    };
    let mut results = vec![output.clone()];
    for var in &vars {
        results.push(gradients.get(var).expect("each has a gradient").clone());
    }
    let on_host = |result: &Tensor| result.to_device(&Device::Cpu)?.to_dtype(DType::F64);
    Ok((
        results.iter().map(on_host).collect::<Result<_>>()?,
        output.dtype(),
    ))
}

/// Compares an operation on a GPU with the same on the CPU in f64, for inputs of these shapes.
fn compare(name: &str, shapes: &[&[usize]], operation: &Operation) {
    let gpu = Device::new_cuda(0).unwrap();
    for (dtype, tolerance) in [
        // Composed of candle's operations, whose derivative of GELU has six digits.
        (DType::F64, 1e-6),
        (DType::F32, 1e-5),
        (DType::F16, 1e-2),
        (DType::BF16, 5e-2),
    ] {
        let inputs: Vec<Tensor> = shapes
            .iter()
            .enumerate()
            .map(|(seed, shape)| values(shape, seed).to_dtype(dtype).unwrap())
            .collect();
        let exact: Vec<Tensor> = inputs
            .iter()
            .map(|input| input.to_dtype(DType::F64).unwrap())
            .collect();
        let dims = operation(&exact).unwrap().dims().to_vec();
        let weight = values(&dims, 9).to_dtype(dtype).unwrap();
        let exact_weight = weight.to_dtype(DType::F64).unwrap();
        let (expected, _) = run(operation, &exact, &exact_weight).unwrap();
        let inputs: Vec<Tensor> = inputs
            .iter()
            .map(|input| input.to_device(&gpu).unwrap())
            .collect();
        let weight = weight.to_device(&gpu).unwrap();
        let (found, found_dtype) = run(operation, &inputs, &weight).unwrap();
        assert_eq!(found_dtype, dtype, "{name}");
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let what = format!("{name} of {shapes:?}, {dtype:?}, result {index}");
            let factor = if index == 0 { 1.0 } else { 4.0 };
            assert_close(&what, found, expected, factor * tolerance);
        }
    }
}

/// Fails unless all values are within `tolerance` of the expected ones, relative to the largest.
fn assert_close(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(found.dims(), expected.dims(), "{what}");
    let values = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let (found, expected) = (values(found), values(expected));
    let largest = expected
        .iter()
        .fold(1e-3f64, |largest, value| largest.max(value.abs()));
    for (found, expected) in found.iter().zip(&expected) {
        assert!(
            (found - expected).abs() <= tolerance * largest,
            "{what}: {found} is not {expected} ({largest} is the largest)"
        );
    }
}

#[test]
fn rows_are_those_of_the_cpu() {
    for shape in [&[5, 7][..], &[2, 3, 64], &[9, 33], &[2, 1200], &[1, 9000]] {
        let width = shape[shape.len() - 1];
        compare("softmax", &[shape], &|x| softmax_last_dim(&x[0]));
        compare("layer_norm", &[shape, &[width], &[width]], &|x| {
            layer_norm(&x[0], &x[1], &x[2], 1e-5)
        });
        compare("rms_norm", &[shape, &[width]], &|x| {
            rms_norm(&x[0], &x[1], 1e-3)
        });
        compare("gelu", &[shape], &|x| gelu(&x[0]));
        compare("gelu_erf", &[shape], &|x| gelu_erf(&x[0]));
        let masks = DropoutMasks::new(3, 5, 8).at("mlp");
        compare("dropout", &[shape], &move |x| dropout(&x[0], 0.3, masks));
    }
}

#[test]
fn strided_tensors_are_those_of_the_cpu() {
    compare("softmax", &[&[9, 40]], &|x| softmax_last_dim(&x[0].t()?));
    compare("softmax", &[&[9, 40]], &|x| {
        softmax_last_dim(&x[0].narrow(1, 3, 30)?)
    });
    compare("rms_norm", &[&[40, 9], &[40]], &|x| {
        rms_norm(&x[0].t()?, &x[1], 1e-3)
    });
    compare("linear", &[&[7, 9], &[9, 33], &[33]], &|x| {
        linear(&x[0], &x[1].t()?, Some(&x[2]))
    });
    compare("linear", &[&[7, 9], &[33, 20]], &|x| {
        linear(&x[0], &x[1].narrow(1, 4, 9)?, None)
    });
    // Heads of keys and values that several heads of queries share, and positions before heads.
    compare("attention", &[&[2, 5, 4, 16], &[2, 2, 6, 16]], &|x| {
        let query = x[0].transpose(1, 2)?;
        let key = x[1].unsqueeze(2)?.expand((2, 2, 2, 6, 16))?;
        let key = key.reshape((2, 4, 6, 16))?;
        scaled_dot_product_attention(&query, &key, &key, false, 0.25)?.transpose(1, 2)
    });
}

#[test]
fn layers_are_those_of_the_cpu() {
    for (x, outputs) in [
        (&[2, 3, 4][..], 5),
        (&[40, 33], 65),
        (&[64, 16], 264),
        (&[7], 2),
    ] {
        let shapes = [x, &[outputs, x[x.len() - 1]], &[outputs]];
        compare("linear", &shapes, &|x| linear(&x[0], &x[1], Some(&x[2])));
        compare("linear", &shapes[..2], &|x| linear(&x[0], &x[1], None));
        let residual = [&x[..x.len() - 1], &[outputs]].concat();
        let with_residual = [shapes[0], shapes[1], shapes[2], &residual];
        compare("linear_add", &with_residual, &|x| {
            linear_add(&x[0], &x[1], Some(&x[2]), &x[3])
        });
        compare("linear_gelu_erf", &shapes, &|x| {
            linear_gelu_erf(&x[0], &x[1], &x[2])
        });
    }
}

#[test]
fn attention_is_that_of_the_cpu() {
    for causal in [false, true] {
        for (query, columns, value_width) in [
            ([2, 3, 5, 4], 5, 4),
            ([1, 2, 70, 8], 130, 3),
            ([1, 1, 40, 100], 33, 128),
            // Wider than there are kernels for.
            ([1, 1, 5, 136], 6, 8),
        ] {
            let [batch, heads, _, width] = query;
            let shapes = [
                &query[..],
                &[batch, heads, columns, width],
                &[batch, heads, columns, value_width],
            ];
            compare("attention", &shapes, &move |x| {
                scaled_dot_product_attention(&x[0], &x[1], &x[2], causal, 1.0 / width as f64)
            });
        }
        for (batch, time, heads, width) in [(2, 5, 3, 4), (1, 70, 2, 8), (1, 1, 1, 1)] {
            let shape = [batch, time, 3 * heads * width];
            compare("packed_attention", &[&shape], &move |x| {
                packed_attention(&x[0], heads, causal)
            });
        }
    }
}

#[test]
fn rotations_are_those_of_the_cpu() {
    for (shape, angles) in [
        ([2, 3, 4, 6], &[4, 3][..]),
        ([2, 3, 4, 32], &[2, 4, 16]),
        ([1, 1, 1, 2], &[1, 1]),
    ] {
        let angles = values(angles, 5);
        for (name, rotate) in [
            ("rope", rope as fn(&Tensor, &Tensor, &Tensor) -> _),
            ("rope_i", rope_i),
        ] {
            let angles = angles.clone();
            let rotate = move |x: &[Tensor]| {
                let of_x = |angles: Tensor| angles.to_dtype(x[0].dtype())?.to_device(x[0].device());
                rotate(&x[0], &of_x(angles.cos()?)?, &of_x(angles.sin()?)?)
            };
            compare(name, &[&shape], &rotate);
        }
    }
}

#[test]
fn cross_entropy_is_that_of_the_cpu() {
    for (rows, classes) in [(4, 5), (90, 257), (1, 1), (3, 5003)] {
        for dtype in [DType::U32, DType::I64] {
            let targets: Vec<u32> = (0..rows as u32)
                .map(|row| row * 7 % classes as u32)
                .collect();
            let targets = Tensor::new(targets, &Device::Cpu).unwrap();
            let targets = targets.to_dtype(dtype).unwrap();
            compare("cross_entropy", &[&[rows, classes]], &move |x| {
                cross_entropy(&x[0], &targets.to_device(x[0].device())?)
            });
        }
    }
}

#[test]
fn embedding_is_that_of_the_cpu() {
    for (count, width, rows) in [(5, 7, 9), (300, 8, 200), (3, 33, 70)] {
        for dtype in [DType::U32, DType::I64] {
            let ids = (0..rows).map(|row| (row * row / 40 % count) as u32);
            let ids = Tensor::new(ids.collect::<Vec<_>>(), &Device::Cpu).unwrap();
            let ids = ids.to_dtype(dtype).unwrap();
            compare("embedding", &[&[count, width]], &move |x| {
                embedding(&ids.to_device(x[0].device())?, &x[0])
            });
        }
    }
}

/// candle cannot make tensors without elements on GPUs, but parts of tensors may have none.
#[test]
fn tensors_without_elements_come_out_empty() {
    let gpu = Device::new_cuda(0).unwrap();
    let nothing = |shape: &[usize]| {
        let x = Tensor::ones(shape, DType::F32, &gpu).unwrap();
        x.narrow(0, 0, 0).unwrap()
    };
    let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &gpu).unwrap();
    let x = nothing(&[2, 12]);
    let heads = nothing(&[2, 3, 4, 8]);
    let angles = ones(&[4, 4]);
    for y in [
        softmax_last_dim(&x),
        rms_norm(&x, &ones(&[12]), 1e-5),
        layer_norm(&x, &ones(&[12]), &ones(&[12]), 1e-5),
        gelu_erf(&x),
        dropout(&x, 0.5, DropoutMasks::new(1, 2, 3)),
        linear(&x, &ones(&[12, 12]), Some(&ones(&[12]))),
    ] {
        assert_eq!(y.unwrap().dims(), [0, 12]);
    }
    let qkv = nothing(&[2, 5, 12]);
    let y = packed_attention(&qkv, 2, true).unwrap();
    assert_eq!(y.dims(), [0, 5, 4]);
    for y in [
        scaled_dot_product_attention(&heads, &heads, &heads, true, 0.5),
        rope(&heads, &angles, &angles),
    ] {
        assert_eq!(y.unwrap().dims(), [0, 3, 4, 8]);
    }
}

#[test]
fn a_target_that_is_no_class_makes_loss_and_gradient_nan() {
    let gpu = Device::new_cuda(0).unwrap();
    let scores = values(&[3, 4], 0).to_dtype(DType::F32).unwrap();
    let scores = Var::from_tensor(&scores.to_device(&gpu).unwrap()).unwrap();
    for (target, is_class) in [(3, true), (4, false), (-1, false), (1 << 32, false)] {
        let targets = Tensor::new(&[0i64, target, 2], &gpu).unwrap();
        let loss = cross_entropy(&scores, &targets).unwrap();
        let gradients = loss.backward().unwrap();
        let loss = loss.to_scalar::<f32>().unwrap();
        assert_eq!(loss.is_finite(), is_class, "{target}");
        let rows = gradients.get(&scores).unwrap().to_vec2::<f32>().unwrap();
        assert!(rows[1].iter().all(|x| x.is_nan() != is_class), "{target}");
        // Those of the other rows stay what they are.
        assert!(
            [&rows[0][..], &rows[2]]
                .concat()
                .iter()
                .all(|x| x.is_finite())
        );
    }
}

#[test]
fn results_have_the_same_bits_every_time() {
    let gpu = Device::new_cuda(0).unwrap();
    let qkv = values(&[2, 70, 3 * 32], 0).to_dtype(DType::BF16).unwrap();
    let qkv = qkv.to_device(&gpu).unwrap();
    let ones = Tensor::ones(32, DType::BF16, &gpu).unwrap();
    let operation = |x: &[Tensor]| {
        let y = packed_attention(&x[0], 2, true)?;
        layer_norm(&y, &x[1], &x[1], 1e-5)?.sum(D::Minus1)
    };
    let weight = Tensor::ones((2, 70), DType::BF16, &gpu).unwrap();
    let once = || {
        let (results, _) = run(&operation, &[qkv.clone(), ones.clone()], &weight).unwrap();
        let values = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f64>().unwrap();
        results.iter().map(values).collect::<Vec<_>>()
    };
    assert_eq!(once(), once());
}

/// Runs tests as on a GPU that is older than the kernels, where operations are composed of
/// candle's. Only the stand-in can be such a GPU.
#[test]
fn older_gpus_compute_the_same() {
    let tests = [
        "attention_is_that_of_the_cpu",
        "cross_entropy_is_that_of_the_cpu",
        "embedding_is_that_of_the_cpu",
        "layers_are_those_of_the_cpu",
        "rotations_are_those_of_the_cpu",
        "strided_tensors_are_those_of_the_cpu",
    ];
    let program = std::env::current_exe().unwrap();
    let status = std::process::Command::new(program)
        .args(tests)
        .args(["--exact", "--test-threads=1"])
        .env("CUDA_STAND_IN_CAPABILITY", "75")
        .status();
    assert!(status.unwrap().success());
}

/// How often something has happened on the stand-in for a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Counts {
    kernels: u64,
    copies: u64,
    waits: u64,
}

/// Returns the counts so far; `None` on a real GPU, which does not count.
fn counts() -> Option<Counts> {
    let demands = stand_in::counts()?.process;
    Some(Counts {
        kernels: demands.kernels,
        copies: demands.copies_up + demands.copies_down,
        waits: demands.host_waits,
    })
}

/// Counts the launches, the copies and the waits of an operation: of its forward, and of its
/// backward.
fn counted(operation: &Operation, inputs: &[Tensor]) -> Option<[Counts; 2]> {
    let vars: Vec<Var> = inputs
        .iter()
        .map(|x| Var::from_tensor(x).unwrap())
        .collect();
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let start = counts()?;
    let output = operation(&tensors).unwrap();
    let middle = counts()?;
    output.backward().unwrap();
    let end = counts()?;
    let difference = |after: Counts, before: Counts| Counts {
        kernels: after.kernels - before.kernels,
        copies: after.copies - before.copies,
        waits: after.waits - before.waits,
    };
    Some([difference(middle, start), difference(end, middle)])
}

/// The launches, matrix products among them. Of a backward, candle's own are one for the first
/// gradient and one that adds for each input.
#[test]
fn an_operation_is_few_launches_without_copies_or_waits() {
    // Other tests would be counted too.
    if std::env::var_os("COUNTED_ALONE").is_none() {
        let program = std::env::current_exe().unwrap();
        let status = std::process::Command::new(program)
            .args([
                "an_operation_is_few_launches_without_copies_or_waits",
                "--exact",
            ])
            .env("COUNTED_ALONE", "1")
            .status();
        assert!(status.unwrap().success());
        return;
    }
    let gpu = Device::new_cuda(0).unwrap();
    let ones = |shape: &[usize]| Tensor::ones(shape, DType::BF16, &gpu).unwrap();
    let case = |name, shapes: &[&[usize]], operation: &Operation, kernels: [u64; 2]| {
        let inputs: Vec<Tensor> = shapes.iter().map(|shape| ones(shape)).collect();
        let Some(found) = counted(operation, &inputs) else {
            return;
        };
        let candles = 1 + inputs.len() as u64;
        let expected = [kernels[0], kernels[1] + candles].map(|kernels| Counts {
            kernels,
            copies: 0,
            waits: 0,
        });
        assert_eq!(found, expected, "{name}");
    };
    let (x, norm, layer) = (&[6, 40][..], &[40][..], &[24, 40][..]);
    case("softmax", &[x], &|x| softmax_last_dim(&x[0]), [1, 1]);
    let layer_norm = |x: &[Tensor]| layer_norm(&x[0], &x[1], &x[2], 1e-5);
    case("layer_norm", &[x, norm, norm], &layer_norm, [1, 4]);
    let rms_norm = |x: &[Tensor]| rms_norm(&x[0], &x[1], 1e-5);
    case("rms_norm", &[x, norm], &rms_norm, [1, 2]);
    let linear = |x: &[Tensor]| linear(&x[0], &x[1], Some(&x[2]));
    case("linear", &[x, layer, &[24]], &linear, [2, 4]);
    let linear_gelu = |x: &[Tensor]| linear_gelu_erf(&x[0], &x[1], &x[2]);
    case("linear_gelu_erf", &[x, layer, &[24]], &linear_gelu, [2, 4]);
    let attention = |x: &[Tensor]| packed_attention(&x[0], 2, true);
    case("packed_attention", &[&[2, 6, 48]], &attention, [1, 3]);
    let embedding = |x: &[Tensor]| {
        let ids = Tensor::zeros((2, 9), DType::U32, x[0].device())?;
        embedding(&ids, &x[0])
    };
    case("embedding", &[x], &embedding, [1, 3]);
    let cross_entropy = |x: &[Tensor]| {
        let targets = Tensor::zeros(x[0].dim(0)?, DType::U32, x[0].device())?;
        cross_entropy(&x[0], &targets)
    };
    case("cross_entropy", &[x], &cross_entropy, [2, 1]);
}

/// Kernels of one stream could read a tensor of another before it has been written.
#[test]
fn tensors_of_other_streams_and_gpus_are_refused() {
    let gpu = Device::new_cuda_with_stream(0).unwrap();
    let mut others = vec![
        Device::new_cuda_with_stream(0).unwrap(),
        Device::new_cuda(0).unwrap(),
    ];
    // Where there is a second one.
    others.extend(Device::new_cuda(1).ok());
    let on = |device: &Device, x: Tensor| x.to_dtype(DType::F32)?.to_device(device);
    let table = Var::from_tensor(&on(&gpu, values(&[6, 8], 1)).unwrap()).unwrap();
    let weight = on(&gpu, values(&[8, 8], 2)).unwrap();
    for other in &others {
        let ids = Tensor::zeros((2, 9), DType::U32, other).unwrap();
        let x = on(other, values(&[6, 8], 3)).unwrap();
        let results = [
            embedding(&ids, &table),
            cross_entropy(&table, &ids.i((0, ..6)).unwrap()),
            linear(&x, &weight, None),
            linear_add(&table, &weight, Some(&weight.i(0).unwrap()), &x),
            rms_norm(&x, &weight.i(0).unwrap(), 1e-5),
            rope(
                &table.reshape((1, 1, 6, 8)).unwrap(),
                &x.narrow(1, 0, 4).unwrap(),
                &x.narrow(1, 0, 4).unwrap(),
            ),
        ];
        for (index, result) in results.into_iter().enumerate() {
            let error = result.unwrap_err().to_string();
            // candle finds some of those of other GPUs.
            let is_found = error.contains("one `Device`") || error.contains("device mismatch");
            assert!(is_found, "{index}: {error}");
        }
    }
    // Clones are the same device.
    let ids = Tensor::zeros((2, 9), DType::U32, &gpu.clone()).unwrap();
    embedding(&ids, &table).unwrap();
}
