//! The progress of bytes: a bar on a terminal, a line now and then elsewhere.

use std::io::{self, IsTerminal as _};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::capture;
use crate::output;
use crate::text::bytes_text;

/// The number of times per second that the bar is drawn.
const DRAWS_PER_SECOND: u8 = 10;

/// The time from one line to the next, where there is no terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// The progress of a command that reads or writes many bytes.
pub(crate) enum Progress {
    /// Nothing is shown.
    Hidden,
    /// A bar.
    Bar(ProgressBar),
    /// Lines on stderr.
    Lines {
        total_bytes: u64,
        done_bytes: AtomicU64,
        start: Instant,
        /// The time of the last line.
        last_line_time: Mutex<Instant>,
    },
}

impl Progress {
    /// Creates a progress bar on a terminal, and lines now and then elsewhere.
    pub(crate) fn new(bytes: u64, is_shown: bool) -> Self {
        // A program that embeds this command owns the terminal.
        if !is_shown || capture::is_on() {
            return Progress::Hidden;
        }
        // Logs of jobs have no cursor: a bar would fill them with copies of itself.
        if !is_terminal() {
            let now = Instant::now();
            return Progress::Lines {
                total_bytes: bytes,
                done_bytes: AtomicU64::new(0),
                start: now,
                last_line_time: Mutex::new(now),
            };
        }
        let template =
            "{bar:30} {binary_bytes}/{binary_total_bytes}, {binary_bytes_per_sec}, {eta} left";
        Progress::Bar(make_bar(bytes, template))
    }

    /// Counts bytes that are done. Prints a line if the last one is long ago.
    pub(crate) fn add(&self, bytes: u64) {
        match self {
            Progress::Hidden => {}
            Progress::Bar(bar) => bar.inc(bytes),
            Progress::Lines {
                total_bytes,
                done_bytes,
                start,
                last_line_time,
            } => {
                let done_bytes = done_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
                // If another thread holds the lock, it prints, and one line is enough.
                if let Ok(mut last_line_time) = last_line_time.try_lock()
                    && last_line_time.elapsed() >= LINE_INTERVAL
                {
                    *last_line_time = Instant::now();
                    output::print_message(&progress_line(
                        done_bytes,
                        *total_bytes,
                        start.elapsed(),
                    ));
                }
            }
        }
    }
}

/// Returns `true` if stderr is a terminal on which a line can be drawn over.
pub(crate) fn is_terminal() -> bool {
    io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Returns a bar of this length on stderr.
pub(crate) fn make_bar(length: u64, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template).expect("the templates are ours");
    ProgressBar::with_draw_target(
        Some(length),
        ProgressDrawTarget::stderr_with_hz(DRAWS_PER_SECOND),
    )
    .with_style(style)
}

/// Returns the line about this many bytes of all after this much time.
fn progress_line(done_bytes: u64, total_bytes: u64, elapsed: Duration) -> String {
    // The mean over all time is steadier than that of the last seconds, which depend on caches.
    let rate = done_bytes as f64 / elapsed.as_secs_f64().max(1e-9);
    let remaining_seconds = total_bytes.saturating_sub(done_bytes) as f64 / rate.max(1.0);
    format!(
        "{} of {}, {}/s, {remaining_seconds:.0} s left",
        bytes_text(done_bytes),
        bytes_text(total_bytes),
        bytes_text(rate as u64)
    )
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Progress::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_tells_bytes_speed_and_the_time_left() {
        let line = progress_line(1 << 20, 4 << 20, Duration::from_secs(2));
        assert_eq!(line, "1.0 MiB of 4.0 MiB, 512.0 KiB/s, 6 s left");
    }
}
