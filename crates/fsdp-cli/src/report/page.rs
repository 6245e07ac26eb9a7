//! The page of a run.

use std::fmt::Write as _;

use fsdp_formats::lineage::{Link, Note};

use super::chart::chart;
use super::history::History;
use super::record::Run;
use super::series::Series;
use crate::markup::{escape, page};
use crate::text::{count, iec};

/// A way to write a value.
type Show = fn(f64) -> String;

/// The checkpoints that are listed, the newest.
const CHECKPOINTS: usize = 200;

/// Returns the page.
pub(super) fn html(run: &Run) -> String {
    let mut body = format!("<h1>{}</h1>\n", escape(&run.name));
    summary(&mut body, run);
    charts(&mut body, run);
    starts(&mut body, &run.history);
    saves(&mut body, &run.history);
    lineage(&mut body, &run.checkpoints);
    page(&format!("Run {}", run.name), &body)
}

/// Appends the table of totals.
fn summary(body: &mut String, run: &Run) {
    let metrics = &run.metrics;
    let loss = metrics
        .last_loss
        .map_or_else(|| "unknown".to_owned(), number);
    let mut rows = vec![
        ("Steps", metrics.steps.to_string()),
        ("Last loss", loss),
        ("Checkpoints", run.checkpoints.len().to_string()),
    ];
    if !run.history.starts.is_empty() {
        rows.push((
            "Starts",
            format!(
                "{}, of which {} resumed",
                run.history.starts.len() + run.history.earlier_starts,
                run.history.resumes
            ),
        ));
    }
    if metrics.skipped > 0 {
        rows.push((
            "Updates left out",
            format!("{}: gradients that were not finite", metrics.skipped),
        ));
    }
    if metrics.unreadable > 0 {
        rows.push(("Unreadable", count_lines(metrics.unreadable)));
    }
    body.push_str("<table>\n");
    for (name, value) in rows {
        row(body, &[escape(name), escape(&value)]);
    }
    body.push_str("</table>\n");
}

fn count_lines(lines: u64) -> String {
    count(
        usize::try_from(lines).unwrap_or(usize::MAX),
        "line of the metrics",
        "lines of the metrics",
    )
}

/// Appends the curves.
fn charts(body: &mut String, run: &Run) {
    let metrics = &run.metrics;
    let curves: [(&str, &Series, Show); 5] = [
        ("Loss", &metrics.loss, number),
        ("Tokens per second", &metrics.tokens_per_s, number),
        ("Memory of rank 0's process, peak", &metrics.memory, memory),
        (
            "Norm of the gradients, before clipping",
            &metrics.grad_norm,
            number,
        ),
        ("Learning rate", &metrics.lr, number),
    ];
    for (title, series, show) in curves {
        if let Some(chart) = chart(title, series, show) {
            // Writing to a string cannot fail.
            let _ = write!(
                body,
                "<h2>{title}</h2>\n<div class=\"wide\">{chart}</div>\n"
            );
        }
    }
    if metrics.loss.points().len() > 1 {
        body.push_str(
            "<p class=\"soft\">Curves are means over a few steps; the band behind them is all that was seen.</p>\n",
        );
    }
}

/// Appends the table of the run's starts, and how each ended.
fn starts(body: &mut String, history: &History) {
    if history.starts.is_empty() {
        return;
    }
    body.push_str("<h2>Starts</h2>\n<div class=\"wide\"><table>\n");
    header(
        body,
        &["when (UTC)", "after step", "ranks", "from", "ended"],
    );
    let last = history.starts.len() - 1;
    for (index, start) in history.starts.iter().enumerate() {
        // The last one may still run.
        let silent = if index == last {
            ""
        } else {
            "killed or crashed"
        };
        let ended = start.end.unwrap_or(silent);
        let class = if start.end.is_none() && index < last {
            "bad"
        } else {
            ""
        };
        row(
            body,
            &[
                start.time.map_or_else(|| "unknown".to_owned(), utc),
                start.step.to_string(),
                start
                    .ranks
                    .map_or_else(String::new, |ranks| ranks.to_string()),
                start
                    .resumed_from
                    .as_deref()
                    .map_or_else(|| "the beginning".to_owned(), code),
                format!("<span class=\"{class}\">{ended}</span>"),
            ],
        );
    }
    body.push_str("</table></div>\n");
    earlier(body, history.earlier_starts);
}

/// Appends the table of saves, the newest first.
fn saves(body: &mut String, history: &History) {
    if history.saves.is_empty() {
        return;
    }
    body.push_str("<h2>Saves</h2>\n<div class=\"wide\"><table>\n");
    header(
        body,
        &[
            "step",
            "place",
            "size",
            "seconds",
            "GB/s",
            "training waited",
        ],
    );
    for save in history.saves.iter().rev() {
        row(
            body,
            &[
                save.step.to_string(),
                code(&save.path),
                iec(save.bytes),
                format!("{:.3}", save.seconds),
                format!("{:.2}", save.bytes as f64 / 1e9 / save.seconds.max(1e-9)),
                format!("{:.3} s", save.stall_seconds),
            ],
        );
    }
    body.push_str("</table></div>\n");
    earlier(body, history.earlier_saves);
}

/// Appends the table of the chain of checkpoints, the newest first.
fn lineage(body: &mut String, checkpoints: &[Link]) {
    if checkpoints.is_empty() {
        return;
    }
    body.push_str("<h2>Checkpoints</h2>\n<div class=\"wide\"><table>\n");
    header(body, &["checkpoint", "step", "parent", "digest", "notes"]);
    for link in checkpoints.iter().rev().take(CHECKPOINTS) {
        let lineage = link.lineage.as_ref();
        let parent = lineage.and_then(|lineage| lineage.parent);
        let notes: Vec<String> = link.notes.iter().map(note).collect();
        row(
            body,
            &[
                code(&link.name),
                lineage.map_or_else(String::new, |lineage| lineage.step.to_string()),
                parent.map_or_else(String::new, |parent| format!("step {}", parent.step)),
                link.digest
                    .map_or_else(String::new, |digest| code(&digest.to_string())),
                notes.join("<br>"),
            ],
        );
    }
    body.push_str("</table></div>\n");
    earlier(body, checkpoints.len().saturating_sub(CHECKPOINTS));
}

/// Returns a note about a checkpoint as HTML, marked if the chain of checkpoints is broken there.
fn note(note: &Note) -> String {
    let class = if note.is_break() { "bad" } else { "soft" };
    format!(
        "<span class=\"{class}\">{}</span>",
        escape(&note.to_string())
    )
}

/// Appends a note that `more` earlier rows are not shown.
fn earlier(body: &mut String, more: usize) {
    if more > 0 {
        let _ = writeln!(body, "<p class=\"soft\">… and {more} earlier ones.</p>");
    }
}

/// Appends a row of cells, which are HTML.
fn row(body: &mut String, cells: &[String]) {
    body.push_str("<tr>");
    for cell in cells {
        let _ = write!(body, "<td>{cell}</td>");
    }
    body.push_str("</tr>\n");
}

/// Appends a row of column names.
fn header(body: &mut String, names: &[&str]) {
    body.push_str("<tr>");
    for name in names {
        let _ = write!(body, "<th>{name}</th>");
    }
    body.push_str("</tr>\n");
}

fn code(text: &str) -> String {
    format!("<code>{}</code>", escape(text))
}

/// Formats a number for people: four digits, and a power where there are many more.
fn number(value: f64) -> String {
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
    let seconds = seconds.clamp(0.0, 253_402_300_799.0) as u64;
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years of 400 begin in March, so that a leap day comes last.
    let day = days + 719_468;
    let (era, day_of_era) = (day / 146_097, day % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!(
        "{year}-{month:02}-{day_of_month:02} {:02}:{:02}:{:02}",
        second / 3600,
        second / 60 % 60,
        second % 60
    )
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
