//! Fast operations with gradients for candle models.
//!
//! candle's fused operations (`candle_nn::ops::softmax_last_dim`, `rms_norm`, `layer_norm`,
//! `rotary_emb::rope`, `ops::sdpa`) have no backward, or silently stop the gradient. The same
//! functions composed of candle's small operations have a backward, but each small operation reads
//! and writes all elements, in the forward and again in the backward. The functions here compute in
//! one pass over rows that stay in the cache, have a backward that does the same, and work in any
//! candle model.
//!
//! | function | computes | replaces |
//! |---|---|---|
//! | [`softmax_last_dim`] | softmax over the last dimension | `candle_nn::ops::softmax_last_dim` |
//! | [`rms_norm`] | root-mean-square norm over the last dimension | `candle_nn::ops::rms_norm` |
//! | [`layer_norm`] | layer norm over the last dimension | `candle_nn::ops::layer_norm` |
//! | [`rope()`], [`rope_i`] | rotary embeddings, of halves and of neighbours | `candle_nn::rotary_emb::{rope, rope_i}` |
//! | [`scaled_dot_product_attention`] | attention, causal or not | `candle_nn::ops::sdpa` |
//! | [`packed_attention`] | the same on the output of one projection to queries, keys and values | |
//! | [`gelu_erf`], [`gelu()`] | GELU, exact and by tanh | `Tensor::{gelu_erf, gelu}` |
//! | [`cross_entropy()`] | mean cross-entropy of scores and targets | `candle_nn::loss::cross_entropy` |
//! | [`embedding()`] | rows of a table by index | `candle_nn::Embedding` |
//! | [`dropout()`] | dropout whose masks do not depend on ranks | `candle_nn::ops::dropout` |
//! | [`linear()`] | a product with a weight, plus a bias | `candle_nn::Linear` |
//! | [`linear_add`] | a residual plus [`linear()`] | |
//! | [`linear_gelu_erf`] | GELU of a product with a weight, plus a bias | |
//! | [`add()`] | a sum, also with a tensor that lacks first dimensions | `Tensor::{add, broadcast_add}` |
//!
//! On CPUs they take f32, f64, bf16 and f16. The half types are computed in f32 and rounded once,
//! at the end. [`linear_gelu_erf`] and [`linear_add`] round twice, as the two operations that they
//! join would. On NVIDIA GPUs of compute capability 8.0 or higher, with the feature `cuda`, there
//! are kernels for f32, bf16 and f16; matrix products are cuBLAS's. Elsewhere each function is
//! composed of candle's operations, and has the same gradients: on older GPUs, in f64 on GPUs, and
//! for attention whose heads are wider than 128 elements or than the GPU has shared memory for.
//! All tensors of an operation must be on one `Device` and its clones: those of other GPUs, or of
//! another handle of the same one whose work is in another stream, are an error.
//!
//! candle's backward makes a tensor of zeros for each argument of each operation, and adds the
//! gradient to it. In the backward of a sharded model, operations of this crate do without both:
//! [`autograd`] says how. So a step of a model that is made of them has about a third fewer
//! launches and half as many allocations. Behind one of candle's own operations that is no view,
//! all operations are as in candle's backward.
//!
//! Results on CPUs do not depend on the number of threads or the machine's vector instructions,
//! except in matrix products, which use the crate `gemm`, as candle does. Work is shared by the
//! threads of the current rayon pool. Kernels give the same bits from run to run.

mod add;
mod attention;
pub mod autograd;
mod cross_entropy;
mod dropout;
mod element;
mod embedding;
mod gelu;
mod indices;
#[cfg_attr(
    not(any(test, feature = "cuda")),
    expect(dead_code, reason = "nothing is launched without a GPU or a test")
)]
mod kernels;
mod linear;
mod norm;
mod operation;
mod parts;
mod product;
mod real;
mod rope;
mod rows;
mod softmax;
pub mod step;
#[cfg(test)]
mod tests;
mod values;

pub use add::add;
pub use attention::{packed_attention, scaled_dot_product_attention};
pub use cross_entropy::cross_entropy;
pub use dropout::{DropoutMasks, dropout};
pub use embedding::embedding;
pub use gelu::{gelu, gelu_erf};
pub use linear::{linear, linear_add, linear_gelu_erf};
pub use norm::{layer_norm, rms_norm};
pub use rope::{rope, rope_i};
pub use softmax::softmax_last_dim;
