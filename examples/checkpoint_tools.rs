//! Checkpoints without a model, ranks or candle: opened in any format, listed, read in part,
//! checked, converted. This is what the `fsdp` command does, as a library.
//!
//! ```console
//! cargo run -p fsdp-examples --bin checkpoint-tools -- step-20 model.safetensors
//! ```

use anyhow::{Context as _, Result, ensure};
use fsdp::formats::checkpoint::{self, Checkpoint};
use fsdp::formats::reader::OpenOptions;
use fsdp::layout::{DType, TensorBox};
use fsdp::tools::convert::{ConvertOptions, OutputFormat, Rename, View, convert};
use fsdp::tools::verify::{Level, VerifyOptions, verify};

/// Prints the first row of a tensor of `float32`, reading no more than that.
fn print_first_row(source: &dyn Checkpoint, name: &str, shape: &[usize]) -> Result<()> {
    let mut row = shape.to_vec();
    if let Some(first) = row.first_mut() {
        *first = (*first).min(1);
    }
    let row = TensorBox::new(vec![0; shape.len()], row);
    let mut bytes = vec![0; row.numel() * 4];
    source.read_box(name, &row, &mut bytes)?;
    let values: Vec<f32> = bytes
        .chunks_exact(4)
        .map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]))
        .collect();
    println!(
        "  begins with {:?}, {} bytes of data read",
        &values[..values.len().min(4)],
        source.bytes_read()
    );
    Ok(())
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (path, output) = arguments
        .next()
        .zip(arguments.next())
        .context("usage: checkpoint-tools CKPT OUTPUT.safetensors")?;
    // The format is found by content. No pickle in it is executed.
    let source = checkpoint::open(path.as_str(), OpenOptions { verify: true })?;
    println!("{}", source.format());
    for (name, tensor) in source.metadata().tensors() {
        let dtype = tensor.properties.dtype;
        let boxes = tensor.chunks.len();
        println!("{name}: {dtype} {:?} in {boxes} boxes", tensor.shape);
        if dtype == DType::F32 && tensor.shape.len() == 2 {
            print_first_row(&*source, name, &tensor.shape)?;
        }
    }
    let report = verify(&*source, Level::Deep, VerifyOptions::default())?;
    ensure!(
        report.is_ok(),
        "the checkpoint is damaged: {:?}",
        report.problems
    );
    // The model alone, under its bare names, in one file; memory does not grow with its size.
    let model = View::new(
        &*source,
        |name| {
            name.strip_prefix("model.")
                .map_or(Rename::Drop, |bare| Rename::To(bare.to_owned()))
        },
        None,
    )?;
    let written = convert(
        &model,
        output.as_str(),
        OutputFormat::SafetensorsFile,
        ConvertOptions::default(),
    )?;
    println!("wrote {} tensors to `{output}`", written.tensors);
    Ok(())
}
