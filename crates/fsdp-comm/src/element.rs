//! The element types of tensor collectives.

use fsdp_layout::DType;
use half::{bf16, f16};

use crate::reduce::Reduce;

/// An element type of the tensor collectives: plain bytes with a dtype, and a reduction.
/// Implemented for `f32`, `f64`, [`struct@f16`], [`bf16`] and the integers of 8 to 64 bits; it
/// cannot be implemented elsewhere.
pub trait Element: bytemuck::Pod + Send + Sync + Reduce {
    /// The dtype that all ranks of a collective must agree on.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($element:ty => $dtype:ident),* $(,)?) => {
        $(impl Element for $element {
            const DTYPE: DType = DType::$dtype;
        })*
    };
}

elements! {
    f32 => F32, f64 => F64, f16 => F16, bf16 => BF16,
    i64 => I64, i32 => I32, i16 => I16, i8 => I8,
    u64 => U64, u32 => U32, u16 => U16, u8 => U8,
}
