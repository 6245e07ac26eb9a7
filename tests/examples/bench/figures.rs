//! The measured figures, and their output.

use std::time::Duration;

use serde::Serialize;

/// One case.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Case {
    pub(crate) name: String,
    /// The size of the state, by name.
    pub(crate) size: String,
    pub(crate) ranks: usize,
    pub(crate) place: String,
    /// Bytes that the case is about.
    pub(crate) bytes: u64,
    /// Median.
    pub(crate) seconds: f64,
    /// The limit of the machine for the same work, measured in turns with the case.
    pub(crate) limit: Option<Limit>,
    /// The most heap that was in use beyond the state itself, on one rank.
    pub(crate) peak_bytes: Option<u64>,
    /// Bytes read for each byte that was wanted.
    pub(crate) read_ratio: Option<f64>,
}

/// A limit with which a case is compared.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Limit {
    pub(crate) name: String,
    /// Median.
    pub(crate) seconds: f64,
    /// How many times as fast as the limit the case is: the median over pairs.
    pub(crate) ratio: f64,
}

/// All cases so far.
#[derive(Debug)]
pub(crate) struct Figures {
    pub(crate) cases: Vec<Case>,
    /// `true` if each figure is printed at once.
    talks: bool,
}

impl Figures {
    pub(crate) fn new(talks: bool) -> Self {
        Figures {
            cases: Vec::new(),
            talks,
        }
    }

    pub(crate) fn push(&mut self, case: Case) {
        if self.talks {
            let Case {
                name,
                size,
                ranks,
                place,
                bytes,
                seconds,
                limit,
                peak_bytes,
                read_ratio,
            } = &case;
            let speed = *bytes as f64 / seconds / 1e9;
            print!("{name:<28} {size:>5} {ranks} {place:<6} {seconds:>9.4} s {speed:>7.2} GB/s");
            if let Some(Limit {
                name,
                seconds,
                ratio,
            }) = limit
            {
                print!("  {ratio:>5.2} x {name} ({seconds:.4} s)");
            }
            if let Some(peak) = peak_bytes {
                print!("  peak {:.1} MiB", *peak as f64 / f64::from(1 << 20));
            }
            if let Some(ratio) = read_ratio {
                print!("  read {ratio:.3} x");
            }
            println!();
        }
        self.cases.push(case);
    }
}

/// Times of a case and of its limit, taken in turns.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pairs {
    case: Vec<f64>,
    limit: Vec<f64>,
}

impl Pairs {
    pub(crate) fn push(&mut self, case: Duration, limit: Duration) {
        self.case.push(case.as_secs_f64());
        self.limit.push(limit.as_secs_f64());
    }

    /// The median of the case's times.
    pub(crate) fn seconds(&self) -> f64 {
        median(self.case.clone())
    }

    pub(crate) fn limit(&self, name: &str) -> Limit {
        let ratios = self
            .case
            .iter()
            .zip(&self.limit)
            .map(|(case, limit)| limit / case)
            .collect();
        Limit {
            name: name.to_owned(),
            seconds: median(self.limit.clone()),
            ratio: median(ratios),
        }
    }
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
