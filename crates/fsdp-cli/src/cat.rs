//! `fsdp cat`: one tensor or value of a checkpoint, as numbers, statistics, or a `.npy` file.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::Args;
use clap::error::ErrorKind;
use fsdp_formats::FileError;
use fsdp_formats::Location;
use fsdp_formats::checkpoint::{self, Checkpoint, stream};
use fsdp_formats::metadata::TensorEntry;
use fsdp_formats::plan::LoadPlanError;
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::storage::Durable;
use fsdp_layout::{DType, PlainValue, TensorBox};
use fsdp_tools::elements::{Census, for_each};
use fsdp_tools::verify;
use serde::Serialize;
use serde_json::{Value, json};

use super::failure::UsageError;
use super::keys;
use super::output;
use super::text::{escaped, escaped_lines};

/// Options of `fsdp cat`.
#[derive(Debug, Args)]
pub(crate) struct CatArguments {
    /// A checkpoint of any format
    #[arg(value_name = "CKPT")]
    path: Location,
    /// Key of a tensor or value, as in the list of `fsdp inspect`
    #[arg(value_name = "TENSOR")]
    name: String,
    /// Counts, extremes, mean and deviation instead of the elements
    #[arg(long, conflicts_with = "npy")]
    stats: bool,
    /// Write the tensor to this new file, for NumPy; `-` is stdout
    #[arg(long, value_name = "FILE")]
    npy: Option<PathBuf>,
    /// One JSON object on stdout
    #[arg(long, env = "FSDP_JSON")]
    json: bool,
}

impl CatArguments {
    /// Checks what clap cannot check.
    ///
    /// # Errors
    /// Both the tensor and JSON would go to stdout.
    pub(crate) fn check(&self) -> Result<(), clap::Error> {
        if self.json && self.npy.as_deref() == Some(Path::new(STDOUT)) {
            let problem = "`--npy -` and `--json` would both write to stdout: leave `--json` out, or name a file\n";
            return Err(clap::Error::raw(ErrorKind::ArgumentConflict, problem));
        }
        Ok(())
    }
}

/// The file name that stands for stdout.
const STDOUT: &str = "-";

const SCHEMA: u32 = 1;

/// The largest number of elements in one JSON object.
const MAX_JSON_ELEMENTS: u64 = 1 << 20;

#[derive(Debug, Serialize)]
struct Shown {
    schema: u32,
    name: String,
    /// The dtype; `null` for a value.
    dtype: Option<String>,
    shape: Option<Vec<usize>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stats: Option<Stats>,
    #[serde(skip_serializing_if = "Option::is_none")]
    npy: Option<String>,
    /// The elements of a tensor, row-major.
    #[serde(skip_serializing_if = "Option::is_none")]
    elements: Option<Vec<Value>>,
    /// A value that is not a tensor.
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<Value>,
}

/// The statistics of a tensor. Extremes, mean and deviation are those of the finite elements;
/// `null` if there are none.
#[derive(Debug, Serialize)]
struct Stats {
    count: u64,
    nan: u64,
    infinite: u64,
    zero: u64,
    min: Option<f64>,
    max: Option<f64>,
    mean: Option<f64>,
    std: Option<f64>,
}

/// Shows a tensor or value: `fsdp cat`.
///
/// # Errors
/// There is no such key, it cannot be read, or not be shown as asked.
pub(crate) fn run(arguments: &CatArguments) -> Result<()> {
    let source = checkpoint::open(&arguments.path, OpenOptions { verify: true })?;
    let name = &arguments.name;
    let mut shown = Shown {
        schema: SCHEMA,
        name: name.clone(),
        dtype: None,
        shape: None,
        stats: None,
        npy: None,
        elements: None,
        value: None,
    };
    if !source.metadata().entries.contains_key(name) {
        let missing = anyhow::Error::from(FileError::from(LoadPlanError::Missing {
            fqn: name.clone(),
        }));
        return Err(match keys::nearest(name, source.metadata()) {
            Some(near) => missing.context(format!(
                "no key `{}`; the most like it are {near}",
                escaped(name)
            )),
            None => missing,
        });
    }
    let opaque = source.opaque_type(name)?;
    let tensor = source.metadata().tensor(name).filter(|_| opaque.is_none());
    let Some(tensor) = tensor else {
        if arguments.stats || arguments.npy.is_some() {
            return Err(UsageError::NoTensor { name: name.clone() }.into());
        }
        let value = value_json(&source.describe_value(name)?);
        if arguments.json {
            shown.value = Some(value);
            return output::json(&shown);
        }
        if opaque.is_some() {
            // An object and what lies below it: a tree.
            return output::data(&escaped_lines(&format!("{value:#}")));
        }
        return output::data(&escaped(&value.to_string()));
    };
    shown.dtype = Some(tensor.properties.dtype.to_string());
    shown.shape = Some(tensor.shape.clone());
    if let Some(file) = &arguments.npy {
        if file == Path::new(STDOUT) {
            return print_npy(&*source, name, tensor);
        }
        write_npy(&*source, name, tensor, file)?;
        shown.npy = Some(file.display().to_string());
    } else if arguments.stats {
        let census = verify::census(&*source, name, None)?;
        let census = census.ok_or(UsageError::NoNumbers {
            dtype: tensor.properties.dtype,
        })?;
        shown.stats = Some(Stats::new(&census));
    } else if arguments.json {
        let elements = super::inspect::bytes(tensor) / tensor.properties.dtype.size_in_bytes();
        if elements > MAX_JSON_ELEMENTS {
            return Err(UsageError::TooLarge {
                elements,
                limit: MAX_JSON_ELEMENTS,
            }
            .into());
        }
        let mut values = Vec::new();
        each_piece(&*source, name, tensor, &mut |bytes| {
            elements_json(tensor.properties.dtype, bytes, &mut values);
            Ok(())
        })?;
        shown.elements = Some(values);
    } else {
        return print(&*source, name, tensor);
    }
    match (&shown.stats, arguments.json) {
        (_, true) => output::json(&shown),
        (Some(stats), false) => output::lines(&stats.lines()),
        _ => Ok(()),
    }
}

/// Hands the bytes of a tensor to `sink`, in row-major order, piece by piece.
fn each_piece(
    source: &dyn Checkpoint,
    name: &str,
    tensor: &TensorEntry,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), CatError>,
) -> Result<()> {
    let (dtype, whole) = (tensor.properties.dtype, TensorBox::whole(&tensor.shape));
    let length = super::inspect::bytes(tensor);
    stream::<CatError>(source, name, dtype, &whole, 0..length, sink)
        .map_err(|CatError(error)| error)
}

/// An error that ends a stream early, from the checkpoint or from the consumer of the bytes.
struct CatError(anyhow::Error);

impl From<FileError> for CatError {
    fn from(error: FileError) -> Self {
        CatError(error.into())
    }
}

impl From<anyhow::Error> for CatError {
    fn from(error: anyhow::Error) -> Self {
        CatError(error)
    }
}

/// Prints the elements of a tensor, with a line for each innermost row.
fn print(source: &dyn Checkpoint, name: &str, tensor: &TensorEntry) -> Result<()> {
    let row = tensor.shape.last().copied().unwrap_or(1).max(1);
    // A piece may end within a row, so the column is kept from one piece to the next.
    let mut column = 0;
    each_piece(source, name, tensor, &mut |bytes| {
        let mut values = Vec::new();
        elements_json(tensor.properties.dtype, bytes, &mut values);
        let mut text = String::new();
        for value in values {
            match value {
                Value::String(value) => text.push_str(&value),
                value => text.push_str(&value.to_string()),
            }
            column = (column + 1) % row;
            text.push(if column == 0 { '\n' } else { ' ' });
        }
        Ok(output::raw(text.as_bytes())?)
    })
}

/// Adds elements as JSON: numbers and bools; text for NaN, infinities, complex numbers, and the
/// bytes of other types.
fn elements_json(dtype: DType, bytes: &[u8], values: &mut Vec<Value>) {
    let size = dtype.size_in_bytes() as usize;
    match dtype {
        DType::Bool => values.extend(bytes.iter().map(|&byte| Value::from(byte != 0))),
        // Not through a float, which is exact only up to 2^53.
        DType::I64 => values.extend(
            bytes
                .as_chunks()
                .0
                .iter()
                .map(|b| Value::from(i64::from_le_bytes(*b))),
        ),
        DType::U64 => values.extend(
            bytes
                .as_chunks()
                .0
                .iter()
                .map(|b| Value::from(u64::from_le_bytes(*b))),
        ),
        DType::Complex32 | DType::Complex64 | DType::Complex128 => {
            let part = match dtype {
                DType::Complex32 => DType::F16,
                DType::Complex64 => DType::F32,
                _ => DType::F64,
            };
            let mut parts = Vec::new();
            for_each(part, bytes, &mut |value| parts.push(value));
            values.extend(parts.as_chunks().0.iter().map(|&[real, imaginary]| {
                Value::from(complex(real, imaginary, part != DType::F64))
            }));
        }
        _ => {
            let whole = !dtype.is_float();
            let single = dtype != DType::F64;
            let numbers = for_each(dtype, bytes, &mut |value| {
                values.push(number(value, whole, single))
            });
            if !numbers {
                values.extend(
                    bytes
                        .chunks_exact(size)
                        .map(|bytes| Value::from(hex(bytes))),
                );
            }
        }
    }
}

/// Returns a complex number as Python writes it without parentheses, such as `1.5-2.0j`.
fn complex(real: f64, imaginary: f64, single: bool) -> String {
    let digits = |value: f64| {
        if single {
            format!("{:?}", value as f32)
        } else {
            format!("{value:?}")
        }
    };
    let sign = if imaginary.is_sign_negative() && !imaginary.is_nan() {
        ""
    } else {
        "+"
    };
    format!("{}{sign}{}j", digits(real), digits(imaginary))
}

/// Returns bytes in hexadecimal, in their order.
fn hex(bytes: &[u8]) -> String {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("0x{digits}")
}

/// Returns the decimal digits of an integer in little-endian two's complement of any length.
fn decimal(bytes: &[u8]) -> String {
    let negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
    let mut magnitude = bytes.to_vec();
    if negative {
        // The magnitude is the two's complement.
        let mut carry = true;
        for byte in &mut magnitude {
            let (value, over) = (!*byte).overflowing_add(u8::from(carry));
            (*byte, carry) = (value, over);
        }
    }
    let mut digits = Vec::new();
    while magnitude.iter().any(|&byte| byte != 0) {
        let mut rest = 0u32;
        for byte in magnitude.iter_mut().rev() {
            let value = rest << 8 | u32::from(*byte);
            *byte = (value / 10) as u8;
            rest = value % 10;
        }
        digits.push(char::from(b'0' + rest as u8));
    }
    if digits.is_empty() {
        digits.push('0');
    }
    digits.extend(negative.then_some('-'));
    digits.iter().rev().collect()
}

/// Returns a number as JSON. With `single`, it has no more digits than single precision needs.
fn number(value: f64, whole: bool, single: bool) -> Value {
    if whole {
        return Value::from(value as i64);
    }
    let shortest = if single {
        format!("{:?}", value as f32).parse().unwrap_or(value)
    } else {
        value
    };
    if value.is_finite() {
        Value::from(shortest)
    } else {
        Value::from(value.to_string())
    }
}

/// Returns a value as JSON. Tuples and sets become lists, dicts with keys other than text become
/// lists of pairs, and dtypes, devices and paths become text.
fn value_json(value: &PlainValue) -> Value {
    match value {
        PlainValue::None => Value::Null,
        PlainValue::Bool(value) => (*value).into(),
        PlainValue::Int(value) => (*value).into(),
        PlainValue::Float(value) if value.is_finite() => (*value).into(),
        PlainValue::Float(value) => value.to_string().into(),
        PlainValue::Str(value) => value.as_str().into(),
        PlainValue::List(items) | PlainValue::Tuple(items) | PlainValue::Set(items) => {
            items.iter().map(value_json).collect()
        }
        PlainValue::Dict(items) => {
            let named: Option<serde_json::Map<_, _>> = items
                .iter()
                .map(|(key, value)| Some((key.as_str()?.to_owned(), value_json(value))))
                .collect();
            if let Some(named) = named {
                return Value::Object(named);
            }
            items
                .iter()
                .map(|(key, value)| json!([value_json(key), value_json(value)]))
                .collect()
        }
        PlainValue::Tensor(tensor) => {
            let mut elements = Vec::new();
            elements_json(tensor.dtype, &tensor.data, &mut elements);
            if elements.is_empty() {
                // The tensor has no elements, or they were not read.
                return json!({"dtype": tensor.dtype.to_string(), "shape": tensor.shape});
            }
            json!({"dtype": tensor.dtype.to_string(), "shape": tensor.shape, "elements": elements})
        }
        // More digits than a JSON number may have.
        PlainValue::BigInt(bytes) => decimal(bytes).into(),
        PlainValue::Bytes(bytes) => hex(bytes).into(),
        PlainValue::Typed(_, description) => value_json(description),
        other => format!("{other:?}").into(),
    }
}

fn or_none(value: Option<f64>) -> String {
    value.map_or_else(|| "none".to_owned(), |value| value.to_string())
}

impl Stats {
    fn new(census: &Census) -> Self {
        let Census {
            count,
            nan,
            infinite,
            zero,
            min,
            max,
            ..
        } = *census;
        let some = |value: f64| (count > nan + infinite).then_some(value);
        let (mean, std) = (some(census.mean()), some(census.std()));
        Stats {
            count,
            nan,
            infinite,
            zero,
            min: some(min),
            max: some(max),
            mean,
            std,
        }
    }

    /// Returns the statistics as lines of text.
    fn lines(&self) -> Vec<String> {
        vec![
            format!("count     {}", self.count),
            format!("nan       {}", self.nan),
            format!("infinite  {}", self.infinite),
            format!("zero      {}", self.zero),
            format!("min       {}", or_none(self.min)),
            format!("max       {}", or_none(self.max)),
            format!("mean      {}", or_none(self.mean)),
            format!("std       {}", or_none(self.std)),
        ]
    }
}

/// Returns NumPy's name of a dtype; `None` if it has none.
fn numpy_type(dtype: DType) -> Option<&'static str> {
    Some(match dtype {
        DType::Bool => "|b1",
        DType::U8 => "|u1",
        DType::I8 => "|i1",
        DType::U16 => "<u2",
        DType::I16 => "<i2",
        DType::U32 => "<u4",
        DType::I32 => "<i4",
        DType::U64 => "<u8",
        DType::I64 => "<i8",
        DType::F16 => "<f2",
        DType::F32 => "<f4",
        DType::F64 => "<f8",
        DType::Complex64 => "<c8",
        DType::Complex128 => "<c16",
        _ => return None,
    })
}

/// Returns what precedes the elements in NumPy's format, version 1.0: magic, length of the header,
/// a Python dict padded to 64 bytes.
fn npy_header(descr: &str, shape: &[usize]) -> Result<Vec<u8>> {
    /// The bytes before the dict, and the newline after it.
    const AROUND: usize = 10 + 1;
    let sizes: String = shape.iter().map(|size| format!("{size},")).collect();
    let mut dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({sizes}), }}");
    while !(dict.len() + AROUND).is_multiple_of(64) {
        dict.push(' ');
    }
    dict.push('\n');
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend(
        u16::try_from(dict.len())
            .context("a shape of too many dimensions")?
            .to_le_bytes(),
    );
    header.extend(dict.into_bytes());
    Ok(header)
}

/// Returns what precedes the elements of a tensor in a NumPy file.
fn npy_header_of(tensor: &TensorEntry) -> Result<Vec<u8>> {
    let dtype = tensor.properties.dtype;
    npy_header(
        numpy_type(dtype).ok_or(UsageError::NoNumpy { dtype })?,
        &tensor.shape,
    )
}

/// Prints a tensor as a NumPy file, for a program that reads it from a pipe.
fn print_npy(source: &dyn Checkpoint, name: &str, tensor: &TensorEntry) -> Result<()> {
    output::raw(&npy_header_of(tensor)?)?;
    each_piece(source, name, tensor, &mut |bytes| Ok(output::raw(bytes)?))
}

/// Writes a tensor to a new NumPy file, which appears whole or not at all.
fn write_npy(source: &dyn Checkpoint, name: &str, tensor: &TensorEntry, path: &Path) -> Result<()> {
    let header = npy_header_of(tensor)?;
    if path.symlink_metadata().is_ok() {
        return Err(UsageError::Exists {
            path: path.display().to_string(),
        }
        .into());
    }
    let staging = Durable::new().prepare(path, false)?;
    let file = staging.create_single(header.len() as u64 + super::inspect::bytes(tensor))?;
    file.write_at(0, &header)?;
    let mut at = header.len() as u64;
    each_piece(source, name, tensor, &mut |bytes| {
        file.write_at(at, bytes)?;
        at += bytes.len() as u64;
        Ok(())
    })?;
    file.finish()?;
    Ok(staging.commit_single()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_shown_exactly() {
        let shown = |dtype, bytes: &[u8]| {
            let mut values = Vec::new();
            elements_json(dtype, bytes, &mut values);
            Value::from(values).to_string()
        };
        assert_eq!(
            shown(
                DType::F32,
                &[0.1f32.to_le_bytes(), f32::NAN.to_le_bytes()].concat()
            ),
            r#"[0.1,"NaN"]"#
        );
        assert_eq!(
            shown(DType::I64, &i64::MAX.to_le_bytes()),
            "[9223372036854775807]"
        );
        assert_eq!(shown(DType::Bool, &[0, 1]), "[false,true]");
        assert_eq!(shown(DType::I8, &[255]), "[-1]");
        assert_eq!(shown(DType::QUInt8, &[7]), "[7]");
        let complex: Vec<u8> = [1.5f32, -2.0, 0.1, f32::INFINITY]
            .into_iter()
            .flat_map(f32::to_le_bytes)
            .collect();
        assert_eq!(
            shown(DType::Complex64, &complex),
            r#"["1.5-2.0j","0.1+infj"]"#
        );
        assert_eq!(
            shown(
                DType::Complex128,
                &[0.1f64.to_le_bytes(), (-0.0f64).to_le_bytes()].concat()
            ),
            r#"["0.1-0.0j"]"#
        );
        assert_eq!(
            shown(DType::Complex32, &[0, 0x3c, 0, 0xc0]),
            r#"["1.0-2.0j"]"#
        );
    }

    #[test]
    fn large_integers_are_shown_in_full() {
        for value in [0, 1, -1, 255, -256, i128::MAX, i128::MIN, 10i128.pow(30)] {
            assert_eq!(decimal(&value.to_le_bytes()), value.to_string());
        }
        assert_eq!(
            value_json(&PlainValue::Bytes(vec![0, 255])),
            Value::from("0x00ff")
        );
    }

    #[test]
    fn npy_headers_are_padded() {
        let header = npy_header("<f4", &[2, 3]).unwrap();
        assert_eq!(header.len() % 64, 0);
        assert_eq!(&header[..10], b"\x93NUMPY\x01\x00\x76\x00");
        assert!(header.ends_with(b"\n"));
    }
}
