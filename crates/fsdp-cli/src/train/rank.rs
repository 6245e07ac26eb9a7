//! The work of each rank: build, restore, train, save, sample.

use std::io;
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::data::{Batches, Text};
use crate::gpt::Gpt;
use crate::memory;
use anyhow::{Context as _, Result};
use candle_core::{DType, Device, Tensor};
use fsdp::checkpoint::{Location, RunFacts, StepCheckpoint, check_replicas};
use fsdp::formats::digest::Digest;
use fsdp::formats::lineage::DataPosition;
use fsdp::layout::{ErrorKind, Failure, count_text};
use fsdp::nn::{
    ClipOptions, FinishOptions, FinishedStep, GradScalerOptions, MixedPrecision, NnError,
    OnNonFinite,
};
use fsdp::prelude::*;
use fsdp::state::StateError;
use serde_json::json;
use tracing::info_span;

use super::arguments::{DeviceName, NonFinite, TrainArguments, elastic_job};
use super::checkpoints::Checkpoints;
use super::device::open_gpu;
use super::fallback::with_damage_context;
use super::report::{Reporter, SCHEMA, StepMetrics, now};
use super::sample::sample;
use super::settings::{Resume, Settings};
use super::state::{parts_to_load, restore};
use crate::output;
use crate::stop::StopRequest;

/// The data that all ranks of a process share.
pub(super) struct Job<'a> {
    pub(super) arguments: &'a TrainArguments,
    pub(super) settings: Settings,
    pub(super) text: Text,
    pub(super) batches: Batches,
    /// The checkpoint that the run continues from.
    pub(super) origin: Option<StepCheckpoint>,
    /// `true` if that is a durable checkpoint of the run itself, from which a further run continues
    /// like this one.
    pub(super) is_saved: bool,
    /// `true` if this run does not continue one in its directory.
    pub(super) is_new_run: bool,
    /// The number of rows of the text that the steps before that checkpoint have read.
    pub(super) rows_read: u64,
    /// The same checkpoint, open, until all ranks have read it.
    pub(super) resume: Mutex<Option<Arc<Resume>>>,
    /// Damaged checkpoints that are newer than the one to resume from. Saves replace them.
    pub(super) damaged: Vec<Location>,
    pub(super) mesh: Option<DeviceMesh>,
    pub(super) threads_per_rank: usize,
    pub(super) device: DeviceName,
    /// The number of this process among those of its machine, if ranks are processes.
    pub(super) local_rank: Option<usize>,
    pub(super) stop: StopRequest,
}

/// The way in which a successful run ends. It is the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RunEnd {
    /// All steps are done.
    Done,
    /// A signal stopped the run after a step, which is saved, or before the first step.
    Stopped,
}

impl Job<'_> {
    /// Returns the first step to do.
    pub(super) fn start_step(&self) -> u64 {
        // Without a checkpoint to continue from, no step is done yet.
        self.origin.as_ref().map_or(0, |origin| origin.step)
    }

    /// Returns the number of rows of the text that all steps before `step` have read.
    fn rows_before(&self, step: u64) -> u128 {
        u128::from(self.rows_read) + self.batches.rows_of(step.saturating_sub(self.start_step()))
    }

    /// Locks the open checkpoint that the run continues from. There is none if the run starts from
    /// the beginning, or once the checkpoint has been closed.
    fn lock_resume(&self) -> MutexGuard<'_, Option<Arc<Resume>>> {
        self.resume.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the library's options for a rank on `device`.
    fn fsdp_config(&self, device: &Device) -> FsdpConfig {
        FsdpConfig {
            device: device.clone(),
            strategy: self.arguments.strategy,
            mesh: self.mesh.clone(),
            use_orig_params: !self.arguments.flat,
            // Reductions are in f32.
            mixed_precision: MixedPrecision {
                param: self.arguments.mixed_precision,
                reduce: self.arguments.mixed_precision.map(|_| DType::F32),
                ..MixedPrecision::default()
            },
            cpu_offload: self.arguments.cpu_offload,
            allow_tf32: self.arguments.allow_tf32,
            backward_prefetch: self.arguments.backward_prefetch.library_option(),
            forward_prefetch: self.arguments.forward_prefetch,
            limit_all_gathers: self.arguments.limit_all_gathers,
            seed: self.settings.seed,
            ..FsdpConfig::default()
        }
    }
}

struct Rank<'a> {
    job: &'a Job<'a>,
    device: Device,
    run: TrainState<Gpt>,
    checkpoints: Checkpoints,
    reporter: Option<Reporter>,
    /// The digest of the text, on the rank that reports.
    text_digest: Option<Digest>,
}

/// Trains on one rank.
///
/// # Errors
/// The error of this rank, or that of another rank.
pub(super) fn run(group: ProcessGroup, job: &Job<'_>) -> Result<RunEnd> {
    let is_reporter = group.rank() == 0;
    let device = match job.device {
        DeviceName::Cpu => Device::Cpu,
        DeviceName::Cuda => {
            let opened = open_gpu(job.local_rank.unwrap_or(group.rank()), &group);
            // A rank without a GPU must not leave the others waiting for it.
            group.agree("open a GPU", opened.map_err(|error| format!("{error:#}")))?
        }
    };
    let model = FullyShardedDataParallel::new(group, job.fsdp_config(&device), |scope| {
        let is_recomputed = job.arguments.activation_checkpointing;
        Gpt::build(scope, &job.settings.gpt, is_recomputed)
    })?;
    let optimizer = job
        .settings
        .optimizer
        .make(job.settings.lr, model.parameters())?;
    // Only f16 has so small a range that the loss needs a scale.
    let needs_scaler = job.arguments.mixed_precision == Some(DType::F16);
    let resume = job.lock_resume().clone();
    let parts = resume
        .as_ref()
        .map(|resume| parts_to_load(resume, needs_scaler));
    let mut checkpoints = Checkpoints::new(job.arguments, model.group(), &job.damaged, parts)?;
    let mut run = TrainState::new(model, vec![optimizer]);
    if needs_scaler {
        run.scaler = Some(GradScaler::new(GradScalerOptions::default())?);
    }
    if let Some(resume) = resume {
        info_span!("load", rank = run.model.group().rank())
            .in_scope(|| restore(&resume, &mut checkpoints.checkpointer, &mut run))
            .map_err(|error| with_damage_context(error, &resume.path))?;
        // The last rank that closes it lets it be removed.
        job.lock_resume().take();
    }
    // The learning rate to start from is that of the settings, even if the loaded optimizer has
    // another one.
    for group in run.optimizers.iter_mut().flat_map(Optimizer::groups_mut) {
        group.set_initial_lr(job.settings.lr);
    }
    run.optimizers.iter_mut().try_for_each(Optimizer::train)?;
    // A load may take long. Nothing is lost if the run ends here, and a step and its save might
    // take too long.
    if job.is_saved && any_rank_stops(run.model.group(), &job.stop)? {
        if is_reporter {
            output::print_message(
                "stopped by a signal before the first step: go on with `--resume`",
            );
        }
        return Ok(RunEnd::Stopped);
    }
    // If the checkpoint could not be loaded, the run has ended above, and has written nothing.
    checkpoints.check_writable(&job.arguments.checkpoint_location())?;
    let reporter = open_reporter(run.model.group(), job)?;
    let text_digest = is_reporter.then(|| job.text.digest());
    Rank {
        job,
        device,
        run,
        checkpoints,
        reporter,
        text_digest,
    }
    .train()
}

/// Opens the run's files on the rank that reports; returns `None` on the others. No rank may begin
/// a step if they cannot be used. This is a collective.
///
/// # Errors
/// On the rank that reports, the errors of [`Reporter::open`]. On the other ranks, an error with
/// the text of that one.
fn open_reporter(group: &ProcessGroup, job: &Job<'_>) -> Result<Option<Reporter>> {
    let opened = match group.rank() {
        0 => Reporter::open(job.arguments, job.start_step(), job.is_new_run).map(Some),
        _ => Ok(None),
    };
    let outcome = match &opened {
        Ok(_) => Ok(()),
        Err(error) => Err(StateError::Other {
            message: format!("{error:#}"),
            kind: match error.root_cause().downcast_ref::<io::Error>() {
                Some(error) => Failure::kind(error),
                None => ErrorKind::Usage,
            },
        }),
    };
    let agreement = group.agree("open the run's files", outcome);
    let reporter = opened?;
    agreement?;
    Ok(reporter)
}

/// Returns `true` if a signal has asked any rank to stop. This is a collective.
fn any_rank_stops(group: &ProcessGroup, stop: &StopRequest) -> Result<bool> {
    let mut stop_flags = vec![0u64; group.world_size()];
    group.all_gather_into(&mut stop_flags, &[u64::from(stop.signal().is_some())])?;
    Ok(stop_flags.contains(&1))
}

/// Returns `true` if the number of steps done is a multiple of `every`; `false` if there is none.
fn is_due(steps_done: u64, every: Option<NonZeroU64>) -> bool {
    every.is_some_and(|every| steps_done % every == 0)
}

impl Rank<'_> {
    /// Runs the steps, with the saves between them, and the end of the run: waits for the last
    /// save, clears the memory tier, and makes the text sample. If a signal has asked a rank to
    /// stop, ends after the step, once it is saved.
    fn train(mut self) -> Result<RunEnd> {
        let arguments = self.job.arguments;
        let steps = arguments.steps;
        self.report_start()?;
        for step in self.job.start_step()..steps {
            let (metrics, is_stopping) = self.step(step)?;
            if let Some(reporter) = &mut self.reporter {
                reporter.step_done(&metrics)?;
                self.checkpoints.report_if_finished(reporter)?;
            }
            let steps_done = step + 1;
            // Before a save, so that replicas that have drifted apart are not saved as one.
            if is_due(steps_done, arguments.check_replicas) {
                check_replicas(&self.run, self.run.model.group())
                    .with_context(|| format!("after step {steps_done}"))?;
            }
            let is_save_due =
                is_stopping || steps_done == steps || is_due(steps_done, arguments.save_every);
            // A step whose checkpoint is durable right after the save need not be kept in memory
            // too.
            let is_kept_in_memory = !is_save_due
                || self.checkpoints.in_background && !is_stopping && steps_done < steps;
            let memory_every = arguments
                .memory_tier
                .as_ref()
                .map(|_| arguments.memory_every);
            if is_due(steps_done, memory_every) && is_kept_in_memory {
                self.save(steps_done, Checkpoints::save_to_memory)?;
            }
            if is_save_due {
                self.save(steps_done, Checkpoints::save)?;
            }
            if is_stopping && steps_done < steps {
                self.checkpoints.wait(self.reporter.as_ref())?;
                if let Some(reporter) = &self.reporter {
                    reporter.stopped(steps_done)?;
                }
                return Ok(RunEnd::Stopped);
            }
        }
        self.checkpoints.wait(self.reporter.as_ref())?;
        self.checkpoints.clear_memory(self.reporter.is_some())?;
        self.for_each_optimizer(Optimizer::eval)?;
        let mut text = None;
        if arguments.sample > 0 {
            // Everything is saved, so a signal only ends the sample.
            let is_stopping = || any_rank_stops(self.run.model.group(), &self.job.stop);
            text = sample(
                &self.run.model,
                &self.device,
                arguments.sample,
                self.job.settings.seed,
                &is_stopping,
            )?;
        }
        if let Some(reporter) = &self.reporter {
            reporter.end(steps, text.as_deref())?;
        }
        Ok(RunEnd::Done)
    }

    /// Calls a method of each optimizer.
    fn for_each_optimizer(
        &mut self,
        method: fn(&mut Optimizer) -> Result<(), NnError>,
    ) -> Result<(), NnError> {
        self.run.optimizers.iter_mut().try_for_each(method)
    }

    /// Reports the model and the ranks before the first step, on the rank that reports.
    fn report_start(&self) -> Result<()> {
        let Some(reporter) = &self.reporter else {
            return Ok(());
        };
        let parameters = self.run.model.parameters();
        let mut parameter_count = 0;
        for fqn in parameters.fqns() {
            parameter_count += parameters.shape(fqn)?.iter().product::<usize>() as u64;
        }
        let rank_count = self.run.model.group().world_size();
        let thread_count = self.job.threads_per_rank;
        let strategy = parameters.strategy();
        let mut line = format!(
            "{parameter_count} parameters on {} ({strategy}, {} each)",
            count_text(rank_count, "rank", "ranks"),
            count_text(thread_count, "CPU thread", "CPU threads"),
        );
        let resumed_from = self
            .job
            .origin
            .as_ref()
            .map(|origin| origin.path.to_string());
        if let Some(path) = &resumed_from {
            line.push_str(&format!(", from `{path}`"));
        }
        let event = json!({
            "event": "start",
            "schema": SCHEMA,
            "ranks": rank_count,
            "threads_per_rank": thread_count,
            "parameters": parameter_count,
            "step": self.job.start_step(),
            "steps": self.job.arguments.steps,
            "resumed_from": resumed_from,
            // It stays the same when a launcher starts the processes again.
            "job": elastic_job(),
        });
        reporter.start(event, &line)
    }

    /// Does one step on the global batch. All ranks get the same outcome, except for the time, the
    /// speed and the memory of the process, which each rank measures itself.
    ///
    /// Returns `true` too if a signal has asked one of the ranks to stop.
    fn step(&mut self, step: u64) -> Result<(StepMetrics, bool)> {
        let start = Instant::now();
        let _span = info_span!("step", rank = self.run.model.group().rank(), step).entered();
        // Gradients are accumulated over the parts of the batch. Ranks communicate them in the last
        // part only.
        let last_part = self.job.batches.accumulation - 1;
        let mut losses = Vec::with_capacity(last_part + 1);
        for part in 0..last_part {
            losses.push(self.run.model.no_sync(|_| self.backward(step, part))?);
        }
        losses.push(self.backward(step, last_part)?);
        let finished = self.update(step, &losses)?;
        // Each rank has sent the three numbers that `update` lists.
        let [mut signals, bytes, peak_bytes] = [0, 1, 2].map(|position| {
            finished
                .numbers
                .iter()
                .map(move |numbers| numbers[position])
        });
        let seconds = start.elapsed().as_secs_f64();
        let Batches { batch, seq, .. } = self.job.batches;
        let rank_count = finished.losses.len();
        let metrics = StepMetrics {
            step,
            time: now(),
            loss: finished.losses.iter().sum::<f64>() / rank_count as f64,
            lr: self.job.settings.lr * self.job.settings.schedule.factor(step),
            grad_norm: (!finished.is_skipped).then_some(finished.grad_norm),
            skipped: finished.is_skipped,
            tokens_per_s: (batch * seq) as f64 / seconds,
            parameter_bytes: bytes.collect(),
            peak_parameter_bytes: peak_bytes.collect(),
            peak_memory_bytes: memory::peak_process_bytes(),
        };
        Ok((metrics, signals.any(|signal| signal > 0)))
    }

    /// Updates the parameters, at the learning rate of the step. The update is skipped if the
    /// gradients are not finite and there is a loss scale, or `--nonfinite` is `skip`.
    fn update(&mut self, step: u64, losses: &[Tensor]) -> Result<FinishedStep> {
        for optimizer in &mut self.run.optimizers {
            self.job.settings.schedule.apply(optimizer, step)?;
        }
        let parameters = self.run.model.parameters();
        // What stays in memory between steps is without gathered parameters.
        parameters.reshard()?;
        // A signal may reach only some ranks, or one rank later than another. All ranks must stop
        // after the same step, so each sends whether it has received one, together with its loss
        // and its memory.
        let numbers = [
            u64::from(self.job.stop.signal().is_some()),
            parameters.parameter_bytes() as u64,
            parameters.peak_parameter_bytes() as u64,
        ];
        let arguments = self.job.arguments;
        let options = FinishOptions {
            max_norm: arguments.clip_grad_norm.unwrap_or(f64::INFINITY),
            clip: ClipOptions {
                on_non_finite: match arguments.nonfinite {
                    NonFinite::Error => OnNonFinite::Error,
                    NonFinite::Skip => OnNonFinite::Skip,
                },
                ..ClipOptions::default()
            },
            losses,
            numbers: &numbers,
        };
        let scaler = self.run.scaler.as_mut();
        match parameters.finish_step(&mut self.run.optimizers, scaler, &options) {
            Err(error @ NnError::NonFiniteGradients { .. }) => {
                Err(error).with_context(|| format!("step {} was not done", step + 1))
            }
            finished => Ok(finished?),
        }
    }

    /// Runs forward and backward of a part of this rank's rows, and returns the part's share of the
    /// rank's loss, where the device has it.
    fn backward(&self, step: u64, part: usize) -> Result<Tensor> {
        let Job { text, batches, .. } = self.job;
        let rank = self.run.model.group().rank();
        let (tokens, targets) =
            batches.batch(text, self.job.rows_before(step), (rank, part), &self.device)?;
        let weight = batches.weight(rank, part);
        let model = &self.run.model;
        let loss = info_span!("forward")
            .in_scope(|| model.forward(|gpt| gpt.loss(&tokens, &targets)? * weight))?;
        let scaled = match &self.run.scaler {
            Some(scaler) => scaler.scale(&loss)?,
            None => loss.clone(),
        };
        info_span!("backward").in_scope(|| model.backward(&scaled))?;
        // It is fetched with the norm of the gradients, so that a GPU need not be waited for now.
        Ok(loss.detach())
    }

    /// Saves the state after a step with one of the methods of [`Checkpoints`]. Optimizers are in
    /// evaluation mode meanwhile.
    fn save(
        &mut self,
        step: u64,
        save_method: fn(&mut Checkpoints, u64, &TrainState<Gpt>, Option<&Reporter>) -> Result<()>,
    ) -> Result<()> {
        let position = u64::try_from(self.job.rows_before(step)).unwrap_or(u64::MAX);
        let settings = self.job.settings.state(step, position);
        self.run.values.insert("train", settings);
        let data = self.text_digest.map(|digest| DataPosition {
            hash: digest.to_string(),
            position,
        });
        self.checkpoints.checkpointer.set_facts(RunFacts {
            config: self.job.settings.config_digest()?,
            data,
        });
        // A schedule-free optimizer keeps the weights that it trains apart from their average,
        // which is what is saved.
        self.for_each_optimizer(Optimizer::eval)?;
        save_method(
            &mut self.checkpoints,
            step,
            &self.run,
            self.reporter.as_ref(),
        )?;
        Ok(self.for_each_optimizer(Optimizer::train)?)
    }
}
