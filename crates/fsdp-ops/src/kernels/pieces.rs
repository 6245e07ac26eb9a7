//! Launches over pieces: stretches of elements that several tensors have in common.

use candle_core::{DType, Result, Tensor};

use super::argument::{MAX_PIECES, MAX_TENSORS, Pieces, to_int};
use super::cuda;
#[cfg(test)]
use super::host;
use super::kernel::Grid;
use super::memory::{Memory, Operand};

/// The elements that a block has at least, unless a piece has less.
const LEAST_CHUNK: usize = 4096;
/// The divisor of the elements of a chunk, with which all of its packs fit.
const CHUNK_STEP: usize = 2048;

/// A stretch of elements that several tensors have in common: the addresses of its first elements,
/// with the sizes of elements in bytes. The address and the size of a tensor that is left out are
/// 0.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Piece {
    addresses: [u64; MAX_TENSORS],
    /// The addresses of the storages that the tensors lie in.
    storages: [u64; MAX_TENSORS],
    sizes: [usize; MAX_TENSORS],
    count: usize,
}

impl Piece {
    /// Makes a piece of so many elements, without tensors.
    pub(crate) fn new(count: usize) -> Self {
        Piece {
            count,
            ..Piece::default()
        }
    }

    /// Adds a tensor to the piece, at a position. Kernels may write to it.
    ///
    /// # Errors
    /// A tensor that is not contiguous, of another length, or in memory that kernels do not reach.
    pub(crate) fn set(&mut self, position: usize, tensor: &Tensor) -> Result<()> {
        let size = tensor.dtype().size_in_bytes();
        let address = contiguous_address(tensor, self.count)?;
        let start_bytes = tensor.layout().start_offset() * size;
        self.addresses[position] = address;
        self.storages[position] = address - start_bytes as u64;
        self.sizes[position] = size;
        Ok(())
    }

    /// Returns `true` if the piece begins where another one ends, in the storages of all tensors.
    /// Storages that lie side by side do so by chance: another rank, or the next run, may have them
    /// elsewhere, and would add up elements in another order.
    fn follows(&self, earlier: &Piece) -> bool {
        (0..MAX_TENSORS).all(|tensor| {
            let bytes = earlier.count * earlier.sizes[tensor];
            earlier.sizes[tensor] == self.sizes[tensor]
                && earlier.storages[tensor] == self.storages[tensor]
                && earlier.addresses[tensor] + bytes as u64 == self.addresses[tensor]
        })
    }
}

/// Returns the address of the first of so many elements of a tensor, which lie one after the other.
///
/// # Errors
/// A tensor that is not contiguous, of another length, or in memory that kernels do not reach.
pub(crate) fn contiguous_address(tensor: &Tensor, count: usize) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    if layout.contiguous_offsets().is_none() || tensor.elem_count() != count {
        candle_core::bail!(
            "a kernel needs {count} elements one after the other, and a tensor has {layout:?}"
        );
    }
    address(&Operand::new(&storage, layout, "kernel")?)
}

/// Returns the address of a tensor's first element.
///
/// Work on it is ordered by the device's stream, in which all of candle's work is. So no other
/// stream has to be told of it.
fn address(operand: &Operand<'_>) -> Result<u64> {
    match operand.memory {
        Memory::Cuda(storage) => cuda::first_address(storage, operand),
        #[cfg(test)]
        Memory::Cpu(_) => host::address(operand),
    }
}

/// A launch over pieces.
pub(crate) struct PiecesLaunch {
    pub(crate) pieces: Box<Pieces>,
    pub(crate) blocks: usize,
}

impl PiecesLaunch {
    /// Returns the shape of the launch.
    pub(crate) const fn grid(&self) -> Grid {
        Grid::blocks(self.blocks, [256, 1])
    }
}

/// Returns the launches that go over all pieces. They have about `most_blocks` blocks together, if
/// there is so much to do: that depends on the numbers of elements only.
///
/// # Errors
/// More blocks than a launch may have.
pub(crate) fn launches(pieces: &[Piece], most_blocks: usize) -> Result<Vec<PiecesLaunch>> {
    let total: usize = pieces.iter().map(|piece| piece.count).sum();
    let chunk = total
        .div_ceil(most_blocks)
        .next_multiple_of(CHUNK_STEP)
        .max(LEAST_CHUNK);
    let mut launches = Vec::new();
    for pieces in joined(pieces).chunks(MAX_PIECES) {
        let mut table = Box::new(Pieces {
            addresses: [[0; MAX_PIECES]; MAX_TENSORS],
            counts: [0; MAX_PIECES],
            first_blocks: [0; MAX_PIECES],
            chunk: chunk as i64,
            pieces: pieces.len() as i32,
        });
        let mut blocks = 0;
        for (index, piece) in pieces.iter().enumerate() {
            for (tensor, &address) in piece.addresses.iter().enumerate() {
                table.addresses[tensor][index] = address;
            }
            table.counts[index] = piece.count as i64;
            table.first_blocks[index] = to_int(blocks)?;
            blocks += piece.count.div_ceil(chunk);
        }
        launches.push(PiecesLaunch {
            pieces: table,
            blocks,
        });
    }
    Ok(launches)
}

/// Returns the pieces that have elements, where one that begins where the last one ends continues
/// it.
fn joined(pieces: &[Piece]) -> Vec<Piece> {
    let mut joined: Vec<Piece> = Vec::with_capacity(pieces.len());
    for piece in pieces.iter().filter(|piece| piece.count > 0) {
        match joined.last_mut() {
            Some(last) if piece.follows(last) => last.count += piece.count,
            _ => joined.push(*piece),
        }
    }
    joined
}

/// Returns the name of a kernel for two types, up to the second one; `None` if there is none.
pub(crate) const fn name_of_write(to: DType, from: DType) -> Option<&'static str> {
    match (to, from) {
        (DType::F32, DType::F32 | DType::BF16 | DType::F16) => Some("write_f32"),
        (DType::BF16, DType::F32 | DType::BF16) => Some("write_bf16"),
        (DType::F16, DType::F32 | DType::F16) => Some("write_f16"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(addresses: [u64; 2], count: usize) -> Piece {
        let [first, second] = addresses;
        Piece {
            addresses: [first, second, 0, 0, 0],
            storages: [0x100, 0x900, 0, 0, 0],
            sizes: [4, 2, 0, 0, 0],
            count,
        }
    }

    #[test]
    fn pieces_that_continue_each_other_are_one() {
        let pieces = [
            piece([0x100, 0x900], 10),
            piece([0x128, 0x914], 5),
            piece([0x13c, 0x920], 5),
            piece([0x150, 0x92a], 0),
            piece([0x150, 0x92a], 1),
        ];
        let counts =
            |pieces: &[Piece]| -> Vec<usize> { joined(pieces).iter().map(|p| p.count).collect() };
        assert_eq!(counts(&pieces), [15, 6]);
        // Storages that lie side by side.
        let mut others = pieces;
        others[2].storages[1] = 0x920;
        assert_eq!(counts(&others), [15, 5, 1]);
    }

    #[test]
    fn every_piece_has_the_blocks_for_its_chunks() {
        let pieces: Vec<Piece> = (0..70)
            .map(|index| piece([index << 20, index << 20], 4096 * (index as usize % 3) + 1))
            .collect();
        let launches = launches(&pieces, 1 << 16).unwrap();
        assert_eq!(launches.len(), 2);
        let table = &launches[0].pieces;
        assert_eq!(table.first_blocks[..5], [0, 1, 3, 6, 7]);
        assert_eq!((table.chunk, table.pieces), (4096, 64));
        let total: usize = launches.iter().map(|launch| launch.blocks).sum();
        assert_eq!(total, (0..70).map(|index| index % 3 + 1).sum::<usize>());
        // As long as the struct of the kernels, which has a limit.
        assert_eq!(size_of::<Pieces>(), 3344);
    }
}
