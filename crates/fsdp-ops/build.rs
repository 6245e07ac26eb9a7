//! With the feature `cuda`: compiles the CUDA kernels for the GPUs that there are, and for those to
//! come as PTX, which the driver compiles.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

/// The folder of the kernels' sources.
const SOURCES: &str = "cuda";
/// The compute capabilities that kernels are compiled for, with the first version of CUDA that can.
/// GPUs with a later capability of the same generation run them too.
const CAPABILITIES: [(&str, (u32, u32)); 3] = [("80", (11, 0)), ("90", (11, 8)), ("100", (12, 8))];
/// The compute capability of the PTX, for all other generations.
const PTX: &str = "80";
/// The variables by which nvcc is found, which are those of candle's own kernels.
const VARIABLES: [&str; 4] = ["NVCC", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    println!("cargo::rerun-if-changed={SOURCES}");
    for variable in VARIABLES {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    if let Err(message) = compile() {
        println!("cargo::error={message}");
    }
}

/// Compiles all kernels, and writes `images.rs`, which embeds them.
///
/// # Errors
/// A message: that nvcc cannot be started, or what it says of a file.
#[expect(
    clippy::disallowed_methods,
    reason = "what a build makes is no checkpoint"
)]
fn compile() -> Result<(), String> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo has set no OUT_DIR")?);
    let nvcc = nvcc();
    let options = options(&nvcc)?;
    let mut names = Vec::new();
    let mut compilers = Vec::new();
    for source in sources()? {
        let name = source
            .file_stem()
            .ok_or("a source has no name")?
            .to_string_lossy()
            .into_owned();
        let image = out.join(format!("{name}.fatbin"));
        let mut command = Command::new(&nvcc);
        command.args(&options).arg(&source).arg("-o").arg(image);
        compilers.push(thread::spawn(move || run(&mut command)));
        names.push(name);
    }
    for compiler in compilers {
        compiler
            .join()
            .map_err(|_| "a thread that waits for nvcc has panicked")??;
    }
    let mut images = format!("const IMAGES: [(&str, &[u8]); {}] = [\n", names.len());
    for name in names {
        images.push_str(&format!(
            "    ({name:?}, include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.fatbin\"))),\n"
        ));
    }
    images.push_str("];\n");
    fs::write(out.join("images.rs"), images).map_err(|error| error.to_string())
}

/// Returns the files with kernels in them, in the order of their names.
///
/// # Errors
/// A folder that cannot be read.
fn sources() -> Result<Vec<PathBuf>, String> {
    let mut sources = Vec::new();
    for entry in fs::read_dir(SOURCES).map_err(|error| format!("`{SOURCES}`: {error}"))? {
        let path = entry.map_err(|error| error.to_string())?.path();
        if path.extension().is_some_and(|extension| extension == "cu") {
            sources.push(path);
        }
    }
    sources.sort();
    Ok(sources)
}

/// Returns the path of nvcc.
fn nvcc() -> PathBuf {
    if let Some(nvcc) = env::var_os(VARIABLES[0]) {
        return nvcc.into();
    }
    VARIABLES[1..]
        .iter()
        .filter_map(env::var_os)
        .map(|toolkit| Path::new(&toolkit).join("bin/nvcc"))
        .find(|path| path.exists())
        .unwrap_or_else(|| "nvcc".into())
}

/// Returns the options that make one file of machine code for all GPUs, and PTX.
///
/// # Errors
/// A message if nvcc cannot be started.
fn options(nvcc: &Path) -> Result<Vec<String>, String> {
    let version = version(&run(Command::new(nvcc).arg("--version"))?);
    let mut options = vec!["-std=c++17".to_owned(), "-fatbin".to_owned()];
    for (capability, first) in CAPABILITIES {
        if version.is_none_or(|version| version >= first) {
            options.push(format!(
                "-gencode=arch=compute_{capability},code=sm_{capability}"
            ));
        }
    }
    options.push(format!("-gencode=arch=compute_{PTX},code=compute_{PTX}"));
    Ok(options)
}

/// Returns the version of CUDA in the text that nvcc prints of itself, such as `release 13.0`;
/// `None` if there is none in it.
fn version(text: &str) -> Option<(u32, u32)> {
    let (_, rest) = text.split_once("release ")?;
    let (major, rest) = rest.split_once('.')?;
    let minor: String = rest.chars().take_while(char::is_ascii_digit).collect();
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Runs a program, and returns what it prints.
///
/// # Errors
/// A message: that it cannot be started, or what it says when it fails.
fn run(command: &mut Command) -> Result<String, String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| {
        format!(
            "`{program}` cannot be started ({error}): the feature `cuda` needs a CUDA toolkit; \
             NVCC or CUDA_HOME tells where it is"
        )
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    // cargo shows one line of a message.
    let text = String::from_utf8_lossy(&output.stderr).replace('\n', " | ");
    Err(format!("`{program}` has failed: {text}"))
}
