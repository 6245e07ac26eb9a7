//! [`ShardedSampler`]: deals the samples of a data set to ranks, each exactly once per epoch, for
//! any number of ranks.

use fsdp_layout::PlainValue;
use fsdp_state::StateDict;

pub use crate::error::SamplerError;

/// Options of a [`ShardedSampler`]; the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SamplerOptions {
    /// The number of samples of the data set.
    pub samples: u64,
    /// The number of samples of a global batch, those of all ranks together.
    pub batch: u64,
    /// The seed of the order of samples, which is different in each epoch.
    pub seed: u64,
    /// `true` (the default) to shuffle the samples in each epoch; `false` for the order of the data
    /// set.
    pub shuffle: bool,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        SamplerOptions {
            samples: 0,
            batch: 1,
            seed: 0,
            shuffle: true,
        }
    }
}

/// A sampler that deals the samples of a data set to ranks: torch's `DistributedSampler`, but with
/// a position that is part of the run's state. The order of samples depends only on the seed and
/// the epoch, and each global batch is divided into one part per rank. So a run that stops after
/// any batch, and resumes on any number of ranks, sees each sample exactly once per epoch, in the
/// same global batches. A batch at the end of an epoch continues with the first samples of the
/// next.
///
/// The order takes no memory, whatever the number of samples is. No method communicates.
///
/// ```
/// use fsdp_nn::sampler::{SamplerOptions, ShardedSampler};
/// let options = SamplerOptions { samples: 10, batch: 4, seed: 7, ..SamplerOptions::default() };
/// let mut sampler = ShardedSampler::new(options)?;
/// let mut seen = sampler.next_batch(0, 2);
/// seen.extend(ShardedSampler::new(options)?.next_batch(1, 2));
/// // The state goes into a checkpoint, and the run continues with one rank.
/// let state = sampler.state_dict();
/// let mut resumed = ShardedSampler::new(options)?;
/// resumed.load_state_dict(&state)?;
/// seen.extend(resumed.next_batch(0, 1));
/// seen.extend(&resumed.next_batch(0, 1)[..2]);
/// seen.sort_unstable();
/// assert_eq!(seen, (0..10).collect::<Vec<u64>>());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardedSampler {
    options: SamplerOptions,
    /// The samples that all ranks have had since the beginning of the first epoch.
    consumed: u64,
}

impl ShardedSampler {
    /// Makes a sampler at the beginning of the first epoch.
    ///
    /// # Errors
    /// [`SamplerError::Empty`].
    pub fn new(options: SamplerOptions) -> Result<Self, SamplerError> {
        let SamplerOptions { samples, batch, .. } = options;
        if samples == 0 || batch == 0 {
            return Err(SamplerError::Empty { samples, batch });
        }
        Ok(ShardedSampler {
            options,
            consumed: 0,
        })
    }

    /// Returns the number of whole epochs that all ranks together have had.
    #[must_use]
    pub const fn epoch(&self) -> u64 {
        self.consumed / self.options.samples
    }

    /// Returns the weight that each sample has in the loss of its rank: `ranks / batch`.
    ///
    /// Gradients are averaged over ranks, and ranks may have different numbers of samples. Let a
    /// rank's loss be the *sum* of the losses of its samples times this weight. Then each sample of
    /// a global batch counts the same, on any number of ranks. With the mean of a rank's samples it
    /// would not, and a rank without samples would make all gradients NaN.
    ///
    /// ```
    /// use fsdp_nn::sampler::{SamplerOptions, ShardedSampler};
    /// let options = SamplerOptions { samples: 10, batch: 5, ..SamplerOptions::default() };
    /// let loss_of_sample = |sample: u64| sample as f64;
    /// let loss_of_batch = |ranks: usize| -> Result<f64, Box<dyn std::error::Error>> {
    ///     let mut losses = 0.0;
    ///     for rank in 0..ranks {
    ///         let mut sampler = ShardedSampler::new(options)?;
    ///         let sum: f64 = sampler.next_batch(rank, ranks).into_iter().map(loss_of_sample).sum();
    ///         losses += sum * sampler.weight_of_sample(ranks);
    ///     }
    ///     Ok(losses / ranks as f64)
    /// };
    /// assert_eq!(loss_of_batch(2)?, loss_of_batch(1)?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn weight_of_sample(&self, ranks: usize) -> f64 {
        ranks as f64 / self.options.batch as f64
    }

    /// Returns one rank's samples of the next global batch, as indices into the data set, and
    /// advances to the batch after it. The numbers of samples of two ranks differ by at most one,
    /// and a rank has none if there are more ranks than samples in a batch: see
    /// [`Self::weight_of_sample`]. Every rank must call it for each batch.
    ///
    /// # Panics
    /// If there is no such rank: `rank` must be less than `ranks`. It would train on nothing.
    pub fn next_batch(&mut self, rank: usize, ranks: usize) -> Vec<u64> {
        assert!(
            rank < ranks,
            "rank {rank} of {ranks} has no samples: ranks are counted from 0"
        );
        let batch = self.options.batch;
        // Ranks get parts whose sizes differ by one at most. The product may exceed 64 bits.
        let [start, end] =
            [rank, rank + 1].map(|rank| (u128::from(batch) * rank as u128 / ranks as u128) as u64);
        let samples = (start..end)
            .map(|offset| self.sample_at(self.consumed.wrapping_add(offset)))
            .collect();
        self.consumed = self.consumed.wrapping_add(batch);
        samples
    }

    /// Returns the sample at a place in the order of all epochs.
    fn sample_at(&self, place: u64) -> u64 {
        let SamplerOptions {
            samples,
            seed,
            shuffle,
            ..
        } = self.options;
        // A batch may reach into the next epoch, which has an order of its own.
        let epoch = place / samples;
        let place_in_epoch = place % samples;
        if shuffle {
            permute_below(place_in_epoch, samples, mix_bits(mix_bits(seed) ^ epoch))
        } else {
            place_in_epoch
        }
    }

    /// Returns the state for a checkpoint: `samples`, `seed`, `shuffle` and `consumed`, all of them
    /// plain values that are the same on every rank.
    #[must_use]
    pub fn state_dict(&self) -> StateDict {
        let mut state = StateDict::new();
        state.insert("samples", self.options.samples.cast_signed());
        state.insert("seed", self.options.seed.cast_signed());
        state.insert("shuffle", self.options.shuffle);
        state.insert("consumed", self.consumed.cast_signed());
        state
    }

    /// Continues from a saved state. The number of ranks and the size of batches may be different.
    ///
    /// # Errors
    /// [`SamplerError::Other`] for another data set, seed or order, and [`SamplerError::State`].
    /// Nothing has been changed then.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<(), SamplerError> {
        let current = self.options;
        let saved = state.get("shuffle").and_then(|value| value.as_plain());
        let Some(saved_shuffle) = saved.and_then(PlainValue::as_bool) else {
            return Err(SamplerError::State {
                key: "shuffle",
                expected: "bool",
            });
        };
        // With another seed or number of samples, the place in the order would be of other samples.
        check_setting("samples", read_integer(state, "samples")?, current.samples)?;
        check_setting("seed", read_integer(state, "seed")?, current.seed)?;
        check_setting("shuffle", saved_shuffle, current.shuffle)?;
        self.consumed = read_integer(state, "consumed")?;
        Ok(())
    }
}

/// Reads an integer from the state of a sampler.
fn read_integer(state: &StateDict, key: &'static str) -> Result<u64, SamplerError> {
    let saved = state.get(key).and_then(|value| value.as_plain());
    match saved.and_then(PlainValue::as_int) {
        Some(value) => Ok(value.cast_unsigned()),
        None => Err(SamplerError::State {
            key,
            expected: "integer",
        }),
    }
}

/// Checks that a saved setting is the one of this sampler.
fn check_setting<T: PartialEq + ToString>(
    key: &'static str,
    saved: T,
    current: T,
) -> Result<(), SamplerError> {
    if saved == current {
        return Ok(());
    }
    Err(SamplerError::Other {
        key,
        saved: saved.to_string(),
        here: current.to_string(),
    })
}

/// Returns the image of `x` under a random permutation of the numbers below `n`.
///
/// Four rounds of a Feistel network permute all numbers with as many bits as `n` needs. A result
/// that is not below `n` is permuted again until it is ("cycle walking"). Each number below `n`
/// then maps to the next such number on its cycle, so this is a permutation too.
fn permute_below(mut x: u64, n: u64, key: u64) -> u64 {
    // Both halves of the network have as many bits.
    let half_bits = (u64::BITS - (n - 1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1u64 << half_bits) - 1;
    loop {
        let mut left = x >> half_bits;
        let mut right = x & mask;
        for round in 0..4 {
            (left, right) = (
                right,
                left ^ (mix_bits(key ^ mix_bits(right.wrapping_add(round << 56))) & mask),
            );
        }
        x = left << half_bits | right;
        // More than a quarter of the numbers are below `n`, so this ends soon.
        if x < n {
            return x;
        }
    }
}

/// Returns a number whose bits all depend on all bits of `x`: the output function of SplitMix64.
const fn mix_bits(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sampler(samples: u64, batch: u64, seed: u64) -> ShardedSampler {
        ShardedSampler::new(SamplerOptions {
            samples,
            batch,
            seed,
            shuffle: true,
        })
        .unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

        /// A run that is stopped and goes on at other numbers of ranks, and with batches of other
        /// sizes.
        #[test]
        fn every_sample_comes_once_an_epoch_whatever_the_schedule_of_ranks(
            samples in 1u64..300,
            seed: u64,
            schedule in prop::collection::vec((1usize..9, 1u64..40, 1usize..12), 1..8),
        ) {
            let mut state = sampler(samples, 1, seed).state_dict();
            let mut seen = Vec::new();
            for (ranks, batch, steps) in schedule {
                let mut samplers: Vec<ShardedSampler> =
                    (0..ranks).map(|_| sampler(samples, batch, seed)).collect();
                samplers.iter_mut().for_each(|rank| rank.load_state_dict(&state).unwrap());
                for _ in 0..steps {
                    let parts: Vec<Vec<u64>> = samplers
                        .iter_mut()
                        .enumerate()
                        .map(|(rank, sampler)| sampler.next_batch(rank, ranks))
                        .collect();
                    let sizes = parts.iter().map(Vec::len);
                    prop_assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1);
                    seen.extend(parts.concat());
                }
                prop_assert!(samplers.iter().all(|sampler| sampler == &samplers[0]));
                state = samplers[0].state_dict();
            }
            // The same order as on one rank without a stop.
            let whole = sampler(samples, seen.len() as u64, seed).next_batch(0, 1);
            prop_assert_eq!(&seen, &whole);
            for epoch in seen.chunks_exact(samples as usize) {
                let mut epoch = epoch.to_vec();
                epoch.sort_unstable();
                prop_assert_eq!(epoch, (0..samples).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn the_weights_of_all_samples_of_a_batch_are_those_of_its_mean() {
        for (batch, ranks) in [(10, 1), (10, 4), (2, 5), (1, 3)] {
            let rank_weight = |rank: usize| {
                let mut sampler = sampler(100, batch, 1);
                sampler.next_batch(rank, ranks).len() as f64 * sampler.weight_of_sample(ranks)
            };
            let mean = (0..ranks).map(rank_weight).sum::<f64>() / ranks as f64;
            assert!((mean - 1.0).abs() < 1e-12, "{mean} for {batch} on {ranks}");
        }
    }

    #[test]
    fn epochs_and_seeds_have_orders_of_their_own() {
        let mut first = sampler(1000, 1000, 1);
        let orders = [
            first.next_batch(0, 1),
            first.next_batch(0, 1),
            sampler(1000, 1000, 2).next_batch(0, 1),
        ];
        assert!(orders[0] != orders[1] && orders[0] != orders[2] && orders[1] != orders[2]);
        assert_eq!(first.epoch(), 2);
        // No sample stays near its place more often than by chance.
        let near_count = orders[0]
            .iter()
            .zip(0u64..)
            .filter(|(sample, place)| sample.abs_diff(*place) < 10)
            .count();
        assert!(near_count < 50, "{near_count} of 1000");
        let plain = SamplerOptions {
            samples: 3,
            batch: 5,
            shuffle: false,
            ..SamplerOptions::default()
        };
        assert_eq!(
            ShardedSampler::new(plain).unwrap().next_batch(0, 1),
            [0, 1, 2, 0, 1]
        );
    }

    #[test]
    #[should_panic(expected = "rank 2 of 2 has no samples")]
    fn a_rank_that_there_is_not_gets_no_batch() {
        sampler(10, 4, 1).next_batch(2, 2);
    }

    #[test]
    fn the_state_of_another_data_set_is_refused_and_changes_nothing() {
        let mut current = sampler(10, 2, 1);
        current.next_batch(0, 1);
        let before = current.clone();
        for other in [sampler(11, 2, 1), sampler(10, 2, 3)] {
            let error = current.load_state_dict(&other.state_dict()).unwrap_err();
            assert!(matches!(error, SamplerError::Other { .. }), "{error}");
        }
        let mut part = before.state_dict();
        part.remove("consumed");
        assert!(matches!(
            current.load_state_dict(&part),
            Err(SamplerError::State {
                key: "consumed",
                ..
            })
        ));
        assert_eq!(current, before);
        for (samples, batch) in [(0, 1), (1, 0)] {
            let options = SamplerOptions {
                samples,
                batch,
                ..SamplerOptions::default()
            };
            assert!(matches!(
                ShardedSampler::new(options),
                Err(SamplerError::Empty { .. })
            ));
        }
    }
}
