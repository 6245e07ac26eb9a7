//! The place of a process in its job, from the variables that its launcher has set.

use std::cell::RefCell;
use std::ffi::OsString;
use std::fmt;
use std::net::Ipv6Addr;

use crate::access::Secret;
use crate::error::CommError;
use crate::store::{without_brackets, without_zone};

/// The port of rank 0 unless `MASTER_PORT` is set. It is torch's.
pub const DEFAULT_MASTER_PORT: u16 = 29500;

/// The largest number of ranks that a job may have. What ranks tell each other about an operation
/// grows with it, and must fit in one message.
pub const MAX_WORLD_SIZE: usize = 1 << 16;

/// The program that started a process as a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// torchrun, or `fsdp launch`, which sets the same variables.
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// SLURM's `srun`.
    Slurm,
    /// `mpiexec` of MPICH and its relatives.
    Mpich,
    /// An indexed Kubernetes job.
    Kubernetes,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Torchrun => "torchrun",
            Launcher::OpenMpi => "Open MPI",
            Launcher::Slurm => "SLURM",
            Launcher::Mpich => "MPICH",
            Launcher::Kubernetes => "Kubernetes",
        })
    }
}

/// The variables in which a launcher tells a process its place. Of several that are listed, the
/// first that is set counts, except for those of the job.
struct LauncherVariables {
    launcher: Launcher,
    rank: &'static str,
    world_size: &'static [&'static str],
    local_rank: &'static [&'static str],
    local_world_size: &'static [&'static str],
    /// The variables whose values together are the name of the job.
    job: &'static [&'static str],
}

/// The variables of all launchers. Those of a job that runs inside the job of another launcher come
/// first.
const LAUNCHERS: [LauncherVariables; 5] = [
    LauncherVariables {
        launcher: Launcher::Torchrun,
        rank: "RANK",
        world_size: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        local_world_size: &["LOCAL_WORLD_SIZE"],
        job: &["TORCHELASTIC_RUN_ID"],
    },
    LauncherVariables {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_world_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        job: &["PMIX_NAMESPACE"],
    },
    LauncherVariables {
        launcher: Launcher::Slurm,
        rank: "SLURM_PROCID",
        world_size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: &["SLURM_LOCALID"],
        local_world_size: &[],
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    },
    LauncherVariables {
        launcher: Launcher::Mpich,
        rank: "PMI_RANK",
        world_size: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID"],
        local_world_size: &["MPI_LOCALNRANKS"],
        job: &[],
    },
    LauncherVariables {
        launcher: Launcher::Kubernetes,
        rank: "JOB_COMPLETION_INDEX",
        world_size: &["WORLD_SIZE"],
        local_rank: &[],
        local_world_size: &[],
        job: &["JOB_NAME"],
    },
];

/// A process's place in its job.
///
/// The first launcher in this table whose rank variable is set decides. So torchrun or Open MPI's
/// `mpirun` inside a SLURM allocation is found, and not the single process of the allocation
/// itself.
///
/// | launcher | rank | world size | local rank, local world size |
/// |---|---|---|---|
/// | torchrun, `fsdp launch` | `RANK` | `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
/// | Open MPI | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `OMPI_COMM_WORLD_LOCAL_SIZE` |
/// | SLURM step (`SLURM_STEP_ID` is set) | `SLURM_PROCID` | `SLURM_STEP_NUM_TASKS`, else `SLURM_NTASKS` | `SLURM_LOCALID`; all ranks if `SLURM_STEP_NUM_NODES`, else `SLURM_NNODES`, is 1 |
/// | MPICH, Intel MPI | `PMI_RANK` | `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` |
/// | Kubernetes | `JOB_COMPLETION_INDEX` | `WORLD_SIZE` | |
///
/// `MASTER_ADDR` is the address of rank 0. If it is not set, the address is this host if the
/// launcher says that all ranks are on one host, and under SLURM the first host of
/// `SLURM_STEP_NODELIST`; otherwise its absence is an error. `MASTER_PORT` is
/// [`DEFAULT_MASTER_PORT`] by default.
///
/// Jobs that use the same port are told apart by `FSDP_JOB_ID`, or if it is not set by the
/// launcher's own name for the job (`TORCHELASTIC_RUN_ID`; `PMIX_NAMESPACE`; `SLURM_JOB_ID` and
/// `SLURM_STEP_ID`; `JOB_NAME`).
///
/// `FSDP_SECRET` is a text that only the ranks of the job know, the same on all of them. `fsdp
/// launch` makes one. Every connection between ranks begins with a proof that both sides know it;
/// what is sent after that is not encrypted. Without a secret, ranks meet at a loopback address
/// only, unless `FSDP_INSECURE` is `true`, and only if the job has a name: they could not tell jobs
/// apart otherwise.
///
/// If torchrun sets `TORCHELASTIC_USE_AGENT_STORE=True`, its agent listens at
/// `MASTER_ADDR:MASTER_PORT` itself, with torch's key-value store. Then rank 0 listens on a free
/// port of its own host, and the others read its address from the agent's store.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Environment {
    /// The launcher.
    pub launcher: Launcher,
    /// The number of this process among all, from 0.
    pub rank: usize,
    /// The number of processes of the job.
    pub world_size: usize,
    /// The number of this process among those of its host (torchrun's `LOCAL_RANK`), if the
    /// launcher sets it. It chooses the GPU.
    pub local_rank: Option<usize>,
    /// The number of processes on its host (torchrun's `LOCAL_WORLD_SIZE`), if the launcher sets
    /// it.
    pub local_world_size: Option<usize>,
    /// The host of rank 0, or of the agent that keeps a store: a name or an address.
    pub master_addr: String,
    /// The port on which rank 0 listens, or the agent that keeps a store.
    pub master_port: u16,
    /// The name that tells this job from others on the same port.
    pub job: String,
    /// The secret of the job: `FSDP_SECRET`.
    pub secret: Option<Secret>,
    /// `true` if the ranks may meet at an address that other hosts reach, although there is no
    /// secret: `FSDP_INSECURE`.
    pub insecure: bool,
    /// The key of rank 0's address in the store of torchrun's agent, if the agent keeps one.
    pub agent_store: Option<String>,
}

/// The variable of torchrun that is `True` if its agent keeps a store for the ranks.
const USE_AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";

/// The variable of the job's secret. It has no command line option, because command lines can be
/// seen by everybody.
const SECRET: &str = "FSDP_SECRET";

/// The variable that allows ranks of several hosts to meet without a secret.
const INSECURE: &str = "FSDP_INSECURE";

impl Environment {
    /// Reads the place of this process from its environment variables.
    ///
    /// # Errors
    /// [`CommError::Environment`] names the variable that is missing or makes no sense.
    pub fn from_env() -> Result<Self, CommError> {
        Self::from_os_variables(|name| std::env::var_os(name))
    }

    /// Reads the place of a process from variables that `get` returns. One that is not UTF-8 is an
    /// error: if a secret counted as absent because of that, the ranks would meet without one.
    fn from_os_variables(get: impl Fn(&str) -> Option<OsString>) -> Result<Self, CommError> {
        let unreadable = RefCell::new(None);
        let environment = Self::from_variables(|name| {
            let value = get(name)?.into_string();
            value
                .inspect_err(|_| drop(unreadable.replace(Some(name.to_owned()))))
                .ok()
        });
        match unreadable.into_inner() {
            Some(name) => Err(variable_error(&name, "is not UTF-8")),
            None => environment,
        }
    }

    /// Reads the place of a process from variables that `get` returns. Empty ones count as absent.
    ///
    /// ```
    /// use fsdp_comm::{Environment, Launcher};
    /// let variables = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2"), ("SLURM_PROCID", "0"),
    ///     ("MASTER_ADDR", "node1")];
    /// let environment = Environment::from_variables(|name| {
    ///     variables.iter().find(|variable| variable.0 == name).map(|variable| variable.1.to_owned())
    /// })?;
    /// assert_eq!((environment.launcher, environment.rank), (Launcher::OpenMpi, 1));
    /// # Ok::<(), fsdp_comm::CommError>(())
    /// ```
    ///
    /// # Errors
    /// The same as [`from_env`](Self::from_env).
    pub fn from_variables(get: impl Fn(&str) -> Option<String>) -> Result<Self, CommError> {
        let variables = Variables(&get);
        let names = LAUNCHERS.iter().find(|names| {
            // SLURM sets a rank also for a process that is not in a step, and so no rank of a job.
            variables.is_set(names.rank)
                && (names.launcher != Launcher::Slurm || variables.is_set("SLURM_STEP_ID"))
        });
        let Some(names) = names else {
            let message = "is not set, nor is any other launcher's rank variable: start the ranks with `fsdp launch`, \
                           torchrun, mpirun, srun or an indexed Kubernetes job";
            return Err(variable_error("RANK", message));
        };
        // The rank and the size come first: all other variables make sense only for a rank of a
        // job.
        let (rank, world_size) = variables.read_place(names)?;
        let master_port = variables
            .read_number("MASTER_PORT")?
            .unwrap_or(DEFAULT_MASTER_PORT);
        if master_port == 0 && world_size > 1 {
            return Err(variable_error(
                "MASTER_PORT",
                "is `0`, which stands for any port: the ranks need the same one",
            ));
        }
        let job = variables.job(names.job);
        // The address of rank 0 may depend on everything else, so it is found last.
        let mut environment = Environment {
            launcher: names.launcher,
            rank,
            world_size,
            local_rank: variables.read_first_number(names.local_rank)?,
            local_world_size: variables.read_first_number(names.local_world_size)?,
            master_addr: String::new(),
            master_port,
            agent_store: variables.agent_store(names.launcher, &job),
            job,
            secret: variables.secret()?,
            insecure: variables.insecure()?,
        };
        if names.launcher == Launcher::Slurm {
            // SLURM tells how many ranks each host has in a form of its own, but also how many
            // hosts there are.
            let hosts: Option<usize> =
                variables.read_first_number(&["SLURM_STEP_NUM_NODES", "SLURM_NNODES"])?;
            environment.local_world_size = (hosts == Some(1)).then_some(world_size);
        }
        environment.master_addr = match variables.get("MASTER_ADDR") {
            Some(address) => checked_host(address)?,
            None => environment.default_master(&variables)?,
        };
        Ok(environment)
    }

    /// Returns the address at which all ranks meet, with its port. Ranks that have no secret and
    /// are all on one host meet at its loopback address, whatever `MASTER_ADDR` is.
    #[must_use]
    pub fn master(&self) -> String {
        // Nobody outside of this host can reach the loopback address, so no secret is needed there.
        if self.is_on_one_host()
            && self.secret.is_none()
            && !self.insecure
            && self.agent_store.is_none()
        {
            return format!("127.0.0.1:{}", self.master_port);
        }
        // An IPv6 address needs brackets before a port.
        let host = without_brackets(&self.master_addr);
        if host.contains(':') {
            format!("[{host}]:{}", self.master_port)
        } else {
            format!("{}:{}", self.master_addr, self.master_port)
        }
    }

    /// Returns `true` if the launcher says that all ranks are on one host.
    pub(crate) fn is_on_one_host(&self) -> bool {
        self.local_world_size == Some(self.world_size)
    }

    /// Checks that the ranks of this job cannot connect to another job at the same port by mistake:
    /// they need a name or a secret, unless torchrun's agent connects them. The `tcp` backend calls
    /// it before it connects.
    ///
    /// # Errors
    /// [`CommError::Environment`]: there is neither.
    pub fn check_identity(&self) -> Result<(), CommError> {
        // `none` is the name that torchrun gives to a job without a name.
        let has_name = !self.job.is_empty() && self.job != "none";
        if has_name || self.secret.is_some() || self.agent_store.is_some() || self.world_size == 1 {
            return Ok(());
        }
        Err(variable_error(
            "FSDP_JOB_ID",
            "is not set, nor is FSDP_SECRET: two jobs at one port could not be told apart",
        ))
    }

    /// Returns the address of rank 0 if `MASTER_ADDR` is not set; see [`Environment`].
    fn default_master(&self, variables: &Variables<'_>) -> Result<String, CommError> {
        if self.world_size == 1 || self.is_on_one_host() {
            return Ok("127.0.0.1".to_owned());
        }
        match variables.get("SLURM_STEP_NODELIST") {
            Some(hosts) if self.launcher == Launcher::Slurm => {
                first_host(&hosts).ok_or_else(|| {
                    variable_error("SLURM_STEP_NODELIST", "names no host: set MASTER_ADDR")
                })
            }
            _ => Err(variable_error(
                "MASTER_ADDR",
                "is not set: it must name the host of rank 0",
            )),
        }
    }
}

/// Returns the error of a variable that is missing or makes no sense.
fn variable_error(variable: &str, message: impl Into<String>) -> CommError {
    CommError::Environment {
        variable: variable.to_owned(),
        message: message.into(),
    }
}

/// Checks the value of `MASTER_ADDR`. A port in it would be taken for a part of an IPv6 address.
fn checked_host(address: String) -> Result<String, CommError> {
    let ip = without_zone(without_brackets(&address));
    if address.contains(':') && ip.parse::<Ipv6Addr>().is_err() {
        return Err(variable_error(
            "MASTER_ADDR",
            format!("is `{address}`, no host: the port belongs in MASTER_PORT"),
        ));
    }
    Ok(address)
}

/// The environment variables of a process. Empty ones count as absent.
struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    /// Returns a variable without spaces around it; `None` if nothing is left.
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name)
            .map(|value| value.trim().to_owned())
            .filter(|value| !value.is_empty())
    }

    fn is_set(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// Reads a variable that holds a number; `None` if it is not set. A value that is no number, or
    /// not one in the range of the type, is an error.
    fn read_number<T: std::str::FromStr>(&self, name: &str) -> Result<Option<T>, CommError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        value
            .parse()
            .map(Some)
            .map_err(|_| variable_error(name, format!("is `{value}`, not a number in range")))
    }

    /// Reads the number in the first of the variables `names` that is set; `None` if none is.
    fn read_first_number(&self, names: &[&str]) -> Result<Option<usize>, CommError> {
        let mut names = names.iter();
        let name = names.find(|name| self.is_set(name));
        name.map_or(Ok(None), |name| self.read_number(name))
    }

    /// Reads a variable that the launcher must have set, as it has set the rank.
    fn read_required(&self, name: &str, names: &LauncherVariables) -> Result<usize, CommError> {
        let LauncherVariables { launcher, rank, .. } = names;
        self.read_number(name)?.ok_or_else(|| {
            variable_error(
                name,
                format!("is not set, though {launcher} has set `{rank}`"),
            )
        })
    }

    /// Reads the rank and the world size, and checks that there is such a rank.
    fn read_place(&self, names: &LauncherVariables) -> Result<(usize, usize), CommError> {
        let rank_variable = names.rank;
        let set_variable = names.world_size.iter().find(|name| self.is_set(name));
        let size_variable = set_variable.unwrap_or(&names.world_size[0]);
        let rank_number = self.read_required(rank_variable, names)?;
        let world_size = self.read_required(size_variable, names)?;
        if world_size == 0 || world_size > MAX_WORLD_SIZE {
            return Err(variable_error(
                size_variable,
                format!("is `{world_size}`, but a job has 1 to {MAX_WORLD_SIZE} ranks"),
            ));
        }
        if rank_number >= world_size {
            return Err(variable_error(
                rank_variable,
                format!(
                    "is `{rank_number}`, but `{size_variable}` is `{world_size}`, and ranks count from 0"
                ),
            ));
        }
        Ok((rank_number, world_size))
    }

    /// Returns the key of rank 0's address in the store of torchrun's agent; `None` if it keeps no
    /// store.
    ///
    /// The restart count is not part of the key. An agent that restarts its ranks because another
    /// agent did so does not count that, so the ranks of one attempt can have different counts.
    fn agent_store(&self, launcher: Launcher, job: &str) -> Option<String> {
        let has_store =
            launcher == Launcher::Torchrun && self.get(USE_AGENT_STORE).as_deref() == Some("True");
        has_store.then(|| format!("fsdp/{job}/address"))
    }

    /// Reads the job's secret; `None` if there is none. One that is too short is an error.
    fn secret(&self) -> Result<Option<Secret>, CommError> {
        self.get(SECRET)
            .map(|text| Secret::new(text).map_err(|reason| variable_error(SECRET, reason)))
            .transpose()
    }

    /// Returns `true` if ranks may meet without a secret at an address that other hosts reach.
    fn insecure(&self) -> Result<bool, CommError> {
        match self.get(INSECURE).as_deref() {
            None | Some("false" | "0") => Ok(false),
            Some("true" | "1") => Ok(true),
            Some(value) => Err(variable_error(
                INSECURE,
                format!("is `{value}`, neither `true` nor `false`"),
            )),
        }
    }

    /// Returns the name of the job: `FSDP_JOB_ID`, or the values of the variables `names`,
    /// joined by dots.
    fn job(&self, names: &[&str]) -> String {
        self.get("FSDP_JOB_ID").unwrap_or_else(|| {
            names
                .iter()
                .filter_map(|name| self.get(name))
                .collect::<Vec<_>>()
                .join(".")
        })
    }
}

/// Returns the first host of SLURM's list of hosts: `gpu-01` of `gpu-[01-04,7],login2`.
///
/// Returns `None` for a list that it does not understand: an empty or unclosed list, and a name
/// with more than one pair of brackets. `MASTER_ADDR` has to be set then.
fn first_host(hosts: &str) -> Option<String> {
    let end = hosts.find([',', '[']).unwrap_or(hosts.len());
    let (prefix, after_prefix) = hosts.split_at(end);
    let Some(in_brackets) = after_prefix.strip_prefix('[') else {
        return (!prefix.is_empty()).then(|| prefix.to_owned());
    };
    // The host's name is the text before the brackets, the first number in them, and the text after
    // them.
    let (ranges, after_brackets) = in_brackets.split_once(']')?;
    let first_number = ranges.split([',', '-']).next()?;
    let suffix = after_brackets.split(',').next()?;
    if first_number.is_empty() || suffix.contains('[') {
        return None;
    }
    Some(format!("{prefix}{first_number}{suffix}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(variables: &[(&str, &str)]) -> Result<Environment, CommError> {
        Environment::from_variables(|name| {
            variables
                .iter()
                .find(|variable| variable.0 == name)
                .map(|variable| variable.1.to_owned())
        })
    }

    fn wrong(variables: &[(&str, &str)]) -> String {
        match from(variables) {
            Err(CommError::Environment { variable, .. }) => variable,
            other => panic!("{other:?}"),
        }
    }

    const TORCHRUN: [(&str, &str); 8] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "fe80::1"),
        ("MASTER_PORT", "1234"),
        ("TORCHELASTIC_RUN_ID", "run"),
        ("FSDP_JOB_ID", ""),
    ];
    const MPI: [(&str, &str); 5] = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("PMIX_NAMESPACE", "prterun-1"),
    ];
    const SLURM: [(&str, &str); 7] = [
        ("SLURM_PROCID", "5"),
        ("SLURM_NTASKS", "99"),
        ("SLURM_STEP_NUM_TASKS", "8"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_JOB_ID", "77"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NODELIST", "gpu-[01-04,7],login2"),
    ];

    #[test]
    fn each_launcher_is_understood() {
        let torchrun = from(&TORCHRUN).unwrap();
        assert_eq!(
            (torchrun.launcher, torchrun.rank, torchrun.world_size),
            (Launcher::Torchrun, 3, 4)
        );
        assert_eq!(
            (torchrun.local_rank, torchrun.local_world_size),
            (Some(1), Some(2))
        );
        assert_eq!(
            (torchrun.master(), torchrun.job),
            ("[fe80::1]:1234".to_owned(), "run".to_owned())
        );

        let mpi = from(&MPI).unwrap();
        assert_eq!(
            (mpi.launcher, mpi.rank, mpi.world_size, mpi.local_rank),
            (Launcher::OpenMpi, 1, 2, Some(1))
        );
        assert_eq!(
            (mpi.master(), mpi.job),
            ("127.0.0.1:29500".to_owned(), "prterun-1".to_owned())
        );

        let slurm = from(&SLURM).unwrap();
        assert_eq!(
            (
                slurm.launcher,
                slurm.rank,
                slurm.world_size,
                slurm.local_rank
            ),
            (Launcher::Slurm, 5, 8, Some(1))
        );
        assert_eq!(
            (slurm.master(), slurm.job),
            ("gpu-01:29500".to_owned(), "77.0".to_owned())
        );
        assert_eq!(slurm.local_world_size, None);

        let mpich = [
            ("PMI_RANK", "1"),
            ("PMI_SIZE", "2"),
            ("MPI_LOCALRANKID", "1"),
            ("MPI_LOCALNRANKS", "2"),
        ];
        let mpich = from(&mpich).unwrap();
        assert_eq!(
            (
                mpich.launcher,
                mpich.rank,
                mpich.world_size,
                mpich.local_rank
            ),
            (Launcher::Mpich, 1, 2, Some(1))
        );
        assert_eq!(mpich.master(), "127.0.0.1:29500");

        let pod = [
            ("JOB_COMPLETION_INDEX", "0"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "job-0.svc"),
            ("JOB_NAME", "job"),
        ];
        let pod = from(&pod).unwrap();
        assert_eq!(
            (pod.launcher, pod.rank, pod.world_size, pod.job),
            (Launcher::Kubernetes, 0, 2, "job".to_owned())
        );
    }

    #[test]
    fn only_torchruns_agent_keeps_a_store() {
        let with = |variables: &[(&str, &str)], value| {
            from(&[variables, &[(USE_AGENT_STORE, value)]].concat())
        };
        assert_eq!(from(&TORCHRUN).unwrap().agent_store, None);
        assert_eq!(with(&TORCHRUN, "False").unwrap().agent_store, None);
        assert_eq!(with(&TORCHRUN, "").unwrap().agent_store, None);
        assert_eq!(with(&MPI, "True").unwrap().agent_store, None);
        let kept = with(&TORCHRUN, "True").unwrap();
        assert_eq!(kept.agent_store.as_deref(), Some("fsdp/run/address"));
        // Ranks of one attempt may have different counts.
        let restarted = [&TORCHRUN[..], &[("TORCHELASTIC_RESTART_COUNT", "2")]].concat();
        assert_eq!(with(&restarted, "True").unwrap(), kept);
    }

    #[test]
    fn ranks_of_one_host_need_no_secret_whatever_its_name_is() {
        let one_host = [
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "node7"),
        ];
        let with = |more: (&'static str, &'static str)| {
            from(&[&one_host[..], &[more]].concat()).unwrap().master()
        };
        assert_eq!(from(&one_host).unwrap().master(), "127.0.0.1:29500");
        // There may be other hosts, or others may join.
        assert_eq!(
            with(("FSDP_SECRET", "a secret of this test")),
            "node7:29500"
        );
        assert_eq!(with(("FSDP_INSECURE", "true")), "node7:29500");
        assert_eq!(
            from(&[one_host[0], one_host[1], one_host[3]])
                .unwrap()
                .master(),
            "node7:29500"
        );
        assert_eq!(
            wrong(&[
                one_host[0],
                one_host[1],
                one_host[3],
                ("FSDP_SECRET", "short")
            ]),
            "FSDP_SECRET"
        );
        assert_eq!(
            wrong(&[
                one_host[0],
                one_host[1],
                one_host[3],
                ("FSDP_INSECURE", "maybe")
            ]),
            "FSDP_INSECURE"
        );
    }

    #[test]
    fn ranks_that_slurm_has_started_on_one_host_need_no_secret() {
        let with =
            |more: &[(&'static str, &'static str)]| from(&[&SLURM[..], more].concat()).unwrap();
        for one in [
            &[("SLURM_STEP_NUM_NODES", "1"), ("SLURM_NNODES", "4")][..],
            &[("SLURM_NNODES", "1")],
        ] {
            let environment = with(one);
            assert_eq!(
                (environment.local_world_size, environment.master()),
                (Some(8), "127.0.0.1:29500".to_owned())
            );
        }
        let several = with(&[("SLURM_STEP_NUM_NODES", "2"), ("SLURM_NNODES", "1")]);
        assert_eq!(
            (several.local_world_size, several.master()),
            (None, "gpu-01:29500".to_owned())
        );
    }

    #[test]
    fn the_inner_launcher_counts() {
        let all: Vec<(&str, &str)> = [&TORCHRUN[..], &MPI, &SLURM].concat();
        assert_eq!(from(&all).unwrap().launcher, Launcher::Torchrun);
        assert_eq!(
            from(&[&MPI[..], &SLURM].concat()).unwrap().launcher,
            Launcher::OpenMpi
        );
        // A batch script is no step.
        let batch: Vec<(&str, &str)> = SLURM
            .iter()
            .copied()
            .filter(|variable| variable.0 != "SLURM_STEP_ID")
            .collect();
        assert_eq!(wrong(&batch), "RANK");
    }

    #[test]
    fn what_is_wrong_is_named() {
        assert_eq!(wrong(&[]), "RANK");
        assert_eq!(wrong(&[("RANK", "0")]), "WORLD_SIZE");
        assert_eq!(wrong(&[("RANK", "0"), ("WORLD_SIZE", "2")]), "MASTER_ADDR");
        assert_eq!(wrong(&[("RANK", "2"), ("WORLD_SIZE", "2")]), "RANK");
        assert_eq!(wrong(&[("RANK", "-1"), ("WORLD_SIZE", "2")]), "RANK");
        assert_eq!(wrong(&[("RANK", "0"), ("WORLD_SIZE", "0")]), "WORLD_SIZE");
        assert_eq!(
            wrong(&[("RANK", "0"), ("WORLD_SIZE", "18446744073709551615")]),
            "WORLD_SIZE"
        );
        assert_eq!(
            wrong(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "65536")]),
            "MASTER_PORT"
        );
        let two = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "node")];
        assert_eq!(
            wrong(&[&two[..], &[("MASTER_PORT", "0")]].concat()),
            "MASTER_PORT"
        );
        for address in [
            "node:29500",
            "10.0.0.1:29500",
            "[fe80::1]:29500",
            ":29500",
            "tcp://node",
        ] {
            assert_eq!(
                wrong(&[two[0], two[1], ("MASTER_ADDR", address)]),
                "MASTER_ADDR",
                "{address}"
            );
        }
        for address in ["node", "10.0.0.1", "::1", "[fe80::1]", "fe80::1%2"] {
            assert_eq!(
                from(&[two[0], two[1], ("MASTER_ADDR", address)])
                    .unwrap()
                    .master_addr,
                address
            );
        }
        assert_eq!(
            wrong(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "x")]),
            "LOCAL_RANK"
        );
        let slurm = [
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NODELIST", "["),
        ];
        assert_eq!(wrong(&slurm), "SLURM_STEP_NODELIST");
    }

    #[test]
    #[cfg(unix)]
    fn a_variable_that_is_not_utf_8_is_not_taken_for_absent() {
        use std::os::unix::ffi::OsStringExt as _;
        for broken in ["FSDP_SECRET", "FSDP_JOB_ID", "RANK"] {
            let environment = Environment::from_os_variables(|name| match name {
                _ if name == broken => Some(OsString::from_vec(vec![0xff; 32])),
                "RANK" | "JOB_COMPLETION_INDEX" => Some("0".into()),
                "WORLD_SIZE" => Some("1".into()),
                _ => None,
            });
            let Err(CommError::Environment { variable, .. }) = &environment else {
                panic!("{broken}: {environment:?}")
            };
            assert_eq!(variable, broken);
        }
    }

    #[test]
    fn first_hosts() {
        let hosts = [
            "node1",
            "node1,node2",
            "n[3]",
            "n[003-010]",
            "n[3,5-7]-ib,m",
            "",
            "n[",
            "[]",
            "n[1]m[2]",
        ];
        let first = ["node1", "node1", "n3", "n003", "n3-ib", "", "", "", ""].map(str::to_owned);
        for (hosts, first) in hosts.into_iter().zip(first) {
            assert_eq!(
                first_host(hosts),
                Some(first).filter(|first| !first.is_empty()),
                "{hosts}"
            );
        }
    }
}
