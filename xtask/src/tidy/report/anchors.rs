//! The rates of other projects of the field, taken by this report.

/// The number of rates.
pub(super) const COLUMNS: usize = 10;

/// A project, or a package of it.
pub(super) struct Anchor {
    pub(super) name: &'static str,
    /// The start of the id of the commit that was counted; all are of August 2026.
    pub(super) revision: &'static str,
    /// The rates, in the order of the columns.
    pub(super) rates: [f64; COLUMNS],
}

pub(super) const ANCHORS: [Anchor; 6] = [
    // Without `integration.rs`, which is its test suite for other implementations.
    Anchor {
        name: "object_store",
        revision: "978fb48",
        rates: [0.5, 0.0, 1.9, 1.5, 0.5, 0.4, 1.9, 1.1, 7.6, 30.9],
    },
    Anchor {
        name: "burn-store",
        revision: "2c06be3",
        rates: [0.0, 0.2, 1.2, 2.3, 0.2, 0.0, 2.6, 1.4, 7.5, 29.9],
    },
    Anchor {
        name: "ndslice",
        revision: "3fc0a66",
        rates: [0.2, 0.0, 0.5, 0.7, 0.0, 0.0, 0.0, 5.4, 5.9, 54.4],
    },
    Anchor {
        name: "nextest-runner",
        revision: "b2a481b",
        rates: [0.2, 0.0, 1.4, 1.1, 1.3, 0.2, 0.5, 3.5, 7.2, 17.6],
    },
    // All its packages together.
    Anchor {
        name: "ripgrep",
        revision: "3fce3b5",
        rates: [0.6, 0.7, 0.3, 0.0, 0.2, 0.3, 0.0, 3.6, 5.1, 40.9],
    },
    Anchor {
        name: "candle-core",
        revision: "2a13b0f",
        rates: [0.3, 1.2, 8.3, 0.5, 3.1, 1.0, 0.0, 4.3, 2.5, 4.4],
    },
];
