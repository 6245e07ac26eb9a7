//! The progress of bytes: a bar on a terminal, a line now and then elsewhere.

use std::io::{self, IsTerminal as _};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::capture;
use crate::output;
use crate::text::iec;

/// The number of times per second that the bar is drawn.
const HZ: u8 = 10;

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
        total: u64,
        done: AtomicU64,
        started: Instant,
        /// The time of the last line.
        last: Mutex<Instant>,
    },
}

impl Progress {
    /// Creates a progress bar on a terminal, and lines now and then elsewhere.
    pub(crate) fn new(bytes: u64, wanted: bool) -> Self {
        // A program that embeds this command owns the terminal.
        if !wanted || capture::is_on() {
            return Progress::Hidden;
        }
        // Logs of jobs have no cursor: a bar would fill them with copies of itself.
        if !is_terminal() {
            let now = Instant::now();
            return Progress::Lines {
                total: bytes,
                done: AtomicU64::new(0),
                started: now,
                last: Mutex::new(now),
            };
        }
        let template =
            "{bar:30} {binary_bytes}/{binary_total_bytes}, {binary_bytes_per_sec}, {eta} left";
        Progress::Bar(bar(bytes, template))
    }

    /// Counts bytes that are done. Prints a line if the last one is long ago.
    pub(crate) fn add(&self, bytes: u64) {
        match self {
            Progress::Hidden => {}
            Progress::Bar(bar) => bar.inc(bytes),
            Progress::Lines {
                total,
                done,
                started,
                last,
            } => {
                let done = done.fetch_add(bytes, Ordering::Relaxed) + bytes;
                // If another thread holds the lock, it prints, and one line is enough.
                if let Ok(mut last) = last.try_lock()
                    && last.elapsed() >= LINE_INTERVAL
                {
                    *last = Instant::now();
                    output::talk(&line(done, *total, started.elapsed()));
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
pub(crate) fn bar(length: u64, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template).expect("the templates are ours");
    ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr_with_hz(HZ))
        .with_style(style)
}

/// Returns the line after so many bytes of all and so much time.
fn line(done: u64, total: u64, elapsed: Duration) -> String {
    // The mean over all time is steadier than that of the last seconds, which depend on caches.
    let rate = done as f64 / elapsed.as_secs_f64().max(1e-9);
    let remaining = total.saturating_sub(done) as f64 / rate.max(1.0);
    format!(
        "{} of {}, {}/s, {remaining:.0} s left",
        iec(done),
        iec(total),
        iec(rate as u64)
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
        let line = line(1 << 20, 4 << 20, Duration::from_secs(2));
        assert_eq!(line, "1.0 MiB of 4.0 MiB, 512.0 KiB/s, 6 s left");
    }
}
