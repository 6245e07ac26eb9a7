//! Training text: the bytes of a file as tokens, and the tokens that each rank sees at each step.

use std::borrow::Cow;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use thiserror::Error;

/// The number of different tokens: a token is a byte.
pub const VOCAB: usize = 256;

/// The longest text that is read.
pub const MAX_TEXT_BYTES: u64 = 16 << 30;

/// The text that is used when none is given. It was written for this purpose.
const BUILTIN: &[u8] = include_bytes!("../data/harbour.txt");

/// A mistake in training data, or in the way it is to be cut.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DataError {
    /// The file cannot be read.
    #[error("failed to read training text `{}`", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The file is empty.
    #[error("training text `{name}` is empty")]
    Empty {
        /// The file.
        name: String,
    },
    /// The file has too few bytes for one row.
    #[error("training text `{name}` has {found} bytes, but rows of {seq} tokens need at least {needed}")]
    TooShort {
        /// The file.
        name: String,
        /// The number of its bytes.
        found: usize,
        /// The number of tokens of a row.
        seq: usize,
        /// The number of bytes that are needed.
        needed: usize,
    },
    /// The file is longer than [`MAX_TEXT_BYTES`].
    #[error("training text `{name}` has more than {MAX_TEXT_BYTES} bytes")]
    TooLong {
        /// The file.
        name: String,
    },
    /// The ranks cannot have equal parts of the batch.
    #[error(
        "a batch of {batch} rows cannot be shared by {parts} equal parts ({ranks} ranks x {accumulation} backwards)"
    )]
    Indivisible {
        /// The number of rows of the global batch.
        batch: usize,
        /// The number of parts.
        parts: usize,
        /// The number of ranks.
        ranks: usize,
        /// The number of backwards of one step on each rank.
        accumulation: usize,
    },
}

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
        Text { name: "(built in)".to_owned(), bytes: Cow::Borrowed(BUILTIN) }
    }

    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, is empty, or is longer than [`MAX_TEXT_BYTES`].
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let name = path.display().to_string();
        let failed = |source| DataError::Read { path: path.to_owned(), source };
        let mut bytes = Vec::new();
        let file = File::open(path).map_err(failed)?;
        file.take(MAX_TEXT_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > MAX_TEXT_BYTES {
            return Err(DataError::TooLong { name });
        }
        Self::new(name, bytes)
    }

    /// Creates a text in memory. `name` is for messages.
    ///
    /// # Errors
    /// It is empty.
    pub fn new(name: impl Into<String>, bytes: impl Into<Cow<'static, [u8]>>) -> Result<Self, DataError> {
        let (name, bytes) = (name.into(), bytes.into());
        if bytes.is_empty() { Err(DataError::Empty { name }) } else { Ok(Text { name, bytes }) }
    }

    /// Returns the number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns `false`: an empty text cannot be made.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// The way in which the global batch of each step is cut from a text and shared by the ranks.
///
/// Row `b` of step `s` starts at byte `((s * batch + b) * seq) mod (len - seq - 1)`; targets are the bytes one
/// further on. Rank `r` of `ranks` has the rows with `b * ranks / batch == r`, in order, cut into `accumulation` equal
/// parts, one for each backward.
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
    /// [`DataError::TooShort`] and [`DataError::Indivisible`].
    pub fn check(&self, text: &Text) -> Result<(), DataError> {
        let Batches { batch, seq, ranks, accumulation } = *self;
        let parts = ranks.saturating_mul(accumulation);
        if batch == 0 || parts == 0 || !batch.is_multiple_of(parts) {
            return Err(DataError::Indivisible { batch, parts, ranks, accumulation });
        }
        // One more for the targets, and one more so that the start has somewhere to be.
        let needed = seq.saturating_add(2);
        if text.len() < needed {
            return Err(DataError::TooShort { name: text.name.clone(), found: text.len(), seq, needed });
        }
        Ok(())
    }

    /// Returns the positions at which the rows of one backward start, in a text of `len` bytes.
    fn starts(&self, len: usize, step: u64, rank: usize, part: usize) -> impl Iterator<Item = usize> {
        let Batches { batch, seq, ranks, accumulation } = *self;
        let rows = batch / ranks / accumulation;
        let first = rank * (batch / ranks) + part * rows;
        (first..first + rows).map(move |row| {
            let start = (u128::from(step) * batch as u128 + row as u128) * seq as u128;
            (start % (len - seq - 1) as u128) as usize
        })
    }

    /// Returns tokens and targets, each `[rows, seq]` (u32), of backward `part` of a step on one rank.
    ///
    /// # Errors
    /// The same as [`Self::check`], and candle's errors.
    pub fn batch(
        &self,
        text: &Text,
        step: u64,
        rank: usize,
        part: usize,
        device: &Device,
    ) -> Result<(Tensor, Tensor), candle_core::Error> {
        self.check(text).map_err(candle_core::Error::wrap)?;
        let starts: Vec<usize> = self.starts(text.len(), step, rank, part).collect();
        // The target of each token is the one after it.
        let rows = |shift: usize| {
            let row =
                |&start: &usize| text.bytes[start + shift..start + shift + self.seq].iter().map(|&b| u32::from(b));
            let tokens: Vec<u32> = starts.iter().flat_map(row).collect();
            Tensor::from_vec(tokens, (starts.len(), self.seq), device)
        };
        Ok((rows(0)?, rows(1)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_and_parts_share_the_rows_of_the_global_batch_in_order() {
        let text = Text::new("t", (0..=255u8).collect::<Vec<_>>()).unwrap();
        let whole = Batches { batch: 12, seq: 10, ranks: 1, accumulation: 1 };
        for step in [0, 1, 25, u64::MAX] {
            let all: Vec<usize> = whole.starts(text.len(), step, 0, 0).collect();
            let expected: Vec<usize> =
                (0..12).map(|b| ((u128::from(step) * 12 + b) * 10 % (256 - 10 - 1)) as usize).collect();
            assert_eq!(all, expected);
            for (ranks, accumulation) in [(2, 1), (3, 2), (4, 3), (12, 1)] {
                let cut = Batches { ranks, accumulation, ..whole };
                let parts = (0..ranks).flat_map(|rank| (0..accumulation).map(move |part| (rank, part)));
                let joined: Vec<usize> = parts.flat_map(|(r, p)| cut.starts(text.len(), step, r, p)).collect();
                assert_eq!(joined, all);
                for (row, _) in all.iter().enumerate() {
                    assert_eq!(row * ranks / 12, row / (12 / ranks), "the rule of the documentation");
                }
            }
        }
    }

    #[test]
    fn targets_are_one_byte_further_on() {
        let text = Text::new("t", b"abcdefgh".to_vec()).unwrap();
        let batches = Batches { batch: 2, seq: 3, ranks: 2, accumulation: 1 };
        let (tokens, targets) = batches.batch(&text, 0, 1, 0, &Device::Cpu).unwrap();
        assert_eq!(tokens.to_vec2::<u32>().unwrap(), [[100, 101, 102]]);
        assert_eq!(targets.to_vec2::<u32>().unwrap(), [[101, 102, 103]]);
    }

    #[test]
    fn texts_without_a_row_and_batches_that_do_not_divide_are_refused() {
        assert!(matches!(Text::new("t", b"".to_vec()), Err(DataError::Empty { .. })));
        let batches = Batches { batch: 4, seq: 8, ranks: 2, accumulation: 1 };
        let short = Text::new("t", vec![0; 9]).unwrap();
        assert!(matches!(batches.check(&short), Err(DataError::TooShort { needed: 10, .. })));
        let enough = Text::new("t", vec![0; 10]).unwrap();
        batches.check(&enough).unwrap();
        for (batch, ranks, accumulation) in [(4, 3, 1), (4, 0, 1), (0, 1, 1), (4, 2, 3), (4, usize::MAX, 2)] {
            let odd = Batches { batch, ranks, accumulation, ..batches };
            assert!(matches!(odd.check(&enough), Err(DataError::Indivisible { .. })), "{odd:?}");
        }
    }

    #[test]
    fn the_built_in_text_is_long_enough_for_real_runs() {
        Batches { batch: 1, seq: 1024, ranks: 1, accumulation: 1 }.check(&Text::builtin()).unwrap();
    }
}
