//! The kernels by name, and the shapes of their launches.
//!
//! Shapes depend on those of the tensors only, so that results do not depend on the GPU.

use candle_core::DType;

/// The bytes that a thread reads or writes best at once: a pack of elements.
const PACK_BYTES: usize = 16;
/// The threads of a block of kernels over elements.
const THREADS: usize = 256;
/// The threads that share a row, and those that share a tile of columns.
const WARP: usize = 32;
/// The rows of a block of kernels over rows in which a warp has each row.
const ROWS_OF_BLOCK: usize = 4;
/// The rows that a block of kernels over columns reads at once.
const COLUMN_ROWS: usize = 8;

/// A file of kernels, which are loaded together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Module {
    Attention,
    AttentionF32,
    Columns,
    CrossEntropy,
    Dropout,
    Elementwise,
    Embedding,
    Factored,
    Gradients,
    Norm,
    Optimizer,
    Rope,
    Softmax,
}

impl Module {
    /// Returns the name of the file, without what follows the dot.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Module::Attention => "attention",
            Module::AttentionF32 => "attention_f32",
            Module::Columns => "columns",
            Module::CrossEntropy => "cross_entropy",
            Module::Dropout => "dropout",
            Module::Elementwise => "elementwise",
            Module::Embedding => "embedding",
            Module::Factored => "factored",
            Module::Gradients => "gradients",
            Module::Norm => "norm",
            Module::Optimizer => "optimizer",
            Module::Rope => "rope",
            Module::Softmax => "softmax",
        }
    }
}

/// A kernel: its file, its name up to the dtype, and the dtype that the name ends with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Kernel(
    pub(crate) Module,
    pub(crate) &'static str,
    pub(crate) Option<DType>,
);

impl Kernel {
    /// Returns the name by which a module is asked for the kernel.
    pub(super) fn name(&self) -> String {
        match self.2 {
            Some(dtype) => format!("{}_{}", self.1, dtype.as_str()),
            None => self.1.to_owned(),
        }
    }
}

/// The shape of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grid {
    /// The blocks in the first two dimensions.
    pub(crate) blocks: [usize; 2],
    /// The threads of a block in the first two dimensions.
    pub(crate) threads: [usize; 2],
    /// The bytes of dynamic shared memory of a block.
    pub(crate) shared_bytes: usize,
}

impl Grid {
    /// Returns so many blocks in one dimension, of so many threads.
    pub(crate) const fn blocks(blocks: usize, threads: [usize; 2]) -> Self {
        Grid {
            blocks: [blocks, 1],
            threads,
            shared_bytes: 0,
        }
    }

    /// Returns the shape for kernels over elements.
    pub(crate) fn elements(count: usize, dtype: DType) -> Self {
        Grid::blocks(count.div_ceil(THREADS * pack(dtype)), [THREADS, 1])
    }

    /// Returns the shape for kernels over rows: a warp for each short row, and a block for each
    /// long one.
    pub(crate) fn rows(rows: usize, width: usize, dtype: DType) -> Self {
        let threads = match width * dtype.size_in_bytes() {
            0..=3072 => {
                return Grid::blocks(rows.div_ceil(ROWS_OF_BLOCK), [WARP, ROWS_OF_BLOCK]);
            }
            3073..=4096 => 128,
            4097..=32_768 => 256,
            _ => 1024,
        };
        Grid::blocks(rows, [threads, 1])
    }

    /// Returns the shape for kernels over short vectors: each has a thread for each of its packs,
    /// rounded up to a power of two, and at most a warp.
    pub(crate) fn vectors(count: usize, width: usize, dtype: DType) -> Self {
        let threads = width.div_ceil(pack(dtype)).max(1).next_power_of_two();
        let threads = threads.min(WARP);
        let vectors = THREADS / threads;
        Grid::blocks(count.div_ceil(vectors), [threads, vectors])
    }

    /// Returns the shape for kernels of which each block has a chunk of rows: a thread for each
    /// pack of a row, in whole warps, up to a limit.
    pub(crate) fn chunks(count: usize, width: usize, dtype: DType) -> Self {
        let warps = width.div_ceil(pack(dtype) * WARP).max(1);
        Grid::blocks(count, [(warps * WARP).min(THREADS), 1])
    }

    /// Returns the shape for kernels over columns, which write [`columns_parts`] rows of partial
    /// sums.
    pub(crate) fn columns(rows: usize, width: usize, dtype: DType) -> Self {
        Grid {
            blocks: [tiles(width, dtype), columns_parts(rows, width, dtype)],
            threads: [WARP, COLUMN_ROWS],
            shared_bytes: 0,
        }
    }

    /// Returns the shape for the kernel that adds up rows of partial sums.
    pub(crate) const fn finish_columns(width: usize) -> Self {
        Grid::blocks(width.div_ceil(WARP), [WARP, COLUMN_ROWS])
    }
}

/// The most blocks in the second dimension of a launch.
pub(crate) const MOST_BLOCK_ROWS: usize = 65_535;

/// Returns the number of elements in a pack.
fn pack(dtype: DType) -> usize {
    PACK_BYTES / dtype.size_in_bytes()
}

/// Returns the number of tiles of columns, of which a block of kernels over columns has one.
fn tiles(width: usize, dtype: DType) -> usize {
    width.div_ceil(WARP * pack(dtype))
}

/// Returns the number of rows of partial sums that a kernel over columns writes: enough for many
/// blocks, and each of several rows.
pub(crate) fn columns_parts(rows: usize, width: usize, dtype: DType) -> usize {
    let most = (1024 / tiles(width, dtype).max(1)).clamp(1, MOST_BLOCK_ROWS);
    rows.div_ceil(32).clamp(1, most)
}
