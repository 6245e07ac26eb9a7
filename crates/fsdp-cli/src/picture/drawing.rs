//! The picture as SVG and HTML.

use fsdp_formats::metadata::TensorEntry;
use fsdp_layout::count_text;

use super::files::CheckpointFiles;
use super::raster::Cell;
use super::terminal::cut_text;
use crate::markup::{escape, shortened};
use crate::svg::{Area, Picture};
use crate::text::bytes_text;

/// The most cells across a tensor.
const COLUMNS: usize = 96;
/// The files that are drawn one by one.
const MAX_FILES: usize = 256;
const WIDTH: f64 = 960.0;
/// The left edge of bars and tensors.
const LEFT: f64 = 330.0;
/// The width of a tensor, and of the bar of the largest file.
const TENSOR_WIDTH: f64 = 380.0;
/// The left edge of what is told about a file or a tensor.
const NOTES_LEFT: f64 = LEFT + TENSOR_WIDTH + 10.0;
/// The height of a line.
const LINE_HEIGHT: f64 = 20.0;
/// The longest name that is shown whole.
const MAX_NAME_CHARACTERS: usize = 50;

/// Returns the picture as the text of an SVG file, with at most `max_tensors` tensors.
pub(super) fn picture_file(
    title: &str,
    checkpoint_files: &CheckpointFiles<'_>,
    max_tensors: usize,
) -> String {
    let mut picture = Picture::default();
    picture.text(
        (12.0, 26.0),
        "font-size=\"16\"",
        &summary(checkpoint_files),
        "",
    );
    let height = draw(&mut picture, checkpoint_files, max_tensors, 40.0);
    picture.into_file(title, WIDTH, height)
}

/// Returns the body of a page with the picture.
pub(super) fn page_body(checkpoint_files: &CheckpointFiles<'_>, max_tensors: usize) -> String {
    let mut picture = Picture::default();
    let height = draw(&mut picture, checkpoint_files, max_tensors, 0.0);
    format!(
        "<h1>{}</h1>\n<p>{}. Each file has a colour; a tensor is shown along the dimensions in \
         which it is cut. Point at a part to see who holds it.</p>\n<div class=\"wide\">{}</div>\n",
        escape(&checkpoint_files.path),
        escape(&summary(checkpoint_files)),
        picture.for_page("Who holds what", WIDTH, height)
    )
}

/// Returns the line of text above the picture.
fn summary(checkpoint_files: &CheckpointFiles<'_>) -> String {
    format!(
        "{} ({}): {}, {} in {}",
        checkpoint_files.path,
        checkpoint_files.format,
        count_text(checkpoint_files.entries.len(), "tensor", "tensors"),
        bytes_text(checkpoint_files.bytes),
        count_text(checkpoint_files.files.len(), "file", "files")
    )
}

/// Draws files and tensors below `top`. Returns the position of the drawing's bottom.
fn draw(
    picture: &mut Picture,
    checkpoint_files: &CheckpointFiles<'_>,
    max_tensors: usize,
    top: f64,
) -> f64 {
    let mut y = top + LINE_HEIGHT;
    // First the files, each with a bar for its bytes.
    for (position, file) in checkpoint_files.files.iter().take(MAX_FILES).enumerate() {
        let name = format!("rank {}  {}", file.rank_text(), file.file);
        draw_label(picture, &name, y);
        let bar = Area {
            x: LEFT,
            y: y - 12.0,
            width: TENSOR_WIDTH * file.bytes as f64 / checkpoint_files.max_file_bytes() as f64,
            height: 14.0,
        };
        picture.rectangle(bar, &file_fill(position as u32), "");
        let boxes = count_text(file.boxes, "box", "boxes");
        let description = format!("{}, {boxes}", bytes_text(file.bytes));
        picture.text((NOTES_LEFT, y), "class=\"soft\"", &description, "");
        y += LINE_HEIGHT;
    }
    if checkpoint_files.files.len() > MAX_FILES {
        let more_files = checkpoint_files.files.len() - MAX_FILES;
        let more_files = count_text(more_files, "more file", "more files");
        draw_label(picture, &format!("… and {more_files}"), y);
        y += LINE_HEIGHT;
    }
    // Then the tensors, each as a grid of cells in the colours of their files.
    y += LINE_HEIGHT;
    let tensors = &checkpoint_files.entries;
    for (name, entry) in tensors.iter().take(max_tensors) {
        draw_label(picture, name, y);
        y += draw_tensor(picture, checkpoint_files, entry, y);
    }
    if tensors.len() > max_tensors {
        let hidden_tensors = tensors.len() - max_tensors;
        let hidden_tensors = count_text(hidden_tensors, "more tensor", "more tensors");
        draw_label(picture, &format!("… and {hidden_tensors}"), y);
        y += LINE_HEIGHT;
    }
    y
}

/// Draws a tensor on the line at `y`, and returns the height that it takes.
fn draw_tensor(
    picture: &mut Picture,
    checkpoint_files: &CheckpointFiles<'_>,
    entry: &TensorEntry,
    y: f64,
) -> f64 {
    let raster = checkpoint_files.raster(entry, COLUMNS);
    let dtype = entry.properties.dtype;
    let description = format!("{dtype} {:?}{}", entry.shape, cut_text(&raster.dimensions));
    picture.text(
        (NOTES_LEFT, y),
        "class=\"soft\"",
        &shortened(&description, 44),
        "",
    );
    // A grid of several rows is higher than a line of text.
    let height = if raster.rows == 1 { 14.0 } else { 7.0 };
    for row in 0..raster.rows {
        for (cells, cell) in raster.runs(row) {
            let area = Area {
                x: LEFT + width_of(cells.start),
                y: y - 12.0 + row as f64 * height,
                width: width_of(cells.len()),
                height,
            };
            match cell {
                Cell::Nobody => picture.rectangle(area, "class=\"none\"", "nobody"),
                Cell::Several => picture.rectangle(area, "class=\"several\"", "several boxes"),
                Cell::File(position) => {
                    let file = &checkpoint_files.files[position as usize];
                    let name = shortened(&file.file, MAX_NAME_CHARACTERS);
                    let tooltip = format!("rank {}, {name}", file.rank_text());
                    picture.rectangle(area, &file_fill(position), &tooltip);
                }
            }
        }
    }
    LINE_HEIGHT.max(raster.rows as f64 * height + 6.0)
}

/// Returns the width of some cells of a grid.
fn width_of(cells: usize) -> f64 {
    TENSOR_WIDTH * cells as f64 / COLUMNS as f64
}

/// Writes a name at the left of a line, shortened to fit. A tooltip shows more of it.
fn draw_label(picture: &mut Picture, name: &str, y: f64) {
    let short_name = shortened(name, MAX_NAME_CHARACTERS);
    picture.text((12.0, y), "", &short_name, &shortened(name, 1000));
}

/// Returns the colour of the file at a position as a style: neighbours differ much, in light and
/// dark.
fn file_fill(position: u32) -> String {
    let hue = (210.0 + f64::from(position) * 137.508) % 360.0;
    format!("fill=\"hsl({hue:.0} 55% {}%)\"", 48 + position % 3 * 7)
}
