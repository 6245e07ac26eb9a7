//! Tensor parallelism: the parts of a model's tensors that each rank holds. This is arithmetic
//! only.
//!
//! [`Rules`] tell by a tensor's key how it is cut. A [`TensorParallelPlan`] applies them to a
//! checkpoint for a number of ranks, and fails if a tensor does not fit. The names are those of the
//! tensor-parallel plans of `transformers`:
//!
//! | rule | what a rank holds of `weight`, which is `[out, in]` | of `bias` |
//! |---|---|---|
//! | `colwise` | its rows | its part |
//! | `rowwise` | its columns | all |
//! | `packed_colwise` | its rows of the first half, then of the second | the same |
//! | `colwise(heads)` | the rows of its heads | its part |
//! | `colwise(heads, kv_heads, kv_heads)` | the rows of its heads of queries, then of keys, then of values | the same |
//! | `conv1d_colwise`, `conv1d_rowwise` | the same of `[in, out]`, which GPT-2 has | the same |
//! | `vocab` | its rows; the last ranks have fewer, or none | its part |
//! | `replicate` | all | all |
//!
//! There may be fewer `kv_heads` than ranks. Several consecutive ranks then hold the same head.
//!
//! ```
//! use fsdp_formats::checkpoint::open;
//! use fsdp_tools::convert::{convert, ConvertOptions, OutputFormat};
//! use fsdp_tools::tensor_parallel::{Rules, TensorParallelPlan};
//! # fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let source = open("Llama-3-8B", Default::default())?;
//! let rules = Rules::new::<&str>(&[], [("heads".to_owned(), 32), ("kv_heads".to_owned(), 8)].into())?;
//! let plan = TensorParallelPlan::new(source.metadata(), &rules, 4)?;
//! let options = ConvertOptions { tensor_parallel: Some(&plan), ..ConvertOptions::default() };
//! convert(&*source, "for-4-ranks", OutputFormat::SafetensorsDirectory { max_file_bytes: 5_000_000_000 }, options)?;
//! # Ok(()) }
//! ```

mod error;
mod plan;
mod rule;

pub use self::error::TensorParallelError;
pub use self::plan::{Cut, TensorParallelPlan};
pub use self::rule::Rules;
