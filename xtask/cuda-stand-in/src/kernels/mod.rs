//! candle's kernels, on the host. Each reads its arguments at once, as a launch does, and returns
//! the work for a stream.
//!
//! They compute in `f64` and round once, so they differ from a GPU's by rounding.

mod arguments;
mod copies;
mod element;
mod indexing;
mod maps;
mod reductions;
mod rows;

pub(crate) use self::arguments::{Arguments, Grid, Kernel};
pub(crate) use self::element::Element;

/// Returns the kernel of a name, if it is one of those that are known here.
pub(crate) fn find(name: &str) -> Option<Kernel> {
    // The type of float8 has an underscore in it.
    let (root, dtype) = name
        .strip_suffix("_f8_e4m3")
        .map_or_else(|| name.rsplit_once('_'), |root| Some((root, "f8_e4m3")))?;
    maps::find(root, dtype)
        .or_else(|| copies::find(root, dtype))
        .or_else(|| reductions::find(root, dtype))
        .or_else(|| rows::find(root, dtype))
        .or_else(|| indexing::find(root, dtype))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found_by_operation_and_type() {
        for name in [
            "uneg_f32",
            "badd_bf16",
            "eq_i64",
            "cast_f32_bf16",
            "affine_u8",
            "where_u8_f16",
            "fast_sum_f64",
        ] {
            assert!(find(name).is_some(), "{name}");
        }
        for name in [
            "uneg_f31",
            "fast_sum_small_u32",
            "softmax_f32",
            "rope_i_f32",
            "is_u32_f32",
            "ia_i64_bf16",
        ] {
            assert_eq!(find(name).is_some(), name != "uneg_f31", "{name}");
        }
        for name in [
            "copy2d_f16",
            "const_set_f32",
            "ucopy_i64",
            "uelu_f32",
            "no_such",
            "nothing",
            "_",
        ] {
            assert_eq!(
                find(name).is_some(),
                !name.starts_with("no") && name != "_",
                "{name}"
            );
        }
    }
}
