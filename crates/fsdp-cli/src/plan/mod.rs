//! `fsdp plan`: computes the checkpoints of a job that is larger than any machine at hand, with the
//! planner that saves use.

mod cost;
mod interval;
mod models;
mod plot;
mod report;
mod state;
mod twin;

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::builder::{PossibleValuesParser, RangedU64ValueParser};
use clap::{ArgGroup, Args};
use fsdp_formats::Location;
use serde::Serialize;

use self::cost::Links;
use self::report::{Machines, PlanReport, SCHEMA};
use self::state::{JobState, OptimizerState, ParameterType};
use self::twin::{JobShape, Layout};
use super::failure::UsageError;
use super::new_file::{check_free, write};
use super::output;

/// The largest number of ranks.
const MAX_RANKS: u64 = 131_072;
/// The default mean time between failures of a host, in hours. It is that of the hosts that trained
/// Llama 3.
const DEFAULT_MTBF_HOURS: f64 = 5700.0;

/// Options of `fsdp plan`.
#[derive(Debug, Args)]
#[command(
    group(ArgGroup::new("of").required(true).args(["model", "like"])),
    group(ArgGroup::new("world").required(true).args(["ranks", "sweep"])),
    after_help = "\
Examples:
  fsdp plan --model llama-405b --ranks 16384 --replicas 8 --storage 2000
  fsdp plan --like runs/demo/step-00000300 --ranks 64 --plot interval.svg
  fsdp plan --model llama-8b --sweep 8,64,512 --dtype bfloat16 --optimizer adamw-master"
)]
pub(crate) struct PlanArguments {
    /// A published model
    #[arg(long, value_name = "MODEL", value_parser = models())]
    model: Option<String>,
    /// The tensors of a checkpoint of any format; only its metadata is read
    #[arg(long, value_name = "CKPT", conflicts_with_all = ["dtype", "optimizer"])]
    like: Option<Location>,
    /// Ranks of the job
    #[arg(long, value_name = "N", value_parser = ranks())]
    ranks: Option<usize>,
    /// Several numbers of ranks, one line for each
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = ranks(), conflicts_with = "plot")]
    sweep: Vec<usize>,
    /// Ranks that hold the same shard (hybrid sharding)
    #[arg(long, value_name = "R", default_value_t = 1, value_parser = ranks())]
    replicas: usize,
    /// Ranks of one host
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = ranks())]
    ranks_per_host: usize,
    /// Type of the model's parameters
    #[arg(long, value_enum, default_value_t = ParameterType::Float32)]
    dtype: ParameterType,
    /// State of the optimizer
    #[arg(long, value_enum, default_value_t = OptimizerState::Adamw)]
    optimizer: OptimizerState,
    /// The way in which tensors are cut
    #[arg(long, value_enum, default_value_t = Layout::Flat)]
    layout: Layout,
    /// GB/s at which one rank copies its state to its host's memory
    #[arg(long, value_name = "GB/S", default_value_t = 20.0, value_parser = positive)]
    staging: f64,
    /// GB/s between one host and the storage
    #[arg(long, value_name = "GB/S", default_value_t = 25.0, value_parser = positive)]
    host_link: f64,
    /// GB/s of the storage, for all hosts together
    #[arg(long, value_name = "GB/S", default_value_t = 200.0, value_parser = positive)]
    storage: f64,
    /// Mean hours between two failures of one host
    #[arg(long, value_name = "HOURS", default_value_t = DEFAULT_MTBF_HOURS, value_parser = positive)]
    mtbf: f64,
    /// Minutes from a failure until a new start can load
    #[arg(long, value_name = "MINUTES", default_value_t = 10.0, value_parser = positive)]
    restart: f64,
    /// One JSON object on stdout
    #[arg(long)]
    json: bool,
    /// A picture of the effective time against the interval between saves
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

/// The JSON of several plans.
#[derive(Debug, Serialize)]
struct Sweep {
    schema: u32,
    plans: Vec<PlanReport>,
}

fn models() -> PossibleValuesParser {
    PossibleValuesParser::new(models::PRESETS.iter().map(|(name, _)| *name))
}

fn ranks() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=MAX_RANKS)
}

/// Parses a finite number above 0.
fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        // Speeds and times are divisors, so none may be 0.
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("must be a number above 0".to_owned()),
    }
}

/// Plans the checkpoints of a job: `fsdp plan`.
///
/// # Errors
/// There is no such checkpoint, the ranks cannot be divided into equal replicas, the plan is too
/// large, or the plot exists already.
pub(crate) fn run(arguments: &PlanArguments) -> Result<()> {
    let (name, state) = arguments.state()?;
    if let Some(plot) = &arguments.plot {
        // A large plan takes minutes, so a file that is in the way is told before.
        check_free(plot, false)?;
    }
    if let Some(ranks) = arguments.ranks {
        let report = arguments.report(&name, &state, ranks)?;
        if let Some(plot) = &arguments.plot {
            write(plot, plot::svg(&report).as_bytes(), false)?;
        }
        return if arguments.json {
            output::json(&report)
        } else {
            output::lines(&report.lines())
        };
    }
    // The plans of a sweep are made one after the other: each may take gigabytes.
    let mut plans = Vec::with_capacity(arguments.sweep.len());
    for &ranks in &arguments.sweep {
        let plan = arguments.report(&name, &state, ranks)?;
        plans.push(plan.without_memory());
    }
    if arguments.json {
        return output::json(&Sweep {
            schema: SCHEMA,
            plans,
        });
    }
    let mut lines = vec![PlanReport::header()];
    lines.extend(plans.iter().map(PlanReport::row));
    output::lines(&lines)
}

impl PlanArguments {
    /// Returns the name and the state of what is planned.
    fn state(&self) -> Result<(String, JobState)> {
        if let Some(location) = &self.like {
            let state = JobState::from_checkpoint(location)?;
            return Ok((location.to_string(), state));
        }
        let name = self
            .model
            .clone()
            .expect("clap requires `--model` without `--like`");
        let Some(preset) = models::preset(&name) else {
            bail!(UsageError::NoModel { name });
        };
        let state = JobState::from_model(preset, self.dtype, self.optimizer)?;
        Ok((name, state))
    }

    /// Plans for one number of ranks.
    fn report(&self, name: &str, state: &JobState, ranks: usize) -> Result<PlanReport> {
        // The options are in GB/s, hours and minutes.
        let machines = Machines {
            ranks_per_host: self.ranks_per_host,
            links: Links {
                staging: self.staging * 1e9,
                host_link: self.host_link * 1e9,
                storage: self.storage * 1e9,
            },
            host_mtbf: self.mtbf * 3600.0,
            restart: self.restart * 60.0,
        };
        let shape = JobShape {
            ranks,
            replicas: self.replicas,
            layout: self.layout,
        };
        let planned = twin::plan(state, &shape)?;
        let name = name.to_owned();
        Ok(PlanReport::new(name, state, &shape, &machines, &planned))
    }
}
