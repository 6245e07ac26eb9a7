//! Buffers whose size comes from another rank or the environment. Too large a size is an error, and
//! not an abort.

/// Reserves room for `additional` bytes. `name` is for the message of the error.
pub(crate) fn reserve(buffer: &mut Vec<u8>, additional: usize, name: &str) -> Result<(), String> {
    buffer
        .try_reserve_exact(additional)
        .map_err(|_| format!("there is not enough memory for the {additional} bytes of {name}"))
}

/// Creates a buffer of `len` zeros. `name` is for the message of the error.
pub(crate) fn zeroed(len: usize, name: &str) -> Result<Vec<u8>, String> {
    let mut buffer = Vec::new();
    reserve(&mut buffer, len, name)?;
    buffer.resize(len, 0);
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_that_does_not_fit_in_memory_is_an_error_with_the_size_and_the_name() {
        let error = zeroed(usize::MAX / 2, "an object of rank 3").unwrap_err();
        assert!(
            error.contains("an object of rank 3") && error.contains(&(usize::MAX / 2).to_string()),
            "{error}"
        );
        assert_eq!(zeroed(3, "x"), Ok(vec![0; 3]));
    }
}
