//! The plots of the page on benchmarks, drawn from the figures in `docs/bench.json`.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::bench::figures::{Case, Results};
use crate::files::{read, write};
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
    let results: Results = serde_json::from_str(&read(&root.join(FIGURES))?)
        .with_context(|| format!("`{FIGURES}` has no figures"))?;
    for (name, drawn) in draw(&results) {
        let path = root.join(PICTURES).join(name);
        // A picture that is missing is one that differs.
        if std::fs::read_to_string(&path).is_ok_and(|old| old == drawn) {
            continue;
        }
        ensure!(
            bless,
            "`{PICTURES}/{name}` is not what `{FIGURES}` makes (`--bless` draws it)"
        );
        write(&path, &drawn)?;
        say(&format!("xtask: drew `{PICTURES}/{name}`"));
    }
    Ok(())
}

/// A group of bars with one label.
#[derive(Debug)]
struct BarGroup {
    label: String,
    bars: Vec<Bar>,
}

#[derive(Debug, PartialEq)]
struct Bar {
    class: &'static str,
    value: f64,
    /// The text at its end.
    number: String,
}

/// Draws all plots, each with the name of its file.
fn draw(results: &Results) -> [(&'static str, String); 3] {
    let mut saves = Vec::new();
    let mut loads = Vec::new();
    let mut ratios: Vec<BarGroup> = Vec::new();
    for case in results.cases.iter().filter(|case| case.size == SIZE) {
        let ranks = ranks(case);
        let is_to_disk = case
            .limit
            .as_ref()
            .is_some_and(|limit| limit.name == "raw write, fsync");
        if case.name == "save" && is_to_disk {
            saves.push(speeds(case, format!("{ranks}, {}", case.place)));
        }
        if case.name == "load in place" {
            loads.push(speeds(case, format!("{ranks}, saved on {}", case.ranks)));
        } else if let Some(saved) = case.name.strip_prefix("load in place, saved on ") {
            loads.push(speeds(case, format!("{ranks}, saved on {saved}")));
        }
        push_ratio(&mut ratios, case);
    }
    let legend = [
        ("r0", "fsdp"),
        ("r1", "PyTorch"),
        ("none", "the machine's limit"),
    ];
    let save = bars("Saves of 2 GiB, GB/s", &legend, &saves, Scale::Linear);
    let load = bars(
        "Loads of 2 GiB in place, GB/s",
        &legend,
        &loads,
        Scale::Linear,
    );
    let torch = bars(
        "Times as fast as PyTorch, 2 GiB",
        &[],
        &ratios,
        Scale::Logarithmic,
    );
    [
        ("bench-save.svg", save),
        ("bench-load.svg", load),
        ("bench-torch.svg", torch),
    ]
}

/// Returns the number of ranks in words.
fn ranks(case: &Case) -> String {
    let noun = if case.ranks == 1 { "rank" } else { "ranks" };
    format!("{} {noun}", case.ranks)
}

/// Returns the speeds of a case, of torch and of the machine, as far as they were measured.
fn speeds(case: &Case, label: String) -> BarGroup {
    let mut bars = Vec::new();
    for (class, seconds) in [
        ("r0", Some(case.seconds)),
        ("r1", case.torch_seconds),
        ("none", case.limit.as_ref().map(|limit| limit.seconds)),
    ] {
        if let Some(seconds) = seconds {
            let value = case.bytes as f64 / seconds / 1e9;
            let number = format!("{value:.2}");
            bars.push(Bar {
                class,
                value,
                number,
            });
        }
    }
    BarGroup { label, bars }
}

/// Adds how many times as fast as torch a case is, if torch was measured. A case that was measured
/// beside several limits is shown once.
fn push_ratio(groups: &mut Vec<BarGroup>, case: &Case) {
    let Some(torch) = case.torch_seconds else {
        return;
    };
    let label = format!("{}, {}, {}", case.name, ranks(case), case.place);
    if case.name.contains("saved on") || groups.iter().any(|group| group.label == label) {
        return;
    }
    let value = torch / case.seconds;
    let bar = Bar {
        class: "r0",
        value,
        number: format!("{value:.1}"),
    };
    groups.push(BarGroup {
        label,
        bars: vec![bar],
    });
}

/// The meaning of a bar's length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scale {
    /// Bars start at 0.
    Linear,
    /// Values are ratios. Bars start at 1, and values below 1 go to the left.
    Logarithmic,
}

/// The horizontal axis of a plot.
struct Axis {
    scale: Scale,
    least: f64,
    most: f64,
}

impl Axis {
    /// Returns an axis that has room for all bars.
    fn new(scale: Scale, groups: &[BarGroup]) -> Axis {
        // 1 is always on the axis: ratios start there, and speeds below it need no larger scale.
        let mut axis = Axis {
            scale,
            least: 1.0,
            most: 1.0,
        };
        for bar in groups.iter().flat_map(|group| &group.bars) {
            axis.least = axis.least.min(bar.value);
            axis.most = axis.most.max(bar.value);
        }
        axis
    }

    /// Returns the place of a value.
    fn x(&self, value: f64) -> f64 {
        let along = match self.scale {
            Scale::Linear => value / self.most,
            Scale::Logarithmic => {
                (value / self.least).ln() / (self.most / self.least).ln().max(1e-9)
            }
        };
        LEFT + along * (WIDTH - LEFT - RIGHT)
    }

    /// Returns the place at which bars start.
    fn base(&self) -> f64 {
        match self.scale {
            Scale::Linear => self.x(0.0),
            Scale::Logarithmic => self.x(1.0),
        }
    }
}

/// Draws groups of bars as SVG elements.
fn bars(title: &str, legend: &[(&str, &str)], groups: &[BarGroup], scale: Scale) -> String {
    let axis = Axis::new(scale, groups);
    let base = axis.base();
    let title = escape(title);
    let mut drawn = format!("<text x=\"8\" y=\"18\">{title}</text>\n");
    for (index, (class, name)) in legend.iter().enumerate() {
        let at = LEFT + 70.0 + 90.0 * index as f64;
        drawn += &format!(
            "<rect x=\"{at}\" y=\"8\" width=\"12\" height=\"12\" class=\"{class}\"/>\
             <text x=\"{}\" y=\"18\" class=\"small\">{}</text>\n",
            at + 17.0,
            escape(name)
        );
    }
    let mut y = TOP;
    for group in groups {
        let height = BAR * group.bars.len() as f64;
        drawn += &format!(
            "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\" class=\"small\">{}</text>\n",
            LEFT - 8.0,
            y + height / 2.0 + 4.0,
            escape(&group.label)
        );
        for bar in &group.bars {
            let start = base.min(axis.x(bar.value));
            let end = base.max(axis.x(bar.value));
            drawn += &format!(
                "<rect x=\"{start:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" \
                 class=\"{}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" class=\"small\">{}</text>\n",
                end - start,
                BAR - 2.0,
                bar.class,
                end + 5.0,
                y + BAR - 3.0,
                escape(&bar.number)
            );
            y += BAR;
        }
        y += GAP;
    }
    drawn += &format!(
        "<line x1=\"{base:.1}\" x2=\"{base:.1}\" y1=\"{}\" y2=\"{:.1}\" class=\"line\"/>\n",
        TOP - 6.0,
        y - GAP + 4.0
    );
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {y:.0}\" \
         width=\"{WIDTH}\" height=\"{y:.0}\" role=\"img\" aria-label=\"{title}\">\n{drawn}</svg>\n"
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
        let bar = Bar {
            class: "r0",
            value: 2.0,
            number: "2.00".to_owned(),
        };
        assert_eq!(group.bars, [bar]);
        let group = speeds(&case("save", 1.0, Some(4.0)), "a".to_owned());
        assert_eq!(group.bars[1].value, 0.5);

        let mut groups = Vec::new();
        push_ratio(&mut groups, &case("save", 1.0, None));
        push_ratio(&mut groups, &case("load", 1.0, Some(3.0)));
        push_ratio(&mut groups, &case("load", 1.0, Some(3.0)));
        assert_eq!(groups.len(), 1);
        assert_eq!(groups[0].bars[0].number, "3.0");
    }

    #[test]
    fn slower_than_torch_goes_to_the_left() {
        let groups = [0.5, 8.0].map(|value| BarGroup {
            label: "<x>".to_owned(),
            bars: vec![Bar {
                class: "r0",
                value,
                number: String::new(),
            }],
        });
        let drawn = bars("t", &[], &groups, Scale::Logarithmic);
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
