//! A text sample from a trained model.

use crate::gpt::Gpt;
use candle_core::{DType, Device};
use fsdp::prelude::*;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// The temperature of the sample. Below 1, likely bytes are taken more often than the model
/// predicts.
const TEMPERATURE: f64 = 0.8;

/// The text that the model continues: the start of a paragraph.
const PROMPT: u8 = b'\n';

/// The number of bytes between two looks whether the sample is to be left out.
const BYTES_BETWEEN_LOOKS: usize = 64;

/// Returns a text of `length` bytes that the model generates, one by one, or `None` if
/// `is_stopping` returns `true` meanwhile, which it does on all ranks or on none. All ranks take
/// part, and all get the same text. Parameters are sharded again on return.
///
/// # Errors
/// The errors of the forwards and of `is_stopping`.
pub(super) fn sample(
    model: &FullyShardedDataParallel<Gpt>,
    device: &Device,
    length: usize,
    seed: u64,
    is_stopping: &dyn Fn() -> anyhow::Result<bool>,
) -> anyhow::Result<Option<String>> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut drawn_bytes = 0;
    let mut is_stopped = false;
    let generated = model.forward(|gpt| {
        gpt.generate(&[u32::from(PROMPT)], length, device, &mut |scores| {
            drawn_bytes += 1;
            if drawn_bytes % BYTES_BETWEEN_LOOKS == 0 {
                is_stopped = is_stopping().map_err(candle_core::Error::msg)?;
                if is_stopped {
                    candle_core::bail!("the sample is left out");
                }
            }
            let quantile = f64::from(rng.next_u32()) / f64::from(u32::MAX);
            Ok(draw(&scores.to_dtype(DType::F32)?.to_vec1()?, quantile))
        })
    });
    model.parameters().reshard()?;
    if is_stopped {
        return Ok(None);
    }
    let text = generated?;
    let bytes: Vec<u8> = text
        .to_vec1::<u32>()?
        .iter()
        .map(|&byte| byte as u8)
        .collect();
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}

/// Returns the token at `quantile` of the distribution that the scores describe.
fn draw(logits: &[f32], quantile: f64) -> u32 {
    let highest_score = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = logits
        .iter()
        .map(|&score| (f64::from(score - highest_score) / TEMPERATURE).exp())
        .collect();
    let mut remaining_weight = quantile * weights.iter().sum::<f64>();
    // The token in whose weight the quantile falls is the first that leaves nothing of it.
    for (token, weight) in weights.iter().enumerate() {
        remaining_weight -= weight;
        if remaining_weight <= 0.0 {
            return token as u32;
        }
    }
    // Rounding, or scores that are no numbers.
    u32::from(PROMPT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_the_scores() {
        let logits = [f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY, 1.0];
        assert_eq!(draw(&logits, 0.25), 1);
        assert_eq!(draw(&logits, 0.75), 3);
        assert_eq!(draw(&[0.0, 100.0], 0.5), 1);
        assert_eq!(draw(&[f32::NAN; 4], 0.5), u32::from(PROMPT));
    }
}
