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

use anyhow::Result;
use clap::builder::PossibleValuesParser;
use clap::{ArgGroup, Args};
use fsdp_formats::Location;
use fsdp_layout::DType;
use serde_json::json;

use self::cost::Machines;
use self::report::{PlanReport, SCHEMA};
use self::state::{JobState, OptimizerState};
use self::twin::{JobShape, Layout};
use super::new_file::{Content, NewFile};
use super::output;
use super::parsers::{float_type_parser, one_to};

/// The largest number of ranks.
const MAX_RANKS: u64 = 131_072;

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
    #[arg(long, value_name = "MODEL", value_parser = PossibleValuesParser::new(models::MODELS.map(|(name, _)| name)))]
    model: Option<String>,
    /// The tensors of a checkpoint of any format; only its metadata is read
    #[arg(long, value_name = "CKPT", conflicts_with_all = ["dtype", "optimizer"])]
    like: Option<Location>,
    /// Ranks of the job
    #[arg(long, value_name = "N", value_parser = one_to(MAX_RANKS))]
    ranks: Option<usize>,
    /// Several numbers of ranks, one line for each
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = one_to(MAX_RANKS), conflicts_with = "plot")]
    sweep: Vec<usize>,
    /// Ranks that hold the same shard (hybrid sharding)
    #[arg(long, value_name = "R", default_value_t = 1, value_parser = one_to(MAX_RANKS))]
    replicas: usize,
    /// Ranks of one host
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = one_to(MAX_RANKS))]
    ranks_per_host: usize,
    /// Type of the model's parameters
    #[arg(long, default_value = "float32",
          value_parser = float_type_parser(["float32", "bfloat16", "float16"]))]
    dtype: DType,
    /// State of the optimizer
    #[arg(long, value_enum, default_value_t = OptimizerState::Adamw)]
    optimizer: OptimizerState,
    /// The way in which tensors are cut
    #[arg(long, value_enum, default_value_t = Layout::Flat)]
    layout: Layout,
    #[command(flatten)]
    machines: Machines,
    /// One JSON object on stdout
    #[arg(long)]
    json: bool,
    /// A picture of the effective time against the interval between saves
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

/// Plans the checkpoints of a job: `fsdp plan`.
///
/// # Errors
/// There is no such checkpoint, the ranks cannot be divided into equal replicas, the plan is too
/// large, or the plot exists already.
pub(crate) fn run(arguments: &PlanArguments) -> Result<()> {
    let (model, state) = arguments.load_state()?;
    let plot = arguments.plot.as_ref().map(|path| NewFile {
        path,
        content: Content::Picture,
        overwrite: None,
    });
    if let Some(plot) = plot {
        // A large plan takes minutes, so a file that is in the way is told before.
        plot.check()?;
    }
    if let Some(ranks) = arguments.ranks {
        let report = arguments.make_report(&model, &state, ranks)?;
        if let Some(plot) = plot {
            plot.write(plot::plan_picture(&report).as_bytes())?;
        }
        return if arguments.json {
            output::print_json(&report.json())
        } else {
            output::print_lines(&report.lines())
        };
    }
    // The plans of a sweep are made one after the other: each may take gigabytes.
    let mut plans = Vec::new();
    let mut lines = vec![PlanReport::header()];
    for &ranks in &arguments.sweep {
        let mut report = arguments.make_report(&model, &state, ranks)?;
        // It would be that of the largest plan so far.
        report.peak_bytes = None;
        plans.push(report.json());
        lines.push(report.row());
    }
    if arguments.json {
        return output::print_json(&json!({ "schema": SCHEMA, "plans": plans }));
    }
    output::print_lines(&lines)
}

impl PlanArguments {
    /// Returns the name and the state of what is planned: a published model, or a checkpoint.
    ///
    /// # Errors
    /// There is no committed checkpoint.
    fn load_state(&self) -> Result<(String, JobState)> {
        if let Some(location) = &self.like {
            let state = JobState::from_checkpoint(location)?;
            return Ok((location.to_string(), state));
        }
        let name = self
            .model
            .clone()
            .expect("clap requires `--model` without `--like`");
        let units = models::find_units(&name).expect("clap takes no other name");
        let state = JobState::from_model(units, self.dtype, self.optimizer)?;
        Ok((name, state))
    }

    /// Plans a save of this many ranks, and returns the report.
    ///
    /// # Errors
    /// The errors of [`twin::plan`].
    fn make_report<'a>(
        &self,
        model: &'a str,
        state: &'a JobState,
        ranks: usize,
    ) -> Result<PlanReport<'a>> {
        let shape = JobShape {
            ranks,
            replicas: self.replicas,
            ranks_per_host: self.ranks_per_host,
            layout: self.layout,
        };
        let planned = twin::plan(state, &shape)?;
        Ok(PlanReport::new(
            model,
            state,
            shape,
            &self.machines,
            planned,
        ))
    }
}
