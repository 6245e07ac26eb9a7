//! The picture as SVG and HTML.

use std::fmt::Write as _;

use super::holders::Holdings;
use super::raster::{Cell, Size};
use super::terminal::cut;
use crate::markup::{escape, shortened, svg, svg_file};
use crate::text::{count, iec};

const SIZE: Size = Size {
    rows: 8,
    columns: 96,
};
/// The files that are drawn one by one.
const FILES: usize = 256;
const WIDTH: f64 = 960.0;
/// The left edge of bars and tensors.
const LEFT: f64 = 330.0;
/// The width of a tensor, and of the bar of the largest file.
const ACROSS: f64 = 380.0;
/// The height of a line.
const LINE: f64 = 20.0;
/// The longest name that is shown whole.
const NAME: usize = 50;

/// Returns the picture as a file of its own.
pub(super) fn file(title: &str, holdings: &Holdings<'_>, limit: usize) -> String {
    let (body, height) = draw(holdings, limit, 40.0);
    let heading = format!(
        "<text x=\"12\" y=\"26\" font-size=\"16\">{}</text>\n",
        escape(&summary(holdings))
    );
    svg_file(title, WIDTH, height, &format!("{heading}{body}"))
}

/// Returns the body of a page with the picture.
pub(super) fn body(holdings: &Holdings<'_>, limit: usize) -> String {
    let (drawn, height) = draw(holdings, limit, 0.0);
    format!(
        "<h1>{}</h1>\n<p>{}. Each file has a colour; a tensor is shown along the dimensions in which it is cut. Point at a part to \
         see who holds it.</p>\n<div class=\"wide\">{}</div>\n",
        escape(&holdings.path),
        escape(&summary(holdings)),
        svg("Who holds what", WIDTH, height, &drawn)
    )
}

/// Returns the line of text above the picture.
fn summary(holdings: &Holdings<'_>) -> String {
    let (tensors, files) = (holdings.tensors().len(), holdings.holders.len());
    format!(
        "{} ({}): {}, {} in {}",
        holdings.path,
        holdings.format,
        count(tensors, "tensor", "tensors"),
        iec(holdings.bytes()),
        count(files, "file", "files")
    )
}

/// Draws files and tensors below `top`. Returns the drawing, and the position of its bottom.
fn draw(holdings: &Holdings<'_>, limit: usize, top: f64) -> (String, f64) {
    let mut drawn = String::new();
    let mut y = top + LINE;
    // First the files, each with a bar for its bytes. (Writing to a string cannot fail.)
    for (position, holder) in holdings.holders.iter().take(FILES).enumerate() {
        let width = ACROSS * holder.bytes as f64 / holdings.largest() as f64;
        let name = format!("rank {}  {}", holder.rank_text(), holder.file);
        label(&mut drawn, &name, y);
        let _ = writeln!(
            drawn,
            "<rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"14\" fill=\"{}\"/>\
             <text class=\"soft\" x=\"{:.1}\" y=\"{y:.1}\">{}, {} boxes</text>",
            y - 12.0,
            colour(position as u32),
            LEFT + ACROSS + 10.0,
            iec(holder.bytes),
            holder.boxes
        );
        y += LINE;
    }
    if holdings.holders.len() > FILES {
        label(
            &mut drawn,
            &format!("… and {} more files", holdings.holders.len() - FILES),
            y,
        );
        y += LINE;
    }
    // Then the tensors, each as a grid of cells in the colours of their files.
    y += LINE;
    let tensors = holdings.tensors();
    for (name, entry) in tensors.iter().take(limit) {
        let raster = holdings.raster(entry, SIZE);
        label(&mut drawn, name, y);
        let what = format!(
            "{} {:?}{}",
            entry.properties.dtype,
            entry.shape,
            cut(&raster.dimensions)
        );
        let _ = writeln!(
            drawn,
            "<text class=\"soft\" x=\"{:.1}\" y=\"{y:.1}\">{}</text>",
            LEFT + ACROSS + 10.0,
            escape(&shortened(&what, 44))
        );
        // A grid of several rows is higher than a line of text.
        let height = if raster.rows == 1 { 14.0 } else { 7.0 };
        for row in 0..raster.rows {
            let at = y - 12.0 + row as f64 * height;
            for (cells, cell) in raster.runs(row) {
                let part = |cell: usize| ACROSS * cell as f64 / SIZE.columns as f64;
                let (fill, who) = match cell {
                    Cell::Nobody => ("class=\"none\"".to_owned(), "nobody".to_owned()),
                    Cell::Several => ("class=\"several\"".to_owned(), "several boxes".to_owned()),
                    Cell::Holder(position) => {
                        let holder = &holdings.holders[position as usize];
                        let who = format!(
                            "rank {}, {}",
                            holder.rank_text(),
                            shortened(&holder.file, NAME)
                        );
                        (format!("fill=\"{}\"", colour(position)), who)
                    }
                };
                let _ = writeln!(
                    drawn,
                    "<rect x=\"{:.1}\" y=\"{at:.1}\" width=\"{:.1}\" height=\"{height}\" {fill}><title>{}</title></rect>",
                    LEFT + part(cells.start),
                    part(cells.len()),
                    escape(&who)
                );
            }
        }
        y += LINE.max(raster.rows as f64 * height + 6.0);
    }
    if tensors.len() > limit {
        label(
            &mut drawn,
            &format!("… and {} more tensors", tensors.len() - limit),
            y,
        );
        y += LINE;
    }
    (drawn, y)
}

/// Writes a name at the left of a line, shortened to fit. A tooltip shows more of it.
fn label(drawn: &mut String, name: &str, y: f64) {
    let _ = write!(
        drawn,
        "<text x=\"12\" y=\"{y:.1}\">{}<title>{}</title></text>",
        escape(&shortened(name, NAME)),
        escape(&shortened(name, 1000))
    );
}

/// Returns the colour of the file at a position: neighbours differ much, in light and dark.
fn colour(position: u32) -> String {
    let hue = (210.0 + f64::from(position) * 137.508) % 360.0;
    format!("hsl({hue:.0} 55% {}%)", 48 + position % 3 * 7)
}
