//! The progress of bytes: a bar on a terminal, a line now and then elsewhere.

use std::io::IsTerminal as _;
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
const BETWEEN_LINES: Duration = Duration::from_secs(10);

/// The progress of a command that reads or writes many bytes.
pub(crate) enum Progress {
    /// Nothing is shown.
    Hidden,
    /// A bar.
    Bar(ProgressBar),
    /// Lines on stderr.
    Lines(Lines),
}

/// The bytes so far, and when the last line was printed.
pub(crate) struct Lines {
    total: u64,
    done: AtomicU64,
    started: Instant,
    last: Mutex<Instant>,
}

impl Progress {
    /// Creates a progress bar on a terminal, and lines now and then elsewhere.
    pub(crate) fn new(bytes: u64, wanted: bool) -> Self {
        if !wanted || capture::is_on() {
            return Progress::Hidden;
        }
        let terminal = std::io::stderr().is_terminal()
            && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        if !terminal {
            let now = Instant::now();
            return Progress::Lines(Lines {
                total: bytes,
                done: AtomicU64::new(0),
                started: now,
                last: Mutex::new(now),
            });
        }
        let bar =
            ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::stderr_with_hz(HZ));
        let template =
            "{bar:30} {binary_bytes}/{binary_total_bytes}, {binary_bytes_per_sec}, {eta} left";
        bar.set_style(
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
        );
        Progress::Bar(bar)
    }

    /// Notes bytes that are done.
    pub(crate) fn add(&self, bytes: u64) {
        match self {
            Progress::Hidden => {}
            Progress::Bar(bar) => bar.inc(bytes),
            Progress::Lines(lines) => lines.add(bytes),
        }
    }
}

impl Lines {
    /// Notes bytes that are done, and prints a line if the last one is long ago.
    fn add(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        // If another thread holds the lock, it prints, and one line is enough.
        let Ok(mut last) = self.last.try_lock() else {
            return;
        };
        if last.elapsed() >= BETWEEN_LINES {
            *last = Instant::now();
            output::talk(&self.line(done, self.started.elapsed()));
        }
    }

    /// Returns the line after so many bytes and so much time.
    fn line(&self, done: u64, elapsed: Duration) -> String {
        let rate = done as f64 / elapsed.as_secs_f64().max(1e-9);
        let left = self.total.saturating_sub(done) as f64 / rate.max(1.0);
        format!(
            "{} of {}, {}/s, {left:.0} s left",
            iec(done),
            iec(self.total),
            iec(rate as u64)
        )
    }
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
        let now = Instant::now();
        let lines = Lines {
            total: 4 << 20,
            done: AtomicU64::new(0),
            started: now,
            last: Mutex::new(now),
        };
        let line = lines.line(1 << 20, Duration::from_secs(2));
        assert_eq!(line, "1.0 MiB of 4.0 MiB, 512.0 KiB/s, 6 s left");
    }
}
