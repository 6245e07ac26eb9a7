//! The options of `fsdp launch`, and the variables that tell each process its place.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::num::{NonZeroU64, NonZeroUsize};
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::BoolishValueParser;
use fsdp::comm::{DEFAULT_MASTER_PORT, MAX_WORLD_SIZE, Secret};

use super::gpus::SharedGpus;
use crate::failure::usage_error;

/// The largest number of processes of one node.
const MAX_PROCESSES: usize = 1024;

/// The address at which ranks of one node meet.
const LOCALHOST: Ipv4Addr = Ipv4Addr::LOCALHOST;

#[derive(Debug, Args)]
#[command(after_help = "\
Each process gets torchrun's variables: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and \
MASTER_PORT, TORCHELASTIC_RESTART_COUNT and TORCHELASTIC_MAX_RESTARTS; FSDP_JOB_ID and FSDP_SECRET; and \
RAYON_NUM_THREADS, its share of the cores, unless that is set. With --ranks-per-gpu it also gets CUDA_VISIBLE_DEVICES and \
NCCL_HOSTID. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed on \
to all that a process has started. When a process fails, all others are ended, and \
its exit code (128 + N for signal N) is returned.

Examples:
  fsdp launch --nproc 4 -- fsdp train --steps 60 --out runs/demo
  fsdp launch --nproc 8 --nnodes 2 --node-rank 0 --master-addr node0 -- fsdp train --batch 16 --out /shared/runs/demo")]
pub(crate) struct LaunchArguments {
    /// Number of processes on this node. With MIN:MAX a job on one node begins with MAX, and each
    /// restart leaves out the processes that failed, down to MIN
    #[arg(long, value_name = "N|MIN:MAX")]
    pub(super) nproc: ProcessCount,
    /// Seconds after which a job that has shrunk below MAX saves, and is started again with MAX
    /// processes [default: never]
    #[arg(long, value_name = "SECONDS")]
    pub(super) regrow_after: Option<NonZeroU64>,
    /// Number of nodes; `fsdp launch` is started on each
    #[arg(long, value_name = "K", default_value = "1")]
    nnodes: NonZeroUsize,
    /// This node among them, from 0
    #[arg(long, value_name = "R", default_value_t = 0)]
    node_rank: usize,
    /// Host of node 0 [default: 127.0.0.1 on one node]
    #[arg(long, value_name = "HOST")]
    master_addr: Option<String>,
    /// Port on which rank 0 listens [default: a free one on one node, else 29500]
    #[arg(long, value_name = "PORT")]
    master_port: Option<u16>,
    /// Name that tells this job from others on the same port; the same on all nodes [default:
    /// random on one node, else made of address, port and sizes; required with --insecure on
    /// several nodes]
    #[arg(long, value_name = "ID")]
    job_id: Option<String>,
    /// Let the ranks of several nodes meet without a secret, although anybody in the network could
    /// join them then
    #[arg(long, value_parser = BoolishValueParser::new())]
    insecure: bool,
    /// Let N ranks share each GPU: the first N processes of this node use its first GPU, and so on
    /// [default: CUDA's own choice; with `fsdp train --backend nccl` a GPU for each rank]
    #[arg(long, value_name = "N")]
    ranks_per_gpu: Option<NonZeroUsize>,
    /// Seconds between asking processes to end and killing them
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub(super) grace: u64,
    /// Times that all processes are started again after one has failed. `fsdp train` continues from
    /// its newest checkpoint then
    #[arg(long, value_name = "R", default_value_t = 0)]
    pub(super) max_restarts: u32,
    /// The program and its arguments
    #[arg(
        value_name = "PROGRAM",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub(super) program: Vec<OsString>,
}

/// The number of processes of a node, which may shrink from `maximum` to `minimum`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProcessCount {
    pub(super) minimum: usize,
    pub(super) maximum: usize,
}

impl FromStr for ProcessCount {
    type Err = String;

    /// Parses `N` or `MIN:MAX`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (minimum, maximum) = text.split_once(':').unwrap_or((text, text));
        if let (Ok(minimum), Ok(maximum)) = (minimum.parse(), maximum.parse())
            && 1 <= minimum
            && minimum <= maximum
            && maximum <= MAX_PROCESSES
        {
            return Ok(ProcessCount { minimum, maximum });
        }
        Err(format!(
            "it must be a number from 1 to {MAX_PROCESSES}, or two as MIN:MAX"
        ))
    }
}

/// The variable of the job's secret. It is no option, because everybody on a host can see command
/// lines.
const SECRET_VARIABLE: &str = "FSDP_SECRET";

/// The place at which all ranks of a job meet, and the data that all of them share.
pub(super) struct Rendezvous {
    /// The global rank of the first process of this node.
    pub(super) first_rank: usize,
    /// The variables that all processes of this node share: torchrun's, and the job's name and
    /// secret.
    variables: Vec<(&'static str, String)>,
    /// The GPUs, if ranks share them.
    shared_gpus: Option<SharedGpus>,
}

impl Rendezvous {
    /// Returns the variables that tell a process of this node its place among the ranks.
    pub(super) fn variables(&self, local_rank: usize) -> Vec<(&'static str, String)> {
        let mut variables = self.variables.clone();
        variables.push(("RANK", (self.first_rank + local_rank).to_string()));
        variables.push(("LOCAL_RANK", local_rank.to_string()));
        let shared_gpus = self.shared_gpus.iter();
        variables.extend(shared_gpus.flat_map(|gpus| gpus.variables(local_rank)));
        variables
    }
}

impl LaunchArguments {
    /// Returns the place at which the ranks of the job meet, `nproc` on each node, after some
    /// restarts.
    ///
    /// # Errors
    /// Options that do not go together; fewer GPUs than the ranks need; no free port.
    pub(super) fn make_rendezvous(&self, nproc: usize, restarts: u32) -> Result<Rendezvous> {
        let nnodes = self.nnodes.get();
        let node_rank = self.node_rank;
        let has_several_nodes = nnodes > 1;
        let may_shrink = self.nproc.minimum < self.nproc.maximum;
        // The launchers of several nodes do not talk to each other, so none knows what another has
        // left.
        if has_several_nodes && may_shrink {
            bail!(usage_error(
                format!(
                    "the number of processes can change only on one node, and there are {nnodes}"
                ),
                "give `--nproc` one number",
            ));
        }
        if may_shrink && self.max_restarts == 0 {
            bail!(usage_error(
                "a job of MIN:MAX processes shrinks when it is started again, and it never is",
                "allow that with `--max-restarts`, or give `--nproc` one number",
            ));
        }
        if !may_shrink && self.regrow_after.is_some() {
            bail!(usage_error(
                "`--regrow-after` is for a job that may shrink, and this one always has all \
                 processes",
                "give `--nproc` as MIN:MAX, or leave `--regrow-after` out",
            ));
        }
        if node_rank >= nnodes {
            bail!(usage_error(
                format!(
                    "this is node {node_rank}, but nodes are numbered from 0, and there are {nnodes}"
                ),
                "give each node its own `--node-rank`",
            ));
        }
        let world_size = nproc.saturating_mul(nnodes);
        if world_size > MAX_WORLD_SIZE {
            bail!(usage_error(
                format!(
                    "{nproc} processes on each of {nnodes} nodes are more than {MAX_WORLD_SIZE} \
                     ranks"
                ),
                "start fewer processes with `--nproc` or `--nnodes`",
            ));
        }
        let master_addr = match &self.master_addr {
            Some(address) => address.clone(),
            None if has_several_nodes => bail!(usage_error(
                format!("{nnodes} nodes need the address of node 0"),
                "name it with `--master-addr`, the same on all nodes",
            )),
            None => LOCALHOST.to_string(),
        };
        let master_port = match self.master_port {
            Some(port) => port,
            None if has_several_nodes => DEFAULT_MASTER_PORT,
            None => find_free_port()?,
        };
        let job_id = match &self.job_id {
            Some(job_id) => job_id.clone(),
            // Without a secret the name is all that tells jobs apart, and others may come to the
            // same one.
            None if has_several_nodes && self.insecure && !has_secret() => {
                bail!(usage_error(
                    format!(
                        "without a secret, the ranks of {nnodes} nodes know each other by the name \
                         of the job only, which has none"
                    ),
                    "give all nodes the same new `--job-id`, or the same FSDP_SECRET",
                ));
            }
            // All nodes must come to the same name.
            None if has_several_nodes => format!("{master_addr}:{master_port}-{nnodes}x{nproc}"),
            None => format!("{:016x}", rand::random::<u64>()),
        };
        let shared_gpus = self
            .ranks_per_gpu
            .map(|count| SharedGpus::find(count, nproc, node_rank))
            .transpose()?;
        let mut variables = vec![
            ("WORLD_SIZE", world_size.to_string()),
            ("LOCAL_WORLD_SIZE", nproc.to_string()),
            ("GROUP_RANK", node_rank.to_string()),
            ("FSDP_JOB_ID", job_id),
            ("MASTER_PORT", master_port.to_string()),
            // If this runs inside a job of torchrun, its ranks must not look for torchrun's agent.
            ("TORCHELASTIC_USE_AGENT_STORE", "False".to_owned()),
            ("FSDP_INSECURE", self.insecure.to_string()),
            ("TORCHELASTIC_RESTART_COUNT", restarts.to_string()),
            ("TORCHELASTIC_MAX_RESTARTS", self.max_restarts.to_string()),
        ];
        if has_several_nodes {
            // All nodes must have the same secret, so the user has to give it to each, and the
            // ranks inherit it.
            self.check_secret(&master_addr)?;
        } else {
            let secret = Secret::random().context("failed to make a secret")?;
            variables.push((SECRET_VARIABLE, secret.text().to_owned()));
        }
        variables.push(("MASTER_ADDR", master_addr));
        Ok(Rendezvous {
            first_rank: node_rank * nproc,
            variables,
            shared_gpus,
        })
    }

    /// Checks that ranks of several nodes will let each other in.
    ///
    /// # Errors
    /// There is no secret, they meet over a network, and `--insecure` is not set.
    fn check_secret(&self, master_addr: &str) -> Result<()> {
        let address = master_addr.trim_start_matches('[').trim_end_matches(']');
        let is_loopback = address.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
        if has_secret() || self.insecure || is_loopback {
            return Ok(());
        }
        bail!(usage_error(
            format!(
                "the ranks of {} nodes need a secret, by which they recognize each other",
                self.nnodes
            ),
            "set FSDP_SECRET to the same random text on all nodes (`openssl rand -hex 32` makes \
             one), or trust everybody in the network with `--insecure`",
        ))
    }
}

/// Returns `true` if the user has given this job a secret.
pub(crate) fn has_secret() -> bool {
    std::env::var_os(SECRET_VARIABLE).is_some_and(|secret| !secret.is_empty())
}

/// Finds a port that is free now. If another program takes it before rank 0 does, the ranks report
/// that.
///
/// # Errors
/// No port can be opened.
fn find_free_port() -> Result<u16> {
    let local_address =
        TcpListener::bind((LOCALHOST, 0)).and_then(|listener| listener.local_addr());
    let address = local_address
        .with_context(|| format!("no free port on {LOCALHOST}: name one with `--master-port`"))?;
    Ok(address.port())
}
