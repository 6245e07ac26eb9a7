//! `fsdp cat`: one tensor or value of a checkpoint, as numbers, statistics, or a `.npy` file.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use clap::error::ErrorKind;
use fsdp_formats::FileError;
use fsdp_formats::Location;
use fsdp_formats::checkpoint::{self, Checkpoint, stream};
use fsdp_formats::internals::decimal_text;
use fsdp_formats::metadata::{Metadata, TensorEntry};
use fsdp_formats::plan::LoadPlanError;
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::{DType, PlainValue, TensorBox};
use fsdp_tools::elements::for_each_number;
use fsdp_tools::verify;
use serde_json::{Value, json};

use crate::failure::usage_error;
use crate::new_file::{Content, NewFile};
use crate::text::{escaped, escaped_lines, or_word};
use crate::{inspect, keys, output};

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
    #[arg(long)]
    json: bool,
}

impl CatArguments {
    /// Checks what clap cannot check.
    ///
    /// # Errors
    /// Both the tensor and JSON would go to stdout.
    pub(crate) fn check(&self) -> Result<(), clap::Error> {
        if self.json && self.npy.as_deref() == Some(Path::new(STDOUT)) {
            let problem = "`--npy -` and `--json` would both write to stdout: leave `--json` out, \
                           or name a file\n";
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

/// Shows a tensor or value: `fsdp cat`.
///
/// # Errors
/// There is no such key, it cannot be read, or not be shown as asked.
pub(crate) fn run(arguments: &CatArguments) -> Result<()> {
    let name = arguments.name.as_str();
    let options = OpenOptions { verify: true };
    let source = checkpoint::open_selected(&arguments.path, options, &|key| key == name)?;
    if !source.metadata().entries.contains_key(name) {
        return Err(missing_key_error(name, source.metadata()));
    }
    // An object of an unknown type is never built. What it is made of can be shown all the same.
    let opaque = source.opaque_type(name)?;
    match source.metadata().tensor(name) {
        // The dtype and the shape of an opaque tensor do not tell what it is.
        Some(entry) if opaque.is_none() => {
            let source = &*source;
            let tensor = NamedTensor {
                source,
                name,
                entry,
            };
            tensor.show(arguments)
        }
        _ => show_value(arguments, &*source, opaque.is_some()),
    }
}

/// Returns the error for a key that a checkpoint lacks, with the keys that are most like it.
fn missing_key_error(name: &str, metadata: &Metadata) -> anyhow::Error {
    let fqn = name.to_owned();
    let missing = anyhow::Error::from(FileError::from(LoadPlanError::Missing { fqn }));
    match keys::nearest_keys_text(name, metadata) {
        Some(nearest) => {
            let name = escaped(name);
            missing.context(format!("no key `{name}`; the most like it are {nearest}"))
        }
        None => missing,
    }
}

/// Shows a value, or an object and what lies below it.
///
/// # Errors
/// The options are for tensors only; the value cannot be read.
fn show_value(arguments: &CatArguments, source: &dyn Checkpoint, is_opaque: bool) -> Result<()> {
    let name = arguments.name.clone();
    if arguments.stats || arguments.npy.is_some() {
        bail!(usage_error(
            format!("`{name}` is a value, not a tensor"),
            "leave `--stats` and `--npy` out to see the value",
        ));
    }
    let value = value_json(&if is_opaque {
        source.describe_value(&name)?
    } else {
        source.read_value(&name)?
    });
    if arguments.json {
        return output::print_json(&json!({
            "schema": SCHEMA, "name": name, "dtype": null, "shape": null, "value": value,
        }));
    }
    if is_opaque {
        // A tree of several lines.
        return output::print_line(&escaped_lines(&format!("{value:#}")));
    }
    output::print_line(&escaped(&value.to_string()))
}

/// A number about the elements of a tensor.
#[derive(Clone, Copy)]
enum Statistic {
    Real(f64),
    /// An element of an integer type, which `f64` may not hold.
    Integer(i128),
}

impl Statistic {
    fn to_json(self) -> Value {
        match self {
            Statistic::Real(number) => number.into(),
            Statistic::Integer(integer) => match i64::try_from(integer) {
                Ok(integer) => integer.into(),
                // A type of 64 bits has no larger elements.
                Err(_) => (integer as u64).into(),
            },
        }
    }
}

impl fmt::Display for Statistic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Statistic::Real(number) => write!(f, "{number}"),
            Statistic::Integer(integer) => write!(f, "{integer}"),
        }
    }
}

/// A tensor of a checkpoint.
#[derive(Clone, Copy)]
struct NamedTensor<'a> {
    source: &'a dyn Checkpoint,
    name: &'a str,
    entry: &'a TensorEntry,
}

impl NamedTensor<'_> {
    fn dtype(&self) -> DType {
        self.entry.properties.dtype
    }

    /// Shows the tensor, in the way that the options say.
    ///
    /// # Errors
    /// It cannot be read or shown in this way, or the file exists already.
    fn show(&self, arguments: &CatArguments) -> Result<()> {
        let mut report = json!({
            "schema": SCHEMA,
            "name": self.name,
            "dtype": self.dtype().to_string(),
            "shape": self.entry.shape,
        });
        if let Some(file) = &arguments.npy {
            if file == Path::new(STDOUT) {
                // For a program that reads it from a pipe.
                output::print_bytes(&npy_header(self.dtype(), &self.entry.shape)?)?;
                return self.for_each_piece(&mut output::print_bytes);
            }
            self.write_npy(file)?;
            report["npy"] = file.display().to_string().into();
        } else if arguments.stats {
            let Some(census) = verify::compute_census(self.source, self.name)? else {
                bail!(usage_error(
                    format!("elements of dtype {} are not real numbers", self.dtype()),
                    "leave `--stats` out to see the elements' bytes",
                ));
            };
            let counts = [
                ("count", census.count),
                ("nan", census.nan),
                ("infinite", census.infinite),
                ("zero", census.zero),
            ];
            // Without a finite element there is no mean.
            let finite_census = (census.count > census.nan + census.infinite).then_some(&census);
            let [min, max] = match census.integer_range {
                Some((min, max)) => [min, max].map(|integer| Some(Statistic::Integer(integer))),
                None => [census.min, census.max].map(|number| number.map(Statistic::Real)),
            };
            let mean = finite_census.map(|census| Statistic::Real(census.mean()));
            let deviation = finite_census.map(|census| Statistic::Real(census.std()));
            let statistics = [
                ("min", min),
                ("max", max),
                ("mean", mean),
                ("std", deviation),
            ];
            if !arguments.json {
                let counts = counts.map(|(name, count)| format!("{name:<9} {count}"));
                let statistics = statistics
                    .map(|(name, number)| format!("{name:<9} {}", or_word(number, "none")));
                return output::print_lines(&[counts, statistics].concat());
            }
            for (name, count) in counts {
                report["stats"][name] = count.into();
            }
            for (name, number) in statistics {
                report["stats"][name] = number.map_or(Value::Null, Statistic::to_json);
            }
        } else if arguments.json {
            report["elements"] = self.elements()?.into();
        } else {
            return self.print();
        }
        if arguments.json {
            return output::print_json(&report);
        }
        Ok(())
    }

    /// Returns all elements as JSON.
    ///
    /// # Errors
    /// There are too many for one object, or the tensor cannot be read.
    fn elements(&self) -> Result<Vec<Value>> {
        // All elements of one JSON object are in memory at once, here and in whatever reads them.
        let limit = MAX_JSON_ELEMENTS;
        let element_count = inspect::tensor_bytes(self.entry) / self.dtype().size_in_bytes();
        ensure!(
            element_count <= limit,
            usage_error(
                format!(
                    "the tensor has {element_count} elements, but `--json` prints at most {limit}"
                ),
                "use `--npy` or `--stats`, or leave `--json` out",
            )
        );
        let mut elements = Vec::new();
        self.for_each_piece(&mut |bytes| {
            add_elements(self.dtype(), bytes, &mut elements);
            Ok(())
        })?;
        Ok(elements)
    }

    /// Hands the bytes of the tensor to `sink`, in row-major order, piece by piece, until it
    /// returns an error.
    fn for_each_piece(&self, sink: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let whole = TensorBox::whole(&self.entry.shape);
        let total_bytes = inspect::tensor_bytes(self.entry);
        stream(self.source, self.name, &whole, 0..total_bytes, sink)
    }

    /// Prints the elements, with a line for each innermost row.
    fn print(&self) -> Result<()> {
        let row_length = self.entry.shape.last().map_or(1, |&size| size.max(1));
        // A piece may end within a row, so the column is kept from one piece to the next.
        let mut column = 0;
        self.for_each_piece(&mut |bytes| {
            let mut elements = Vec::new();
            add_elements(self.dtype(), bytes, &mut elements);
            let mut text = String::new();
            for element in elements {
                match element {
                    Value::String(element) => text.push_str(&element),
                    element => text.push_str(&element.to_string()),
                }
                column = (column + 1) % row_length;
                text.push(if column == 0 { '\n' } else { ' ' });
            }
            output::print_bytes(text.as_bytes())
        })
    }

    /// Writes the tensor to a new NumPy file, which appears whole or not at all.
    ///
    /// # Errors
    /// Something is there already; NumPy has no such dtype; the tensor cannot be read; a signal has
    /// stopped the command.
    fn write_npy(&self, path: &Path) -> Result<()> {
        let header = npy_header(self.dtype(), &self.entry.shape)?;
        let header_bytes = header.len() as u64;
        let new_file = NewFile {
            path,
            content: Content::Array,
            overwrite: None,
        };
        let length = header_bytes + inspect::tensor_bytes(self.entry);
        new_file.write_with(length, |file| {
            file.write_at(0, &header)?;
            let mut offset = header_bytes;
            self.for_each_piece(&mut |bytes| {
                file.write_at(offset, bytes)?;
                offset += bytes.len() as u64;
                Ok(())
            })
        })
    }
}

/// Adds elements as JSON: numbers and bools; text for NaN, infinities, complex numbers, and the
/// bytes of other types.
fn add_elements(dtype: DType, bytes: &[u8], elements: &mut Vec<Value>) {
    match dtype {
        DType::Bool => elements.extend(bytes.iter().map(|&byte| Value::from(byte != 0))),
        // Not through a float, which is exact only up to 2^53.
        DType::I64 => {
            let (chunks, _) = bytes.as_chunks();
            elements.extend(
                chunks
                    .iter()
                    .map(|&integer_bytes| Value::from(i64::from_le_bytes(integer_bytes))),
            );
        }
        DType::U64 => {
            let (chunks, _) = bytes.as_chunks();
            elements.extend(
                chunks
                    .iter()
                    .map(|&integer_bytes| Value::from(u64::from_le_bytes(integer_bytes))),
            );
        }
        DType::Complex32 | DType::BComplex32 | DType::Complex64 | DType::Complex128 => {
            // A complex number is two floats of half its size, one after the other.
            let part_dtype = match dtype {
                DType::Complex32 => DType::F16,
                DType::BComplex32 => DType::BF16,
                DType::Complex64 => DType::F32,
                _ => DType::F64,
            };
            let mut floats = Vec::new();
            for_each_number(part_dtype, bytes, &mut |value| floats.push(value));
            for &[real, imaginary] in floats.as_chunks().0 {
                elements.push(complex_text(real, imaginary, part_dtype != DType::F64).into());
            }
        }
        _ => {
            let is_number = for_each_number(dtype, bytes, &mut |value| {
                elements.push(number_json(value, dtype))
            });
            if !is_number {
                let element_bytes = dtype.size_in_bytes() as usize;
                elements.extend(
                    bytes
                        .chunks_exact(element_bytes)
                        .map(|element| hex_text(element).into()),
                );
            }
        }
    }
}

/// Returns a complex number as Python writes it without parentheses, such as `1.5-2.0j`. If
/// `is_single`, its parts have no more digits than single precision needs.
fn complex_text(real: f64, imaginary: f64, is_single: bool) -> String {
    // NaN has a sign bit too, which nobody wants to see.
    let has_minus = imaginary.is_sign_negative() && !imaginary.is_nan();
    let plus = if has_minus { "" } else { "+" };
    if is_single {
        format!("{:?}{plus}{:?}j", real as f32, imaginary as f32)
    } else {
        format!("{real:?}{plus}{imaginary:?}j")
    }
}

/// Returns bytes in hexadecimal, in their order.
fn hex_text(bytes: &[u8]) -> String {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("0x{digits}")
}

/// Returns an element of this dtype as JSON, with no more digits than its precision needs.
fn number_json(value: f64, dtype: DType) -> Value {
    if !dtype.is_float() {
        return Value::from(value as i64);
    }
    if !value.is_finite() {
        return Value::from(value.to_string());
    }
    if dtype == DType::F64 {
        return Value::from(value);
    }
    // The shortest decimal that is this number in single precision: 0.1, not 0.10000000149011612.
    let digits = format!("{:?}", value as f32);
    let shortest: f64 = digits
        .parse()
        .expect("Rust reads the numbers that it writes");
    Value::from(shortest)
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
            // JSON has only text as keys.
            let object: Option<serde_json::Map<_, _>> = items
                .iter()
                .map(|(key, value)| Some((key.as_str()?.to_owned(), value_json(value))))
                .collect();
            if let Some(object) = object {
                return Value::Object(object);
            }
            items
                .iter()
                .map(|(key, value)| json!([value_json(key), value_json(value)]))
                .collect()
        }
        PlainValue::Tensor(tensor) => {
            let mut object = json!({"dtype": tensor.dtype.to_string(), "shape": tensor.shape});
            let mut elements = Vec::new();
            add_elements(tensor.dtype, &tensor.data, &mut elements);
            // There are none in a tensor without elements, or where they were not read.
            if !elements.is_empty() {
                object["elements"] = elements.into();
            }
            object
        }
        // More digits than a JSON number may have.
        PlainValue::BigInt(bytes) => decimal_text(bytes).into(),
        PlainValue::Bytes(bytes) => hex_text(bytes).into(),
        PlainValue::Typed(_, description) => value_json(description),
        _ => format!("{value:?}").into(),
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
///
/// # Errors
/// NumPy has no such dtype, or the shape has too many dimensions.
fn npy_header(dtype: DType, shape: &[usize]) -> Result<Vec<u8>> {
    /// The bytes before the dict, and the newline after it.
    const FRAME_BYTES: usize = 10 + 1;
    let descr = numpy_type(dtype).ok_or_else(|| {
        usage_error(
            format!("NumPy has no dtype for {dtype}"),
            "cast bfloat16 first: `fsdp convert --include NAME --dtype float32`; other types can be \
             printed",
        )
    })?;
    let sizes: String = shape.iter().map(|size| format!("{size},")).collect();
    let dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({sizes}), }}");
    // NumPy maps files into memory, and aligns the elements to 64 bytes for that.
    let padded_width = (dict.len() + FRAME_BYTES).next_multiple_of(64) - FRAME_BYTES;
    let length = u16::try_from(padded_width + 1).context("a shape of too many dimensions")?;
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend(length.to_le_bytes());
    header.extend(format!("{dict:padded_width$}\n").into_bytes());
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_shown_exactly() {
        let shown = |dtype, bytes: &[u8]| {
            let mut values = Vec::new();
            add_elements(dtype, bytes, &mut values);
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
            assert_eq!(decimal_text(&value.to_le_bytes()), value.to_string());
        }
        assert_eq!(
            value_json(&PlainValue::Bytes(vec![0, 255])),
            Value::from("0x00ff")
        );
    }

    #[test]
    fn npy_headers_are_padded() {
        let header = npy_header(DType::F32, &[2, 3]).unwrap();
        assert_eq!(header.len() % 64, 0);
        assert_eq!(&header[..10], b"\x93NUMPY\x01\x00\x76\x00");
        assert!(header.ends_with(b"\n"));
    }
}
