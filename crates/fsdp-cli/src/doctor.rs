//! `fsdp doctor`: the backends, devices and libraries that a job would find on this machine, and
//! those that are missing.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use fsdp::comm::{BackendKind, CommError, Environment};
use rustix::fs::statvfs;
use rustix::process::{Resource, getrlimit};
use serde_json::{Value, json};

use crate::job_failure::is_without_launcher;
use crate::launch::{has_secret, list_gpus};
use crate::text::{bytes_text, or_word};
use crate::{memory, output};

#[derive(Debug, Args)]
pub(crate) struct DoctorArguments {
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// The text for a number that this system does not tell.
const UNKNOWN: &str = "unknown";

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The version of the report's schema.
const SCHEMA: u32 = 1;

/// The variables with which launchers and networks tell ranks their place.
const VARIABLES: [&str; 33] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "FSDP_JOB_ID",
    "FSDP_INSECURE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_NAMESPACE",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
    "SLURM_LOCALID",
    "SLURM_STEP_NODELIST",
    "JOB_COMPLETION_INDEX",
    "JOB_NAME",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
];

/// The libraries that GPU ranks need, and the packages that bring them.
const LIBRARIES: [(&str, &str); 2] = [
    ("libcuda.so.1", "it comes with NVIDIA's driver"),
    ("libnccl.so.2", "it is NVIDIA's package `libnccl2`"),
];

/// The directories in which dynamic linkers look by default.
const LIBRARY_DIRECTORIES: [&str; 9] = [
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
    "/usr/local/nvidia/lib64",
];

struct MachineReport {
    /// The launcher of this process, or the reason that there is none.
    launcher: Result<Environment, CommError>,
    variables: BTreeMap<&'static str, String>,
    /// `true` if there is a secret of the job. It is not shown.
    has_secret: bool,
    cpu_cores: Option<usize>,
    memory_bytes: Option<u64>,
    /// The number of files that a process may have open; none for no limit.
    open_files: Option<u64>,
    /// The size of the file system in which a memory tier usually lies.
    dev_shm_bytes: Option<u64>,
    /// The reason that there is no shared memory.
    shared_memory_error: Option<String>,
    gpus: Vec<String>,
    libraries: BTreeMap<&'static str, Option<String>>,
    hints: Vec<String>,
}

/// Lists all backends, each with `true` if this build has it.
fn list_backends() -> impl Iterator<Item = (String, bool)> {
    let kinds = BackendKind::ALL.into_iter();
    kinds.map(|kind| (kind.to_string(), kind.check_compiled_in().is_ok()))
}

/// Examines this machine: `fsdp doctor`.
///
/// # Errors
/// stdout is closed.
pub(crate) fn run(arguments: &DoctorArguments) -> Result<()> {
    let report = examine();
    if arguments.json {
        return output::print_json(&report.json());
    }
    output::print_lines(&report.lines())
}

/// Looks at the environment and at this machine. Whatever is missing is no error, but gets a hint.
fn examine() -> MachineReport {
    let mut hints = Vec::new();
    // The launcher comes first: most jobs that do not start fail because of its variables.
    let launcher = Environment::from_env();
    let fault = match &launcher {
        Ok(environment) => environment.check_identity().err(),
        // Nobody has to have a launcher; but one whose variables make no sense, or are not all set,
        // is a fault.
        Err(error) if is_without_launcher(error) => None,
        Err(error) => Some(error.clone()),
    };
    if let Some(error) = fault {
        hints.push(format!("{error}: `--backend tcp` cannot start like this"));
    }
    // Ranks of one host lend each other memory if the system lets them, and use sockets otherwise.
    let shared_memory = check_shared_memory();
    if let Err(error) = &shared_memory {
        hints.push(format!(
            "no shared memory ({error}): ranks of one host will use sockets, which is slower"
        ));
    }
    let gpus = list_gpus();
    let mut libraries = BTreeMap::new();
    for (name, origin) in LIBRARIES {
        let library = find_library(name);
        if library.is_none() && !gpus.is_empty() {
            hints.push(format!(
                "there is a GPU, but no `{name}`: {origin}; `LD_LIBRARY_PATH` can tell where it is"
            ));
        }
        libraries.insert(name, library);
    }
    // A build without the right features is the most common reason for a GPU that stays idle.
    if !gpus.is_empty() {
        let build_hint =
            "`cargo build --release --features nccl` makes one, and `cargo xtask gpu` tries it";
        if !cfg!(feature = "cuda") {
            hints.push(format!(
                "there is a GPU, but this build computes on CPUs only: {build_hint}"
            ));
        } else if !cfg!(feature = "nccl") {
            hints.push(format!(
                "there is a GPU, but this build's ranks reach each other's only through the host: {build_hint}"
            ));
        }
    }
    MachineReport {
        launcher,
        // Reports are pasted into issues, so the secret itself is in no field.
        has_secret: has_secret(),
        variables: VARIABLES
            .iter()
            .filter_map(|&name| Some((name, std::env::var(name).ok()?)))
            .collect(),
        cpu_cores: std::thread::available_parallelism().ok().map(usize::from),
        memory_bytes: memory::machine_bytes(),
        // Each rank has a socket to every other one, so a low limit keeps large jobs from starting.
        open_files: getrlimit(Resource::Nofile).current,
        dev_shm_bytes: statvfs("/dev/shm")
            .ok()
            .map(|system| system.f_blocks.saturating_mul(system.f_frsize)),
        shared_memory_error: shared_memory.err().map(|error| error.to_string()),
        gpus,
        libraries,
        hints,
    }
}

/// Creates shared memory in the same way as ranks of one host do.
#[cfg(target_os = "linux")]
fn check_shared_memory() -> std::io::Result<()> {
    use std::os::fd::AsRawFd as _;

    // Ranks open each other's segments through `/proc`, which containers may forbid.
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("fsdp-doctor", flags)?;
    rustix::fs::ftruncate(&file, 4096)?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    fs::File::options()
        .read(true)
        .write(true)
        .open(path)
        .map(drop)
}

#[cfg(not(target_os = "linux"))]
fn check_shared_memory() -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}

/// Finds a shared library in `LD_LIBRARY_PATH`, or in the directories that dynamic linkers usually
/// search; `None` if it is nowhere.
fn find_library(name: &str) -> Option<String> {
    // The linker looks into the variable first, so what it would load comes first here too.
    let mut directories = Vec::new();
    if let Some(search_path) = std::env::var_os("LD_LIBRARY_PATH") {
        directories.extend(std::env::split_paths(&search_path));
    }
    directories.extend(LIBRARY_DIRECTORIES.map(PathBuf::from));
    let mut paths = directories.iter().map(|directory| directory.join(name));
    let library_path = paths.find(|path| path.exists())?;
    Some(library_path.display().to_string())
}

impl MachineReport {
    /// Returns the report as JSON.
    fn json(&self) -> Value {
        let backends: Vec<Value> = list_backends()
            .map(|(name, compiled_in)| json!({ "name": name, "compiled_in": compiled_in }))
            .collect();
        let launcher = self.launcher.as_ref().ok().map(|environment| {
            json!({
                "name": environment.launcher.to_string(),
                "rank": environment.rank,
                "world_size": environment.world_size,
                "local_rank": environment.local_rank,
                "local_world_size": environment.local_world_size,
                "master": environment.master(),
                "job": environment.job,
            })
        });
        json!({
            "schema": SCHEMA,
            "version": VERSION,
            "backends": backends,
            "launcher": launcher,
            "launcher_error": self.launcher.as_ref().err().map(ToString::to_string),
            "variables": self.variables,
            "secret": self.has_secret,
            "cpu_cores": self.cpu_cores,
            "memory_bytes": self.memory_bytes,
            "open_files": self.open_files,
            "dev_shm_bytes": self.dev_shm_bytes,
            "shared_memory": self.shared_memory_error.is_none(),
            "shared_memory_error": self.shared_memory_error,
            "gpus": self.gpus,
            "libraries": self.libraries,
            "hints": self.hints,
        })
    }

    /// Returns the report as lines of text.
    fn lines(&self) -> Vec<String> {
        let mut rows = vec![("fsdp", VERSION.to_owned())];
        for (name, is_compiled_in) in list_backends() {
            let state = if is_compiled_in {
                "yes"
            } else {
                "not compiled in"
            };
            rows.push(("backend", format!("{name}: {state}")));
        }
        let launcher = match &self.launcher {
            Ok(environment) => format!(
                "{}: rank {} of {}, which meet at {}",
                environment.launcher,
                environment.rank,
                environment.world_size,
                environment.master()
            ),
            Err(error) => format!("none: {error}"),
        };
        rows.push(("launcher", launcher));
        for (name, value) in &self.variables {
            rows.push(("variable", format!("{name}={value}")));
        }
        let secret = if self.has_secret {
            "FSDP_SECRET is set"
        } else {
            "none"
        };
        let open_files = self.open_files.map(|limit| format!("at most {limit}"));
        let error = self.shared_memory_error.as_ref();
        let shared_memory = error.map(|error| format!("no: {error}"));
        let gpus = Some(self.gpus.len()).filter(|&gpus| gpus > 0);
        rows.extend([
            ("secret", secret.to_owned()),
            ("CPU cores", or_word(self.cpu_cores, UNKNOWN)),
            (
                "memory",
                or_word(self.memory_bytes.map(bytes_text), UNKNOWN),
            ),
            ("open files", or_word(open_files, "no limit")),
            (
                "/dev/shm",
                or_word(self.dev_shm_bytes.map(bytes_text), "none"),
            ),
            ("shared memory", or_word(shared_memory, "yes")),
            ("GPUs", or_word(gpus, "none")),
        ]);
        for (name, path) in &self.libraries {
            let path = or_word(path.as_ref(), "not found");
            rows.push(("library", format!("{name}: {path}")));
        }
        for hint in &self.hints {
            rows.push(("hint", hint.clone()));
        }
        rows.into_iter()
            .map(|(name, text)| format!("{name:<14}{text}"))
            .collect()
    }
}
