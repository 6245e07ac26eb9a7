//! The page of a run.

use std::time::{Duration, UNIX_EPOCH};

use fsdp_formats::lineage::{Link, Note};

use super::chart::chart;
use super::history::History;
use super::metrics::Metrics;
use super::series::Series;
use crate::markup::{escape, page};
use crate::text::{count, iec, or_word};

/// The checkpoints that are listed, the newest.
const CHECKPOINTS: usize = 200;

/// Returns the page of a run. Its checkpoints are the oldest first.
pub(super) fn html(
    name: &str,
    metrics: &Metrics,
    history: &History,
    checkpoints: &[Link],
) -> String {
    let mut body = format!("<h1>{}</h1>\n", escape(name));
    summary(&mut body, metrics, history, checkpoints.len());
    charts(&mut body, metrics);
    starts(&mut body, history);
    saves(&mut body, history);
    lineage(&mut body, checkpoints);
    page(&format!("Run {name}"), &body)
}

/// Appends the table of totals.
fn summary(body: &mut String, metrics: &Metrics, history: &History, checkpoints: usize) {
    let loss = or_word(metrics.last_loss.map(number), "unknown");
    let mut rows = vec![
        ("Steps", metrics.steps.to_string()),
        ("Last loss", loss),
        ("Checkpoints", checkpoints.to_string()),
    ];
    // Runs of before these events were recorded have no starts; their page leaves the row out.
    if !history.starts.is_empty() {
        let starts = history.starts.len() + history.earlier_starts;
        let resumes = history.resumes;
        rows.push(("Starts", format!("{starts}, of which {resumes} resumed")));
    }
    if metrics.skipped > 0 {
        let why = "gradients that were not finite";
        rows.push(("Updates left out", format!("{}: {why}", metrics.skipped)));
    }
    if metrics.unreadable > 0 {
        let lines = usize::try_from(metrics.unreadable).expect("this machine has counted them");
        let many = count(lines, "line of the metrics", "lines of the metrics");
        rows.push(("Unreadable", many));
    }
    body.push_str("<table>\n");
    for (name, value) in rows {
        row(body, &[escape(name), escape(&value)]);
    }
    body.push_str("</table>\n");
}

/// Appends the curves.
fn charts(body: &mut String, metrics: &Metrics) {
    let norm = "Norm of the gradients, before clipping";
    type Show = fn(f64) -> String;
    let curves: [(&str, &Series, Show); 5] = [
        ("Loss", &metrics.loss, number),
        ("Tokens per second", &metrics.tokens_per_s, number),
        ("Memory of rank 0's process, peak", &metrics.memory, memory),
        (norm, &metrics.grad_norm, number),
        ("Learning rate", &metrics.lr, number),
    ];
    for (title, series, show) in curves {
        // Not every run has every curve: a checkpoint of another program has no speed.
        if let Some(chart) = chart(title, series, show) {
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
fn starts(body: &mut String, history: &History) {
    let last = history.starts.len().saturating_sub(1);
    let mut rows = Vec::new();
    for (index, start) in history.starts.iter().enumerate() {
        let (class, ended) = match start.end {
            Some(end) => ("", end),
            // The last one may still run.
            None if index == last => ("", ""),
            None => ("bad", "killed or crashed"),
        };
        rows.push([
            or_word(start.time.map(utc), "unknown"),
            start.step.to_string(),
            or_word(start.ranks, ""),
            or_word(start.resumed_from.as_deref().map(code), "the beginning"),
            format!("<span class=\"{class}\">{ended}</span>"),
        ]);
    }
    let columns = ["when (UTC)", "after step", "ranks", "from", "ended"];
    table(body, "Starts", columns, &rows, history.earlier_starts);
}

/// Appends the table of saves, the newest first.
fn saves(body: &mut String, history: &History) {
    let mut rows = Vec::new();
    // The newest is what a reader looks for first.
    for save in history.saves.iter().rev() {
        rows.push([
            save.step.to_string(),
            code(&save.path),
            iec(save.bytes),
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
    table(body, "Saves", columns, &rows, history.earlier_saves);
}

/// Appends the table of the chain of checkpoints, the newest first.
fn lineage(body: &mut String, checkpoints: &[Link]) {
    let mut rows = Vec::new();
    for link in checkpoints.iter().rev().take(CHECKPOINTS) {
        let lineage = link.lineage.as_ref();
        let parent = lineage.and_then(|lineage| lineage.parent);
        let notes: Vec<String> = link.notes.iter().map(note_html).collect();
        rows.push([
            code(&link.name),
            or_word(lineage.map(|lineage| lineage.step), ""),
            or_word(parent.map(|parent| format!("step {}", parent.step)), ""),
            or_word(link.digest.map(|digest| code(&digest.to_string())), ""),
            notes.join("<br>"),
        ]);
    }
    let columns = ["checkpoint", "step", "parent", "digest", "notes"];
    let more = checkpoints.len().saturating_sub(CHECKPOINTS);
    table(body, "Checkpoints", columns, &rows, more);
}

/// Returns a note about a checkpoint as HTML, marked if the chain of checkpoints is broken there.
fn note_html(note: &Note) -> String {
    let class = if note.is_break() { "bad" } else { "soft" };
    let text = escape(&note.to_string());
    format!("<span class=\"{class}\">{text}</span>")
}

/// Appends a table below a heading, and a note if `more` earlier rows are not shown. Without rows
/// there is no table.
fn table<const N: usize>(
    body: &mut String,
    heading: &str,
    columns: [&str; N],
    rows: &[[String; N]],
    more: usize,
) {
    if rows.is_empty() {
        return;
    }
    let columns = columns.map(|name| format!("<th>{name}</th>")).concat();
    body.push_str(&format!(
        "<h2>{heading}</h2>\n<div class=\"wide\"><table>\n<tr>{columns}</tr>\n"
    ));
    for cells in rows {
        row(body, cells);
    }
    body.push_str("</table></div>\n");
    if more > 0 {
        body.push_str(&format!(
            "<p class=\"soft\">… and {more} earlier ones.</p>\n"
        ));
    }
}

/// Appends a row of cells, which are HTML.
fn row(body: &mut String, cells: &[String]) {
    // Cells are HTML already: whoever makes one has escaped the names in it.
    body.push_str("<tr>");
    for cell in cells {
        body.push_str(&format!("<td>{cell}</td>"));
    }
    body.push_str("</tr>\n");
}

fn code(text: &str) -> String {
    format!("<code>{}</code>", escape(text))
}

/// Formats a number for people: four digits, and a power where there are many more.
fn number(value: f64) -> String {
    // Losses, norms and learning rates differ by powers of ten, and all are on one page.
    let size = value.abs();
    if size == 0.0 {
        "0".to_owned()
    } else if !(1e-3..1e7).contains(&size) {
        format!("{value:.2e}")
    } else if size >= 1000.0 {
        format!("{value:.0}")
    } else if size >= 1.0 {
        format!("{value:.3}")
    } else {
        format!("{value:.4}")
    }
}

fn memory(bytes: f64) -> String {
    iec(bytes.max(0.0) as u64)
}

/// Formats a time in seconds since 1970.
fn utc(seconds: f64) -> String {
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
        assert_eq!(utc(0.0), "1970-01-01 00:00:00");
        assert_eq!(utc(951_782_399.0), "2000-02-28 23:59:59");
        assert_eq!(utc(951_782_400.0), "2000-02-29 00:00:00");
        assert_eq!(utc(1_709_251_200.9), "2024-03-01 00:00:00");
        assert_eq!(utc(f64::NAN), "1970-01-01 00:00:00");
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(
            [
                number(2.34567),
                number(0.01),
                number(123_456.0),
                number(3e-9)
            ],
            ["2.346", "0.0100", "123456", "3.00e-9"]
        );
    }
}
