//! The picture as lines of text.

use fsdp_formats::metadata::TensorEntry;
use fsdp_layout::count_text;

use super::files::CheckpointFiles;
use super::raster::Cell;
use crate::markup::shortened;
use crate::text::{bytes_text, column_widths, escaped};

/// The most cells across a tensor.
const COLUMNS: usize = 40;
/// The files that are listed one by one.
const MAX_FILES: usize = 36;
/// The longest name that is shown whole.
const MAX_NAME_CHARACTERS: usize = 48;
/// The width of the bar of the largest file.
const BAR_WIDTH: u64 = 24;

/// Returns the lines of the layout picture of `checkpoint_files`, with at most `max_tensors`
/// tensors.
pub(super) fn picture_lines(
    checkpoint_files: &CheckpointFiles<'_>,
    max_tensors: usize,
) -> Vec<String> {
    let tensors = &checkpoint_files.entries;
    let files = count_text(checkpoint_files.files.len(), "file", "files");
    let mut lines = vec![
        format!(
            "checkpoint  {} ({})",
            escaped(&checkpoint_files.path),
            checkpoint_files.format
        ),
        format!(
            "tensors     {}, {} in {files}",
            tensors.len(),
            bytes_text(checkpoint_files.bytes)
        ),
        String::new(),
    ];
    add_files(checkpoint_files, &mut lines);
    lines.push(String::new());
    let shown_tensors = &tensors[..tensors.len().min(max_tensors)];
    add_rasters(checkpoint_files, shown_tensors, &mut lines);
    if tensors.len() > shown_tensors.len() {
        let hidden_tensors = tensors.len() - shown_tensors.len();
        lines.push(format!(
            "… and {hidden_tensors} more: `--limit N` shows N, `--include GLOB` selects, `--html FILE` draws"
        ));
    }
    lines
}

/// Adds a table of the files, with a bar for the bytes of each.
fn add_files(checkpoint_files: &CheckpointFiles<'_>, lines: &mut Vec<String>) {
    let mut rows = vec![["", "rank", "file", "boxes", "bytes"].map(str::to_owned)];
    // There are only 36 digits and letters, and a table that fills the screen hides the tensors.
    let listed = &checkpoint_files.files[..checkpoint_files.files.len().min(MAX_FILES)];
    let mut bars = vec![String::new()];
    for (position, file) in listed.iter().enumerate() {
        rows.push([
            symbol(position as u32).to_string(),
            file.rank_text(),
            shortened(&escaped(&file.file), MAX_NAME_CHARACTERS),
            file.boxes.to_string(),
            bytes_text(file.bytes),
        ]);
        bars.push(bar_text(file.bytes, checkpoint_files.max_file_bytes()));
    }
    let [_, w1, w2, w3, w4] = column_widths(&rows);
    for ([symbol, rank, file, boxes, bytes], bar) in rows.iter().zip(bars) {
        let line =
            format!("{symbol:1}  {rank:>w1$}  {file:w2$}  {boxes:>w3$}  {bytes:>w4$}  {bar}");
        lines.push(line.trim_end().to_owned());
    }
    if checkpoint_files.files.len() > MAX_FILES {
        lines.push(format!(
            "… and {} more; letters repeat after {MAX_FILES} files",
            checkpoint_files.files.len() - MAX_FILES
        ));
    }
}

/// Adds a picture of each tensor, with a symbol for the file that holds each of its parts.
fn add_rasters(
    checkpoint_files: &CheckpointFiles<'_>,
    shown_tensors: &[(&str, &TensorEntry)],
    lines: &mut Vec<String>,
) {
    let names: Vec<[String; 1]> = shown_tensors
        .iter()
        .map(|(name, _)| [shortened(&escaped(name), MAX_NAME_CHARACTERS)])
        .collect();
    let [width] = column_widths(&names);
    for ([name], (_, entry)) in names.iter().zip(shown_tensors) {
        let raster = checkpoint_files.raster(entry, COLUMNS);
        for row in 0..raster.rows {
            let cells: String = raster.row(row).iter().copied().map(cell_symbol).collect();
            // The name and the description are beside the first row.
            lines.push(if row == 0 {
                let dtype = entry.properties.dtype;
                let cut = cut_text(&raster.dimensions);
                format!("{name:width$}  {cells}  {dtype} {:?}{cut}", entry.shape)
            } else {
                format!("{:width$}  {cells}", "")
            });
        }
    }
}

/// Returns the words for the dimensions in which a tensor is cut.
pub(super) fn cut_text(dimensions: &[usize]) -> String {
    match *dimensions {
        [] => String::new(),
        [dimension] => format!(", cut along dim {dimension}"),
        _ => {
            let dimensions: Vec<String> = dimensions.iter().map(ToString::to_string).collect();
            format!(", cut along dims {}", dimensions.join(" and "))
        }
    }
}

/// Returns the character that stands for the file at a position: a digit or a letter.
fn symbol(position: u32) -> char {
    char::from_digit(position % 36, 36).expect("the remainder is a digit")
}

/// Returns the character that a cell of a picture is drawn as.
fn cell_symbol(cell: Cell) -> char {
    match cell {
        Cell::Nobody => '·',
        Cell::File(position) => symbol(position),
        Cell::Several => '+',
    }
}

/// Returns a bar whose length is the proportion of `bytes` to `largest`, in eighths of a character.
fn bar_text(bytes: u64, largest: u64) -> String {
    let eighths = (u128::from(bytes) * u128::from(BAR_WIDTH) * 8 / u128::from(largest)) as usize;
    // The last character is a part of a block, so that bars differ where files differ little.
    let partial_block = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"][eighths % 8];
    format!("{}{partial_block}", "█".repeat(eighths / 8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_long_as_their_part_of_the_largest() {
        assert_eq!(bar_text(100, 100).chars().count(), 24);
        assert_eq!(bar_text(50, 100), "█".repeat(12));
        assert_eq!(bar_text(1, 192), "▏");
        assert_eq!(bar_text(u64::MAX, u64::MAX).chars().count(), 24);
    }
}
