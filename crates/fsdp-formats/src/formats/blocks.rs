//! Elements that are quantized in blocks of 32 along the last dimension, read as `f32`.
//!
//! | kind | a block |
//! |---|---|
//! | `Q8_0` | a scale of `f16`, 32 signed bytes: `scale * byte` |
//! | `Q4_0` | a scale of `f16`, 16 bytes with two numbers each: `scale * (number - 8)`, the low halves before the high ones |

use fsdp_layout::TensorBox;
use fsdp_layout::boxes::copy_runs;
use half::f16;

use crate::error::FormatError;
use crate::storage::read_at::ReadAt;

/// The elements of a block.
pub(crate) const BLOCK: usize = 32;

/// The kinds of blocks that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockFormat {
    /// 8 bits for each element.
    Q8_0,
    /// 4 bits for each element.
    Q4_0,
}

impl BlockFormat {
    /// Returns the bytes of a block.
    const fn block_bytes(self) -> usize {
        match self {
            BlockFormat::Q8_0 => 34,
            BlockFormat::Q4_0 => 18,
        }
    }

    /// Returns the bytes of so many elements, a multiple of [`BLOCK`].
    pub(crate) const fn bytes(self, elements: u64) -> u64 {
        (elements / BLOCK as u64).saturating_mul(self.block_bytes() as u64)
    }

    /// Decodes one block.
    fn decode(self, block: &[u8], elements: &mut [f32; BLOCK]) {
        let [low, high, numbers @ ..] = block else {
            return;
        };
        let scale = f16::from_le_bytes([*low, *high]).to_f32();
        match self {
            BlockFormat::Q8_0 => {
                for (element, &number) in elements.iter_mut().zip(numbers) {
                    *element = scale * f32::from(number.cast_signed());
                }
            }
            BlockFormat::Q4_0 => {
                for (at, &pair) in numbers.iter().enumerate().take(BLOCK / 2) {
                    elements[at] = f32::from(i16::from(pair & 15) - 8) * scale;
                    elements[at + BLOCK / 2] = f32::from(i16::from(pair >> 4) - 8) * scale;
                }
            }
        }
    }
}

/// The blocks that are read at once.
const AT_ONCE: usize = 2048;

/// Reads `overlap` of a tensor of whole blocks, whose box is `whole`, to where it lies in `dst`,
/// which holds `bounds`.
pub(crate) fn read(
    file: &dyn ReadAt,
    start: u64,
    format: BlockFormat,
    whole: &TensorBox,
    overlap: &TensorBox,
    bounds: &TensorBox,
    dst: &mut [u8],
) -> Result<(), FormatError> {
    for run in copy_runs(overlap, whole, bounds) {
        let mut done = 0;
        while done < run.len {
            let first = run.src + done;
            let block = first / BLOCK;
            let blocks = ((run.src + run.len).div_ceil(BLOCK) - block).min(AT_ONCE);
            let mut bytes = vec![0; blocks * format.block_bytes()];
            file.read_exact_at(start + (block * format.block_bytes()) as u64, &mut bytes)?;
            let mut elements = [0f32; BLOCK];
            for (number, encoded) in bytes.chunks_exact(format.block_bytes()).enumerate() {
                format.decode(encoded, &mut elements);
                let from = (block + number) * BLOCK;
                let wanted = (run.src + done)..(run.src + run.len).min(from + BLOCK);
                for at in wanted {
                    let to = (run.dst + at - run.src) * 4;
                    dst[to..to + 4].copy_from_slice(&elements[at - from].to_le_bytes());
                    done += 1;
                }
            }
        }
    }
    Ok(())
}
