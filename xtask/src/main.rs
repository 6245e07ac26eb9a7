//! The project's own tasks, for CI and for people before they push. `cargo xtask ci` runs all
//! checks.

mod bench;
mod docs;
mod features;
mod files;
mod fuzz;
mod gpu;
mod interop;
mod job;
mod kernels;
mod kills;
mod metadata;
mod mpi;
mod package;
mod python;
mod shell;
mod soak;
mod strangers;
mod tidy;
mod wheel;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

use self::shell::{BESIDE_A_LIBRARY, TESTED, cargo, cargo_output, say};

#[derive(Parser)]
#[command(about = "The project's own tasks", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// All checks and all tests: what CI runs.
    Ci,
    /// Formatting, without changing anything.
    Fmt,
    /// The project's own rules: layers, file sizes, where `unsafe` may be.
    Tidy(tidy::TidyArguments),
    /// clippy on everything, warnings denied.
    Clippy,
    /// Each crate without features, with each of them, and with all; warnings denied.
    Features(features::FeaturesArguments),
    /// The API documentation, warnings denied.
    Doc,
    /// The examples in documentation.
    Doctest,
    /// All other tests.
    Test,
    /// Tests against the real PyTorch, which is installed for them: checkpoints in both directions,
    /// and losses after them.
    Interop,
    /// The packages that would be published: their manifests, files and licences.
    Package(package::PackageArguments),
    /// The book: built, its links checked, and its console samples run again and compared.
    Docs(docs::DocsArguments),
    /// The Python wheel: built, installed in a fresh environment, and tested there with PyTorch.
    Wheel(wheel::WheelArguments),
    /// Every fuzz target for a while, from its seeds; needs cargo-fuzz.
    Fuzz {
        /// The time for each target
        #[arg(long, value_name = "N", default_value_t = 60)]
        seconds: u64,
    },
    /// The tests that need GPUs, on the GPUs of this machine; without one they are skipped.
    Gpu(gpu::GpuArguments),
    /// The registers, spills and shared memory of the CUDA kernels, against a table; without `nvcc`
    /// they are not compared.
    Kernels(kernels::KernelsArguments),
    /// All benches, beside the limits of the machine and, if asked for, beside PyTorch.
    Bench(Box<bench::BenchArguments>),
    /// The conformance suite under `mpirun`, where an MPI is installed.
    Mpi {
        /// Also compare `fsdp train` with threads; builds the whole workspace again
        #[arg(long)]
        train: bool,
    },
    /// Simulations of saves on a disk that loses what was not synced: crashes and failures of every
    /// kind, each repeatable.
    Simulate {
        /// The number of simulations
        #[arg(long, value_name = "N", default_value_t = 2000)]
        seeds: u64,
        /// The seed of the first one [default: random]
        #[arg(long, value_name = "S")]
        seed: Option<u64>,
        /// Look for each of the bugs that are put in on purpose, instead
        #[arg(long)]
        flaws: bool,
        /// Use the debug build, which takes less time to make
        #[arg(long)]
        debug: bool,
        /// Print each operation
        #[arg(long)]
        trace: bool,
    },
    /// Runs whose ranks and launchers are killed and stopped over and over: they must end with the
    /// bits of one that nobody disturbed.
    Kills(kills::KillsArguments),
    /// Strangers at the ports of jobs: the jobs must neither end nor grow, and must have the bits
    /// of undisturbed ones.
    Strangers(strangers::StrangersArguments),
    /// Ranks killed or stopped at random moments of training and saving; the newest checkpoint must
    /// resume.
    Soak(soak::SoakArguments),
}

/// The variable that tells nextest how many tests run at once.
const TEST_THREADS: &str = "NEXTEST_TEST_THREADS";

/// The tasks of `ci`, in order: quick ones and those that fail most often come first; the tests'
/// summary comes last. The first task that builds programs builds all tests. While the libraries
/// are built one after the other, tests are built on the other cores.
const CI: [&[&str]; 10] = [
    &["fmt"],
    &["tidy"],
    &["clippy"],
    &["gpu", "--check"],
    &["package"],
    &["doc"],
    &["docs", "--no-build", "--with-tests"],
    &["doctest"],
    &["mpi"],
    &["test"],
];

fn main() -> Result<()> {
    let root = root()?;
    let words: Vec<String> = std::env::args().skip(1).collect();
    match Arguments::parse().task {
        Task::Ci => {
            for words in CI {
                let task = Arguments::parse_from(std::iter::once(&"xtask").chain(words)).task;
                timed(&words.join(" "), || run(task, &root))?;
            }
            Ok(())
        }
        task => timed(&words.join(" "), || run(task, &root)),
    }
}

/// Runs a task, and says how long it took if it passed.
fn timed(name: &str, task: impl FnOnce() -> Result<()>) -> Result<()> {
    let start = Instant::now();
    task()?;
    let seconds = start.elapsed().as_secs_f64();
    say(&format!("xtask: {name} passed in {seconds:.0} s"));
    Ok(())
}

/// Returns the directory of the workspace, which is the parent of this package's.
fn root() -> Result<PathBuf> {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").context("run it as `cargo xtask`")?;
    Ok(Path::new(&package)
        .parent()
        .context("xtask is in a workspace")?
        .to_owned())
}

/// Runs one task.
fn run(task: Task, root: &Path) -> Result<()> {
    match task {
        Task::Ci => unreachable!("main runs its parts"),
        Task::Fmt => cargo(root, &["fmt", "--all", "--check"], &[]),
        Task::Tidy(arguments) => tidy::run(root, &arguments),
        Task::Clippy => clippy(root),
        Task::Features(arguments) => features::run(root, &arguments),
        Task::Doc => doc(root),
        Task::Doctest => cargo(root, &[&["test", "--doc"], TESTED].concat(), &[]),
        Task::Test => test(root),
        Task::Interop => interop::test(root),
        Task::Package(arguments) => package::run(root, &arguments),
        Task::Docs(arguments) => docs::check(root, &arguments),
        Task::Wheel(arguments) => wheel::build(root, &arguments),
        Task::Fuzz { seconds } => fuzz::fuzz(root, seconds),
        Task::Gpu(arguments) => gpu::run(root, &arguments),
        Task::Kernels(arguments) => kernels::compare(root, &arguments),
        Task::Bench(arguments) => bench::run(root, &arguments),
        Task::Mpi { train } => mpi::run(root, train),
        Task::Simulate {
            seeds,
            seed,
            flaws,
            debug,
            trace,
        } => {
            let seed = seed
                .unwrap_or_else(|| u64::from(rand::random::<u32>()))
                .to_string();
            let seeds = seeds.to_string();
            let mut environment = vec![
                ("FSDP_SIMULATION_SEEDS", seeds.as_str()),
                ("FSDP_SIMULATION_SEED", seed.as_str()),
            ];
            environment.extend(flaws.then_some(("FSDP_SIMULATION_FLAWS", "1")));
            environment.extend(trace.then_some(("FSDP_SIMULATION_TRACE", "1")));
            let arguments = [
                "test",
                "--package",
                "fsdp-checkpoint",
                "--test",
                "simulation",
                "--profile",
                if debug { "dev" } else { "release" },
                "--locked",
                "--",
                "--ignored",
                "--nocapture",
            ];
            cargo(root, &arguments, &environment)
        }
        Task::Kills(arguments) => kills::run(root, &arguments),
        Task::Strangers(arguments) => strangers::run(root, &arguments),
        Task::Soak(arguments) => soak::run(root, &arguments),
    }
}

/// Runs clippy on everything.
fn clippy(root: &Path) -> Result<()> {
    let target = gpu::check_target(root);
    let directory = ["--target-dir", &*target.to_string_lossy()];
    // In the workspace the tests and the examples turn the object stores on. Check the command also
    // without them, and once more without candle.
    for packages in [
        &["--workspace", "--all-targets"][..],
        &[
            "--workspace",
            "--exclude",
            "fsdp-tests",
            "--exclude",
            "fsdp-examples",
        ],
        &[
            "--package",
            "fsdp-cli",
            "--no-default-features",
            "--all-targets",
        ],
    ] {
        let clippy = [
            &["clippy", "--locked"],
            &directory[..],
            packages,
            &["--", "-D", "warnings"],
        ];
        cargo(root, &clippy.concat(), &[])?;
    }
    Ok(())
}

/// Builds the API documentation.
fn doc(root: &Path) -> Result<()> {
    // Beside clippy's builds, because both need only the signatures of the dependencies.
    let target = gpu::check_target(root);
    let doc = [
        "doc",
        "--locked",
        "--target-dir",
        &*target.to_string_lossy(),
        "--workspace",
        "--no-deps",
        "--document-private-items",
    ];
    cargo(root, &doc, &[("RUSTDOCFLAGS", "-D warnings")])
}

/// Runs all tests except those in documentation. nextest runs them if it is installed, because it
/// stops tests that hang. Programs of `examples/` directories, which no test runs, are only checked
/// by clippy, and not built.
fn test(root: &Path) -> Result<()> {
    // In the workspace the tests turn the object stores on. These are the error messages of a build
    // without them. It is built for these few tests alone, so optimizing it would only cost time.
    // Deep values need most of the stack in such a build, so their test runs here too.
    let deep = "a_list_that_holds_itself_is_an_error";
    let without_stores = [
        "test",
        "--package",
        "fsdp-formats",
        "--lib",
        "--locked",
        "--",
        "location",
        deep,
    ];
    cargo(
        root,
        &without_stores,
        &[("CARGO_PROFILE_DEV_OPT_LEVEL", "0")],
    )?;
    // The error messages about GPUs, on machines with and without them.
    let nccl = [
        "test",
        "--package",
        "fsdp-comm",
        "--features",
        "fsdp-comm/nccl",
        "--lib",
        "--locked",
    ];
    cargo(root, &[&nccl, BESIDE_A_LIBRARY, &["nccl"]].concat(), &[])?;
    let folder = kernels::build(root)?.map(|folder| folder.to_string_lossy().into_owned());
    let mut environment: Vec<(&str, &str)> = Vec::new();
    environment.extend(folder.as_deref().map(|folder| (kernels::FOLDER, folder)));
    if cargo_output(root, &["nextest", "--version"]).is_ok() {
        // Many tests wait for a deadline or for another process, so more of them run at once than
        // there are cores.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let at_once =
            std::env::var(TEST_THREADS).unwrap_or_else(|_| (cores + cores.div_ceil(2)).to_string());
        environment.push((TEST_THREADS, &at_once));
        let nextest = [&["nextest", "run", "--tests"], TESTED].concat();
        return cargo(root, &nextest, &environment);
    }
    say("xtask: cargo-nextest is not installed, so tests that hang are not stopped");
    cargo(root, &[&["test", "--tests"], TESTED].concat(), &environment)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tasks_of_ci_are_tasks() {
        for words in CI {
            Arguments::try_parse_from(std::iter::once(&"xtask").chain(words)).unwrap();
        }
    }
}
