//! Initial values that depend on the seed, the parameter's name and the element's position, and on
//! nothing else: each rank makes only its own elements, and any number of ranks makes the same
//! model.

use std::f64::consts::TAU;
use std::ops::Range;

use candle_nn::Init;
use candle_nn::init::NormalOrUniform;
use fsdp_flat::storage::Scalar;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// The initial values of a parameter, which depend on the seed and on its name only.
pub(crate) struct InitialValues<'a> {
    pub(crate) init: &'a Init,
    pub(crate) seed: u64,
    pub(crate) fqn: &'a str,
    pub(crate) shape: &'a [usize],
}

impl InitialValues<'_> {
    /// Writes the values of a range of the parameter's elements, row-major, to `elements`.
    pub(crate) fn fill<T: Scalar>(&self, range: Range<usize>, elements: &mut [T]) {
        match *self.init {
            Init::Const(value) => elements.fill(T::from_f64(value)),
            Init::Uniform { lo, up } => {
                let mut words = self.random_words(range.start);
                for value in elements {
                    *value = T::from_f64(lo + (up - lo) * next_fraction(&mut words));
                }
            }
            Init::Randn { mean, stdev } => {
                // Box-Muller: two words make two elements, 2k and 2k + 1.
                let mut pairs = self.random_words(range.start & !1);
                let mut spare_normal = None;
                if range.start % 2 == 1 && !elements.is_empty() {
                    spare_normal = Some(next_normal_pair(&mut pairs).1);
                }
                for value in elements {
                    let normal = spare_normal.take().unwrap_or_else(|| {
                        let (first, second) = next_normal_pair(&mut pairs);
                        spare_normal = Some(second);
                        first
                    });
                    *value = T::from_f64(mean + stdev * normal);
                }
            }
            Init::Kaiming {
                dist,
                fan,
                non_linearity,
            } => {
                // A parameter with an empty dimension has no values, but must not divide by zero.
                let fan = fan.for_shape(&candle_core::Shape::from(self.shape)).max(1);
                let stdev = non_linearity.gain() / (fan as f64).sqrt();
                let init = &match dist {
                    NormalOrUniform::Normal => Init::Randn { mean: 0.0, stdev },
                    NormalOrUniform::Uniform => {
                        // A uniform distribution from -b to b has the standard deviation
                        // b / sqrt(3).
                        let bound = 3f64.sqrt() * stdev;
                        Init::Uniform {
                            lo: -bound,
                            up: bound,
                        }
                    }
                };
                InitialValues { init, ..*self }.fill(range, elements);
            }
        }
    }

    /// Returns the random words from `first_element` on: one word for each element.
    fn random_words(&self, first_element: usize) -> ChaCha8Rng {
        // Seed and name make the key, so that no value depends on the other parameters or on how
        // they are sharded.
        let mut key = [0; 32];
        key[..8].copy_from_slice(&self.seed.to_le_bytes());
        let name = twox_hash::XxHash3_128::oneshot(self.fqn.as_bytes());
        key[8..24].copy_from_slice(&name.to_le_bytes());
        let mut rng = ChaCha8Rng::from_seed(key);
        rng.set_word_pos(first_element as u128);
        rng
    }
}

/// Returns a number in the open interval from 0 to 1.
fn next_fraction(words: &mut ChaCha8Rng) -> f64 {
    (f64::from(words.next_u32()) + 0.5) / f64::from(1 << 16) / f64::from(1 << 16)
}

/// Returns two independent numbers of the standard normal distribution: a Box-Muller transform.
fn next_normal_pair(words: &mut ChaCha8Rng) -> (f64, f64) {
    let radius = (-2.0 * next_fraction(words).ln()).sqrt();
    let (sin, cos) = (TAU * next_fraction(words)).sin_cos();
    (radius * cos, radius * sin)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_part_of_a_parameter_has_the_same_values_as_the_whole() {
        let inits = [
            Init::Const(0.5),
            Init::Randn {
                mean: 1.0,
                stdev: 2.0,
            },
            Init::Uniform { lo: -1.0, up: 3.0 },
        ];
        for init in inits {
            let mut whole = vec![0f32; 37];
            let values = InitialValues {
                init: &init,
                seed: 7,
                fqn: "h.0.weight",
                shape: &[37],
            };
            values.fill(0..37, &mut whole);
            for range in [0..37, 1..5, 4..4, 8..37, 35..37] {
                let mut part = vec![0f32; range.len()];
                values.fill(range.clone(), &mut part);
                assert_eq!(part, whole[range]);
            }
        }
    }

    #[test]
    fn names_and_seeds_differ_and_moments_are_right() {
        let normal = Init::Randn {
            mean: 0.0,
            stdev: 0.02,
        };
        let make = |seed, fqn| {
            let mut elements = vec![0f64; 100_000];
            let values = InitialValues {
                init: &normal,
                seed,
                fqn,
                shape: &[100_000],
            };
            values.fill(0..100_000, &mut elements);
            elements
        };
        let a = make(0, "a");
        assert_ne!(a, make(0, "b"));
        assert_ne!(a, make(1, "a"));
        let mean = a.iter().sum::<f64>() / 1e5;
        let deviation = (a.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 1e5).sqrt();
        assert!(mean.abs() < 4.0 * 0.02 / 1e5f64.sqrt(), "{mean}");
        assert!((deviation / 0.02 - 1.0).abs() < 0.02, "{deviation}");
    }
}
