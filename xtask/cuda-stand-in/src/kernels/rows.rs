//! Kernels on the rows of a tensor: softmax, norms, and rotary embeddings.

use super::arguments::{Arguments, Grid, Kernel, by_type};
use super::element::Element;
use crate::machine::elements;
use crate::memory::Address;
use crate::queue::Work;

/// Returns the kernel of an operation for a type.
pub(super) fn find(root: &str, dtype: &str) -> Option<Kernel> {
    match root {
        "softmax" => by_type!(dtype, softmax),
        "rmsnorm" => by_type!(dtype, rms_norm),
        "layernorm" => by_type!(dtype, layer_norm),
        "rope_i" => by_type!(dtype, rope_interleaved),
        "rope" => by_type!(dtype, rope),
        "rope_thd" => by_type!(dtype, rope_thd),
        _ => None,
    }
}

/// Writes `change` of each row of `columns` elements.
fn rows<T: Element>(
    (from, to): (Address, Address),
    (count, columns): (usize, usize),
    change: impl Fn(&mut [f64]),
) -> Result<(), String> {
    let from = elements::<T>(from)?;
    let to = elements::<T>(to)?;
    let mut row = Vec::with_capacity(columns);
    for start in (0..count).map(|row| row * columns) {
        row.clear();
        row.extend((start..start + columns).map(|k| from.get(k).to_f64()));
        change(&mut row);
        (start..)
            .zip(&row)
            .for_each(|(k, &x)| to.set(k, T::from_f64(x)));
    }
    Ok(())
}

fn softmax<T: Element>(arguments: &mut Arguments, grid: Grid) -> Work {
    let between = (arguments.address(), arguments.address());
    let columns = arguments.int();
    let count = grid.blocks * grid.block[0];
    Box::new(move || {
        rows::<T>(between, (count, columns), |row| {
            let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            row.iter_mut().for_each(|x| *x = (*x - largest).exp());
            let sum: f64 = row.iter().sum();
            row.iter_mut().for_each(|x| *x /= sum);
        })
    })
}

/// Returns the values at an address; `None` if it is null.
fn optional<T: Element>(address: Address, len: usize) -> Result<Option<Vec<T>>, String> {
    if address == 0 {
        Ok(None)
    } else {
        Ok(Some(elements::<T>(address)?.first(len)?.to_vec()))
    }
}

fn rms_norm<T: Element>(arguments: &mut Arguments, grid: Grid) -> Work {
    let between = (arguments.address(), arguments.address());
    let factors = arguments.address();
    let columns = arguments.int();
    let _threads = arguments.int();
    let epsilon = arguments.value::<f32>();
    let count = grid.blocks * grid.block[1];
    Box::new(move || {
        let factors = optional::<T>(factors, columns)?;
        rows::<T>(between, (count, columns), |row| {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / columns as f64;
            let scale = 1.0 / (mean + f64::from(epsilon)).sqrt();
            for (k, x) in row.iter_mut().enumerate() {
                *x *= scale * factors.as_ref().map_or(1.0, |factors| factors[k].to_f64());
            }
        })
    })
}

fn layer_norm<T: Element>(arguments: &mut Arguments, grid: Grid) -> Work {
    let between = (arguments.address(), arguments.address());
    let factors = arguments.address();
    let summands = arguments.address();
    let columns = arguments.int();
    let _threads = arguments.int();
    let epsilon = arguments.value::<f32>();
    let count = grid.blocks * grid.block[1];
    Box::new(move || {
        let factors = optional::<T>(factors, columns)?;
        let summands = optional::<T>(summands, columns)?;
        rows::<T>(between, (count, columns), |row| {
            let mean = row.iter().sum::<f64>() / columns as f64;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / columns as f64;
            let scale = 1.0 / (variance + f64::from(epsilon)).sqrt();
            for (k, x) in row.iter_mut().enumerate() {
                let factor = factors.as_ref().map_or(1.0, |factors| factors[k].to_f64());
                *x = (*x - mean) * scale * factor
                    + summands
                        .as_ref()
                        .map_or(0.0, |summands| summands[k].to_f64());
            }
        })
    })
}

/// The addresses of a rotary embedding: its input, cosines, sines and output.
fn addresses(arguments: &mut Arguments) -> [Address; 4] {
    [
        arguments.address(),
        arguments.address(),
        arguments.address(),
        arguments.address(),
    ]
}

/// Rotates `pairs` pairs of elements: `places` tells the places of a pair, and of its cosine and
/// sine.
fn rotate<T: Element>(
    [from, cosines, sines, to]: [Address; 4],
    pairs: usize,
    places: impl Fn(usize) -> (usize, usize, usize),
) -> Result<(), String> {
    let from = elements::<T>(from)?;
    let cosines = elements::<T>(cosines)?;
    let sines = elements::<T>(sines)?;
    let to = elements::<T>(to)?;
    for pair in 0..pairs {
        let (first, second, angle) = places(pair);
        let x = from.get(first).to_f64();
        let y = from.get(second).to_f64();
        let cosine = cosines.get(angle).to_f64();
        let sine = sines.get(angle).to_f64();
        to.set(first, T::from_f64(x * cosine - y * sine));
        to.set(second, T::from_f64(x * sine + y * cosine));
    }
    Ok(())
}

/// Returns the start of a batch's own angles, where each batch has some.
fn batch(pair: usize, stride: usize, angles: usize) -> usize {
    (2 * pair)
        .checked_div(stride)
        .map_or(0, |batch| batch * angles)
}

fn rope_interleaved<T: Element>(arguments: &mut Arguments, _: Grid) -> Work {
    let addresses = addresses(arguments);
    let heads = arguments.int();
    let each = arguments.int();
    let stride = arguments.int();
    Box::new(move || {
        rotate::<T>(addresses, heads * each / 2, |pair| {
            (
                2 * pair,
                2 * pair + 1,
                pair % (each / 2) + batch(pair, stride, each / 2),
            )
        })
    })
}

fn rope<T: Element>(arguments: &mut Arguments, _: Grid) -> Work {
    let addresses = addresses(arguments);
    let heads = arguments.int();
    let each = arguments.int();
    let size = arguments.int();
    let stride = arguments.int();
    Box::new(move || {
        rotate::<T>(addresses, heads * each / 2, |pair| {
            let head = pair / (each / 2);
            let within = pair % (each / 2);
            let time = within / (size / 2);
            let k = within % (size / 2);
            let first = head * each + time * size + k;
            (
                first,
                first + size / 2,
                time * (size / 2) + k + batch(pair, stride, each / 2),
            )
        })
    })
}

fn rope_thd<T: Element>(arguments: &mut Arguments, _: Grid) -> Work {
    let addresses = addresses(arguments);
    let batches = arguments.int();
    let times = arguments.int();
    let heads = arguments.int();
    let size = arguments.int();
    let stride = arguments.int();
    Box::new(move || {
        rotate::<T>(addresses, batches * times * heads * size / 2, |pair| {
            let row = pair / (size / 2);
            let k = pair % (size / 2);
            let time = row / heads % times;
            let first = row * size + k;
            (
                first,
                first + size / 2,
                time * (size / 2) + k + batch(pair, stride, times * size / 2),
            )
        })
    })
}
