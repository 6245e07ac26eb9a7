//! The settings of a run. An option on the command line comes first, then the checkpoint's value,
//! then the default.

use std::path::PathBuf;

use crate::data::VOCAB;
use crate::gpt::GptConfig;
use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum as _;
use fsdp::checkpoint::Location;
use fsdp::formats::checkpoint::{self, Checkpoint};
use fsdp::formats::digest::Digest;
use fsdp::formats::metadata::{Entry, Metadata};
use fsdp::formats::reader::{CheckpointReader, OpenOptions};
use fsdp::prelude::*;

use super::arguments::{DECAYS, MAX_LAYERS, MAX_SIZE, TrainArguments, decay};
use super::optimizers::OptimizerName;
use crate::failure::usage_error;
use crate::job_failure::changed;
use crate::output;
use crate::text::choice_name;

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
/// A tensor that tells whether a checkpoint has the prefix of models.
const EMBEDDING: &str = "transformer.wte.weight";

impl Resume {
    /// Opens the committed checkpoint of a run.
    ///
    /// # Errors
    /// It is damaged.
    pub(super) fn open(path: Location) -> Result<Self> {
        let reader = CheckpointReader::open(&path)?;
        let step = natural(&reader.read_value("train.step")?)
            .with_context(|| format!("`train.step` of `{path}` is not a step"))?;
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
        // A file of weights alone has the names of the model; a checkpoint of a run has more, and
        // puts them below `model.`.
        let model = if metadata.tensor(EMBEDDING).is_some() {
            ""
        } else {
            MODEL
        };
        let by_name = has_keys(metadata, &format!("optim.state.{EMBEDDING}."))
            || !has_keys(metadata, "optim.state.");
        if !by_name {
            output::talk(&format!(
                "`{path}`: the optimizer's state is not by parameters' names, and is left out"
            ));
        }
        let optimizer = by_name && has_keys(metadata, "optim.param_groups.");
        let mut resume = Resume {
            step: 0,
            path: path.clone(),
            checkpoint,
            model,
            optimizer,
        };
        // Warn about state that a checkpoint of another program lacks.
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
        // A checkpoint of a model alone counts as that of no step.
        resume.step = step.unwrap_or(0);
        Ok(resume)
    }

    /// Returns the number of rows of the text that the run has read so far. It is stored if the
    /// batches had several sizes. Otherwise all had the size that is stored, or else `batch_size`.
    ///
    /// # Errors
    /// Values that cannot be read.
    pub(super) fn rows_read(&self, batch_size: usize) -> Result<u64> {
        if let Some(rows) = self.read("train.rows", natural)? {
            return Ok(rows);
        }
        // Without a count of rows, all steps had batches of one size: the stored one, or else the
        // one of this run.
        let saved = self.read("train.config.batch", natural)?;
        Ok(self.step.saturating_mul(saved.unwrap_or(batch_size as u64)))
    }

    /// Returns the learning rate of the optimizer's first group, if it was saved.
    fn lr(&self) -> Result<Option<f64>> {
        // torch saves the learning rate as a value of each parameter group, which all have the same
        // one here.
        for (key, _) in self.checkpoint.metadata().values() {
            if key.starts_with("optim.param_groups.") && key.ends_with(".lr") {
                return self.read(key, PlainValue::as_float);
            }
        }
        Ok(None)
    }

    /// Returns what the checkpoint holds of the model under a name.
    pub(super) fn entry(&self, name: &str) -> Option<&Entry> {
        let entries = &self.checkpoint.metadata().entries;
        entries.get(&format!("{}{name}", self.model))
    }

    /// Returns a dimension of a tensor of the model.
    fn dimension(&self, name: &str, dim: usize) -> Option<usize> {
        match self.entry(name)? {
            Entry::Tensor(tensor) => tensor.shape.get(dim).copied(),
            Entry::Bytes(_) => None,
        }
    }

    /// Returns a size of the model from the shapes of its tensors, for checkpoints of programs that
    /// do not save their settings.
    fn size_of_tensors(&self, key: &str) -> Option<usize> {
        match key {
            "hidden" => self.dimension(EMBEDDING, 1),
            "seq" => self.dimension("transformer.wpe.weight", 0),
            "layers" => {
                let prefix = format!("{}transformer.h.", self.model);
                let names = self.checkpoint.metadata().tensors();
                let layers = names.filter_map(|(key, _)| layer_of(key, &prefix));
                layers.max()?.checked_add(1)
            }
            _ => None,
        }
    }

    /// Reads a value; `None` if the checkpoint has none of this name, as those of other programs
    /// may not.
    ///
    /// # Errors
    /// A value that cannot be read, or that `convert` refuses.
    pub(super) fn read<T>(
        &self,
        key: &str,
        convert: impl FnOnce(&PlainValue) -> Option<T>,
    ) -> Result<Option<T>> {
        if !self.checkpoint.metadata().entries.contains_key(key) {
            return Ok(None);
        }
        let value = self.checkpoint.read_value(key)?;
        let converted = convert(&value).with_context(|| {
            let found = value.type_name();
            format!("`{key}` of `{}` cannot be a {found}", self.path)
        })?;
        Ok(Some(converted))
    }
}

/// Returns `true` if a checkpoint has a key with this prefix.
fn has_keys(metadata: &Metadata, prefix: &str) -> bool {
    let mut keys = metadata.entries.keys();
    keys.any(|key| key.starts_with(prefix))
}

/// Returns the number of the layer that a key with this prefix is of.
fn layer_of(key: &str, prefix: &str) -> Option<usize> {
    key.strip_prefix(prefix)?.split('.').next()?.parse().ok()
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
        if let Some(heads) = saved_size(resume, "heads")?
            && heads != gpt.heads
        {
            bail!(changed("--heads", heads, gpt.heads));
        }
        let mut lr = saved(resume, "train.config.lr", PlainValue::as_float)?;
        if let Some(resume) = resume
            && lr.is_none()
        {
            lr = resume.lr()?;
        }
        // Each part of the schedule may be given anew on a resume: a longer run needs more steps.
        let schedule = Schedule {
            decay: chosen_decay(
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
            bail!(usage_error(
                format!(
                    "the learning rate falls to 0 after {} steps, so the last of {} steps would \
                     train nothing",
                    schedule.steps, arguments.steps
                ),
                "make the schedule longer with `--schedule-steps`, or use `--schedule constant`",
            ));
        }
        // Seeds are unsigned, but integers in checkpoints are signed: the bits are kept.
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
    /// the text. [`Settings::resolve`] and [`Resume::rows_read`] read it.
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
            let size = i64::try_from(value).expect("a larger model cannot be built");
            config.insert(key, size);
        }
        config.insert("lr", self.lr);
        config.insert("optimizer", choice_name(&self.optimizer));
        let (schedule, _) = DECAYS
            .into_iter()
            .find(|(_, decay)| *decay == self.schedule.decay)
            .expect("the decay is that of an option");
        config.insert("schedule", schedule.to_owned());
        config.insert("warmup", self.schedule.warmup.cast_signed());
        // A constant rate has no end. Its number of steps is left out, so that a longer run has the
        // same configuration, and the same digest of it.
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
    match resume {
        Some(resume) => resume.read(key, convert),
        None => Ok(None),
    }
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
    let Some(saved) = saved else {
        return Ok(resume.size_of_tensors(key));
    };
    // The number comes from a file, so it is bounded before memory is taken for it.
    let most = match key {
        "layers" => MAX_LAYERS,
        _ => MAX_SIZE,
    };
    ensure!(
        (1..=most).contains(&(saved as u64)),
        "`{name}` of `{}` is {saved}, and can be 1 to {most}",
        resume.path,
    );
    Ok(Some(saved))
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
    // State of one optimizer is of no use to another, so this cannot change.
    if let Some(asked) = asked {
        let asked = choice_name(&asked);
        ensure!(asked == saved, changed("--optimizer", saved, asked));
    }
    match OptimizerName::from_str(&saved, false) {
        Ok(known) => Ok(known),
        Err(_) => bail!("the checkpoint's optimizer `{saved}` is not known here"),
    }
}

/// Returns the decay that was asked for, or else the checkpoint's.
fn chosen_decay(asked: Option<Decay>, saved: Option<String>) -> Result<Decay> {
    match (asked, saved) {
        (Some(asked), _) => Ok(asked),
        (None, None) => Ok(Decay::Constant),
        (None, Some(saved)) => decay(&saved)
            .with_context(|| format!("the checkpoint's schedule `{saved}` is not known here")),
    }
}
