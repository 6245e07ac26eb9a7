//! Modules, their kernels by name, and launches.

#![expect(
    unsafe_code,
    reason = "functions of C, whose pointers their callers answer for"
)]

use std::ffi::{CStr, c_char, c_uint, c_void};
use std::sync::Arc;

use crate::driver::{answer, give};
use crate::handles::{Handle, Handles};
use crate::kernels::{self, Arguments, Grid, Kernel};
use crate::machine::code::{self, Code};
use crate::machine::{current, push, say};
use crate::queue::carry_out;

/// Modules: the text of each, which holds the names of its kernels.
static MODULES: Handles<Arc<str>> = Handles::new();
/// Kernels, each with its name.
static FUNCTIONS: Handles<(Arc<str>, Kernel)> = Handles::new();

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(made: *mut Handle, image: *const c_void) -> Code {
    if image.is_null() {
        return code::INVALID_VALUE;
    }
    // SAFETY: the stand-in for the compiler writes text only, so this is a string.
    let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy();
    // SAFETY: the caller's pointer.
    answer(current().and_then(|_| unsafe { give(made, MODULES.add(text.into())) }))
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleLoad(_made: *mut Handle, _file: *const c_char) -> Code {
    code::NOT_SUPPORTED
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(module: Handle) -> Code {
    if MODULES.remove(module).is_some() {
        code::SUCCESS
    } else {
        code::INVALID_HANDLE
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(
    made: *mut Handle,
    module: Handle,
    name: *const c_char,
) -> Code {
    let Some(text) = MODULES.get(module) else {
        return code::INVALID_HANDLE;
    };
    // SAFETY: the caller's string.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    if text.is_empty() {
        say(
            "candle's kernels were compiled without their names: delete `target/check`, and build again",
        );
        return code::NOT_FOUND;
    }
    if !has_word(&text, &name) {
        say(&format!("candle has no kernel `{name}`"));
        return code::NOT_FOUND;
    }
    let Some(kernel) = kernels::find(&name) else {
        say(&format!(
            "candle's kernel `{name}` is missing in the stand-in"
        ));
        return code::NOT_FOUND;
    };
    // SAFETY: the caller's pointer.
    answer(unsafe { give(made, FUNCTIONS.add((name.into(), kernel))) })
}

/// Returns `true` if a text holds a name as a word of its own.
fn has_word(text: &str, name: &str) -> bool {
    text.match_indices(name).any(|(start, _)| {
        let before = text[..start].chars().next_back();
        let after = text[start + name.len()..].chars().next();
        !before.is_some_and(is_part_of_word) && !after.is_some_and(is_part_of_word)
    })
}

fn is_part_of_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    function: Handle,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    _shared_bytes: c_uint,
    on: Handle,
    arguments: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> Code {
    let Some((name, kernel)) = FUNCTIONS.get(function) else {
        return code::INVALID_HANDLE;
    };
    let threads = block_x.saturating_mul(block_y).saturating_mul(block_z);
    if [grid_x, grid_y, grid_z, threads].contains(&0) || threads > 1024 {
        say(&format!(
            "`{name}` is launched with {grid_x}x{grid_y}x{grid_z} blocks of {threads} threads"
        ));
        return code::INVALID_VALUE;
    }
    let grid = Grid {
        blocks: grid_x as usize,
        block: [block_x as usize, block_y as usize],
    };
    // SAFETY: the caller gives a pointer for each parameter of the kernel, whose types `kernel`
    // knows.
    let mut arguments = unsafe { Arguments::new(arguments) };
    let work = kernel(&mut arguments, grid);
    let launched = push(
        on,
        Box::new(move || carry_out(work).map_err(|error| format!("`{name}`: {error}"))),
    );
    answer(launched.map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_found_only_by_its_whole_name() {
        let text = "UNARY_OP(float, uneg_f32, -x)\nFAST_OP(double, fast_min_f64)";
        assert!(has_word(text, "uneg_f32") && has_word(text, "fast_min_f64"));
        assert!(
            !has_word(text, "uneg_f3") && !has_word(text, "min_f64") && !has_word(text, "uneg_f64")
        );
    }
}
