//! The arguments of a launch, and how kernels read them.

#![expect(
    unsafe_code,
    reason = "the arguments of a kernel are pointers to values of its own types"
)]

use std::ffi::c_void;

use crate::machine::elements;
use crate::memory::{Address, Elements};
use crate::queue::Work;

/// A kernel: reads its arguments, and returns the work.
pub(crate) type Kernel = fn(&mut Arguments, Grid) -> Work;

/// The size of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    pub(crate) blocks: usize,
    /// The threads of a block, in the first two dimensions.
    pub(crate) block: [usize; 2],
}

/// The arguments of a launch, which are read in order.
#[derive(Debug)]
pub(crate) struct Arguments {
    next: *mut *mut c_void,
}

impl Arguments {
    /// Reads arguments from here.
    ///
    /// # Safety
    /// There is a pointer to each argument that is read, to a value of the type that it is read as.
    pub(crate) const unsafe fn new(next: *mut *mut c_void) -> Self {
        Arguments { next }
    }

    /// Reads an argument.
    pub(super) fn value<T: Copy>(&mut self) -> T {
        // SAFETY: the promise of `new`.
        unsafe {
            let value = (*self.next).cast::<T>().read_unaligned();
            self.next = self.next.add(1);
            value
        }
    }

    pub(super) fn size(&mut self) -> usize {
        self.value()
    }

    pub(super) fn int(&mut self) -> usize {
        self.value::<u32>() as usize
    }

    pub(super) fn address(&mut self) -> Address {
        self.value()
    }

    /// Reads the number of dimensions and the address of `arrays` arrays of that length: sizes and
    /// strides.
    pub(super) fn layout(&mut self, arrays: usize) -> Layout {
        let dims = self.size();
        Layout {
            dims,
            arrays,
            info: self.address(),
        }
    }
}

/// The sizes and strides of tensors, which lie in the GPU's memory themselves.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    dims: usize,
    arrays: usize,
    info: Address,
}

impl Layout {
    /// Returns the places of the elements of each tensor.
    pub(super) fn places(self) -> Result<Vec<Places>, String> {
        if self.info == 0 {
            return Ok(vec![Places(None); self.arrays - 1]);
        }
        let info = match self.dims {
            0 => Vec::new(),
            dims => elements::<usize>(self.info)?
                .first(dims * self.arrays)?
                .to_vec(),
        };
        let sizes = &info[..self.dims];
        let mut places = Vec::new();
        for array in 1..self.arrays {
            let strides = &info[array * self.dims..(array + 1) * self.dims];
            // Kernels do not use the sizes of what is contiguous: those of `index_select` are even
            // another tensor's.
            places.push(if is_contiguous(sizes, strides) {
                Places(None)
            } else {
                Places(Some((sizes.to_vec(), strides.to_vec())))
            });
        }
        Ok(places)
    }
}

/// Returns `true` if elements with these sizes and strides lie one after the other.
fn is_contiguous(sizes: &[usize], strides: &[usize]) -> bool {
    let mut expected = 1;
    sizes.iter().zip(strides).rev().all(|(&size, &stride)| {
        let is_next = size <= 1 || stride == expected;
        expected *= size;
        is_next
    })
}

/// The places of a tensor's elements: one after the other, or by sizes and strides.
#[derive(Debug, Clone)]
pub(super) struct Places(Option<(Vec<usize>, Vec<usize>)>);

impl Places {
    /// Returns the place of the element with this index.
    pub(super) fn place(&self, index: usize) -> usize {
        let Some((sizes, strides)) = &self.0 else {
            return index;
        };
        let mut rest = index;
        let mut place = 0;
        for (size, stride) in sizes.iter().zip(strides).rev() {
            place += rest % size * stride;
            rest /= size;
        }
        place
    }
}

/// Returns the elements of an input, or those of the output if there is none.
pub(super) fn input<T: Copy>(address: Address, output: Elements<T>) -> Result<Elements<T>, String> {
    if address == 0 {
        Ok(output)
    } else {
        elements(address)
    }
}

/// Returns a generic kernel for an element type by the type's name.
macro_rules! by_type {
    ($dtype:expr, $kernel:ident) => {
        match $dtype {
            "u8" => Some($kernel::<u8> as $crate::kernels::arguments::Kernel),
            "u32" => Some($kernel::<u32>),
            "i16" => Some($kernel::<i16>),
            "i32" => Some($kernel::<i32>),
            "i64" => Some($kernel::<i64>),
            "f16" => Some($kernel::<half::f16>),
            "bf16" => Some($kernel::<half::bf16>),
            "f32" => Some($kernel::<f32>),
            "f64" => Some($kernel::<f64>),
            _ => None,
        }
    };
}

pub(super) use by_type;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_found_by_sizes_and_strides() {
        let transposed = Places(Some((vec![3, 2], vec![1, 3])));
        assert_eq!(
            (0..6).map(|k| transposed.place(k)).collect::<Vec<_>>(),
            [0, 3, 1, 4, 2, 5]
        );
        assert_eq!(Places(None).place(4), 4);
        assert!(is_contiguous(&[4, 1, 3], &[3, 7, 1]) && is_contiguous(&[], &[]));
        assert!(!is_contiguous(&[3, 2], &[1, 3]) && !is_contiguous(&[2, 3], &[6, 1]));
    }
}
