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
use crate::payload::slot::Slot;
use crate::storage::read_at::ReadAt;

/// The number of elements of a block.
pub(crate) const BLOCK_ELEMENTS: usize = 32;

/// The kinds of blocks that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockFormat {
    /// 8 bits for each element.
    Q8_0,
    /// 4 bits for each element.
    Q4_0,
}

impl BlockFormat {
    /// Returns how many bytes a block has.
    const fn block_bytes(self) -> usize {
        match self {
            BlockFormat::Q8_0 => 34,
            BlockFormat::Q4_0 => 18,
        }
    }

    /// Returns how many bytes so many elements take, a multiple of [`BLOCK_ELEMENTS`].
    pub(crate) const fn bytes_of_elements(self, elements: u64) -> u64 {
        (elements / BLOCK_ELEMENTS as u64).saturating_mul(self.block_bytes() as u64)
    }

    /// Decodes the elements of one block.
    fn decode(self, block: &[u8], elements: &mut [f32; BLOCK_ELEMENTS]) {
        let (scale, numbers) = block
            .split_first_chunk()
            .expect("a block of each format begins with the two bytes of its scale");
        let scale = f16::from_le_bytes(*scale).to_f32();
        match self {
            BlockFormat::Q8_0 => {
                for (element, &number) in elements.iter_mut().zip(numbers) {
                    *element = scale * f32::from(number.cast_signed());
                }
            }
            BlockFormat::Q4_0 => {
                for (index, &pair) in numbers.iter().enumerate() {
                    elements[index] = f32::from(i16::from(pair & 15) - 8) * scale;
                    elements[index + BLOCK_ELEMENTS / 2] =
                        f32::from(i16::from(pair >> 4) - 8) * scale;
                }
            }
        }
    }
}

/// The blocks that are read at once.
const MAX_BLOCKS_AT_ONCE: usize = 2048;

/// The place of a tensor of whole blocks in its file.
pub(crate) struct BlockedTensor<'b> {
    pub(crate) file: &'b dyn ReadAt,
    /// The offset of the first block.
    pub(crate) start: u64,
    pub(crate) format: BlockFormat,
    /// The box of the whole tensor.
    pub(crate) bounds: &'b TensorBox,
}

impl BlockedTensor<'_> {
    /// Reads the box `overlap` of the tensor into its place in a slot, as `f32`.
    pub(crate) fn read(&self, overlap: &TensorBox, slot: &mut Slot<'_>) -> Result<(), FormatError> {
        let block_bytes = self.format.block_bytes();
        for run in copy_runs(overlap, self.bounds, &slot.bounds) {
            let end = run.src + run.len;
            let mut position = run.src;
            while position < end {
                // A run may begin and end inside of a block, which can be decoded only as a whole.
                let first_block = position / BLOCK_ELEMENTS;
                let block_count =
                    (end.div_ceil(BLOCK_ELEMENTS) - first_block).min(MAX_BLOCKS_AT_ONCE);
                let mut bytes = vec![0; block_count * block_bytes];
                self.file
                    .read_exact_at(self.start + (first_block * block_bytes) as u64, &mut bytes)?;
                let mut elements = [0f32; BLOCK_ELEMENTS];
                for (block_index, encoded) in bytes.chunks_exact(block_bytes).enumerate() {
                    self.format.decode(encoded, &mut elements);
                    let block_start = (first_block + block_index) * BLOCK_ELEMENTS;
                    let block_end = end.min(block_start + BLOCK_ELEMENTS);
                    for element in &elements[position - block_start..block_end - block_start] {
                        let slot_offset = (run.dst + position - run.src) * 4;
                        slot.bytes[slot_offset..slot_offset + 4]
                            .copy_from_slice(&element.to_le_bytes());
                        position += 1;
                    }
                }
            }
        }
        slot.add_to_digest(overlap, size_of::<f32>());
        Ok(())
    }
}
