//! The options of `fsdp launch`, and the variables that tell each process its place.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::num::{NonZeroU64, NonZeroUsize};
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::BoolishValueParser;
use fsdp::comm::{DEFAULT_MASTER_PORT, MAX_WORLD_SIZE, Secret};

use crate::job_failure::JobError;

/// The largest number of processes of one node.
const MAX_PROCESSES: usize = 1024;

/// The address at which ranks of one node meet.
const LOCALHOST: Ipv4Addr = Ipv4Addr::LOCALHOST;

#[derive(Debug, Args)]
#[command(after_help = "\
Each process gets torchrun's variables: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and \
MASTER_PORT, TORCHELASTIC_RESTART_COUNT and TORCHELASTIC_MAX_RESTARTS; FSDP_JOB_ID and FSDP_SECRET; and \
RAYON_NUM_THREADS, its share of the cores, unless that is set. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed on \
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

/// The number of processes of a node, which may shrink from `most` to `least`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProcessCount {
    pub(super) least: usize,
    pub(super) most: usize,
}

impl FromStr for ProcessCount {
    type Err = String;

    /// Reads `N` or `MIN:MAX`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (least, most) = text.split_once(':').unwrap_or((text, text));
        if let (Ok(least), Ok(most)) = (least.parse(), most.parse())
            && 1 <= least
            && least <= most
            && most <= MAX_PROCESSES
        {
            return Ok(ProcessCount { least, most });
        }
        Err(format!(
            "it must be a number from 1 to {MAX_PROCESSES}, or two as MIN:MAX"
        ))
    }
}

/// The variable of the job's secret. It is no option, because everybody on a host can see command
/// lines.
const SECRET: &str = "FSDP_SECRET";

/// The place at which all ranks of a job meet, and the data that all of them share.
#[derive(Debug)]
pub(super) struct Rendezvous {
    world_size: usize,
    nproc: usize,
    node_rank: usize,
    master_addr: String,
    master_port: u16,
    job: String,
    /// `None` where the ranks inherit what this process has: the secret of all nodes, or none.
    secret: Option<Secret>,
    insecure: bool,
    /// The number of restarts before this attempt.
    restarts: u32,
    max_restarts: u32,
}

impl LaunchArguments {
    /// Returns the place at which the ranks of the job meet, `nproc` on each node, after some
    /// restarts.
    ///
    /// # Errors
    /// Options that do not go together; no free port.
    pub(super) fn rendezvous(&self, nproc: usize, restarts: u32) -> Result<Rendezvous> {
        let nnodes = self.nnodes.get();
        let node_rank = self.node_rank;
        let several = nnodes > 1;
        // The launchers of several nodes do not talk to each other, so none knows what another has
        // left.
        if several && self.nproc.least < self.nproc.most {
            bail!(JobError::ElasticNodes { nnodes });
        }
        if node_rank >= nnodes {
            bail!(JobError::NodeRank { node_rank, nnodes });
        }
        let world_size = nproc.saturating_mul(nnodes);
        let max = MAX_WORLD_SIZE;
        if world_size > max {
            bail!(JobError::WorldSize { nproc, nnodes, max });
        }
        let master_addr = match &self.master_addr {
            Some(address) => address.clone(),
            None if several => bail!(JobError::MasterAddr { nnodes }),
            None => LOCALHOST.to_string(),
        };
        let master_port = match self.master_port {
            Some(port) => port,
            None if several => DEFAULT_MASTER_PORT,
            None => free_port()?,
        };
        let job = match &self.job_id {
            Some(job) => job.clone(),
            // Without a secret the name is all that tells jobs apart, and others may come to the
            // same one.
            None if several && self.insecure && !has_secret() => {
                bail!(JobError::JobName { nnodes });
            }
            // All nodes must come to the same name.
            None if several => format!("{master_addr}:{master_port}-{nnodes}x{nproc}"),
            None => format!("{:016x}", rand::random::<u64>()),
        };
        let secret = if several {
            // All nodes must have the same one, so the user has to give it to each.
            self.check_secret(&master_addr)?;
            None
        } else {
            Some(Secret::random().context("failed to make a secret")?)
        };
        Ok(Rendezvous {
            world_size,
            nproc,
            node_rank,
            master_addr,
            master_port,
            job,
            secret,
            insecure: self.insecure,
            restarts,
            max_restarts: self.max_restarts,
        })
    }

    /// Checks that ranks of several nodes will let each other in.
    fn check_secret(&self, master_addr: &str) -> Result<()> {
        let address = master_addr.trim_start_matches('[').trim_end_matches(']');
        let is_loopback = address.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
        if has_secret() || self.insecure || is_loopback {
            return Ok(());
        }
        bail!(JobError::Secret {
            nnodes: self.nnodes.get(),
        })
    }
}

impl Rendezvous {
    /// Returns the global rank of the process with this local rank on this node.
    pub(super) const fn rank(&self, local_rank: usize) -> usize {
        self.node_rank * self.nproc + local_rank
    }

    /// Returns the variables of a process of this node: torchrun's, and the job's name and secret.
    pub(super) fn variables(&self, local_rank: usize) -> Vec<(&'static str, String)> {
        let mut variables = vec![
            ("RANK", self.rank(local_rank).to_string()),
            ("WORLD_SIZE", self.world_size.to_string()),
            ("LOCAL_RANK", local_rank.to_string()),
            ("LOCAL_WORLD_SIZE", self.nproc.to_string()),
            ("GROUP_RANK", self.node_rank.to_string()),
            ("MASTER_ADDR", self.master_addr.clone()),
            ("MASTER_PORT", self.master_port.to_string()),
            ("FSDP_JOB_ID", self.job.clone()),
            // If this runs inside a job of torchrun, its ranks must not look for torchrun's agent.
            ("TORCHELASTIC_USE_AGENT_STORE", "False".to_owned()),
            ("FSDP_INSECURE", self.insecure.to_string()),
            ("TORCHELASTIC_RESTART_COUNT", self.restarts.to_string()),
            ("TORCHELASTIC_MAX_RESTARTS", self.max_restarts.to_string()),
        ];
        if let Some(secret) = &self.secret {
            variables.push((SECRET, secret.text().to_owned()));
        }
        variables
    }
}

/// Returns `true` if the user has given this job a secret.
fn has_secret() -> bool {
    std::env::var_os(SECRET).is_some_and(|secret| !secret.is_empty())
}

/// Finds a port that is free now. If another program takes it before rank 0 does, the ranks report
/// that.
fn free_port() -> Result<u16> {
    let bound = TcpListener::bind((LOCALHOST, 0)).and_then(|listener| listener.local_addr());
    let address = bound
        .with_context(|| format!("no free port on {LOCALHOST}: name one with `--master-port`"))?;
    Ok(address.port())
}
