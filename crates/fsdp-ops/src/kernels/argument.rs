//! The arguments of kernels.

use std::ffi::c_void;

use candle_core::{Layout, Result};

use super::memory::{Operand, Output};

/// An argument of a kernel.
#[derive(Clone, Copy)]
pub(crate) enum Argument<'a> {
    /// A pointer to the first element of a tensor.
    Read(&'a Operand<'a>),
    /// A pointer to the first element of fresh memory.
    Write(&'a Output),
    /// A pointer to a later element of fresh memory.
    WriteFrom(&'a Output, usize),
    /// An `int`, which is an error if the number is larger.
    Int(usize),
    /// An `int64_t`.
    Long(usize),
    /// A `double`.
    Double(f64),
    /// A `uint64_t`.
    Word(u64),
    /// An `Attention`.
    Attention(AttentionSizes),
    /// A `Rotation`.
    Rotation(RotationSizes),
    /// A `Pieces`.
    Pieces(&'a Pieces),
}

/// The elements from one batch, head and position to the next: `Strides` of `common.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strides {
    pub(crate) batch: i64,
    pub(crate) head: i64,
    pub(crate) time: i64,
}

impl Strides {
    /// Returns the strides of a layout `[batch, heads, time, width]`.
    ///
    /// # Errors
    /// Another number of dimensions.
    pub(crate) fn of_layout(layout: &Layout) -> Result<Self> {
        layout.shape().dims4()?;
        let stride = |dim: usize| layout.stride()[dim] as i64;
        Ok(Strides {
            batch: stride(0),
            head: stride(1),
            time: stride(2),
        })
    }
}

/// The sizes and strides of all tensors of an attention: `Attention` of `attention.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionSizes {
    pub(crate) query: Strides,
    pub(crate) key: Strides,
    pub(crate) value: Strides,
    pub(crate) output: Strides,
    pub(crate) dquery: Strides,
    pub(crate) dkey: Strides,
    pub(crate) dvalue: Strides,
    pub(crate) doutput: Strides,
    pub(crate) heads: i32,
    pub(crate) group: i32,
    pub(crate) rows: i32,
    pub(crate) columns: i32,
    pub(crate) width: i32,
    pub(crate) value_width: i32,
    pub(crate) causal: i32,
    pub(crate) scale: f32,
}

/// The sizes and strides of a rotation: `Rotation` of `rope.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct RotationSizes {
    pub(crate) x: Strides,
    pub(crate) y: Strides,
    pub(crate) batches: i64,
    pub(crate) heads: i32,
    pub(crate) time: i32,
    pub(crate) half: i32,
    pub(crate) of_batch: i32,
    pub(crate) back: i32,
}

/// The most pieces of a launch.
pub(super) const MAX_PIECES: usize = 64;
/// The most tensors of a piece.
pub(super) const MAX_TENSORS: usize = 5;

/// The table of the pieces that a launch goes over: `Pieces` of `pieces.cuh`.
#[repr(C)]
#[derive(Debug, Clone)]
pub(crate) struct Pieces {
    pub(super) addresses: [[u64; MAX_PIECES]; MAX_TENSORS],
    pub(super) counts: [i64; MAX_PIECES],
    pub(super) first_blocks: [i32; MAX_PIECES],
    pub(super) chunk: i64,
    pub(super) pieces: i32,
}

/// The value of an argument, in the type that the kernel has for it.
pub(super) enum Value {
    Word(u64),
    Int(i32),
    Long(i64),
    Double(f64),
    Attention(AttentionSizes),
    Rotation(RotationSizes),
    Pieces(Box<Pieces>),
}

impl Value {
    /// Returns the value of an argument. `read` and `write` return the address of a tensor's first
    /// element, and of the first element of fresh memory.
    ///
    /// # Errors
    /// Those of `read` and `write`; numbers that are too large for their types.
    pub(super) fn new<'a>(
        argument: &Argument<'a>,
        read: impl FnOnce(&'a Operand<'a>) -> Result<u64>,
        write: impl FnOnce(&'a Output) -> Result<u64>,
    ) -> Result<Self> {
        Ok(match *argument {
            Argument::Read(operand) => Value::Word(read(operand)?),
            Argument::Write(output) => Value::Word(write(output)?),
            Argument::WriteFrom(output, start) => {
                let bytes = start * output.dtype().size_in_bytes();
                Value::Word(write(output)? + bytes as u64)
            }
            Argument::Int(number) => Value::Int(to_int(number)?),
            Argument::Long(number) => Value::Long(number as i64),
            Argument::Double(number) => Value::Double(number),
            Argument::Word(word) => Value::Word(word),
            Argument::Attention(sizes) => Value::Attention(sizes),
            Argument::Rotation(sizes) => Value::Rotation(sizes),
            Argument::Pieces(pieces) => Value::Pieces(Box::new(pieces.clone())),
        })
    }

    /// Returns a pointer to the value, as launches take it.
    pub(super) const fn pointer(&self) -> *mut c_void {
        match self {
            Value::Word(value) => (&raw const *value).cast_mut().cast(),
            Value::Int(value) => (&raw const *value).cast_mut().cast(),
            Value::Long(value) => (&raw const *value).cast_mut().cast(),
            Value::Double(value) => (&raw const *value).cast_mut().cast(),
            Value::Attention(value) => (&raw const *value).cast_mut().cast(),
            Value::Rotation(value) => (&raw const *value).cast_mut().cast(),
            Value::Pieces(value) => (&raw const **value).cast_mut().cast(),
        }
    }
}

/// Returns a number as a kernel's `int`.
///
/// # Errors
/// A number that is too large.
pub(crate) fn to_int(number: usize) -> Result<i32> {
    i32::try_from(number).map_err(|_| {
        candle_core::Error::Msg(format!("a kernel cannot count to {number}: cut the tensor")).bt()
    })
}
