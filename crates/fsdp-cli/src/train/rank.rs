//! The work of each rank: build, restore, train, save, sample.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::data::{Batches, Text};
use crate::gpt::Gpt;
use crate::memory;
use anyhow::{Context as _, Error, Result};
use candle_core::Device;
use fsdp::checkpoint::{Location, RunFacts, StepCheckpoint, check_replicas};
use fsdp::formats::digest::Digest;
use fsdp::formats::lineage::DataPosition;
use fsdp::layout::{ErrorKind, Failure};
use fsdp::nn::NnError;
use fsdp::prelude::*;
use fsdp::state::StateError;
use tracing::info_span;

use super::arguments::{DeviceName, NonFinite, TrainArguments, elastic_job};
use super::checkpoints::Checkpoints;
use super::fallback::named_if_damaged;
use super::report::{Event, Report, SCHEMA, StepMetrics, now};
use super::sample::sample;
use super::scaling::{precision, scaler};
use super::settings::{Resume, Settings};
use super::state::{parts, restore};
use crate::output;
use crate::stop::StopRequest;

/// The data that all ranks of a process share.
pub(super) struct Job<'a> {
    pub(super) arguments: &'a TrainArguments,
    pub(super) settings: Settings,
    pub(super) text: Text,
    pub(super) batches: Batches,
    /// The checkpoint that the run continues from.
    pub(super) from: Option<StepCheckpoint>,
    /// `true` if that is a durable checkpoint of the run itself, from which a further run continues
    /// like this one.
    pub(super) is_saved: bool,
    /// The number of rows of the text that the steps before that checkpoint have read.
    pub(super) rows: u64,
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
pub(super) enum Ended {
    /// All steps are done.
    Done,
    /// A signal stopped the run after a step, which is saved, or before the first step.
    Stopped,
}

impl Job<'_> {
    /// Returns the first step to do.
    pub(super) fn start(&self) -> u64 {
        self.from.as_ref().map_or(0, |from| from.step)
    }

    /// Returns the number of rows of the text that all steps before `step` have read.
    fn rows_before(&self, step: u64) -> u128 {
        u128::from(self.rows) + self.batches.rows_of(step.saturating_sub(self.start()))
    }

    /// Returns the open checkpoint that the run continues from; `None` if it starts from the
    /// beginning, or once it has been closed.
    fn resume(&self) -> Option<Arc<Resume>> {
        self.resume
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Closes the checkpoint that was resumed from, so that it may be removed.
    fn close_resume(&self) {
        self.resume
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
    }

    /// Builds the model in the scope of an FSDP model.
    fn gpt(&self, scope: &Scope) -> candle_core::Result<Gpt> {
        if self.arguments.activation_checkpointing {
            Gpt::recomputed(scope, &self.settings.gpt)
        } else {
            Gpt::new(scope, &self.settings.gpt)
        }
    }

    /// Returns the library's options.
    fn config(&self, device: &Device) -> FsdpConfig {
        FsdpConfig {
            device: device.clone(),
            strategy: self.arguments.strategy,
            mesh: self.mesh.clone(),
            use_orig_params: !self.arguments.flat,
            mixed_precision: precision(self.arguments.mixed_precision),
            cpu_offload: self.arguments.cpu_offload,
            backward_prefetch: self.arguments.backward_prefetch.option(),
            forward_prefetch: self.arguments.forward_prefetch,
            limit_all_gathers: self.arguments.limit_all_gathers,
            seed: self.settings.seed,
            ..FsdpConfig::default()
        }
    }
}

/// The outcome of a step.
struct Outcome {
    metrics: StepMetrics,
    /// `true` if a signal has asked one of the ranks to stop.
    stops: bool,
}

struct Rank<'a> {
    job: &'a Job<'a>,
    device: Device,
    run: TrainState<Gpt>,
    checkpoints: Checkpoints,
    report: Option<Report>,
    /// The digest of the text, on the rank that reports.
    data: Option<Digest>,
}

/// Trains on one rank.
///
/// # Errors
/// The error of this rank, or that of another rank.
pub(super) fn run(group: ProcessGroup, job: &Job<'_>) -> Result<Ended> {
    let reports = group.rank() == 0;
    let device = match job.device {
        DeviceName::Cpu => Device::Cpu,
        DeviceName::Cuda => {
            let opened = job.device.open(job.local_rank.unwrap_or(group.rank()));
            // A rank without a GPU must not leave the others waiting for it.
            group.agree("open a GPU", opened.map_err(|error| format!("{error:#}")))?
        }
    };
    let model = FullyShardedDataParallel::new(group, job.config(&device), |scope| job.gpt(scope))?;
    let optimizer = job
        .settings
        .optimizer
        .make(job.settings.lr, model.parameters())?;
    let scaler = scaler(job.arguments.mixed_precision)?;
    let resume = job.resume();
    let only = resume
        .as_ref()
        .map(|resume| parts(resume, scaler.is_some()));
    let mut checkpoints = Checkpoints::new(job.arguments, model.group(), &job.damaged, only)?;
    let mut run = TrainState::new(model, vec![optimizer]);
    run.scaler = scaler;
    if let Some(resume) = resume {
        let restored = restore(&resume, checkpoints.checkpointer_mut(), &mut run);
        restored.map_err(|error| named_if_damaged(error, &resume.path))?;
        job.close_resume();
    }
    // The learning rate to start from is that of the settings, even if the loaded optimizer has
    // another one.
    for group in run.optimizers.iter_mut().flat_map(Optimizer::groups_mut) {
        group.set_initial_lr(job.settings.lr);
    }
    run.optimizers.iter_mut().try_for_each(Optimizer::train)?;
    // A load may take long. Nothing is lost if the run ends here, and a step and its save might
    // take too long.
    if job.is_saved && any_stops(run.model.group(), &job.stop)? {
        if reports {
            output::talk("stopped by a signal before the first step: go on with `--resume`");
        }
        return Ok(Ended::Stopped);
    }
    // If the checkpoint could not be loaded, the run has ended above, and has written nothing.
    checkpoints.check_writable(job.arguments.checkpoints())?;
    let report = open_report(run.model.group(), job)?;
    let data = reports.then(|| job.text.digest());
    Rank {
        job,
        device,
        run,
        checkpoints,
        report,
        data,
    }
    .train()
}

/// Opens the run's files on the rank that reports. No rank may begin a step if they cannot be used.
/// This is a collective.
///
/// # Errors
/// On the rank that reports, the errors of [`Report::open`]. On the other ranks, an error with the
/// text of that one.
fn open_report(group: &ProcessGroup, job: &Job<'_>) -> Result<Option<Report>> {
    let report = (group.rank() == 0)
        .then(|| Report::open(job.arguments, job.start()))
        .transpose();
    let failure = report.as_ref().err().map(|error| StateError::Other {
        message: format!("{error:#}"),
        kind: error
            .root_cause()
            .downcast_ref::<io::Error>()
            .map_or(ErrorKind::Usage, Failure::kind),
    });
    let agreed = group.agree("open the run's files", failure.map_or(Ok(()), Err));
    let report = report?;
    agreed?;
    Ok(report)
}

/// Returns `true` if a signal has asked any rank to stop. This is a collective.
fn any_stops(group: &ProcessGroup, stop: &StopRequest) -> Result<bool> {
    let mut all = vec![0u64; group.world_size()];
    group.all_gather_into(&mut all, &[u64::from(stop.signal().is_some())])?;
    Ok(all.contains(&1))
}

/// The update of a step.
struct Update {
    lr: f64,
    /// The norm of all gradients before they were clipped; `None` if they were not finite, and the
    /// step was skipped.
    grad_norm: Option<f64>,
}

impl Rank<'_> {
    /// Runs the steps, with the saves between them, and the end of the run: the last save, and the
    /// text sample.
    fn train(mut self) -> Result<Ended> {
        let TrainArguments {
            steps,
            save_every,
            memory_every,
            check_replicas: check_every,
            sample: sample_bytes,
            ..
        } = *self.job.arguments;
        let memory_tier = &self.job.arguments.memory_tier;
        self.tell_start()?;
        for step in self.job.start()..steps {
            let Outcome { metrics, stops } = self.step(step)?;
            if let Some(report) = &mut self.report {
                report.step(&metrics)?;
                self.checkpoints.report_if_finished(report)?;
            }
            let done = step + 1;
            // Before a save, so that replicas that have drifted apart are not saved as one.
            if check_every.is_some_and(|every| done % every == 0) {
                let same = check_replicas(&self.run, self.run.model.group());
                same.with_context(|| format!("after step {done}"))?;
            }
            let saves = stops || done == steps || save_every.is_some_and(|every| done % every == 0);
            // A step whose checkpoint is durable right after the save need not be kept in memory
            // too.
            let is_needed =
                !saves || self.checkpoints.saves_in_background() && !stops && done < steps;
            if memory_tier.is_some() && done % memory_every == 0 && is_needed {
                self.save(done, Checkpoints::save_to_memory)?;
            }
            if saves {
                self.save(done, Checkpoints::save)?;
            }
            if stops && done < steps {
                self.checkpoints.wait(self.report.as_ref())?;
                if let Some(report) = &self.report {
                    report.stopped(done)?;
                }
                return Ok(Ended::Stopped);
            }
        }
        self.checkpoints.wait(self.report.as_ref())?;
        self.checkpoints.clear_memory(self.report.is_some())?;
        self.run
            .optimizers
            .iter_mut()
            .try_for_each(Optimizer::eval)?;
        let text = match sample_bytes {
            0 => None,
            length => Some(sample(
                &self.run.model,
                &self.device,
                length,
                self.job.settings.seed,
            )?),
        };
        if let Some(report) = &self.report {
            report.end(steps, text.as_deref())?;
        }
        Ok(Ended::Done)
    }

    /// Reports the model and the ranks before the first step, on the rank that reports.
    fn tell_start(&self) -> Result<()> {
        let Some(report) = &self.report else {
            return Ok(());
        };
        let parameters = self.run.model.parameters();
        let numel = |fqn| {
            parameters
                .shape(fqn)
                .map(|shape| shape.iter().product::<usize>() as u64)
        };
        let count: u64 = parameters.fqns().map(numel).sum::<Result<_, _>>()?;
        let (ranks, threads, step) = (
            self.run.model.group().world_size(),
            self.job.threads_per_rank,
            self.job.start(),
        );
        let path = self.job.from.as_ref().map(|from| from.path.to_string());
        let from = path
            .as_ref()
            .map_or_else(String::new, |path| format!(", from `{path}`"));
        let strategy = parameters.strategy();
        let line = format!(
            "{count} parameters on {ranks} ranks ({strategy}, {threads} CPU threads each){from}"
        );
        let event = Event::Start {
            schema: SCHEMA,
            ranks,
            threads_per_rank: threads,
            parameters: count,
            step,
            steps: self.job.arguments.steps,
            resumed_from: path,
            job: elastic_job(),
        };
        report.start(&event, &line)
    }

    /// Does one step on the global batch. All ranks get the same outcome, except for the time, the
    /// speed and the memory of the process, which each rank measures itself.
    fn step(&mut self, step: u64) -> Result<Outcome> {
        let clock = Instant::now();
        let _span = info_span!("step", rank = self.run.model.group().rank(), step).entered();
        // Gradients are accumulated over the parts of the batch. Ranks communicate them in the last
        // part only.
        let last = self.job.batches.accumulation - 1;
        let mut loss = 0.0;
        for part in 0..last {
            loss += self.run.model.no_sync(|_| self.backward(step, part))?;
        }
        loss += self.backward(step, last)?;
        let Update { lr, grad_norm } = self.update(step)?;
        let parameters = self.run.model.parameters();
        parameters.zero_grad();
        let group = self.run.model.group();
        // A signal may reach only some ranks, or one rank later than another. All ranks must stop
        // after the same step, so each sends whether it has received one, together with its loss
        // and its memory.
        let own = [
            loss.to_bits(),
            u64::from(self.job.stop.signal().is_some()),
            parameters.parameter_bytes() as u64,
            parameters.peak_parameter_bytes() as u64,
        ];
        let mut all = vec![0; own.len() * group.world_size()];
        group.all_gather_into(&mut all, &own)?;
        // Each rank has sent the four numbers of `own`, one after the other.
        let [losses, mut signals, bytes, peak_bytes] =
            [0, 1, 2, 3].map(|at| all.iter().skip(at).step_by(own.len()).copied());
        let seconds = clock.elapsed().as_secs_f64();
        let Batches { batch, seq, .. } = self.job.batches;
        let metrics = StepMetrics {
            step,
            time: now(),
            loss: losses.map(f64::from_bits).sum::<f64>() / group.world_size() as f64,
            lr,
            grad_norm,
            skipped: grad_norm.is_none(),
            tokens_per_s: (batch * seq) as f64 / seconds,
            parameter_bytes: bytes.collect(),
            peak_parameter_bytes: peak_bytes.collect(),
            peak_memory_bytes: memory::peak_of_process(),
        };
        Ok(Outcome {
            metrics,
            stops: signals.any(|signal| signal > 0),
        })
    }

    /// Updates the parameters, at the learning rate of the step. The update is skipped if the
    /// gradients are not finite and there is a loss scale, or `--nonfinite` is `skip`.
    fn update(&mut self, step: u64) -> Result<Update> {
        let Settings {
            schedule, lr: base, ..
        } = self.job.settings;
        for optimizer in &mut self.run.optimizers {
            schedule.apply(optimizer, step)?;
        }
        let lr = base * schedule.factor(step);
        let TrainArguments {
            clip_grad_norm,
            nonfinite,
            ..
        } = *self.job.arguments;
        let parameters = self.run.model.parameters();
        if let Some(scaler) = &mut self.run.scaler
            && !scaler.unscale(parameters)?
        {
            // The scale was too large, so it becomes smaller. All ranks have the same result, so
            // all skip the step.
            scaler.update()?;
            return Ok(Update {
                lr,
                grad_norm: None,
            });
        }
        let norm = match clip_grad_norm {
            Some(limit) => parameters.clip_grad_norm(limit),
            None => parameters.finite_grad_norm(),
        };
        let grad_norm = match norm {
            Ok(norm) => norm,
            // The norm is that of all ranks' gradients, so all ranks skip the step, or none does.
            Err(NnError::NonFiniteGradients { .. }) if nonfinite == NonFinite::Skip => {
                return Ok(Update {
                    lr,
                    grad_norm: None,
                });
            }
            Err(error) => {
                return Err(Error::new(error).context(format!("step {} was not done", step + 1)));
            }
        };
        info_span!("optimizer")
            .in_scope(|| self.run.optimizers.iter_mut().try_for_each(Optimizer::step))?;
        if let Some(scaler) = &mut self.run.scaler {
            scaler.update()?;
        }
        Ok(Update {
            lr,
            grad_norm: Some(grad_norm),
        })
    }

    /// Runs forward and backward of a part of this rank's rows, and returns the part's share of the
    /// rank's loss.
    fn backward(&self, step: u64, part: usize) -> Result<f64> {
        let Job { text, batches, .. } = self.job;
        let rank = self.run.model.group().rank();
        let (tokens, targets) =
            batches.batch_at(text, self.job.rows_before(step), rank, part, &self.device)?;
        let weight = batches.weight(rank, part);
        let forward = || {
            self.run
                .model
                .forward(|gpt| gpt.loss(&tokens, &targets)? * weight)
        };
        let loss = info_span!("forward").in_scope(forward)?;
        let scaled = self
            .run
            .scaler
            .as_ref()
            .map_or_else(|| Ok(loss.clone()), |scaler| scaler.scale(&loss))?;
        info_span!("backward").in_scope(|| self.run.model.backward(&scaled))?;
        Ok(f64::from(loss.to_scalar::<f32>()?))
    }

    /// Saves the state after a step with one of the methods of [`Checkpoints`].
    fn save(
        &mut self,
        step: u64,
        save: fn(&mut Checkpoints, u64, &TrainState<Gpt>, Option<&Report>) -> Result<()>,
    ) -> Result<()> {
        let position = u64::try_from(self.job.rows_before(step)).unwrap_or(u64::MAX);
        self.run
            .values
            .insert("train", self.job.settings.state(step, position));
        let data = self.data.map(|digest| DataPosition {
            hash: digest.to_string(),
            position,
        });
        self.checkpoints.set_facts(RunFacts {
            config: self.job.settings.config_digest()?,
            data,
        });
        // A schedule-free optimizer keeps the weights that it trains apart from their average,
        // which is what is saved.
        self.run
            .optimizers
            .iter_mut()
            .try_for_each(Optimizer::eval)?;
        save(&mut self.checkpoints, step, &self.run, self.report.as_ref())?;
        Ok(self
            .run
            .optimizers
            .iter_mut()
            .try_for_each(Optimizer::train)?)
    }
}
