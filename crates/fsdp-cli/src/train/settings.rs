//! The settings of a run. An option on the command line comes first, then the checkpoint's value,
//! then the default.

use std::path::PathBuf;

use crate::data::VOCAB;
use crate::gpt::GptConfig;
use anyhow::{Context, Result, ensure};
use fsdp::checkpoint::Location;
use fsdp::formats::checkpoint::{self, Checkpoint};
use fsdp::formats::digest::Digest;
use fsdp::formats::metadata::Entry;
use fsdp::formats::reader::{CheckpointReader, OpenOptions};
use fsdp::prelude::*;

use super::arguments::{MAX_LAYERS, MAX_SIZE, ScheduleName, TrainArguments};
use super::optimizers::OptimizerName;
use crate::job_failure::JobError;
use crate::output;

/// The settings that are kept in checkpoints.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Settings {
    pub(super) gpt: GptConfig,
    pub(super) batch: usize,
    pub(super) lr: f64,
    pub(super) seed: u64,
    pub(super) optimizer: OptimizerName,
    pub(super) schedule: Schedule,
    /// The text; `None` for the built-in one.
    pub(super) data: Option<PathBuf>,
}

/// An open checkpoint to continue from.
pub(super) struct Resume {
    pub(super) step: u64,
    pub(super) path: Location,
    pub(super) checkpoint: Box<dyn Checkpoint>,
    /// The prefix of the model's names in its keys.
    pub(super) model: &'static str,
    /// `true` if it holds an optimizer's state.
    pub(super) optimizer: bool,
}

/// The prefix of a model's keys in a checkpoint that holds more than a model.
const MODEL: &str = "model.";
/// The prefix of the keys of an optimizer's state.
const OPTIMIZER: &str = "optim.";
/// A tensor that tells whether a checkpoint has the prefix of models.
const EMBEDDING: &str = "transformer.wte.weight";

impl Resume {
    /// Opens the committed checkpoint of a run.
    ///
    /// # Errors
    /// It is damaged.
    pub(super) fn open(path: Location) -> Result<Self> {
        let reader = CheckpointReader::open(&path)?;
        let step = reader.read_value("train.step")?;
        let step = step.as_int().and_then(|step| u64::try_from(step).ok());
        let step = step.with_context(|| format!("`train.step` of `{path}` is not a step"))?;
        Ok(Resume {
            step,
            path,
            checkpoint: Box::new(reader),
            model: MODEL,
            optimizer: true,
        })
    }

    /// Opens a checkpoint of any run and any format, PyTorch's too, that may hold no more than a
    /// model.
    ///
    /// # Errors
    /// The location is not a checkpoint, or a damaged one.
    pub(super) fn at(path: &Location) -> Result<Self> {
        let checkpoint = checkpoint::open(path, OpenOptions::default())?;
        let metadata = checkpoint.metadata();
        let model = if metadata.tensor(EMBEDDING).is_some() {
            ""
        } else {
            MODEL
        };
        let has = |prefix: &str| metadata.entries.keys().any(|key| key.starts_with(prefix));
        let by_name =
            has(&format!("{OPTIMIZER}state.{EMBEDDING}.")) || !has(&format!("{OPTIMIZER}state."));
        if !by_name {
            output::talk(&format!(
                "`{path}`: the optimizer's state is not by parameters' names, and is left out"
            ));
        }
        let optimizer = has(&format!("{OPTIMIZER}param_groups.")) && by_name;
        let mut resume = Resume {
            step: 0,
            path: path.clone(),
            checkpoint,
            model,
            optimizer,
        };
        let step = resume.read("train.step", natural)?;
        let missing = match (optimizer, step) {
            (true, Some(_)) => "",
            (false, Some(_)) => "no optimizer state",
            (true, None) => "no `train.step`: steps count from 0",
            (false, None) => "only a model: the optimizer and the steps begin anew",
        };
        if !missing.is_empty() {
            output::talk(&format!("`{path}` holds {missing}"));
        }
        resume.step = step.unwrap_or(0);
        Ok(resume)
    }

    /// Returns the number of rows of the text that the run has read so far. It is stored if the
    /// batches had several sizes. Otherwise all had the size that is stored, or else `batch`.
    ///
    /// # Errors
    /// Values that cannot be read.
    pub(super) fn rows(&self, batch: usize) -> Result<u64> {
        if let Some(rows) = self.read("train.rows", natural)? {
            return Ok(rows);
        }
        let saved = self.read("train.config.batch", natural)?;
        Ok(self.step.saturating_mul(saved.unwrap_or(batch as u64)))
    }

    /// Returns the learning rate of the optimizer's first group, if it was saved.
    fn lr(&self) -> Result<Option<f64>> {
        let entries = &self.checkpoint.metadata().entries;
        let is_lr = |key: &str| key.starts_with("optim.param_groups.") && key.ends_with(".lr");
        let found = entries
            .iter()
            .find(|(key, entry)| is_lr(key) && matches!(entry, Entry::Bytes(_)));
        found.map_or(Ok(None), |(key, _)| self.read(key, PlainValue::as_float))
    }

    /// Returns a size of the model from the shapes of its tensors, for checkpoints of programs that
    /// do not save their settings.
    fn size_of_tensors(&self, key: &str) -> Option<usize> {
        let metadata = self.checkpoint.metadata();
        match key {
            "hidden" => metadata
                .tensor(&format!("{}{EMBEDDING}", self.model))?
                .shape
                .get(1)
                .copied(),
            "seq" => metadata
                .tensor(&format!("{}transformer.wpe.weight", self.model))?
                .shape
                .first()
                .copied(),
            "layers" => {
                let prefix = format!("{}transformer.h.", self.model);
                let layer = |key: &str| key.strip_prefix(&prefix)?.split('.').next()?.parse().ok();
                metadata
                    .tensors()
                    .filter_map(|(key, _)| layer(key))
                    .max()
                    .and_then(|last: usize| last.checked_add(1))
            }
            _ => None,
        }
    }

    /// Reads a value; `None` if the checkpoint has none of this name, as those of other programs
    /// may not.
    fn value(&self, key: &str) -> Result<Option<PlainValue>> {
        if !self.checkpoint.metadata().entries.contains_key(key) {
            return Ok(None);
        }
        Ok(Some(self.checkpoint.read_value(key)?))
    }

    /// Reads a value that the checkpoint may have.
    ///
    /// # Errors
    /// A value that cannot be read, or that `convert` refuses.
    pub(super) fn read<T>(
        &self,
        key: &str,
        convert: impl FnOnce(&PlainValue) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.value(key)? else {
            return Ok(None);
        };
        let what = || {
            format!(
                "`{key}` of `{}` cannot be a {}",
                self.path,
                value.type_name()
            )
        };
        convert(&value).with_context(what).map(Some)
    }
}

impl Settings {
    /// Determines the settings of a run.
    ///
    /// # Errors
    /// A checkpoint whose settings cannot be read, or an option that contradicts a setting which
    /// cannot change.
    pub(super) fn resolve(arguments: &TrainArguments, resume: Option<&Resume>) -> Result<Self> {
        let gpt = GptConfig {
            layers: size(arguments.layers, resume, "layers", 2)?,
            heads: size(arguments.heads, resume, "heads", 4)?,
            hidden: size(arguments.hidden, resume, "hidden", 64)?,
            seq: size(arguments.seq, resume, "seq", 64)?,
            vocab: VOCAB,
        };
        // Other numbers of heads fit the same shapes, so only this comparison finds that the number
        // has changed.
        if let Some(heads) = saved_size(resume, "heads")?.filter(|&heads| heads != gpt.heads) {
            let (saved, asked) = (heads.to_string(), gpt.heads.to_string());
            return Err(JobError::Changed {
                option: "--heads",
                saved,
                asked,
            }
            .into());
        }
        let lr = match saved(resume, "train.config.lr", PlainValue::as_float)? {
            Some(lr) => Some(lr),
            None => resume.map_or(Ok(None), Resume::lr)?,
        };
        let schedule = Schedule {
            decay: decay(
                arguments.schedule,
                saved(resume, "train.config.schedule", text)?,
            )?,
            warmup: arguments
                .warmup
                .or(saved(resume, "train.config.warmup", natural)?)
                .unwrap_or(0),
            steps: arguments
                .schedule_steps
                .or(saved(resume, "train.config.schedule_steps", natural)?)
                .unwrap_or(arguments.steps),
        };
        if schedule.decay != Decay::Constant && arguments.steps > schedule.steps {
            return Err(JobError::AfterSchedule {
                steps: arguments.steps,
                schedule: schedule.steps,
            }
            .into());
        }
        let seed = saved(resume, "train.seed", |seed| {
            Some(seed.as_int()?.cast_unsigned())
        })?;
        Ok(Settings {
            gpt,
            batch: size(arguments.batch, resume, "batch", 12)?,
            lr: arguments.lr.or(lr).unwrap_or(1e-3),
            seed: arguments.seed.or(seed).unwrap_or(0),
            optimizer: optimizer(
                arguments.optimizer,
                saved(resume, "train.config.optimizer", text)?,
            )?,
            schedule,
            data: arguments
                .data
                .clone()
                .or(saved(resume, "train.config.data", text)?.map(PathBuf::from)),
        })
    }

    /// Returns a digest of all settings that decide what a step computes, as a text.
    ///
    /// # Errors
    /// None that is known: settings are plain values.
    pub(super) fn config_digest(&self) -> Result<Option<String>> {
        let mut state = self.state(0, 0);
        state.remove("step");
        let config = StateValue::Dict(state).to_object()?;
        Ok(config.map(|config| Digest::of_value(&config).to_string()))
    }

    /// Returns the checkpoint's `train` part after this many steps, which have read `rows` rows of
    /// the text. [`Settings::resolve`] and [`Resume::rows`] read it.
    pub(super) fn state(&self, step: u64, rows: u64) -> StateDict {
        let mut config = StateDict::new();
        for (key, value) in [
            ("layers", self.gpt.layers),
            ("heads", self.gpt.heads),
            ("hidden", self.gpt.hidden),
            ("seq", self.gpt.seq),
            ("vocab", self.gpt.vocab),
            ("batch", self.batch),
        ] {
            config.insert(key, i64::try_from(value).unwrap_or(i64::MAX));
        }
        config.insert("lr", self.lr);
        config.insert("optimizer", self.optimizer.name());
        config.insert("schedule", name(self.schedule.decay));
        config.insert("warmup", self.schedule.warmup.cast_signed());
        if self.schedule.decay != Decay::Constant {
            config.insert("schedule_steps", self.schedule.steps.cast_signed());
        }
        if let Some(data) = &self.data {
            config.insert("data", data.display().to_string());
        }
        let mut train = StateDict::new();
        train.insert("step", step.cast_signed());
        // If all batches had the same size, the step and that size tell how many rows were read.
        if rows != step.saturating_mul(self.batch as u64) {
            train.insert("rows", i64::try_from(rows).unwrap_or(i64::MAX));
        }
        train.insert("seed", self.seed.cast_signed());
        train.insert("config", config);
        train
    }
}

/// Reads a value of the checkpoint that a run continues from. Returns `None` if it continues from
/// none, or if the checkpoint has no such value.
fn saved<T>(
    resume: Option<&Resume>,
    key: &str,
    convert: impl FnOnce(&PlainValue) -> Option<T>,
) -> Result<Option<T>> {
    resume.map_or(Ok(None), |resume| resume.read(key, convert))
}

/// Returns a size that was asked for, or else the checkpoint's, or else the default.
fn size(asked: Option<usize>, resume: Option<&Resume>, key: &str, default: usize) -> Result<usize> {
    Ok(asked.or(saved_size(resume, key)?).unwrap_or(default))
}

/// Returns a size of the model or of the batch from the settings of the checkpoint, or else from
/// its tensors.
fn saved_size(resume: Option<&Resume>, key: &str) -> Result<Option<usize>> {
    let Some(resume) = resume else {
        return Ok(None);
    };
    let name = format!("train.config.{key}");
    let saved = resume.read(&name, |value| usize::try_from(value.as_int()?).ok())?;
    // The number comes from a file, so it is bounded before memory is taken for it.
    let most = if key == "layers" {
        MAX_LAYERS
    } else {
        MAX_SIZE
    };
    ensure!(
        saved.is_none_or(|saved| (1..=most).contains(&(saved as u64))),
        "`{name}` of `{}` is {}, and can be 1 to {most}",
        resume.path,
        saved.unwrap_or_default()
    );
    Ok(saved.or_else(|| resume.size_of_tensors(key)))
}

/// Returns a plain value as a text, if it is one.
fn text(value: &PlainValue) -> Option<String> {
    value.as_str().map(str::to_owned)
}

/// Returns a plain value as a number, if it is an integer that is not negative.
fn natural(value: &PlainValue) -> Option<u64> {
    u64::try_from(value.as_int()?).ok()
}

/// Returns the optimizer of the run: the checkpoint's, if it names one, and an error if another one
/// was asked for.
fn optimizer(asked: Option<OptimizerName>, saved: Option<String>) -> Result<OptimizerName> {
    let Some(saved) = saved else {
        return Ok(asked.unwrap_or(OptimizerName::Adamw));
    };
    let known = <OptimizerName as clap::ValueEnum>::from_str(&saved, false).ok();
    match (asked, known) {
        (Some(asked), _) if asked.name() != saved => Err(JobError::Changed {
            option: "--optimizer",
            saved,
            asked: asked.name().to_owned(),
        }
        .into()),
        (_, known) => {
            known.with_context(|| format!("the checkpoint's optimizer `{saved}` is not known here"))
        }
    }
}

/// Returns the decay that was asked for, or else the checkpoint's.
fn decay(asked: Option<ScheduleName>, saved: Option<String>) -> Result<Decay> {
    let saved = saved.map(|saved| {
        <ScheduleName as clap::ValueEnum>::from_str(&saved, false)
            .map_err(|_| anyhow::anyhow!("the checkpoint's schedule `{saved}` is not known here"))
    });
    let name = asked.map(Ok).or(saved).transpose()?;
    Ok(name.map_or(Decay::Constant, ScheduleName::decay))
}

/// Returns the name of a decay in checkpoints.
fn name(decay: Decay) -> &'static str {
    let names = <ScheduleName as clap::ValueEnum>::value_variants();
    names
        .iter()
        .find(|name| name.decay() == decay)
        .map_or("", |name| name.name())
}
