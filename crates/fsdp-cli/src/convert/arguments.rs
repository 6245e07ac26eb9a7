//! The options of `fsdp convert` and `fsdp reshard`.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use fsdp_formats::Location;
use fsdp_formats::metadata::Metadata;
use fsdp_layout::DType;
use fsdp_tools::convert::{Cast, OutputFormat};
use fsdp_tools::tensor_parallel::{Rules, TensorParallelPlan};

use crate::failure::{CommandError, usage_error};
use crate::keys::KeyFilter;
use crate::map::MapArguments;
use crate::parsers::{float_type_parser, one_to};
use crate::text::choice_name;
use crate::work::Work;

/// The largest number of ranks of a checkpoint.
const MAX_RANKS: u64 = 1 << 16;

/// The default size limit of a file in Hugging Face's layout, which is that of Hugging Face's own
/// writers.
const MAX_SHARD_BYTES: u64 = 5_000_000_000;

/// The formats that can be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TargetFormat {
    /// A directory of torch.distributed.checkpoint, for --world-size ranks
    Dcp,
    /// One safetensors file
    Safetensors,
    /// A directory of safetensors files with an index, each of at most --max-shard-size
    Hf,
    /// A directory of safetensors files, one a rank, as torch's HuggingFaceStorageWriter writes it
    HfSharded,
    /// One file that torch.load(weights_only=True) opens
    Torch,
    /// A directory of torch_checkpointing, for --world-size ranks
    TorchCheckpointing,
}

/// The options of both commands.
#[derive(Debug, Args)]
pub(super) struct WriteArguments {
    /// Replace the checkpoint at DST, once everything is written
    #[arg(long)]
    pub(super) overwrite: bool,
    /// Only show how many tensors, values and bytes would be written, and the memory that it would
    /// take
    #[arg(long)]
    pub(super) dry_run: bool,
    #[command(flatten)]
    pub(super) work: Work,
}

/// The format to write, and what belongs to it.
#[derive(Debug, Args)]
pub(super) struct TargetArguments {
    /// The format to write
    #[arg(long, value_enum)]
    pub(super) to: TargetFormat,
    /// Ranks of the destination, for dcp, hf-sharded and torch-checkpointing [default: 1]
    #[arg(long, value_name = "N", value_parser = one_to(MAX_RANKS))]
    world_size: Option<usize>,
    /// Largest size of a file, for hf: 500MB, 2GiB [default: 5GB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    max_shard_size: Option<u64>,
    /// Take the configuration and the tokenizer of this directory along, for hf
    #[arg(long, value_name = "DIR")]
    with: Option<Location>,
    /// Leave out tensors and values that are objects of types that are never built, where the
    /// format cannot keep them
    #[arg(long)]
    pub(super) drop_opaque: bool,
}

/// Options of `fsdp convert`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  fsdp convert runs/demo/step-00000300 model.safetensors --to safetensors --include 'model.*' --rename model.=
  fsdp convert runs/demo/step-00000300 model --to hf --dtype bfloat16 --max-shard-size 2GB
  fsdp convert model.safetensors sharded --to dcp --world-size 4 --prefix model.
  fsdp convert checkpoint/step-1000 hf --to hf --include 'model.*' --rename model.= \\
    --map llama-to-hf --set heads=32 --set kv_heads=8
  fsdp convert Llama-3-8B for-4-ranks --to hf --tp 4")]
pub(crate) struct ConvertArguments {
    /// A checkpoint of any format
    #[arg(value_name = "SRC")]
    pub(super) source: Location,
    /// Place to write to; nothing may be there, unless --overwrite is given
    #[arg(value_name = "DST")]
    pub(super) destination: Location,
    #[command(flatten)]
    pub(super) target: TargetArguments,
    #[command(flatten)]
    pub(super) filter: KeyFilter,
    /// Replace OLD by NEW in keys that are OLD or begin with OLD and a dot; `model.=` removes
    /// `model.`. May be given more than once: the first rule that fits a key counts
    #[arg(long, value_name = "OLD=NEW", value_parser = parse_rename_rule)]
    pub(super) rename: Vec<(String, String)>,
    /// Put this before all keys, after --rename
    #[arg(long, value_name = "PREFIX")]
    pub(super) prefix: Option<String>,
    /// Cast tensors of float64, float32, float16 and bfloat16, but for the state of optimizers,
    /// hyperparameters, counts, and scales of quantized tensors
    #[arg(long, value_parser = float_type_parser(["float64", "float32", "float16", "bfloat16"]))]
    dtype: Option<DType>,
    /// Cast the state of optimizers too, but not its hyperparameters and counts
    #[arg(long, requires = "dtype")]
    cast_optimizer: bool,
    /// Multiply weights of 8 bits by the scales beside them, which are left out. The weights get
    /// the type of --dtype [default: that in config.json, or bfloat16]
    #[arg(long)]
    pub(super) dequantize: bool,
    #[command(flatten)]
    pub(super) map: MapArguments,
    /// Write separate files for each of N tensor-parallel ranks, with the rank's parts of all
    /// tensors (only for hf)
    #[arg(long, value_name = "N", value_parser = one_to(MAX_RANKS))]
    tp: Option<usize>,
    /// Cut tensors whose keys end with PATTERN in this way for --tp: colwise, rowwise, vocab,
    /// replicate and others, such as `mixer.in_proj=colwise`. Needed for tensors that no built-in
    /// rule matches. May be given more than once
    #[arg(long, value_name = "PATTERN=HOW", requires = "tp")]
    tp_rule: Vec<String>,
    #[command(flatten)]
    pub(super) writing: WriteArguments,
}

/// Options of `fsdp reshard`.
#[derive(Debug, Args)]
pub(crate) struct ReshardArguments {
    /// A checkpoint of any format
    #[arg(value_name = "SRC")]
    pub(super) source: Location,
    /// The directory to write; nothing may be there, unless --overwrite is given
    #[arg(value_name = "DST")]
    pub(super) destination: Location,
    /// Ranks of the destination
    #[arg(long, value_name = "N", value_parser = one_to(MAX_RANKS))]
    pub(super) world_size: usize,
    /// Leave out tensors and values that are objects of types that are never built, where they
    /// cannot be kept
    #[arg(long)]
    pub(super) drop_opaque: bool,
    #[command(flatten)]
    pub(super) writing: WriteArguments,
}

/// Options of `fsdp merge`.
#[derive(Debug, Args)]
#[command(after_help = "\
The average is that of floating-point tensors, but for the state of optimizers. All else is taken from the first \
checkpoint. The averaged weights that a run keeps beside its model (EMA) are copied out with \
`fsdp convert --include 'ema.*' --rename ema.=`.

Examples:
  fsdp merge --from run/step-80 --from run/step-90 --from run/step-100 averaged --to hf
  fsdp merge --from a --weight 0.7 --from b --weight 0.3 soup.safetensors --to safetensors --include 'model.*'
  fsdp merge --from Llama-3-8B --lora run/adapter merged --to hf")]
pub(crate) struct MergeArguments {
    /// A checkpoint of any format; give each that is averaged, or the base of an adapter
    #[arg(long, value_name = "CKPT", required = true)]
    pub(super) from: Vec<Location>,
    /// Place to write to; nothing may be there, unless --overwrite is given
    #[arg(value_name = "DST")]
    pub(super) destination: Location,
    /// The weight of each checkpoint, in their order; weights are divided by their sum [default:
    /// all equal]
    #[arg(
        long,
        value_name = "W",
        allow_negative_numbers = true,
        conflicts_with = "lora"
    )]
    pub(super) weight: Vec<f64>,
    /// Merge this LoRA adapter, a directory as PEFT saves it, into the checkpoint
    #[arg(long, value_name = "DIR")]
    pub(super) lora: Option<Location>,
    #[command(flatten)]
    pub(super) target: TargetArguments,
    #[command(flatten)]
    pub(super) filter: KeyFilter,
    /// Replace OLD by NEW in keys of the sources, as `fsdp convert --rename` does, before they are
    /// merged; an adapter's keys stay as they are
    #[arg(long, value_name = "OLD=NEW", value_parser = parse_rename_rule)]
    pub(super) rename: Vec<(String, String)>,
    #[command(flatten)]
    pub(super) writing: WriteArguments,
}

impl TargetArguments {
    /// Returns the format to write, with its options.
    ///
    /// # Errors
    /// An option that the format does not have.
    pub(super) fn output_format(&self) -> Result<OutputFormat> {
        // An option that would be ignored is refused: whoever gives it expects something of it.
        if self.world_size.is_some()
            && !matches!(
                self.to,
                TargetFormat::Dcp | TargetFormat::HfSharded | TargetFormat::TorchCheckpointing
            )
        {
            bail!(self.unused_option_error("--world-size"));
        }
        if self.max_shard_size.is_some() && self.to != TargetFormat::Hf {
            bail!(self.unused_option_error("--max-shard-size"));
        }
        // One rank writes one file, which is what most conversions are for.
        let ranks = self.world_size.unwrap_or(1);
        Ok(match self.to {
            TargetFormat::Dcp => OutputFormat::Dcp { ranks },
            TargetFormat::Safetensors => OutputFormat::SafetensorsFile,
            TargetFormat::Hf => OutputFormat::SafetensorsDirectory {
                max_file_bytes: self.max_shard_size.unwrap_or(MAX_SHARD_BYTES),
            },
            TargetFormat::HfSharded => OutputFormat::SafetensorsShards { ranks },
            TargetFormat::Torch => OutputFormat::Torch,
            TargetFormat::TorchCheckpointing => OutputFormat::TorchCheckpointing { ranks },
        })
    }

    /// Returns the directory of `--with`, whose configuration and tokenizer are copied; `None`
    /// without that option.
    ///
    /// # Errors
    /// The option is given for a format that does not have it; there is no such directory.
    pub(super) fn model_directory(&self) -> Result<Option<&Location>> {
        let Some(directory) = &self.with else {
            return Ok(None);
        };
        if self.to != TargetFormat::Hf {
            bail!(self.unused_option_error("--with"));
        }
        // A slip in the name would otherwise leave the tokenizer out without a word.
        if !directory.exists()? || directory.is_file()? {
            bail!(usage_error(
                format!("`--with` names `{directory}`, which is not a directory that exists"),
                "name the directory of a model's configuration and tokenizer",
            ));
        }
        Ok(Some(directory))
    }

    /// Returns the error that the format does not have an option.
    fn unused_option_error(&self, option: &str) -> CommandError {
        let format_name = choice_name(&self.to);
        usage_error(
            format!("`{option}` has no effect with `--to {format_name}`"),
            "leave the option out, or choose another `--to`",
        )
    }
}

impl ConvertArguments {
    /// Checks the combinations of options that are not checked elsewhere.
    ///
    /// # Errors
    /// `--tp` for another format than `hf`; `--set` that nothing uses.
    pub(super) fn check(&self) -> Result<()> {
        let has_tp = self.tp.is_some();
        // The rules of `--tp` have names of sizes too, so `--set` may be for them.
        self.map.check_set(Some(has_tp))?;
        if has_tp && self.target.to != TargetFormat::Hf {
            bail!(self.target.unused_option_error("--tp"));
        }
        Ok(())
    }

    /// Plans the parts of tensor-parallel ranks; returns `None` without `--tp`. The numbers of
    /// heads that the command line does not set are taken from the first of `places` that has a
    /// `config.json` with them.
    ///
    /// # Errors
    /// A rule that is none, or a tensor that the rules cannot cut.
    pub(super) fn plan_tensor_parallel(
        &self,
        metadata: &Metadata,
        places: &[&Location],
    ) -> Result<Option<TensorParallelPlan>> {
        // Without `--tp` all ranks share the files, and nothing is cut.
        let Some(ranks) = self.tp else {
            return Ok(None);
        };
        let rules = Rules::new(&self.tp_rule, self.map.values(places))?;
        Ok(Some(TensorParallelPlan::new(metadata, &rules, ranks)?))
    }

    /// Returns `true` if tensors may be written with other elements than they have.
    pub(super) const fn changes_elements(&self) -> bool {
        self.dtype.is_some() || self.dequantize || self.map.is_given()
    }

    /// Returns the cast; `None` if none is asked for.
    pub(super) fn cast(&self) -> Option<Cast> {
        self.dtype.map(|dtype| Cast {
            dtype,
            with_optimizer: self.cast_optimizer,
        })
    }
}

/// Parses a size: `2GiB`, `1.5GB`, `4096`.
///
/// # Errors
/// An unknown unit, no number before it, or less than a byte.
fn parse_size(text: &str) -> Result<u64, String> {
    // The unit is all letters at the end; what is before them must be a number.
    let digits = text
        .trim_end_matches(|character: char| character.is_ascii_alphabetic() || character == ' ');
    // Units of 1000 and of 1024 are both in use, and neither may stand for the other.
    let unit: u64 = match text[digits.len()..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        _ => {
            return Err(
                "a size is a number and B, KB, MB, GB, TB, KiB, MiB, GiB or TiB".to_owned(),
            );
        }
    };
    let bytes = match digits.parse::<u64>() {
        Ok(count) => count.checked_mul(unit),
        Err(_) => fraction_of_unit(digits, unit),
    };
    match bytes {
        Some(0) => Err("a file cannot be that small".to_owned()),
        Some(bytes) => Ok(bytes),
        None => Err(format!("`{digits}` is not a valid number of bytes")),
    }
}

/// Returns the bytes of a number with a fraction, such as `1.5`; `None` if it is no number, or too
/// large. Only this goes through a float, which is not exact.
fn fraction_of_unit(digits: &str, unit: u64) -> Option<u64> {
    // No sign, no exponent and no `inf`, which floats may have.
    if digits.contains(|character: char| !character.is_ascii_digit() && character != '.') {
        return None;
    }
    let bytes = digits.parse::<f64>().ok()? * unit as f64;
    (bytes < u64::MAX as f64).then_some(bytes as u64)
}

/// Parses a rule of `--rename`, `OLD=NEW`. NEW may be empty, OLD may not.
fn parse_rename_rule(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        // An empty OLD would fit every key, which `--prefix` is for.
        Some((old, new)) if !old.is_empty() => Ok((old.to_owned(), new.to_owned())),
        _ => Err("expected OLD=NEW, where OLD is not empty".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("2GiB"), Ok(2 << 30));
        assert_eq!(parse_size("500 mb"), Ok(500_000_000));
        assert_eq!(parse_size("1.5GB"), Ok(1_500_000_000));
        assert_eq!(parse_size("18446744073709551615"), Ok(u64::MAX));
        for bad in [
            "",
            "GB",
            "0",
            "-1",
            "1.5.2GB",
            "infGB",
            "1e3",
            "0.0001B",
            "5XB",
            "99999999999GiB",
        ] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
