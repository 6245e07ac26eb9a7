//! cuRAND: generators, which candle makes for each device. The programs under test draw no numbers
//! from them.

#![expect(
    unsafe_code,
    reason = "functions of C, whose pointers their callers answer for"
)]

use std::ffi::{c_int, c_ulonglong};

use crate::handles::{Handle, Handles};

type Code = c_int;

const SUCCESS: Code = 0;
const NOT_INITIALIZED: Code = 101;

static GENERATORS: Handles<()> = Handles::new();

/// Returns the code of a call that only needs a generator.
fn known(generator: Option<()>) -> Code {
    if generator.is_some() {
        SUCCESS
    } else {
        NOT_INITIALIZED
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn curandCreateGenerator(made: *mut Handle, _kind: c_int) -> Code {
    // SAFETY: the caller's pointer.
    unsafe { made.write(GENERATORS.add(())) };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn curandDestroyGenerator(handle: Handle) -> Code {
    known(GENERATORS.remove(handle))
}

#[unsafe(no_mangle)]
extern "C" fn curandSetPseudoRandomGeneratorSeed(handle: Handle, _seed: c_ulonglong) -> Code {
    known(GENERATORS.get(handle))
}

#[unsafe(no_mangle)]
extern "C" fn curandSetStream(handle: Handle, _stream: Handle) -> Code {
    known(GENERATORS.get(handle))
}
