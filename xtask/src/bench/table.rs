//! The figures as a Markdown table, with their targets.

use serde_json::Value;

use super::figures::{Case, Results};

/// The speed that a case must reach at 2 GiB, as a multiple of a limit or of torch's.
struct SpeedTarget {
    case: &'static str,
    /// The name of the limit; every limit if empty.
    limit: &'static str,
    /// The speed, as a multiple of the limit's.
    limit_ratio: Option<f64>,
    /// The speed, as a multiple of torch's.
    torch_ratio: Option<f64>,
}

const TARGETS: [SpeedTarget; 12] = [
    SpeedTarget {
        case: "save",
        limit: "raw write, fsync",
        limit_ratio: Some(0.9),
        torch_ratio: Some(1.5),
    },
    SpeedTarget {
        case: "load",
        limit: "",
        limit_ratio: Some(0.85),
        torch_ratio: Some(2.0),
    },
    SpeedTarget {
        case: "load in place",
        limit: "",
        limit_ratio: Some(0.85),
        torch_ratio: Some(2.0),
    },
    SpeedTarget {
        case: "full gather to rank 0",
        limit: "",
        limit_ratio: None,
        torch_ratio: Some(3.0),
    },
    SpeedTarget {
        case: "optim_state_dict",
        limit: "",
        limit_ratio: None,
        torch_ratio: Some(20.0),
    },
    SpeedTarget {
        case: "DCP to safetensors",
        limit: "",
        limit_ratio: Some(0.9),
        torch_ratio: Some(4.0),
    },
    SpeedTarget {
        case: "safetensors to DCP",
        limit: "",
        limit_ratio: Some(0.9),
        torch_ratio: None,
    },
    SpeedTarget {
        case: "reshard 4 to 2",
        limit: "",
        limit_ratio: Some(0.9),
        torch_ratio: None,
    },
    SpeedTarget {
        case: "DCP to torch",
        limit: "",
        limit_ratio: Some(0.9),
        torch_ratio: None,
    },
    SpeedTarget {
        case: "hashing",
        limit: "",
        limit_ratio: Some(20.0),
        torch_ratio: None,
    },
    SpeedTarget {
        case: "async save, stall",
        limit: "",
        limit_ratio: Some(1.0 / 0.15),
        torch_ratio: None,
    },
    SpeedTarget {
        case: "10 steps after async save",
        limit: "",
        limit_ratio: Some(1.0 / 1.02),
        torch_ratio: None,
    },
];

/// The size of state for which targets are set.
const TARGET_SIZE: &str = "2g";

impl SpeedTarget {
    /// Finds the target of a case; `None` if it has none, or is of another size.
    fn find(case: &Case) -> Option<&'static SpeedTarget> {
        if case.size != TARGET_SIZE {
            return None;
        }
        // A load has the same target whatever number of ranks saved.
        let (name, _) = case
            .name
            .split_once(", saved on")
            .unwrap_or((&case.name, ""));
        let limit = case.limit.as_ref().map_or("", |limit| &limit.name);
        TARGETS.iter().find(|target| {
            target.case == name && (target.limit.is_empty() || target.limit == limit)
        })
    }

    /// Returns the verdicts on a case whose speed is this multiple of the limit's and of torch's.
    fn verdicts(&self, limit_ratio: Option<f64>, torch_ratio: Option<f64>) -> String {
        let mut verdicts = Vec::new();
        for (wanted, found, unit) in [
            (self.limit_ratio, limit_ratio, "× limit"),
            (self.torch_ratio, torch_ratio, "× torch"),
        ] {
            if let (Some(wanted), Some(found)) = (wanted, found) {
                let verdict = if found >= wanted { "met" } else { "**missed**" };
                verdicts.push(format!("{wanted:.2} {unit}: {verdict}"));
            }
        }
        verdicts.join(", ")
    }
}

/// Returns the results as Markdown: a table of all cases, then a table of each of the smaller
/// benches.
pub(super) fn markdown(results: &Results) -> String {
    let mut text = format!("Measured on {}.\n\n", results.machine);
    text.push_str(
        "| case | state | ranks | on | median s | GB/s | × limit | limit \
         | × torch | target | peak above state |\n\
         |---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for case in &results.cases {
        push_case(&mut text, case);
    }
    for other in &results.others {
        text += &format!("\n**{}**\n\n", other.name);
        push_objects(&mut text, &other.figures);
    }
    text
}

/// Appends the row of one case to the table. What was not measured is an empty cell.
fn push_case(text: &mut String, case: &Case) {
    let speed = case.bytes as f64 / case.seconds / 1e9;
    let limit_ratio = case.limit.as_ref().map(|limit| limit.ratio);
    let torch_ratio = case.torch_seconds.map(|torch| torch / case.seconds);
    let peak_mib = case.peak_bytes.map(|peak| peak as f64 / f64::from(1 << 20));
    let cells = [
        case.name.clone(),
        case.size.clone(),
        case.ranks.to_string(),
        case.place.clone(),
        format!("{:.4}", case.seconds),
        format!("{speed:.2}"),
        limit_ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}")),
        case.limit
            .as_ref()
            .map_or_else(String::new, |limit| limit.name.clone()),
        torch_ratio.map_or_else(String::new, |ratio| format!("{ratio:.1}")),
        SpeedTarget::find(case).map_or_else(String::new, |target| {
            target.verdicts(limit_ratio, torch_ratio)
        }),
        peak_mib.map_or_else(String::new, |mib| format!("{mib:.1} MiB")),
    ];
    push_row(text, &cells);
}

/// Appends a table with a row for each object of a list, and a column for each key of the first.
fn push_objects(text: &mut String, figures: &Value) {
    let rows = match figures {
        Value::Array(rows) => rows.as_slice(),
        single => std::slice::from_ref(single),
    };
    let Some(Value::Object(first)) = rows.first() else {
        return;
    };
    let keys: Vec<String> = first.keys().cloned().collect();
    push_row(text, &keys);
    text.push('|');
    text.push_str(&"---|".repeat(keys.len()));
    text.push('\n');
    for row in rows {
        let cells: Vec<String> = keys.iter().map(|key| cell(&row[key])).collect();
        push_row(text, &cells);
    }
}

fn push_row(text: &mut String, cells: &[String]) {
    text.push_str(&format!("| {} |\n", cells.join(" | ")));
}

/// Returns a value as the text of a cell.
fn cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Number(number) => match number.as_f64() {
            Some(value) if number.is_f64() => format!("{value:.4}"),
            _ => number.to_string(),
        },
        other => other.to_string(),
    }
}
