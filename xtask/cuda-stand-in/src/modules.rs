//! Modules, their kernels by name, and launches.

#![expect(
    unsafe_code,
    reason = "functions of C, whose pointers their callers answer for"
)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use libloading::Library;

use crate::counts::{Counted, count};
use crate::driver::{answer, give};
use crate::handles::{Handle, Handles};
use crate::kernels::{self, Arguments, Grid, Kernel};
use crate::libraries::{self, LibraryKernel, Shape};
use crate::machine::code::{self, Code};
use crate::machine::{computes, current, push, say};
use crate::queue::{Work, carry_out};

/// A module.
#[derive(Debug, Clone)]
enum Module {
    /// Kernels of candle's: their source, which holds their names.
    Text(Arc<str>),
    /// Kernels that are compiled for the host.
    Library(Arc<Library>),
}

/// A kernel.
#[derive(Debug, Clone)]
enum Function {
    /// One of candle's, as the stand-in has it.
    Known(Kernel),
    /// One that is compiled for the host.
    Compiled(Arc<LibraryKernel>),
}

static MODULES: Handles<Module> = Handles::new();
/// Kernels, each with its name.
static FUNCTIONS: Handles<(Arc<str>, Function)> = Handles::new();

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(made: *mut Handle, image: *const c_void) -> Code {
    if image.is_null() {
        return code::INVALID_VALUE;
    }
    // SAFETY: the stand-in for the compiler writes libraries and text only.
    let module = match unsafe { libraries::open(image.cast()) } {
        Some(Ok(library)) => Module::Library(Arc::new(library)),
        Some(Err(error)) => {
            say(&format!("kernels cannot be loaded: {error}"));
            return code::INVALID_VALUE;
        }
        None => {
            count(Counted::PtxModules);
            // SAFETY: this is a string.
            let text = unsafe { CStr::from_ptr(image.cast()) };
            Module::Text(text.to_string_lossy().into())
        }
    };
    // SAFETY: the caller's pointer.
    answer(current().and_then(|_| unsafe { give(made, MODULES.add(module)) }))
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
    if let Err(error) = current() {
        return error;
    }
    let Some(module) = MODULES.get(module) else {
        return code::INVALID_HANDLE;
    };
    // SAFETY: the caller's string.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    let function = match module {
        Module::Text(text) => find_known(&text, &name).map(Function::Known),
        Module::Library(library) => LibraryKernel::find(&library, &name)
            .map(|kernel| Function::Compiled(Arc::new(kernel)))
            .ok_or_else(|| format!("a library has no kernel `{name}`")),
    };
    match function {
        // SAFETY: the caller's pointer.
        Ok(function) => answer(unsafe { give(made, FUNCTIONS.add((name.into(), function))) }),
        Err(message) => {
            say(&message);
            code::NOT_FOUND
        }
    }
}

/// Returns a kernel of candle's, if the source of candle's kernels has its name.
///
/// # Errors
/// A message about what is missing.
fn find_known(text: &str, name: &str) -> Result<Kernel, String> {
    if text.is_empty() {
        return Err(
            "kernels were compiled without their names, or without a C++ compiler: \
                    delete `target/check`, and build again"
                .to_owned(),
        );
    }
    if !has_word(text, name) {
        return Err(format!("candle has no kernel `{name}`"));
    }
    kernels::find(name)
        .ok_or_else(|| format!("candle's kernel `{name}` is missing in the stand-in"))
}

/// The attribute of a kernel that says how much dynamic shared memory it may have.
const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;

#[unsafe(no_mangle)]
extern "C" fn cuFuncSetAttribute(function: Handle, attribute: c_int, value: c_int) -> Code {
    if let Err(error) = current() {
        return error;
    }
    let Some((name, function)) = FUNCTIONS.get(function) else {
        return code::INVALID_HANDLE;
    };
    let (Function::Compiled(kernel), MAX_DYNAMIC_SHARED_SIZE_BYTES, Ok(bytes)) =
        (function, attribute, usize::try_from(value))
    else {
        say(&format!(
            "attribute {attribute} of `{name}` cannot be {value}"
        ));
        return code::NOT_SUPPORTED;
    };
    if kernel.allow_shared_bytes(bytes) {
        code::SUCCESS
    } else {
        code::INVALID_VALUE
    }
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
    shared_bytes: c_uint,
    on: Handle,
    arguments: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> Code {
    let Some((name, function)) = FUNCTIONS.get(function) else {
        return code::INVALID_HANDLE;
    };
    let threads = block_x.saturating_mul(block_y).saturating_mul(block_z);
    if [grid_x, grid_y, grid_z, threads].contains(&0) || threads > 1024 {
        say(&format!(
            "`{name}` is launched with {grid_x}x{grid_y}x{grid_z} blocks of {threads} threads"
        ));
        return code::INVALID_VALUE;
    }
    let work: Work = match function {
        Function::Known(kernel) => {
            let grid = Grid {
                blocks: grid_x as usize,
                block: [block_x as usize, block_y as usize],
            };
            // SAFETY: the caller gives a pointer for each parameter of the kernel, whose types
            // `kernel` knows.
            kernel(&mut unsafe { Arguments::new(arguments) }, grid)
        }
        Function::Compiled(kernel) => {
            let shape = Shape {
                blocks: [grid_x, grid_y, grid_z],
                threads: [block_x, block_y, block_z],
                shared_bytes: shared_bytes as usize,
            };
            // SAFETY: the same.
            let Some(work) = (unsafe { kernel.work(arguments, shape) }) else {
                say(&format!("`{name}` cannot be launched"));
                return code::INVALID_VALUE;
            };
            work
        }
    };
    count(Counted::Kernels);
    if !computes() {
        return code::SUCCESS;
    }
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
