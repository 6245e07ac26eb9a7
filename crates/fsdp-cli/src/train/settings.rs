//! The settings of a run. An option on the command line comes first, then the checkpoint's value,
//! then the default.

use std::collections::BTreeSet;
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

use super::arguments::{DECAYS, MAX_LAYERS, MAX_SIZE, TrainArguments, find_decay};
use super::optimizers::OptimizerName;
use crate::exit_codes;
use crate::failure::{CommandError, usage_error};
use crate::job_failure::changed_option_error;
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
    pub(super) model_prefix: &'static str,
    /// `true` if it holds an optimizer's state.
    pub(super) has_optimizer: bool,
}

/// The prefix of a model's keys in a checkpoint that holds more than a model.
const MODEL_PREFIX: &str = "model.";
/// The names of the embedding, which is tied to the output layer. They tell whether a checkpoint
/// has the prefix of models.
const EMBEDDING_NAMES: [&str; 2] = ["transformer.wte.weight", "lm_head.weight"];

impl Resume {
    /// Opens the committed checkpoint of a run.
    ///
    /// # Errors
    /// It is damaged.
    pub(super) fn open(path: Location) -> Result<Self> {
        let reader = CheckpointReader::open(&path)?;
        let step = as_natural(&reader.read_value("train.step")?)
            .with_context(|| format!("`train.step` of `{path}` is not a step"))?;
        Ok(Resume {
            step,
            path,
            checkpoint: Box::new(reader),
            model_prefix: MODEL_PREFIX,
            has_optimizer: true,
        })
    }

    /// Opens a checkpoint of any run and any format, PyTorch's too, that may hold no more than a
    /// model.
    ///
    /// # Errors
    /// The location is not a checkpoint, or a damaged one.
    pub(super) fn open_any(path: &Location) -> Result<Self> {
        let checkpoint = checkpoint::open(path, OpenOptions::default())?;
        let metadata = checkpoint.metadata();
        // A file of weights alone has the names of the model; a checkpoint of a run has more, and
        // puts them below `model.`.
        let has_own_names = EMBEDDING_NAMES
            .iter()
            .any(|name| metadata.tensor(name).is_some());
        let model_prefix = if has_own_names { "" } else { MODEL_PREFIX };
        check_prefix(metadata, model_prefix)?;
        let is_by_name = !has_keys(metadata, "optim.state.")
            || EMBEDDING_NAMES
                .iter()
                .any(|name| has_keys(metadata, &format!("optim.state.{name}.")));
        if !is_by_name {
            output::print_message(&format!(
                "`{path}`: the optimizer's state is not by parameters' names, and is left out"
            ));
        }
        let has_optimizer = is_by_name && has_keys(metadata, "optim.param_groups.");
        let mut resume = Resume {
            step: 0,
            path: path.clone(),
            checkpoint,
            model_prefix,
            has_optimizer,
        };
        // Warn about state that a checkpoint of another program lacks.
        let step = resume.read_as("train.step", as_natural)?;
        let missing = match (has_optimizer, step) {
            (true, Some(_)) => "",
            (false, Some(_)) => "no optimizer state",
            (true, None) => "no `train.step`: steps count from 0",
            (false, None) => "only a model: the optimizer and the steps begin anew",
        };
        if !missing.is_empty() {
            output::print_message(&format!("`{path}` holds {missing}"));
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
        if let Some(rows) = self.read_as("train.rows", as_natural)? {
            return Ok(rows);
        }
        // Without a count of rows, all steps had batches of one size: the stored one, or else the
        // one of this run.
        let saved = self.read_as("train.config.batch", as_natural)?;
        Ok(self.step.saturating_mul(saved.unwrap_or(batch_size as u64)))
    }

    /// Returns the learning rate of the optimizer's first group; `None` if it was not saved.
    fn lr(&self) -> Result<Option<f64>> {
        // torch saves the learning rate as a value of each parameter group, which all have the same
        // one here.
        for (key, _) in self.checkpoint.metadata().values() {
            if key.starts_with("optim.param_groups.") && key.ends_with(".lr") {
                return self.read_as(key, PlainValue::as_float);
            }
        }
        Ok(None)
    }

    /// Returns the entry of the model's parameter `name`; `None` if the checkpoint has none.
    pub(super) fn entry(&self, name: &str) -> Option<&Entry> {
        let entries = &self.checkpoint.metadata().entries;
        entries.get(&format!("{}{name}", self.model_prefix))
    }

    /// Returns the size of one dimension of a tensor of the model; `None` if the checkpoint has no
    /// such tensor or dimension.
    fn dimension(&self, name: &str, dim: usize) -> Option<usize> {
        match self.entry(name)? {
            Entry::Tensor(tensor) => tensor.shape.get(dim).copied(),
            Entry::Bytes(_) => None,
        }
    }

    /// Returns a size of the model from the shapes of its tensors, for checkpoints of programs that
    /// do not save their settings. Returns `None` for a size that shapes do not tell.
    fn size_from_tensors(&self, key: &str) -> Option<usize> {
        match key {
            "hidden" => EMBEDDING_NAMES
                .iter()
                .find_map(|name| self.dimension(name, 1)),
            "seq" => self.dimension("transformer.wpe.weight", 0),
            "layers" => {
                let prefix = format!("{}transformer.h.", self.model_prefix);
                let names = self.checkpoint.metadata().tensors();
                let layer_indices = names.filter_map(|(key, _)| layer_index(key, &prefix));
                layer_indices.max()?.checked_add(1)
            }
            _ => None,
        }
    }

    /// Reads a value; `None` if the checkpoint has none of this name, as those of other programs
    /// may not.
    ///
    /// # Errors
    /// A value that cannot be read, or that `convert` refuses.
    pub(super) fn read_as<T>(
        &self,
        key: &str,
        convert: impl FnOnce(&PlainValue) -> Option<T>,
    ) -> Result<Option<T>> {
        if !self.checkpoint.metadata().entries.contains_key(key) {
            return Ok(None);
        }
        let value = self.checkpoint.read_value(key)?;
        let converted = convert(&value).with_context(|| {
            let type_name = value.type_name();
            format!("`{key}` of `{}` cannot be a {type_name}", self.path)
        })?;
        Ok(Some(converted))
    }
}

/// Checks that a checkpoint has the model's names below `prefix`, if it has them at all.
///
/// # Errors
/// It has them below another prefix, such as `module.`.
fn check_prefix(metadata: &Metadata, prefix: &str) -> Result<()> {
    let names = metadata.tensors().map(|(key, _)| key);
    let prefixes = names.filter_map(|key| {
        let mut names = EMBEDDING_NAMES.iter();
        names.find_map(|name| key.strip_suffix(*name))
    });
    let prefixes: BTreeSet<&str> = prefixes.collect();
    let Some(found) = prefixes.first().filter(|_| !prefixes.contains(prefix)) else {
        return Ok(());
    };
    bail!(CommandError {
        exit_code: exit_codes::DIFFERENCE,
        message: format!(
            "the names of the model begin with `{found}` in the checkpoint, and here with nothing \
             or `{MODEL_PREFIX}`: write it with other names by `fsdp convert --rename {found}=`"
        ),
        hint: None,
    })
}

/// Returns `true` if a checkpoint has a key with this prefix.
fn has_keys(metadata: &Metadata, prefix: &str) -> bool {
    let mut keys = metadata.entries.keys();
    keys.any(|key| key.starts_with(prefix))
}

/// Returns the index of the layer that a key with this prefix is of; `None` for other keys.
fn layer_index(key: &str, prefix: &str) -> Option<usize> {
    key.strip_prefix(prefix)?.split('.').next()?.parse().ok()
}

impl Settings {
    /// Determines the settings of a run.
    ///
    /// # Errors
    /// A checkpoint whose settings cannot be read, or an option that contradicts a setting which
    /// cannot change.
    pub(super) fn resolve(arguments: &TrainArguments, resume: Option<&Resume>) -> Result<Self> {
        // A guess would fit the shapes as well, and be another model.
        if let Some(resume) = resume
            && arguments.heads.is_none()
            && read_size(Some(resume), "heads")?.is_none()
        {
            bail!(usage_error(
                format!(
                    "`{}` does not tell the number of attention heads",
                    resume.path
                ),
                "give it with `--heads`",
            ));
        }
        let gpt = GptConfig {
            layers: choose_size(arguments.layers, resume, "layers", 2)?,
            heads: choose_size(arguments.heads, resume, "heads", 4)?,
            hidden: choose_size(arguments.hidden, resume, "hidden", 64)?,
            seq: choose_size(arguments.seq, resume, "seq", 64)?,
            vocab: VOCAB,
        };
        // Other numbers of heads fit the same shapes, so only this comparison finds that the number
        // has changed.
        if let Some(heads) = read_size(resume, "heads")?
            && heads != gpt.heads
        {
            bail!(changed_option_error("--heads", heads, gpt.heads));
        }
        let mut lr = read_saved(resume, "train.config.lr", PlainValue::as_float)?;
        if let Some(resume) = resume
            && lr.is_none()
        {
            lr = resume.lr()?;
        }
        // Each part of the schedule may be given anew on a resume: a longer run needs more steps.
        let schedule = Schedule {
            decay: choose_decay(
                arguments.schedule,
                read_saved(resume, "train.config.schedule", as_text)?,
            )?,
            warmup: arguments
                .warmup
                .or(read_saved(resume, "train.config.warmup", as_natural)?)
                .unwrap_or(0),
            steps: arguments
                .schedule_steps
                .or(read_saved(
                    resume,
                    "train.config.schedule_steps",
                    as_natural,
                )?)
                .unwrap_or(arguments.steps),
        };
        if schedule.decay == Decay::Constant && arguments.schedule_steps.is_some() {
            bail!(usage_error(
                "the learning rate is constant, so `--schedule-steps` would do nothing",
                "choose how it falls with `--schedule`, or leave `--schedule-steps` out",
            ));
        }
        if schedule.decay != Decay::Constant && schedule.warmup >= schedule.steps {
            bail!(usage_error(
                format!(
                    "the learning rate rises for {} steps, and would fall to 0 after {}",
                    schedule.warmup, schedule.steps
                ),
                "make `--warmup` shorter, or the schedule longer with `--schedule-steps`",
            ));
        }
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
        // The checkpoint keeps the path as text, and a resumed run looks there.
        if let Some(data) = &arguments.data
            && data.to_str().is_none()
        {
            bail!(usage_error(
                format!(
                    "`{}` is not UTF-8, which a checkpoint cannot keep",
                    data.display()
                ),
                "give the text of `--data` another name",
            ));
        }
        // Seeds are unsigned, but integers in checkpoints are signed: the bits are kept.
        let seed = read_saved(resume, "train.seed", |seed| {
            Some(seed.as_int()?.cast_unsigned())
        })?;
        Ok(Settings {
            gpt,
            batch: choose_size(arguments.batch, resume, "batch", 12)?,
            lr: arguments.lr.or(lr).unwrap_or(1e-3),
            seed: arguments.seed.or(seed).unwrap_or(0),
            optimizer: choose_optimizer(
                arguments.optimizer,
                read_saved(resume, "train.config.optimizer", as_text)?,
            )?,
            schedule,
            data: arguments
                .data
                .clone()
                .or(read_saved(resume, "train.config.data", as_text)?.map(PathBuf::from)),
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
    pub(super) fn state(&self, step: u64, rows_read: u64) -> StateDict {
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
        if rows_read != step.saturating_mul(self.batch as u64) {
            train.insert("rows", i64::try_from(rows_read).unwrap_or(i64::MAX));
        }
        train.insert("seed", self.seed.cast_signed());
        train.insert("config", config);
        train
    }
}

/// Reads a value of the checkpoint that a run continues from. Returns `None` if it continues from
/// none, or if the checkpoint has no such value.
fn read_saved<T>(
    resume: Option<&Resume>,
    key: &str,
    convert: impl FnOnce(&PlainValue) -> Option<T>,
) -> Result<Option<T>> {
    match resume {
        Some(resume) => resume.read_as(key, convert),
        None => Ok(None),
    }
}

/// Returns a size that was asked for, or else the checkpoint's, or else the default.
///
/// # Errors
/// The checkpoint's size cannot be read, or is out of bounds.
fn choose_size(
    requested: Option<usize>,
    resume: Option<&Resume>,
    key: &str,
    default: usize,
) -> Result<usize> {
    Ok(requested.or(read_size(resume, key)?).unwrap_or(default))
}

/// Returns a size of the model or of the batch from the settings of the checkpoint, or else from
/// its tensors; `None` if neither tells it.
///
/// # Errors
/// It cannot be read, or is out of bounds.
fn read_size(resume: Option<&Resume>, key: &str) -> Result<Option<usize>> {
    let Some(resume) = resume else {
        return Ok(None);
    };
    let name = format!("train.config.{key}");
    let saved = resume.read_as(&name, |value| usize::try_from(value.as_int()?).ok())?;
    let Some(saved) = saved else {
        return Ok(resume.size_from_tensors(key));
    };
    // The number comes from a file, so it is bounded before memory is taken for it.
    let limit = match key {
        "layers" => MAX_LAYERS,
        _ => MAX_SIZE,
    };
    ensure!(
        (1..=limit).contains(&(saved as u64)),
        "`{name}` of `{}` is {saved}, and can be 1 to {limit}",
        resume.path,
    );
    Ok(Some(saved))
}

/// Returns a plain value as a text; `None` if it is none.
fn as_text(value: &PlainValue) -> Option<String> {
    value.as_str().map(str::to_owned)
}

/// Returns a plain value as a number; `None` if it is no integer, or negative.
fn as_natural(value: &PlainValue) -> Option<u64> {
    u64::try_from(value.as_int()?).ok()
}

/// Returns the optimizer of the run: the checkpoint's, if it names one, or else the one that was
/// asked for.
///
/// # Errors
/// Another one than the checkpoint's was asked for, or the checkpoint's has an unknown name.
fn choose_optimizer(
    requested: Option<OptimizerName>,
    saved_name: Option<String>,
) -> Result<OptimizerName> {
    let Some(saved_name) = saved_name else {
        return Ok(requested.unwrap_or(OptimizerName::Adamw));
    };
    // State of one optimizer is of no use to another, so this cannot change.
    if let Some(requested) = requested {
        let requested = choice_name(&requested);
        ensure!(
            requested == saved_name,
            changed_option_error("--optimizer", saved_name, requested)
        );
    }
    match OptimizerName::from_str(&saved_name, false) {
        Ok(optimizer) => Ok(optimizer),
        Err(_) => bail!("the checkpoint's optimizer `{saved_name}` is not known here"),
    }
}

/// Returns the decay that was asked for, or else the checkpoint's, or else a constant rate.
///
/// # Errors
/// The checkpoint's decay has an unknown name.
fn choose_decay(requested: Option<Decay>, saved_name: Option<String>) -> Result<Decay> {
    match (requested, saved_name) {
        (Some(requested), _) => Ok(requested),
        (None, None) => Ok(Decay::Constant),
        (None, Some(saved_name)) => find_decay(&saved_name)
            .with_context(|| format!("the checkpoint's schedule `{saved_name}` is not known here")),
    }
}
