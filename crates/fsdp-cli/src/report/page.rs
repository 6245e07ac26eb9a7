//! The page of a run.

use std::time::{Duration, UNIX_EPOCH};

use fsdp_formats::lineage::{Link, Note};
use fsdp_layout::count_text;

use super::chart::curve_picture;
use super::history::History;
use super::metrics::Metrics;
use super::series::Series;
use crate::markup::{escape, page};
use crate::text::{bytes_text, or_word};

/// The checkpoints that are listed, the newest.
const MAX_CHECKPOINTS: usize = 200;

/// Returns the page of a run. Its checkpoints are the oldest first.
pub(super) fn run_page(
    name: &str,
    metrics: &Metrics,
    history: &History,
    checkpoints: &[Link],
) -> String {
    let mut body = format!("<h1>{}</h1>\n", escape(name));
    append_summary(&mut body, metrics, history, checkpoints.len());
    append_charts(&mut body, metrics);
    append_starts(&mut body, history);
    append_saves(&mut body, history);
    append_checkpoints(&mut body, checkpoints);
    page(&format!("Run {name}"), &body)
}

/// Appends the table of the run's totals: its steps, last loss, checkpoints and starts, and what
/// was left out or could not be read.
fn append_summary(
    body: &mut String,
    metrics: &Metrics,
    history: &History,
    checkpoint_count: usize,
) {
    let loss = or_word(metrics.last_loss.map(number_text), "unknown");
    let mut rows = vec![
        ("Steps", metrics.steps_done.to_string()),
        ("Last loss", loss),
        ("Checkpoints", checkpoint_count.to_string()),
    ];
    // Runs of before these events were recorded have no starts; their page leaves the row out.
    if !history.starts.is_empty() {
        let starts = history.starts.len() + history.earlier_starts;
        let resumes = history.resumes;
        rows.push(("Starts", format!("{starts}, of which {resumes} resumed")));
    }
    if metrics.skipped_updates > 0 {
        let reason = "gradients that were not finite";
        rows.push((
            "Updates left out",
            format!("{}: {reason}", metrics.skipped_updates),
        ));
    }
    if metrics.unreadable_lines > 0 {
        let lines =
            usize::try_from(metrics.unreadable_lines).expect("this machine has counted them");
        let line_count = count_text(lines, "line of the metrics", "lines of the metrics");
        rows.push(("Unreadable", line_count));
    }
    body.push_str("<table>\n");
    for (name, value) in rows {
        append_row(body, &[escape(name), escape(&value)]);
    }
    body.push_str("</table>\n");
}

/// Appends the curves.
fn append_charts(body: &mut String, metrics: &Metrics) {
    let norm = "Norm of the gradients, before clipping";
    type FormatNumber = fn(f64) -> String;
    let curves: [(&str, &Series, FormatNumber); 5] = [
        ("Loss", &metrics.loss, number_text),
        ("Tokens per second", &metrics.tokens_per_s, number_text),
        (
            "Memory of rank 0's process, peak",
            &metrics.memory_bytes,
            memory_text,
        ),
        (norm, &metrics.grad_norm, number_text),
        ("Learning rate", &metrics.lr, number_text),
    ];
    for (title, series, format_value) in curves {
        // Not every run has every curve: a checkpoint of another program has no speed.
        if let Some(chart) = curve_picture(title, series, format_value) {
            body.push_str(&format!(
                "<h2>{title}</h2>\n<div class=\"wide\">{chart}</div>\n"
            ));
        }
    }
    if metrics.loss.points().len() > 1 {
        body.push_str(
            "<p class=\"soft\">Curves are means over a few steps; the band behind them is all that \
             was seen.</p>\n",
        );
    }
}

/// Appends the table of the run's starts, and how each ended.
fn append_starts(body: &mut String, history: &History) {
    let last_index = history.starts.len().saturating_sub(1);
    let mut rows = Vec::new();
    for (index, start) in history.starts.iter().enumerate() {
        let (class, end_text) = match start.end_text {
            Some(end) => ("", end),
            // The last one may still run.
            None if index == last_index => ("", ""),
            None => ("bad", "killed or crashed"),
        };
        rows.push([
            or_word(start.time.map(utc_text), "unknown"),
            start.step.to_string(),
            or_word(start.ranks, ""),
            or_word(
                start.resumed_from.as_deref().map(code_html),
                "the beginning",
            ),
            format!("<span class=\"{class}\">{end_text}</span>"),
        ]);
    }
    let columns = ["when (UTC)", "after step", "ranks", "from", "ended"];
    append_table(body, "Starts", columns, &rows, history.earlier_starts);
}

/// Appends the table of saves, the newest first.
fn append_saves(body: &mut String, history: &History) {
    let mut rows = Vec::new();
    // The newest is what a reader looks for first.
    for save in history.saves.iter().rev() {
        rows.push([
            save.step.to_string(),
            code_html(&save.path),
            bytes_text(save.bytes),
            format!("{:.3}", save.seconds),
            format!("{:.2}", save.bytes as f64 / 1e9 / save.seconds.max(1e-9)),
            format!("{:.3} s", save.stall_seconds),
        ]);
    }
    let columns = [
        "step",
        "place",
        "size",
        "seconds",
        "GB/s",
        "training waited",
    ];
    append_table(body, "Saves", columns, &rows, history.earlier_saves);
}

/// Appends the table of the chain of checkpoints, the newest first.
fn append_checkpoints(body: &mut String, checkpoints: &[Link]) {
    let mut rows = Vec::new();
    for link in checkpoints.iter().rev().take(MAX_CHECKPOINTS) {
        let lineage = link.lineage.as_ref();
        let parent = lineage.and_then(|lineage| lineage.parent);
        let notes: Vec<String> = link.notes.iter().map(note_html).collect();
        rows.push([
            code_html(&link.name),
            or_word(lineage.map(|lineage| lineage.step), ""),
            or_word(parent.map(|parent| format!("step {}", parent.step)), ""),
            or_word(link.digest.map(|digest| code_html(&digest.to_string())), ""),
            notes.join("<br>"),
        ]);
    }
    let columns = ["checkpoint", "step", "parent", "digest", "notes"];
    let hidden_rows = checkpoints.len().saturating_sub(MAX_CHECKPOINTS);
    append_table(body, "Checkpoints", columns, &rows, hidden_rows);
}

/// Returns a note about a checkpoint as HTML, marked if the chain of checkpoints is broken there or
/// the checkpoint is damaged.
fn note_html(note: &Note) -> String {
    let class = if note.is_break() || note.is_damage() {
        "bad"
    } else {
        "soft"
    };
    let text = escape(&note.to_string());
    format!("<span class=\"{class}\">{text}</span>")
}

/// Appends a table below a heading, and a note if `hidden_rows` earlier rows are not shown. Without
/// rows there is no table.
fn append_table<const N: usize>(
    body: &mut String,
    heading: &str,
    columns: [&str; N],
    rows: &[[String; N]],
    hidden_rows: usize,
) {
    if rows.is_empty() {
        return;
    }
    let columns = columns.map(|name| format!("<th>{name}</th>")).concat();
    body.push_str(&format!(
        "<h2>{heading}</h2>\n<div class=\"wide\"><table>\n<tr>{columns}</tr>\n"
    ));
    for cells in rows {
        append_row(body, cells);
    }
    body.push_str("</table></div>\n");
    if hidden_rows > 0 {
        body.push_str(&format!(
            "<p class=\"soft\">… and {hidden_rows} earlier ones.</p>\n"
        ));
    }
}

/// Appends a row of cells, which are HTML.
fn append_row(body: &mut String, cells: &[String]) {
    // Cells are HTML already: whoever makes one has escaped the names in it.
    body.push_str("<tr>");
    for cell in cells {
        body.push_str(&format!("<td>{cell}</td>"));
    }
    body.push_str("</tr>\n");
}

fn code_html(text: &str) -> String {
    format!("<code>{}</code>", escape(text))
}

/// Formats a number for people: four digits, and a power where there are many more.
fn number_text(value: f64) -> String {
    // Losses, norms and learning rates differ by powers of ten, and all are on one page.
    let magnitude = value.abs();
    if magnitude == 0.0 {
        "0".to_owned()
    } else if !(1e-3..1e7).contains(&magnitude) {
        format!("{value:.2e}")
    } else if magnitude >= 1000.0 {
        format!("{value:.0}")
    } else if magnitude >= 1.0 {
        format!("{value:.3}")
    } else {
        format!("{value:.4}")
    }
}

fn memory_text(bytes: f64) -> String {
    bytes_text(bytes.max(0.0) as u64)
}

/// Formats a time in seconds since 1970.
fn utc_text(seconds: f64) -> String {
    // The time comes from a file. Years have four digits, so the last moment is the end of 9999.
    let seconds = seconds.clamp(0.0, 253_402_300_799.0) as u64;
    let time = UNIX_EPOCH + Duration::from_secs(seconds);
    let text = humantime::format_rfc3339_seconds(time).to_string();
    text.replace('T', " ").replace('Z', "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        assert_eq!(utc_text(0.0), "1970-01-01 00:00:00");
        assert_eq!(utc_text(951_782_399.0), "2000-02-28 23:59:59");
        assert_eq!(utc_text(951_782_400.0), "2000-02-29 00:00:00");
        assert_eq!(utc_text(1_709_251_200.9), "2024-03-01 00:00:00");
        assert_eq!(utc_text(f64::NAN), "1970-01-01 00:00:00");
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(
            [
                number_text(2.34567),
                number_text(0.01),
                number_text(123_456.0),
                number_text(3e-9)
            ],
            ["2.346", "0.0100", "123456", "3.00e-9"]
        );
    }
}
