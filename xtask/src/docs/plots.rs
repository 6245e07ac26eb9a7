//! The plots of the page on benchmarks, drawn from the figures in `docs/bench.json`.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use super::page;
use crate::bench::figures::{Case, Results};
use crate::shell::say;

/// The figures, which `cargo xtask bench --json docs/bench.json` measures.
const FIGURES: &str = "docs/bench.json";
/// The directory of the book's pictures.
const PICTURES: &str = "docs/src/pictures";
/// The size of the state that is shown.
const SIZE: &str = "2g";

const WIDTH: f64 = 640.0;
/// The left edge of the bars.
const LEFT: f64 = 244.0;
/// The space at the right of the longest bar, for its number.
const RIGHT: f64 = 70.0;
const BAR: f64 = 13.0;
const GAP: f64 = 9.0;
const TOP: f64 = 34.0;

/// Compares the plots with those that the figures make, or writes them.
pub(super) fn check(root: &Path, bless: bool) -> Result<()> {
    let path = root.join(FIGURES);
    let text =
        std::fs::read(&path).with_context(|| format!("failed to read `{}`", path.display()))?;
    let results: Results =
        serde_json::from_slice(&text).with_context(|| format!("`{FIGURES}` has no figures"))?;
    for (name, drawn) in draw(&results) {
        let path = root.join(PICTURES).join(name);
        let there = std::fs::read_to_string(&path).unwrap_or_default();
        if there == drawn {
            continue;
        }
        ensure!(
            bless,
            "`{PICTURES}/{name}` is not what `{FIGURES}` makes (`--bless` draws it)"
        );
        page::write(&path, &drawn)?;
        say(&format!("xtask: drew `{PICTURES}/{name}`"));
    }
    Ok(())
}

/// A group of bars with one label.
struct Group {
    label: String,
    /// The class of each bar, its value, and what is written beside it.
    bars: Vec<(&'static str, f64, String)>,
}

/// Draws all plots, each with the name of its file.
fn draw(results: &Results) -> Vec<(&'static str, String)> {
    let cases: Vec<&Case> = results
        .cases
        .iter()
        .filter(|case| case.size == SIZE)
        .collect();
    let saves = cases
        .iter()
        .filter(|case| case.name == "save" && limit_is(case, "raw write, fsync"));
    let saves: Vec<Group> = saves
        .map(|case| speeds(case, format!("{}, {}", ranks(case), case.place)))
        .collect();
    let loads = cases
        .iter()
        .filter(|case| case.name.starts_with("load in place"));
    let loads: Vec<Group> = loads
        .map(|case| {
            let saved = case.name.strip_prefix("load in place, saved on ");
            let saved = saved.map_or_else(|| case.ranks.to_string(), str::to_owned);
            speeds(case, format!("{}, saved on {saved}", ranks(case)))
        })
        .collect();
    let legend = [
        ("r0", "fsdp"),
        ("r1", "PyTorch"),
        ("none", "the machine's limit"),
    ];
    vec![
        (
            "bench-save.svg",
            bars("Saves of 2 GiB, GB/s", &legend, &saves, false),
        ),
        (
            "bench-load.svg",
            bars("Loads of 2 GiB in place, GB/s", &legend, &loads, false),
        ),
        (
            "bench-torch.svg",
            bars(
                "Times as fast as PyTorch, 2 GiB",
                &[],
                &ratios(&cases),
                true,
            ),
        ),
    ]
}

/// Returns the number of ranks in words.
fn ranks(case: &Case) -> String {
    format!(
        "{} {}",
        case.ranks,
        if case.ranks == 1 { "rank" } else { "ranks" }
    )
}

fn limit_is(case: &Case, name: &str) -> bool {
    case.limit.as_ref().is_some_and(|limit| limit.name == name)
}

/// Returns the speeds of a case, of torch and of the machine.
fn speeds(case: &Case, label: String) -> Group {
    let speed = |seconds: f64| case.bytes as f64 / seconds / 1e9;
    let all = [
        ("r0", Some(case.seconds)),
        ("r1", case.torch_seconds),
        ("none", case.limit.as_ref().map(|limit| limit.seconds)),
    ];
    let bars = all
        .into_iter()
        .filter_map(|(class, seconds)| Some((class, speed(seconds?))));
    Group {
        label,
        bars: bars
            .map(|(class, speed)| (class, speed, format!("{speed:.2}")))
            .collect(),
    }
}

/// Returns how many times as fast as torch each case is, for which torch was measured, each once.
fn ratios(cases: &[&Case]) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for case in cases {
        let label = format!("{}, {}, {}", case.name, ranks(case), case.place);
        let Some(torch) = case.torch_seconds else {
            continue;
        };
        if case.name.contains("saved on") || groups.iter().any(|group| group.label == label) {
            continue;
        }
        let ratio = torch / case.seconds;
        groups.push(Group {
            label,
            bars: vec![("r0", ratio, format!("{ratio:.1}"))],
        });
    }
    groups
}

/// Draws groups of bars as SVG elements. With `logarithmic`, the values are ratios on a logarithmic
/// axis: bars start at 1, and values below 1 go to the left.
fn bars(title: &str, legend: &[(&str, &str)], groups: &[Group], logarithmic: bool) -> String {
    let values = || {
        groups
            .iter()
            .flat_map(|group| group.bars.iter().map(|(_, value, _)| *value))
    };
    let most = values().fold(1.0, f64::max);
    let least = if logarithmic {
        values().fold(1.0, f64::min)
    } else {
        0.0
    };
    let x = |value: f64| {
        let along = if logarithmic {
            (value / least).ln() / (most / least).ln().max(1e-9)
        } else {
            value / most
        };
        LEFT + along * (WIDTH - LEFT - RIGHT)
    };
    let base = x(if logarithmic { 1.0 } else { 0.0 });
    let mut drawn = format!("<text x=\"8\" y=\"18\">{}</text>\n", escape(title));
    // Writing to a string cannot fail.
    let mut at = LEFT + 70.0;
    for (class, name) in legend {
        let _ = writeln!(
            drawn,
            "<rect x=\"{at}\" y=\"8\" width=\"12\" height=\"12\" class=\"{class}\"/>\
             <text x=\"{}\" y=\"18\" class=\"small\">{}</text>",
            at + 17.0,
            escape(name)
        );
        at += 90.0;
    }
    let mut y = TOP;
    for group in groups {
        let height = BAR * group.bars.len() as f64;
        let _ = writeln!(
            drawn,
            "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\" class=\"small\">{}</text>",
            LEFT - 8.0,
            y + height / 2.0 + 4.0,
            escape(&group.label)
        );
        for (class, value, number) in &group.bars {
            let (start, end) = (base.min(x(*value)), base.max(x(*value)));
            let _ = writeln!(
                drawn,
                "<rect x=\"{start:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" class=\"{class}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" class=\"small\">{}</text>",
                end - start,
                BAR - 2.0,
                end + 5.0,
                y + BAR - 3.0,
                escape(number)
            );
            y += BAR;
        }
        y += GAP;
    }
    let _ = writeln!(
        drawn,
        "<line x1=\"{base:.1}\" x2=\"{base:.1}\" y1=\"{}\" y2=\"{:.1}\" class=\"line\"/>",
        TOP - 6.0,
        y - GAP + 4.0
    );
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {y:.0}\" width=\"{WIDTH}\" height=\"{y:.0}\" \
         role=\"img\" aria-label=\"{}\">\n{drawn}</svg>\n",
        escape(title)
    )
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(name: &str, seconds: f64, torch_seconds: Option<f64>) -> Case {
        Case {
            name: name.to_owned(),
            size: SIZE.to_owned(),
            ranks: 2,
            place: "disk".to_owned(),
            bytes: 2_000_000_000,
            seconds,
            limit: None,
            peak_bytes: None,
            read_ratio: None,
            torch_seconds,
        }
    }

    #[test]
    fn what_was_not_measured_has_no_bar() {
        let group = speeds(&case("save", 1.0, None), "a".to_owned());
        assert_eq!(group.bars, [("r0", 2.0, "2.00".to_owned())]);
        assert_eq!(
            speeds(&case("save", 1.0, Some(4.0)), "a".to_owned()).bars[1].1,
            0.5
        );
        let cases = [
            &case("save", 1.0, None),
            &case("load", 1.0, Some(3.0)),
            &case("load", 1.0, Some(3.0)),
        ];
        let groups = ratios(&cases);
        assert_eq!(groups.len(), 1);
        assert_eq!(groups[0].bars[0].2, "3.0");
    }

    #[test]
    fn slower_than_torch_goes_to_the_left() {
        let groups: Vec<Group> = [0.5, 8.0]
            .into_iter()
            .map(|value| Group {
                label: "<x>".to_owned(),
                bars: vec![("r0", value, String::new())],
            })
            .collect();
        let drawn = bars("t", &[], &groups, true);
        // The smallest value begins at the left edge, and 1 is a quarter of the way to 8, in powers
        // of 2.
        assert!(drawn.contains(&format!("<rect x=\"{LEFT:.1}\"")), "{drawn}");
        let one = LEFT + (WIDTH - LEFT - RIGHT) / 4.0;
        assert!(
            drawn.contains(&format!("<rect x=\"{one:.1}\"")) && drawn.contains("&lt;x&gt;"),
            "{drawn}"
        );
    }
}
