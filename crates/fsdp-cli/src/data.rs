//! Training text: the bytes of a file as tokens, and the tokens that each rank sees at each step.

use std::borrow::Cow;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use anyhow::{Error, Result, ensure};
use candle_core::{Device, Tensor};
use fsdp_formats::digest::{Digest, Sum};
use fsdp_layout::{DType, Failure};

use crate::exit_codes;
use crate::failure::{CommandError, usage_error};

/// The number of different tokens: a token is a byte.
pub const VOCAB: usize = 256;

/// The longest text that is read.
const MAX_TEXT_BYTES: u64 = 16 << 30;

/// The text that is used by default. It was written for this project.
const BUILTIN: &[u8] = include_bytes!("../data/harbour.txt");

/// The hint for a text that cannot be used.
const TEXT_HINT: &str = "name a text file with `--data`, or leave it out for the built-in text";

/// A text whose bytes are tokens.
#[derive(Debug, Clone)]
pub struct Text {
    name: String,
    bytes: Cow<'static, [u8]>,
}

impl Text {
    /// Returns the text that comes with this crate.
    #[must_use]
    pub fn builtin() -> Self {
        Text {
            name: "(built in)".to_owned(),
            bytes: Cow::Borrowed(BUILTIN),
        }
    }

    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, is empty, or is longer than [`MAX_TEXT_BYTES`].
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let mut bytes = Vec::new();
        let outcome =
            File::open(path).and_then(|file| file.take(MAX_TEXT_BYTES + 1).read_to_end(&mut bytes));
        outcome.map_err(|source| {
            let error = CommandError {
                exit_code: exit_codes::for_kind(Failure::kind(&source)),
                message: format!("failed to read training text `{name}`"),
                hint: Some(TEXT_HINT),
            };
            Error::new(source).context(error)
        })?;
        ensure!(
            bytes.len() as u64 <= MAX_TEXT_BYTES,
            usage_error(
                format!("training text `{name}` has more than {MAX_TEXT_BYTES} bytes"),
                TEXT_HINT
            )
        );
        Ok(Self::new(name, bytes)?)
    }

    /// Creates a text in memory. `name` is for messages.
    ///
    /// # Errors
    /// It is empty.
    fn new(name: String, bytes: Vec<u8>) -> Result<Self, CommandError> {
        if bytes.is_empty() {
            return Err(usage_error(
                format!("training text `{name}` is empty"),
                TEXT_HINT,
            ));
        }
        let bytes = bytes.into();
        Ok(Text { name, bytes })
    }

    /// Returns the name of its file.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns a digest that identifies the text.
    pub(crate) fn digest(&self) -> Digest {
        let mut sum = Sum::default();
        sum.add_bytes(0, &self.bytes);
        sum.finish(DType::U8, &[self.bytes.len()])
    }
}

/// Defines the global batch of each step, and how it is divided among the ranks.
///
/// Row `b` of step `s` has the number `n = s * batch + b`, and starts at byte `(n * seq) mod (len -
/// seq - 1)` of the text; targets are the bytes one position later. The rows are divided in order
/// into `ranks * accumulation` parts, one for each backward of each rank, whose numbers of rows
/// differ by at most one. Each part is weighted by its number of rows in the loss
/// ([`Self::weight`]), so a step is the same for any number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batches {
    /// The number of rows of the global batch.
    pub batch: usize,
    /// The number of tokens of a row.
    pub seq: usize,
    /// The number of ranks.
    pub ranks: usize,
    /// The number of backwards of one step on each rank.
    pub accumulation: usize,
}

impl Batches {
    /// Checks that each step has rows of this text for every rank.
    ///
    /// # Errors
    /// Fewer rows than the ranks need in each step; a text that is shorter than a row.
    pub(crate) fn check(&self, text: &Text) -> Result<(), CommandError> {
        let Batches {
            batch,
            seq,
            ranks,
            accumulation,
        } = *self;
        // Each backward of each rank needs a row, or ranks would wait for gradients that never
        // come.
        let part_count = ranks.saturating_mul(accumulation);
        if part_count == 0 || batch < part_count {
            return Err(usage_error(
                format!(
                    "a batch of {batch} rows has too few for {part_count} parts ({ranks} ranks x \
                     {accumulation} backwards)"
                ),
                "make `--batch` at least `--nproc` times `--accumulate`",
            ));
        }
        // One byte more for the last target, and another because the start is taken modulo
        // `length - seq - 1`, which must not be 0.
        let needed = seq.saturating_add(2);
        if text.bytes.len() < needed {
            return Err(usage_error(
                format!(
                    "training text `{}` has {} bytes, but rows of {seq} tokens need at least \
                     {needed}",
                    text.name,
                    text.bytes.len()
                ),
                "use a longer text, or a smaller `--seq`",
            ));
        }
        Ok(())
    }

    /// Returns the range of rows of the global batch that the backward `part` of `rank` has.
    fn row_range(&self, rank: usize, part: usize) -> Range<usize> {
        let part = rank * self.accumulation + part;
        self.first_row(part)..self.first_row(part + 1)
    }

    /// Returns the first row of one of the parts of all ranks.
    fn first_row(&self, part: usize) -> usize {
        let part_count = self.ranks * self.accumulation;
        // In 128 bits no product is too large.
        (part as u128 * self.batch as u128 / part_count as u128) as usize
    }

    /// Returns the factor by which the mean loss of one backward counts in the rank's loss. The
    /// mean of all ranks' losses is then the mean over the rows of the global batch.
    #[must_use]
    pub fn weight(&self, rank: usize, part: usize) -> f64 {
        (self.row_range(rank, part).len() * self.ranks) as f64 / self.batch as f64
    }

    /// Returns the number of rows of these batches that some steps take together.
    #[must_use]
    pub fn rows_of(&self, steps: u64) -> u128 {
        // In 128 bits no product is too large.
        u128::from(steps) * self.batch as u128
    }

    /// Returns the offsets at which the rows of the backward `part` of `rank` start, in a text of
    /// `text_bytes` bytes. The global batch begins with the row number `batch_start`.
    fn row_offsets(
        &self,
        text_bytes: usize,
        batch_start: u128,
        rank: usize,
        part: usize,
    ) -> impl Iterator<Item = usize> {
        let seq = self.seq;
        self.row_range(rank, part).map(move |row| {
            let first_token = (batch_start + row as u128) * seq as u128;
            // After the last row that fits, the text begins again.
            (first_token % (text_bytes - seq - 1) as u128) as usize
        })
    }

    /// Returns tokens and targets, each `[rows, seq]` (u32), of one backward of a rank. The global
    /// batch begins with the row number `batch_start`: that is [`Self::rows_of`] the steps before
    /// it, if all of them had batches of this size.
    ///
    /// # Errors
    /// Fewer rows than the ranks need in each step; a text that is shorter than a row; errors of
    /// candle.
    pub fn batch(
        &self,
        text: &Text,
        batch_start: u128,
        (rank, part): (usize, usize),
        device: &Device,
    ) -> Result<(Tensor, Tensor), candle_core::Error> {
        self.check(text).map_err(candle_core::Error::wrap)?;
        let mut tokens = Vec::new();
        let mut targets = Vec::new();
        for start in self.row_offsets(text.bytes.len(), batch_start, rank, part) {
            let row = &text.bytes[start..=start + self.seq];
            // The target of each token is the one after it.
            tokens.extend(row[..self.seq].iter().map(|&byte| u32::from(byte)));
            targets.extend(row[1..].iter().map(|&byte| u32::from(byte)));
        }
        let shape = (self.row_range(rank, part).len(), self.seq);
        Ok((
            Tensor::from_vec(tokens, shape, device)?,
            Tensor::from_vec(targets, shape, device)?,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_and_parts_share_the_rows_of_the_global_batch_in_order() {
        let text = Text::new("t".to_owned(), (0..=255u8).collect()).unwrap();
        let whole = Batches {
            batch: 12,
            seq: 10,
            ranks: 1,
            accumulation: 1,
        };
        for step in [0, 1, 25, u64::MAX] {
            let row = whole.rows_of(step);
            let all: Vec<usize> = whole.row_offsets(text.bytes.len(), row, 0, 0).collect();
            let expected: Vec<usize> = (0..12)
                .map(|b| ((u128::from(step) * 12 + b) * 10 % (256 - 10 - 1)) as usize)
                .collect();
            assert_eq!(all, expected);
            for (ranks, accumulation) in [(2, 1), (3, 2), (4, 3), (12, 1), (5, 1), (7, 1), (5, 2)] {
                let cut = Batches {
                    ranks,
                    accumulation,
                    ..whole
                };
                let parts =
                    (0..ranks).flat_map(|rank| (0..accumulation).map(move |part| (rank, part)));
                let joined: Vec<usize> = parts
                    .flat_map(|(r, p)| cut.row_offsets(text.bytes.len(), row, r, p))
                    .collect();
                assert_eq!(joined, all);
            }
        }
    }

    #[test]
    fn parts_differ_by_at_most_a_row_and_count_by_their_rows() {
        for (batch, ranks, accumulation) in
            [(12, 4, 3), (12, 5, 1), (12, 5, 2), (7, 7, 1), (100, 8, 3)]
        {
            let batches = Batches {
                batch,
                seq: 1,
                ranks,
                accumulation,
            };
            let parts =
                || (0..ranks).flat_map(|rank| (0..accumulation).map(move |part| (rank, part)));
            let rows: Vec<usize> = parts()
                .map(|(rank, part)| batches.row_range(rank, part).len())
                .collect();
            assert!(
                rows.iter().min().unwrap() + 1 >= *rows.iter().max().unwrap(),
                "{rows:?}"
            );
            assert_eq!(rows.iter().sum::<usize>(), batch);
            let weights: f64 = parts().map(|(rank, part)| batches.weight(rank, part)).sum();
            assert!((weights / ranks as f64 - 1.0).abs() < 1e-12, "{weights}");
            if batch % (ranks * accumulation) == 0 {
                assert!(parts().all(|(rank, part)| batches.weight(rank, part) == 1.0 / accumulation as f64));
            }
        }
    }

    #[test]
    fn targets_are_one_byte_further_on() {
        let text = Text::new("t".to_owned(), b"abcdefgh".to_vec()).unwrap();
        let batches = Batches {
            batch: 2,
            seq: 3,
            ranks: 2,
            accumulation: 1,
        };
        let (tokens, targets) = batches.batch(&text, 0, (1, 0), &Device::Cpu).unwrap();
        assert_eq!(tokens.to_vec2::<u32>().unwrap(), [[100, 101, 102]]);
        assert_eq!(targets.to_vec2::<u32>().unwrap(), [[101, 102, 103]]);
    }

    #[test]
    fn texts_without_a_row_and_batches_with_fewer_rows_than_parts_are_refused() {
        let empty = Text::new("t".to_owned(), Vec::new()).unwrap_err();
        assert_eq!(empty.message, "training text `t` is empty");
        let batches = Batches {
            batch: 4,
            seq: 8,
            ranks: 2,
            accumulation: 1,
        };
        let short = Text::new("t".to_owned(), vec![0; 9]).unwrap();
        let too_short = batches.check(&short).unwrap_err().message;
        assert!(too_short.ends_with("need at least 10"), "{too_short}");
        let enough = Text::new("t".to_owned(), vec![0; 10]).unwrap();
        batches.check(&enough).unwrap();
        for (batch, ranks, accumulation) in [
            (4, 5, 1),
            (4, 0, 1),
            (0, 1, 1),
            (4, 2, 3),
            (4, usize::MAX, 2),
        ] {
            let few = Batches {
                batch,
                ranks,
                accumulation,
                ..batches
            };
            let error = few.check(&enough).unwrap_err().message;
            assert!(error.starts_with("a batch of"), "{few:?}: {error}");
        }
    }

    #[test]
    fn the_built_in_text_is_long_enough_for_real_runs() {
        Batches {
            batch: 1,
            seq: 1024,
            ranks: 1,
            accumulation: 1,
        }
        .check(&Text::builtin())
        .unwrap();
    }
}
