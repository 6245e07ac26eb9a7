//! The figures as a Markdown table, with their targets.

use std::fmt::Write as _;

use super::figures::{Case, Results};

/// The speed that a case must reach at 2 GiB, as a multiple of a limit or of torch's.
struct Target {
    case: &'static str,
    /// The name of the limit; every limit if empty.
    limit: &'static str,
    /// The speed, as a multiple of the limit's.
    limit_ratio: Option<f64>,
    /// The speed, as a multiple of torch's.
    torch_ratio: Option<f64>,
}

const TARGETS: [Target; 12] = [
    Target {
        case: "save",
        limit: "raw write, fsync",
        limit_ratio: Some(0.9),
        torch_ratio: Some(1.5),
    },
    Target {
        case: "load",
        limit: "",
        limit_ratio: Some(0.85),
        torch_ratio: Some(2.0),
    },
    Target {
        case: "load in place",
        limit: "",
        limit_ratio: Some(0.85),
        torch_ratio: Some(2.0),
    },
    Target {
        case: "full gather to rank 0",
        limit: "",
        limit_ratio: None,
        torch_ratio: Some(3.0),
    },
    Target {
        case: "optim_state_dict",
        limit: "",
        limit_ratio: None,
        torch_ratio: Some(20.0),
    },
    Target {
        case: "DCP to safetensors",
        limit: "",
        limit_ratio: Some(0.9),
        torch_ratio: Some(4.0),
    },
    Target {
        case: "safetensors to DCP",
        limit: "",
        limit_ratio: Some(0.9),
        torch_ratio: None,
    },
    Target {
        case: "reshard 4 to 2",
        limit: "",
        limit_ratio: Some(0.9),
        torch_ratio: None,
    },
    Target {
        case: "DCP to torch",
        limit: "",
        limit_ratio: Some(0.9),
        torch_ratio: None,
    },
    Target {
        case: "hashing",
        limit: "",
        limit_ratio: Some(20.0),
        torch_ratio: None,
    },
    Target {
        case: "async save, stall",
        limit: "",
        limit_ratio: Some(1.0 / 0.15),
        torch_ratio: None,
    },
    Target {
        case: "10 steps after async save",
        limit: "",
        limit_ratio: Some(1.0 / 1.02),
        torch_ratio: None,
    },
];

/// The size of state for which targets are set.
const TARGET_SIZE: &str = "2g";

impl Target {
    /// Returns the target of a case; `None` if it has none, or is of another size.
    fn of(case: &Case) -> Option<&'static Target> {
        // A load has the same target whatever number of ranks saved.
        let name = case.name.split(", saved on").next().unwrap_or(&case.name);
        let limit = case.limit.as_ref().map_or("", |limit| &limit.name);
        let fits = |target: &&Target| {
            target.case == name && (target.limit.is_empty() || target.limit == limit)
        };
        TARGETS
            .iter()
            .find(fits)
            .filter(|_| case.size == TARGET_SIZE)
    }
}

/// Returns the results as Markdown: a table of all cases, then a table of each of the smaller
/// benches.
pub(super) fn markdown(results: &Results) -> String {
    let mut text = format!("Measured on {}.\n\n", results.machine);
    text.push_str(
        "| case | state | ranks | on | median s | GB/s | × limit | limit | × torch | target | peak above state |\n\
         |---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for case in &results.cases {
        line(&mut text, case);
    }
    for other in &results.others {
        let _ = write!(text, "\n**{}**\n\n", other.name);
        objects(&mut text, &other.figures);
    }
    text
}

/// Appends the row of one case to the table.
fn line(text: &mut String, case: &Case) {
    let Case {
        name,
        size,
        ranks,
        place,
        seconds,
        ..
    } = case;
    let speed = case.bytes as f64 / seconds / 1e9;
    let limit = case.limit.as_ref();
    let torch = case.torch_seconds.map(|torch| torch / seconds);
    let target = Target::of(case).map_or_else(String::new, |target| {
        let of_limit = judge(
            target.limit_ratio,
            limit.map(|limit| limit.ratio),
            "× limit",
        );
        let of_torch = judge(target.torch_ratio, torch, "× torch");
        [of_limit, of_torch]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
            .join(", ")
    });
    let _ = writeln!(
        text,
        "| {name} | {size} | {ranks} | {place} | {seconds:.4} | {speed:.2} | {} | {} | {} | {target} | {} |",
        limit
            .map(|limit| format!("{:.2}", limit.ratio))
            .unwrap_or_default(),
        limit.map(|limit| limit.name.clone()).unwrap_or_default(),
        torch.map(|torch| format!("{torch:.1}")).unwrap_or_default(),
        case.peak_bytes
            .map(|peak| format!("{:.1} MiB", peak as f64 / f64::from(1 << 20)))
            .unwrap_or_default(),
    );
}

/// Compares a speed with its target, if both are known. `of` says what both are measured in (`×
/// limit`).
fn judge(wanted: Option<f64>, found: Option<f64>, of: &str) -> Option<String> {
    let (wanted, found) = (wanted?, found?);
    let verdict = if found >= wanted { "met" } else { "**missed**" };
    Some(format!("{wanted:.2} {of}: {verdict}"))
}

/// Appends a table with a row for each object of a list, and a column for each key of the first.
fn objects(text: &mut String, figures: &serde_json::Value) {
    let rows = figures
        .as_array()
        .map_or_else(|| std::slice::from_ref(figures), Vec::as_slice);
    let Some(keys) = rows
        .first()
        .and_then(|row| row.as_object())
        .map(|row| row.keys().cloned().collect::<Vec<_>>())
    else {
        return;
    };
    let _ = writeln!(
        text,
        "| {} |\n|{}",
        keys.join(" | "),
        "---|".repeat(keys.len())
    );
    for row in rows {
        let cells = keys.iter().map(|key| match &row[key] {
            serde_json::Value::Number(number) if number.is_f64() => {
                format!("{:.4}", number.as_f64().unwrap_or(f64::NAN))
            }
            serde_json::Value::String(text) => text.clone(),
            serde_json::Value::Null => String::new(),
            other => other.to_string(),
        });
        let _ = writeln!(text, "| {} |", cells.collect::<Vec<_>>().join(" | "));
    }
}
