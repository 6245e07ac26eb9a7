//! Values that every element type can hold, and their sums over five ranks too.

use std::fmt::Debug;

use fsdp_comm::Element;
use half::{bf16, f16};

pub(super) trait TestElement: Element + PartialEq + Debug {
    /// This whole number, at most 127.
    fn of(number: usize) -> Self;
}

macro_rules! test_elements {
    ($($element:ty: $of:expr),* $(,)?) => {
        $(impl TestElement for $element {
            fn of(number: usize) -> Self {
                assert!(number <= 127);
                let of: fn(u8) -> Self = $of;
                of(number as u8)
            }
        })*
    };
}

test_elements! {
    f32: f32::from, f64: f64::from, f16: |x| f16::from_f32(x.into()), bf16: |x| bf16::from_f32(x.into()),
    i64: i64::from, i32: i32::from, i16: i16::from, i8: |x| x as i8,
    u64: u64::from, u32: u32::from, u16: u16::from, u8: |x| x,
}

/// Returns the element of rank `rank` at `index`, which is at most 20.
pub(super) fn number(rank: usize, index: usize) -> usize {
    (rank * 5 + index * 3 + index / 17) % 21
}

/// Returns the elements of rank `rank`.
pub(super) fn numbers<T: TestElement>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|index| T::of(number(rank, index))).collect()
}

/// Calls a generic function with every element type.
macro_rules! for_each_element {
    ($function:ident($($argument:expr),*)) => {{
        $function::<f32>($($argument),*);
        $function::<f64>($($argument),*);
        $function::<half::f16>($($argument),*);
        $function::<half::bf16>($($argument),*);
        $function::<i64>($($argument),*);
        $function::<i32>($($argument),*);
        $function::<i16>($($argument),*);
        $function::<i8>($($argument),*);
        $function::<u64>($($argument),*);
        $function::<u32>($($argument),*);
        $function::<u16>($($argument),*);
        $function::<u8>($($argument),*);
    }};
}
pub(super) use for_each_element;
