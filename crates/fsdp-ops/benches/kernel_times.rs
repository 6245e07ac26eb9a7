//! The times of the operations on a GPU, at the sizes of a GPT with 86 million parameters, each in
//! a line. `cargo xtask gpu --build` packs this for a machine with a GPU; where there is a CUDA
//! toolkit too, `cargo bench --features cuda` runs it. With the argument `small` sizes are small.

#![expect(clippy::print_stdout, reason = "a program that reports to a person")]

use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor, Var};
use fsdp_ops::step::{self, Factor, Part, Rule, Update};
use fsdp_ops::{
    DropoutMasks, cross_entropy, dropout, embedding, gelu_erf, layer_norm, linear, linear_gelu_erf,
    packed_attention, rms_norm, softmax_last_dim,
};

/// The calls that are queued before the host waits for the GPU.
const CALLS: u32 = 10;
/// How often that is done. The shortest time counts.
const TURNS: usize = 5;

/// The sizes of a model.
struct Sizes {
    batch: usize,
    time: usize,
    heads: usize,
    hidden: usize,
    vocab: usize,
    /// The parameters that a step of an optimizer updates.
    parameters: usize,
}

const USUAL: Sizes = Sizes {
    batch: 8,
    time: 1024,
    heads: 12,
    hidden: 768,
    vocab: 50_304,
    parameters: 86 << 20,
};

const SMALL: Sizes = Sizes {
    batch: 2,
    time: 16,
    heads: 2,
    hidden: 32,
    vocab: 100,
    parameters: 1 << 14,
};

fn main() -> Result<()> {
    let is_small = std::env::args().any(|argument| argument == "small");
    let sizes = if is_small { SMALL } else { USUAL };
    let device = Device::new_cuda_with_stream(0)?;
    for dtype in [DType::BF16, DType::F32] {
        time_operations(&sizes, dtype, &device)?;
    }
    time_step(&sizes, &device)
}

/// Prints the times of the operations of a model.
fn time_operations(sizes: &Sizes, dtype: DType, device: &Device) -> Result<()> {
    let Sizes {
        batch,
        time,
        heads,
        hidden,
        vocab,
        ..
    } = *sizes;
    let rows = batch * time;
    let of_shape = |shape: &[usize]| -> Result<Tensor> {
        values(shape.iter().product(), device)?
            .reshape(shape)?
            .to_dtype(dtype)
    };
    let ids = Tensor::arange(0u32, rows as u32, device)?;
    let ids = (ids.to_dtype(DType::F32)? * (vocab as f64 / rows as f64))?.to_dtype(DType::U32)?;
    let masks = DropoutMasks::new(1, 2, 3).at("mlp");
    let x = of_shape(&[rows, hidden])?;
    let wide = of_shape(&[rows, 4 * hidden])?;
    let (gain, bias) = (of_shape(&[hidden])?, of_shape(&[4 * hidden])?);
    let (up, down) = (
        of_shape(&[4 * hidden, hidden])?,
        of_shape(&[hidden, 4 * hidden])?,
    );
    let scores = of_shape(&[rows, vocab])?;

    let of_x = std::slice::from_ref(&x);
    report("softmax", std::slice::from_ref(&wide), &|x| {
        softmax_last_dim(&x[0])
    })?;
    let norm = [x.clone(), gain.clone(), gain.clone()];
    report("layer_norm", &norm, &|x| {
        layer_norm(&x[0], &x[1], &x[2], 1e-5)
    })?;
    report("rms_norm", &norm[..2], &|x| rms_norm(&x[0], &x[1], 1e-5))?;
    report("gelu_erf", std::slice::from_ref(&wide), &|x| {
        gelu_erf(&x[0])
    })?;
    report("dropout", of_x, &|x| dropout(&x[0], 0.1, masks))?;
    report("linear", &[wide, down, gain], &|x| {
        linear(&x[0], &x[1], Some(&x[2]))
    })?;
    report("linear_gelu_erf", &[x, up, bias], &|x| {
        linear_gelu_erf(&x[0], &x[1], &x[2])
    })?;
    report(
        "packed_attention",
        &[of_shape(&[batch, time, 3 * hidden])?],
        &|x| packed_attention(&x[0], heads, true),
    )?;
    report("cross_entropy", &[scores], &|x| cross_entropy(&x[0], &ids))?;
    report("embedding", &[of_shape(&[vocab, hidden])?], &|x| {
        embedding(&ids, &x[0])
    })
}

/// Prints the times of an operation: of its forward, and of forward and backward together, in which
/// candle makes and adds the gradients.
fn report(
    name: &str,
    inputs: &[Tensor],
    operation: &dyn Fn(&[Tensor]) -> Result<Tensor>,
) -> Result<()> {
    let device = inputs[0].device();
    let forward = microseconds(device, &mut || operation(inputs).map(drop))?;
    let vars: Vec<Var> = inputs.iter().map(Var::from_tensor).collect::<Result<_>>()?;
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let both = microseconds(device, &mut || operation(&tensors)?.backward().map(drop))?;
    println!(
        "KERNEL {name} {} {:?}: forward {forward:.1} us, with the backward {both:.1} us",
        inputs[0].dtype().as_str(),
        inputs[0].dims(),
    );
    Ok(())
}

/// Prints the times of what a step does with all gradients and parameters.
fn time_step(sizes: &Sizes, device: &Device) -> Result<()> {
    const UNITS: usize = 12;
    let numel = sizes.parameters / UNITS;
    let grads: Vec<Tensor> = (0..UNITS)
        .map(|_| values(numel, device))
        .collect::<Result<_>>()?;
    let mut updates = Vec::with_capacity(UNITS);
    for grad in &grads {
        updates.push(Update {
            param: values(numel, device)?,
            grad: grad.clone(),
            state: vec![values(numel, device)?, values(numel, device)?.sqr()?],
        });
    }
    let halves: Vec<Part> = grads
        .iter()
        .map(|grad| Ok(Part::Elements(grad.to_dtype(DType::BF16)?)))
        .collect::<Result<_>>()?;
    let adam = Rule::Adam {
        maximize: false,
        weight_decay: 0.0,
        keep: 0.999,
        betas: (0.9, 0.999),
        eps: 1e-8,
        step_size: 1e-3,
        correction: 1.0,
    };
    let joined = microseconds(device, &mut || {
        step::join(&halves, DType::F32, device).map(drop)
    })?;
    let measured = microseconds(device, &mut || step::statistics(&grads).map(drop))?;
    let updated = microseconds(device, &mut || {
        step::update(&adam, &Factor::Known(1.0), &updates)
    })?;
    // The bytes that each reads and writes for an element.
    for (name, time, bytes) in [
        ("join", joined, 6),
        ("statistics", measured, 4),
        ("adam", updated, 28),
    ] {
        let speed = (bytes * UNITS * numel) as f64 / 1e3 / time;
        println!(
            "KERNEL {name} f32 [{}]: {time:.1} us, {speed:.0} GB/s",
            UNITS * numel
        );
    }
    Ok(())
}

/// Returns numbers between -1 and 1, which need no random generator.
fn values(count: usize, device: &Device) -> Result<Tensor> {
    let values: Vec<f32> = (0..count)
        .map(|index| (index % 1013) as f32 / 506.5 - 1.0)
        .collect();
    Tensor::from_vec(values, count, device)
}

/// Returns the microseconds that a call takes on a GPU if several are queued one after the other.
fn microseconds(device: &Device, call: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
    // The first call loads the kernels.
    call()?;
    let mut best = f64::INFINITY;
    for _ in 0..TURNS {
        device.synchronize()?;
        let start = Instant::now();
        for _ in 0..CALLS {
            call()?;
        }
        device.synchronize()?;
        best = best.min(start.elapsed().as_secs_f64() * 1e6 / f64::from(CALLS));
    }
    Ok(best)
}
